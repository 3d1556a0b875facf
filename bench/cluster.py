"""Two tablet servers on two cores against one, in the same run: appends of 1 KiB and upserts.

Each side is `zufluss dev --tablet-servers`; two tables of one bucket each, so that the second
server leads one of them. Each table has a pump of its own. Pumps need processor time as well: with
fewer than four cores the figure says how the work is shared out rather than what a second server is
worth, and the goals are for machines where pumps and servers do not compete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa

import zufluss
from bench.keyed import KEY, kv_batches, put_frames, random_keys
from bench.report import Measure, compared
from bench.small import ROWS, TEXT_BYTES
from bench.work import UNCOMPRESSED, Load, alternate, encoded, new_table, pump, record_count
from bench.work import produce_frames as frames_of
from zufluss.client.sync.connection import Connection
from zufluss.model.table import TableBucket, TableInfo
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import descendants

GOAL = 1.5
CONNECTIONS = 8
"""Of each pump."""
TABLES = 2
KEYS = 100_000
PUT_ROWS = 500
PUTS = 64
"""Different requests of each pump, sent over and over."""
FRAMES = 64
APPENDED = "id BIGINT, text STRING"


class Side:
    """A cluster, and two tables."""

    def __init__(self, bootstrap: str, pids: Sequence[int], servers: int) -> None:
        """`pids` are all processes of the cluster, `servers` is how many tablet servers it has."""
        self.count = servers
        self.pids = tuple(pids)
        self._stack = ExitStack()
        self.connection: Connection = self._stack.enter_context(zufluss.connect(bootstrap))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(TABLES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def leader(self, info: TableInfo) -> tuple[int, str]:
        """The tablet server of the only bucket of a table, and its address."""
        node = self.connection._twin.metadata.leader(TableBucket(info.table_id, None, 0))
        assert node is not None
        return node.id, f"{node.host}:{node.port}"

    def tables(self, name: str, schema: str | None, keyed: bool) -> list[TableInfo]:
        """Two new tables; with two servers each leads one of them."""
        options = {"primary_key": KEY} if keyed else {}
        columns = [] if schema is None else [schema]
        unique = f"{name}_{time.time_ns()}"  # a peer keeps what earlier runs left
        infos = [
            new_table(
                self.connection, f"{unique}_{i}", *columns, properties=UNCOMPRESSED, **options
            )
            for i in range(TABLES)
        ]
        servers = {self.leader(info)[0] for info in infos}
        if len(servers) != self.count:
            raise RuntimeError(f"{TABLES} tables lie on {len(servers)} of {self.count} servers")
        return infos

    def load(
        self, infos: Sequence[TableInfo], frames: Sequence[list[bytes]], seconds: float
    ) -> list[Load]:
        """Put frames on the leaders of both tables at once."""

        def one(number: int) -> Load:
            address = self.leader(infos[number])[1]
            return pump(
                address,
                (),
                frames[number],
                process=number,
                connections=CONNECTIONS,
                seconds=seconds,
            )

        return list(self._threads.map(one, range(TABLES)))


@contextmanager
def dev(directory: Path, servers: int) -> Iterator[Side]:
    """`zufluss dev --tablet-servers` in a directory of its own."""
    where = directory / f"cluster-{servers}"
    settings = {"zufluss.log.flush": "os"}
    command = (*DevServer(where).command, "--tablet-servers", str(servers))
    with (
        DevServer(where, settings, command=command) as server,
        Side(server.bootstrap, descendants(server.pid), servers) as side,
    ):
        yield side


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Appends, then upserts."""
    seconds = 0.5 if quick else 1.5
    note = f"two tablet servers against one, {os.cpu_count()} cores"
    with dev(directory, 1) as one, dev(directory, 2) as two:
        yield measured(two, one, "append", rounds, seconds, note, GOAL)
        yield measured(two, one, "upsert", rounds, seconds, note, GOAL)


def measured(
    side: Side, other: Side, what: str, rounds: int, seconds: float, note: str, goal: float
) -> Measure:
    """The rates of two clusters under the same load, which take turns."""
    keyed = what == "upsert"
    schema = None if keyed else APPENDED
    made = {each: each.tables(what, schema, keyed) for each in (other, side)}
    frames = {each: [requests(info, keyed) for info in infos] for each, infos in made.items()}
    answered = dict.fromkeys(made, 0)

    def rate(each: Side) -> float:
        loads = each.load(made[each], frames[each], seconds)
        answered[each] += sum(load.answered for load in loads)
        return sum(load.rps for load in loads)

    pids = (*side.pids, *other.pids)
    rates = alternate(rounds, pids, lambda: rate(side), lambda: rate(other))
    if not keyed:
        for each, infos in made.items():
            count = sum(record_count(each.connection, info) for info in infos)
            if count != ROWS * answered[each]:
                raise RuntimeError(f"{count} records, {ROWS * answered[each]} acknowledged")
    label = {
        "append": f"append 1 KiB × {TABLES * CONNECTIONS} into two tables",
        "upsert": f"upsert {PUT_ROWS} rows × {TABLES * CONNECTIONS} into two tables",
    }[what]
    return compared(f"cluster.{what}", f"{label}, {note}", *rates, "/s", at_least=goal)


def requests(info: TableInfo, keyed: bool) -> list[bytes]:
    """What a pump sends over and over."""
    if keyed:
        ids = random_keys(PUTS * PUT_ROWS, KEYS, info.table_id)
        return put_frames(info, kv_batches(info, ids, PUT_ROWS))
    columns = {"id": list(range(ROWS)), "text": ["x" * TEXT_BYTES] * ROWS}
    batch = encoded(info, pa.record_batch(columns, schema=info.schema.arrow))
    return frames_of(info, [batch] * FRAMES)
