"""Helpers for the pyfluss tests: connect, create, append, read, expect errors.

Everything that could wait for ever in pyfluss (its writer retries without end) has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import fluss
import pyarrow as pa
import pytest

from tests.waiting import WAIT_SECONDS

EARLIEST = fluss.EARLIEST_OFFSET
DEADLINE_SECONDS = WAIT_SECONDS
POLL_MS = 500

DATABASE = "wire"
"""The database of the tests."""

IDS = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string())])
"""The everyday table: a number and a text."""

T = TypeVar("T")

_numbers = itertools.count()


def fresh_name(wish: str) -> str:
    """A name that is not used on this worker's server yet."""
    return f"{re.sub(r'[^A-Za-z0-9_]+', '_', wish)[:150]}_{next(_numbers)}"


def fresh_path(wish: str) -> fluss.TablePath:
    """The path of a table that does not exist yet."""
    return fluss.TablePath(DATABASE, fresh_name(wish))


async def connect(bootstrap: str, **properties: str) -> fluss.FlussConnection:
    """A pyfluss connection; properties with `_` for `.` and `-`, as the wheel names them."""
    config = fluss.Config({"bootstrap.servers": bootstrap})
    for name, value in properties.items():
        setattr(config, name, value)
    return await in_time(fluss.FlussConnection.create(config))


@asynccontextmanager
async def connected(bootstrap: str, **properties: str) -> AsyncIterator[fluss.FlussConnection]:
    """A pyfluss connection for the length of a block."""
    connection = await connect(bootstrap, **properties)
    try:
        yield connection
    finally:
        await connection.close()


async def in_time(work: Awaitable[T]) -> T:
    """Await `work`; fails the test after a deadline."""

    async def run() -> T:
        return await work

    return await asyncio.wait_for(run(), DEADLINE_SECONDS)


def descriptor(schema: pa.Schema, **options: Any) -> fluss.TableDescriptor:
    """A pyfluss table descriptor of an Arrow schema."""
    primary_keys = options.pop("primary_keys", None)
    return fluss.TableDescriptor(fluss.Schema(schema, primary_keys=primary_keys), **options)


async def create(
    conn: fluss.FlussConnection, path: fluss.TablePath, schema: pa.Schema = IDS, **options: Any
) -> fluss.FlussTable:
    """Create a table and open it."""
    await in_time(conn.get_admin().create_table(path, descriptor(schema, **options)))
    return await in_time(conn.get_table(path))


def ids(start: int, stop: int, schema: pa.Schema = IDS) -> pa.RecordBatch:
    """Rows `start` to `stop` of the everyday table."""
    numbers = range(start, stop)
    columns = [pa.array(numbers, pa.int64()), pa.array([f"row {i}" for i in numbers])]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


async def append(table: fluss.FlussTable, *batches: pa.RecordBatch) -> None:
    """Append Arrow batches, each acknowledged before the next is sent."""
    writer = table.new_append().create_writer()
    for batch in batches:
        handle = writer.write_arrow_batch(batch)
        await in_time(writer.flush())
        await in_time(handle.wait())


def select(scan: fluss.TableScan, columns: Sequence[int | str] | None) -> fluss.TableScan:
    """The scan with a projection by index or by name."""
    if columns is None:
        return scan
    if isinstance(columns[0], int):
        return scan.project(list(columns))
    return scan.project_by_name(list(columns))


async def arrow_scanner(
    table: fluss.FlussTable,
    start: dict[int, int] | None = None,
    columns: Sequence[int | str] | None = None,
) -> fluss.LogScanner:
    """An Arrow scanner subscribed to the buckets and offsets of `start`, or to all of them."""
    scanner = await in_time(select(table.new_scan(), columns).create_record_batch_log_scanner())
    scanner.subscribe_buckets(start or everything(table))
    return scanner


async def record_scanner(
    table: fluss.FlussTable,
    start: dict[int, int] | None = None,
    columns: Sequence[int | str] | None = None,
) -> fluss.LogScanner:
    """A record scanner subscribed to the buckets and offsets of `start`, or to all of them."""
    scanner = await in_time(select(table.new_scan(), columns).create_log_scanner())
    scanner.subscribe_buckets(start or everything(table))
    return scanner


def everything(table: fluss.FlussTable) -> dict[int, int]:
    """Every bucket from its start."""
    return dict.fromkeys(range(table.get_table_info().num_buckets), EARLIEST)


async def read_arrow(
    table: fluss.FlussTable,
    start: dict[int, int] | None = None,
    columns: Sequence[int | str] | None = None,
) -> pa.Table:
    """All rows up to the current end."""
    scanner = await arrow_scanner(table, start, columns)
    return await in_time(scanner.to_arrow())


async def poll_records(scanner: fluss.LogScanner, count: int) -> list[fluss.ScanRecord]:
    """Poll until `count` records came."""
    found: list[fluss.ScanRecord] = []

    async def poll() -> None:
        while len(found) < count:
            found.extend(await scanner.poll(POLL_MS))

    await in_time(poll())
    return found


async def poll_batches(scanner: fluss.LogScanner, count: int) -> list[fluss.RecordBatch]:
    """Poll until batches with `count` rows came."""
    found: list[fluss.RecordBatch] = []

    async def poll() -> None:
        while sum(b.batch.num_rows for b in found) < count:
            found.extend(await scanner.poll_record_batch(POLL_MS))

    await in_time(poll())
    return found


async def read_records(
    table: fluss.FlussTable, count: int, start: dict[int, int] | None = None
) -> list[fluss.ScanRecord]:
    """`count` records through a record scanner."""
    return await poll_records(await record_scanner(table, start), count)


async def end_offsets(
    admin: fluss.FlussAdmin, path: fluss.TablePath, buckets: Iterable[int] = (0,)
) -> dict[int, int]:
    """The latest offset of each bucket."""
    return await in_time(admin.list_offsets(path, list(buckets), fluss.OffsetSpec.latest()))


@contextmanager
def refused(*codes: int) -> Iterator[None]:
    """The block must raise a pyfluss error with one of these codes."""
    with pytest.raises(fluss.FlussError) as caught:
        yield
    assert caught.value.error_code in codes, f"{caught.value.error_code}: {caught.value.message}"
