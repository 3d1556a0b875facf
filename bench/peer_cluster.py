"""Two tablet servers of ours against one warm Apache Fluss: appends of 1 KiB into two tables.

    python -m bench.peer_cluster --bootstrap-peer 127.0.0.1:9123 --pids 4711,4712

The pids are those of the peer's servers on this machine. Ours are started here, with
`zufluss.log.flush=os`, because that is what the peer does by default. The peer is warmed up with
the same load first: a cold JVM serves a third of what a warm one does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench import cluster
from bench.report import machine, table

GOAL = 1.6


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bootstrap-peer", required=True, help="host:port of the other server")
    parser.add_argument("--pids", required=True, help="its processes, separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=float, default=40.0, help="seconds of load on the peer")
    parser.add_argument("--dir", type=Path, help="where our data goes: the peer's file system")
    a = parser.parse_args()
    pids = tuple(map(int, a.pids.split(",")))
    print(machine(), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="zufluss-bench-", dir=a.dir) as where,
        cluster.Side(a.bootstrap_peer, pids, servers=1) as peer,
    ):
        _warm_up(peer, a.warm_up)
        with cluster.dev(Path(where), 2) as ours:
            note = "two tablet servers against a warm Apache Fluss"
            line = cluster.measured(ours, peer, "append", a.rounds, 1.5, note, GOAL)
    print(f"\n{machine()}\n\n{table([line], {})}")


def _warm_up(peer: cluster.Side, seconds: float) -> None:
    infos = peer.tables("warm_up", cluster.APPENDED, keyed=False)
    frames = [cluster.requests(info, keyed=False) for info in infos]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        peer.load(infos, frames, 5.0)
    for info in infos:
        peer.connection.admin.drop_table(info.path)


if __name__ == "__main__":
    main()
