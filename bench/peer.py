"""An optional comparison with an Apache Fluss that runs somewhere: the same frames on both servers.

    python -m bench.peer --bootstrap-peer 127.0.0.1:9123 --pids 4711,4712
    python -m bench.peer … --only upsert,lookup --keys 100000 --rounds 3 --warm-up 10

The pids are those of its servers on this machine, for CPU and memory. Ours is started here with
`zufluss.log.flush=os`, because that is what the peer does by default. Both are warmed up first (a
cold JVM serves a third of what a warm one does), with log tables and with primary-key tables if
sections of either are wanted; then they take turns. Nothing else of zufluss needs a peer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import kv, peer_kv, peer_log
from bench.peer_kv import KvSide
from bench.peer_log import LogSide
from bench.peer_side import Pair, S, Section
from bench.report import Measure, machine, table
from zufluss.testing.server import DevServer

SECTIONS = [*peer_log.SECTIONS, *peer_kv.SECTIONS]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bootstrap-peer", required=True, help="host:port of the other server")
    parser.add_argument("--pids", required=True, help="its processes, separated by commas")
    parser.add_argument("--only", help=f"sections, out of {','.join(SECTIONS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=float, default=40.0, help="seconds on each side")
    parser.add_argument("--keys", type=int, default=kv.KEYS, help="of the primary-key tables")
    parser.add_argument("--dir", type=Path, help="where our data goes: the peer's file system")
    a = parser.parse_args()
    a.chosen = a.only.split(",") if a.only else SECTIONS
    if unknown := set(a.chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return a


def measure(
    pair: Pair[S], sections: Mapping[str, Section[S]], chosen: list[str], warm_up: float
) -> Iterator[Measure]:
    """The chosen ones of some sections, on warm servers."""
    for side in (pair.ours, pair.theirs):
        side.warm_up(warm_up)
    for name, section in sections.items():
        if name in chosen:
            print(f"{name} …", flush=True)
            yield from section(pair)
    for side in (pair.ours, pair.theirs):
        side.close()


def main() -> None:
    """Compare and print."""
    a = arguments()
    pids = tuple(int(pid) for pid in a.pids.split(","))
    print(machine(), flush=True)
    measures: list[Measure] = []
    with (
        tempfile.TemporaryDirectory(prefix="zufluss-bench-", dir=a.dir) as where,
        DevServer(Path(where) / "data", {"zufluss.log.flush": "os"}) as server,
    ):
        here = Path(where)
        try:
            if set(a.chosen) & set(peer_log.SECTIONS):
                logs = Pair(
                    LogSide(server.bootstrap, (server.pid,), here),
                    LogSide(a.bootstrap_peer, pids, here),
                    a.rounds,
                )
                for line in measure(logs, peer_log.SECTIONS, a.chosen, a.warm_up):
                    measures.append(line)
            if set(a.chosen) & set(peer_kv.SECTIONS):
                keyed = Pair(
                    KvSide(server.bootstrap, (server.pid,), here, a.keys),
                    KvSide(a.bootstrap_peer, pids, here, a.keys),
                    a.rounds,
                )
                for line in measure(keyed, peer_kv.SECTIONS, a.chosen, a.warm_up):
                    measures.append(line)
        finally:  # what was measured before a failure is worth seeing
            print(f"\n{machine()}\n\n{table(measures, {})}")


if __name__ == "__main__":
    main()
