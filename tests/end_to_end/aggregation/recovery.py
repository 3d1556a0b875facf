"""Helpers for tests of crashes and undo: a table with all functions, its events, and jobs to kill.

A job reads events from a position, writes them exactly once, and stores checkpoint and position in
a file in one step. `job.py` is such a job, in a process of its own. At the end a table must have
the same rows as a table that was written to without a crash.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasketches import hll_sketch, update_theta_sketch
from pyroaring import BitMap, BitMap64

from tests.end_to_end.aggregation.tables import fresh_name
from tests.end_to_end.raw import RawClient
from tests.waiting import WAIT_SECONDS
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.model.producer import UNDO_TASK, ProducerWriter
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

AGGREGATION = {"table.merge-engine": "aggregation"}
DELETES = {"table.delete.behavior": "ALLOW"}
SHARED = {"table.column-lock.enabled": "false"}
VIEWS = "page INT, views BIGINT SUM, top INT MAX, PRIMARY KEY (page)"
SUM = "page INT, views BIGINT SUM, PRIMARY KEY (page)"
DAYS = "page INT, day STRING, views BIGINT SUM, PRIMARY KEY (page, day)"
EVERY_FUNCTION = """
    k INT,
    sum_long BIGINT SUM, sum_decimal DECIMAL(20, 3) SUM, sum_double DOUBLE SUM,
    wrapped TINYINT SUM(overflow = wrap),
    product DOUBLE PRODUCT, product_int INT PRODUCT(overflow = wrap), number BIGINT COUNT,
    greatest INT MAX, least STRING MIN,
    at_greatest STRING MAX_BY(by = greatest), at_least INT MIN_BY(by = least),
    last INT LAST_VALUE, last_known INT LAST_VALUE_IGNORE_NULLS,
    first INT FIRST_VALUE, first_known INT FIRST_VALUE_IGNORE_NULLS,
    names STRING LISTAGG(delimiter = ';'), words STRING STRING_AGG(limit = 40, overflow = truncate),
    parts ARRAY<INT> ARRAY_AGG, kinds ARRAY<STRING> COLLECT,
    all_true BOOLEAN BOOL_AND, any_true BOOLEAN BOOL_OR,
    users BYTES RBM32, sessions BYTES RBM64, visitors BYTES HLL, guests BYTES THETA,
    PRIMARY KEY (k)
"""
IDEMPOTENT = """
    k INT,
    greatest INT MAX, least STRING MIN,
    at_greatest STRING MAX_BY(by = greatest), at_least INT MIN_BY(by = least),
    last INT LAST_VALUE, last_known INT LAST_VALUE_IGNORE_NULLS,
    first INT FIRST_VALUE, first_known INT FIRST_VALUE_IGNORE_NULLS,
    kinds ARRAY<STRING> COLLECT, all_true BOOLEAN BOOL_AND, any_true BOOLEAN BOOL_OR,
    users BYTES RBM32, sessions BYTES RBM64, visitors BYTES HLL, guests BYTES THETA,
    PRIMARY KEY (k)
"""
"""Functions for which writing the same rows again changes nothing."""
KEYS = 12

Event = dict[str, Any]


# -- tables --------------------------------------------------------------------------------------


def create(conn: Connection, schema: str = VIEWS, *, buckets: int = 3, **options: Any) -> Table:
    """A new aggregation table that no other test uses."""
    name = f"fluss.{fresh_name()}"
    properties = AGGREGATION | options.pop("properties", {})
    conn.admin.create_table(name, schema, bucket_count=buckets, properties=properties, **options)
    return conn.table(name)


def bucket_of(table: Table, bucket_id: int = 0, partition_id: int | None = None) -> TableBucket:
    """A bucket of a table."""
    return TableBucket(table.info.table_id, partition_id, bucket_id)


def views(*pages: int, each: int = 1) -> dict[str, list[int]]:
    """Rows for `VIEWS`: `top` is the page."""
    return {"page": list(pages), "views": [each] * len(pages), "top": list(pages)}


def rows_of(table: Table) -> list[dict[str, Any]]:
    """All rows in the order of their keys."""
    rows: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
    return sorted(rows, key=lambda row: [row[name] for name in table.info.schema.primary_key])


def column_of(table: Table, name: str = "views") -> dict[Any, Any]:
    """The values of one column by the first one."""
    first = table.info.schema.names[0]
    return {row[first]: row[name] for row in rows_of(table)}


def put_plain(table: Table, *inputs: Any, columns: Sequence[str] | None = None) -> None:
    """Write without a producer."""
    with table.upsert(columns) as writer:
        for data in inputs:
            writer.write(data)


# -- events --------------------------------------------------------------------------------------


def event(seed: int, position: int) -> Event:
    """One event for `EVERY_FUNCTION`: any of its inputs may be NULL."""
    chance = random.Random(f"{seed} {position}")
    number = chance.randrange(-9, 10)
    visitors, guests = hll_sketch(8), update_theta_sketch(5)
    for _ in range(3):
        visitors.update(chance.randrange(500))
        guests.update(chance.randrange(500))
    values: Event = {
        "sum_long": number,
        "sum_decimal": Decimal(number) / 8,
        "sum_double": number / 4,
        "wrapped": chance.randrange(-128, 128),
        "product": chance.choice((0.5, 1.0, 2.0, -1.0)),
        "product_int": chance.randrange(1, 8),
        "number": number,
        "greatest": chance.randrange(6),
        "least": chance.choice("abcdef"),
        "at_greatest": f"g{position}",
        "at_least": position,
        "last": position,
        "last_known": position,
        "first": position,
        "first_known": position,
        "names": f"n{position}",
        "words": f"w{position}",
        "parts": [number, None, position],
        "kinds": [chance.choice("xyz"), None],
        "all_true": chance.random() < 0.9,
        "any_true": chance.random() < 0.1,
        "users": BitMap([position, number % 7]).serialize(),
        "sessions": BitMap64([position << 33, number % 5]).serialize(),
        "visitors": visitors.serialize_compact(),
        "guests": guests.compact().serialize(),
    }
    given = {name: value if chance.random() < 0.85 else None for name, value in values.items()}
    return {"k": chance.randrange(KEYS), **given}


def columns_of(events: Sequence[Event]) -> dict[str, list[Any]]:
    """Events as columns."""
    return {name: [each[name] for each in events] for name in events[0]}


def written(table: Table, seed: int, span: range) -> dict[str, list[Any]]:
    """Events, as columns of a table that may have only some of the functions."""
    columns = columns_of([event(seed, position) for position in span])
    return {name: columns[name] for name in table.info.schema.names}


def without_crash(
    conn: Connection, seed: int, count: int, schema: str = EVERY_FUNCTION
) -> list[dict[str, Any]]:
    """The rows of a table to which a plain writer wrote the events one after the other."""
    table = create(conn, schema)
    for first in range(0, count, 16):
        put_plain(table, written(table, seed, range(first, min(first + 16, count))))
    return rows_of(table)


# -- the wire ------------------------------------------------------------------------------------


def writers_of(raw: RawClient, table: Table, bucket: int = 0) -> list[ProducerWriter | None]:
    """The writer ids of the batches of a bucket's changelog, in order."""
    return [ProducerWriter.of(h.writer_id) for h in raw.batches(table.info.table_id, bucket)]


def undo_records(raw: RawClient, table: Table, bucket: int = 0) -> dict[int, int]:
    """The records that undos have written into a bucket, by their epoch."""
    found: dict[int, int] = {}
    for header in raw.batches(table.info.table_id, bucket):
        writer = ProducerWriter.of(header.writer_id)
        if writer is not None and writer.task == UNDO_TASK:
            found[writer.epoch] = found.get(writer.epoch, 0) + header.record_count
    return found


def folded(changes: pa.Table, rows: Mapping[int, Event] | None = None) -> dict[int, Event]:
    """Apply the changelog of a bucket to rows; asserts that before-images fit."""
    state = dict(rows or {})
    for change in changes.to_pylist():
        kind, row = change.pop("_change_type"), change
        del row["_log_offset"], row["_commit_timestamp"]
        key = next(iter(row.values()))
        if kind in ("-U", "-D"):
            assert state.pop(key) == row, f"{kind} {row} was not there"
        else:
            assert key not in state, f"{kind} {row} was there"
            state[key] = row
    return state


# -- looking -------------------------------------------------------------------------------------


def metric(server: DevServer, name: str, *labels: str) -> float:
    """One metric, over all label values that have these texts."""
    port = server.properties["zufluss.metrics.port"]
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=WAIT_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    shown = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return sum(
        float(value)
        for key, value in shown
        if key.partition("{")[0] == name and all(label in key for label in labels)
    )


# -- processes -----------------------------------------------------------------------------------


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Suspend a process for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def lose_tables(server: DevServer) -> None:
    """Remove the table directories of a stopped server; metadata and remote storage stay."""
    for path in Path(server.data_dir).glob("fluss/*"):
        shutil.rmtree(path)
