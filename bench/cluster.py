"""Two tablet servers on two cores against one, in the same run: appends of 1 KiB and upserts.

Each side is `zufluss dev --tablet-servers`; two tables of one bucket each, so that the second
server leads one of them. Each table has a pump of its own. Pumps need processor time as well: with
fewer than four cores the figure says how the work is shared out rather than what a second server is
worth, and the goals are for machines where pumps and servers do not compete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


class Side:
    """A cluster with a number of tablet servers, and two tables."""

    def __init__(self, directory: Path, servers: int) -> None:
        self.count = servers
        self._stack = ExitStack()
        server = DevServer(
            directory / f"cluster-{servers}",
            {"zufluss.log.flush": "os"},
            command=(*DevServer(directory).command, "--tablet-servers", str(servers)),
        )
        self._stack.enter_context(server)
        self.pids = tuple(descendants(server.pid))
        self.connection: Connection = self._stack.enter_context(zufluss.connect(server.bootstrap))
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
        infos = [
            new_table(self.connection, f"{name}{i}", *columns, properties=UNCOMPRESSED, **options)
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


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Appends, then upserts."""
    seconds = 0.5 if quick else 1.5
    with Side(directory, 1) as one, Side(directory, 2) as two:
        yield _measured(one, two, "append", rounds, seconds)
        yield _measured(one, two, "upsert", rounds, seconds)


def _measured(one: Side, two: Side, what: str, rounds: int, seconds: float) -> Measure:
    keyed = what == "upsert"
    schema = None if keyed else "id BIGINT, text STRING"
    made = {side: side.tables(what, schema, keyed) for side in (one, two)}
    frames = {side: [_frames(info, keyed) for info in infos] for side, infos in made.items()}
    answered = dict.fromkeys(made, 0)

    def rate(side: Side) -> float:
        loads = side.load(made[side], frames[side], seconds)
        answered[side] += sum(load.answered for load in loads)
        return sum(load.rps for load in loads)

    rates = alternate(rounds, (*one.pids, *two.pids), lambda: rate(two), lambda: rate(one))
    if not keyed:
        for side, infos in made.items():
            count = sum(record_count(side.connection, info) for info in infos)
            if count != ROWS * answered[side]:
                raise RuntimeError(f"{count} records, {ROWS * answered[side]} acknowledged")
    label = {
        "append": f"append 1 KiB × {TABLES * CONNECTIONS} into two tables",
        "upsert": f"upsert {PUT_ROWS} rows × {TABLES * CONNECTIONS} into two tables",
    }[what]
    note = f"{label}, two tablet servers against one, {os.cpu_count()} cores"
    return compared(f"cluster.{what}", note, *rates, "/s", at_least=GOAL)


def _frames(info: TableInfo, keyed: bool) -> list[bytes]:
    if keyed:
        ids = random_keys(PUTS * PUT_ROWS, KEYS, info.table_id)
        return put_frames(info, kv_batches(info, ids, PUT_ROWS))
    columns = {"id": list(range(ROWS)), "text": ["x" * TEXT_BYTES] * ROWS}
    batch = encoded(info, pa.record_batch(columns, schema=info.schema.arrow))
    return frames_of(info, [batch] * FRAMES)
