"""Aggregation: puts that are merged column by column, against puts of whole rows.

* `put`: prepared requests of random rows of ten columns on keys that exist, to a table whose
  columns are summed, compared and replaced (`FUNCTIONS`), against the same rows upserted to a table
  without a merge engine. Batches of 500 rows to four buckets, as `bench.peer_kv` has them.
* `batch`: the same with batches of 10,000 rows.
* `states`: rows of few, skewed keys through our client: aggregated before they are sent, against
  every row sent.
* `locks`: rows through our client's exactly-once writer, whose columns are its own and whose puts
  are fenced, against a plain writer.

Both sides are tables of one server, so that nothing else differs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import zufluss
from bench.keyed import (
    KEY,
    Batch,
    every_key,
    keyed_rows,
    kv_batches,
    put_frames,
    random_keys,
)
from bench.report import Measure, compared
from bench.work import TEN_COLUMNS, Target, alternate, new_table
from zufluss.model.aggregate import AggFunction
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer

FUNCTIONS = {"a": "sum", "b": "max", "c": "sum", "d": "sum"}
"""Functions of the columns that do not just keep their last value."""
OTHERS = "last_value_ignore_nulls"
KEYS = 200_000
BUCKETS = 4
WINDOW = 4
BATCH_ROWS = (500, 10_000)
ROWS = 400_000
"""Rows of a round."""
SKEWED_KEYS = 1_000
SKEW = 1.3
"""The exponent of how often keys come: of 10,000 rows, 840 have different ones."""
WRITTEN_ROWS = 10_000
"""Rows that a writer is given at a time."""


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Everything."""
    rows = ROWS // 4 if quick else ROWS
    with (
        DevServer(directory / "aggregate", {"zufluss.log.flush": "os"}) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        for batch_rows in BATCH_ROWS:
            yield _puts(server, connection, rounds, batch_rows, rows)
        yield _states(connection, server.pid, rounds, rows)
        yield _locks(connection, server.pid, rounds, rows)


def aggregated() -> Schema:
    """The ten columns with their functions."""
    schema = Schema.of(TEN_COLUMNS, primary_key=KEY)
    columns = [
        column
        if column.name in KEY
        else replace(column, agg_function=AggFunction.named(FUNCTIONS.get(column.name, OTHERS)))
        for column in schema.columns
    ]
    return Schema.of(columns, primary_key=KEY)


def aggregation_table(connection: zufluss.Connection, name: str, buckets: int) -> TableInfo:
    """A table that aggregates."""
    properties = {"table.merge-engine": "aggregation"}
    return new_table(
        connection, name, aggregated(), primary_key=KEY, buckets=buckets, properties=properties
    )


class Side:
    """A table and the requests that fill and change it."""

    def __init__(self, server: DevServer, info: TableInfo) -> None:
        self.target = Target(server.bootstrap, (server.pid,))
        self.info = info
        self._seed = 0

    def send(self, batches: Sequence[Batch]) -> float:
        """Send batches, each once; the seconds it took."""
        frames = put_frames(self.info, batches)
        return self.target.load(frames, window=WINDOW, count=len(frames)).seconds

    def random_rows(self, keys: int, count: int, batch_rows: int) -> float:
        """Random rows for keys that exist; rows per second."""
        self._seed += count
        batches = kv_batches(
            self.info, random_keys(count, keys, self._seed), batch_rows, self._seed
        )
        return count / self.send(batches)


def _puts(
    server: DevServer, connection: zufluss.Connection, rounds: int, batch_rows: int, rows: int
) -> Measure:
    plain = new_table(connection, f"plain_{batch_rows}", primary_key=KEY, buckets=BUCKETS)
    merged = aggregation_table(connection, f"aggregate_{batch_rows}", BUCKETS)
    sides = [Side(server, info) for info in (merged, plain)]
    for side in sides:
        side.send(kv_batches(side.info, every_key(KEYS), batch_rows))
    ours, others = alternate(
        rounds,
        (server.pid, os.getpid()),
        *(lambda side=side: side.random_rows(KEYS, rows, batch_rows) for side in sides),
    )
    label = f"aggregation of batches of {batch_rows} rows, against plain upserts of them"
    return compared(f"aggregate.{batch_rows}", label, ours, others, " rows/s", at_least=0.7)


def _states(connection: zufluss.Connection, pid: int, rounds: int, rows: int) -> Measure:
    table = connection.table(str(aggregation_table(connection, "skewed", 1).path))
    batches = _skewed(2 * rows)

    def written(pre_aggregate: bool) -> float:
        with table.upsert(pre_aggregate=pre_aggregate) as writer:
            return _rate(writer, batches)

    ours, others = alternate(
        rounds, (pid, os.getpid()), lambda: written(True), lambda: written(False)
    )
    label = f"rows of {SKEWED_KEYS} skewed keys, aggregated before they are sent, against all sent"
    return compared("aggregate.states", label, ours, others, " rows/s", at_least=3.0)


def _locks(connection: zufluss.Connection, pid: int, rounds: int, rows: int) -> Measure:
    locked = connection.table(str(aggregation_table(connection, "locked", BUCKETS).path))
    free = connection.table(str(aggregation_table(connection, "free", BUCKETS).path))
    batches = _uniform(rows)
    with locked.exactly_once_writer("bench") as owner, free.upsert() as writer:
        ours, others = alternate(
            rounds,
            (pid, os.getpid()),
            lambda: _rate(owner, batches),
            lambda: _rate(writer, batches),
        )
    label = "rows of an exactly-once writer, which owns its columns, against those of any writer"
    return compared("aggregate.locks", label, ours, others, " rows/s", at_least=0.9)


def _rate(writer: Any, given: Sequence[pa.RecordBatch]) -> float:
    """Rows per second through a writer of the client, acknowledged."""
    began = time.perf_counter()
    for rows in given:
        writer.write(rows)
    writer.flush()
    return sum(rows.num_rows for rows in given) / (time.perf_counter() - began)


def _skewed(count: int) -> list[pa.RecordBatch]:
    return _written(np.random.default_rng(count).zipf(SKEW, count) % SKEWED_KEYS)


def _uniform(count: int) -> list[pa.RecordBatch]:
    return _written(np.random.default_rng(count).integers(0, KEYS, count))


def _written(ids: npt.NDArray[np.int64]) -> list[pa.RecordBatch]:
    return [keyed_rows(ids[at : at + WRITTEN_ROWS], at) for at in range(0, len(ids), WRITTEN_ROWS)]
