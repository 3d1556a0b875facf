"""Calls that connectors of the Fluss ecosystem make, replayed as frames, and their answers."""

from __future__ import annotations

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import IDS, append, create, ids
from tests.end_to_end.raw import RawClient
from zufluss.record.arrow.message import decode
from zufluss.record.header import iter_headers

EMPTY = pa.schema([])


@pytest.fixture
async def counted(conn: fluss.FlussConnection, path: fluss.TablePath) -> int:
    """The id of a table with batches of 3, 4 and 100 000 rows, the last too large for one read."""
    table = await create(conn, path, IDS, bucket_count=1)
    for start, stop in ((0, 3), (3, 7), (7, 100_007)):
        await append(table, ids(start, stop))
    return int(table.get_table_info().table_id)


def test_a_fetch_without_columns_counts_rows(raw: RawClient, counted: int) -> None:
    """Spark asks for no column when it counts."""
    rows, offset, size = 0, 0, 0
    while offset < raw.end_offset(counted):
        records = raw.fetch(counted, offset, columns=()).records
        for pos, header in iter_headers(records):
            batch, _ = decode(records, pos, header, EMPTY)
            assert (batch.num_rows, batch.num_columns) == (header.record_count, 0)
            rows += header.record_count
            offset = header.next_offset
        size += len(records)
    assert rows == 100_007
    assert size < 4_096


def test_a_changelog_fetched_without_columns_has_its_change_types(
    raw: RawClient, changed: int
) -> None:
    """A count over a changelog tells rows that came from rows that went."""
    records = raw.fetch(changed, columns=()).records
    kinds = [
        bytes(records[at : at + header.change_types_size])
        for pos, header in iter_headers(records)
        for at in [pos + header.body_offset - header.change_types_size]
    ]
    assert b"".join(kinds) == bytes([1, 1, 2, 3])
    assert sum(header.record_count for _, header in iter_headers(records)) == 4


@pytest.fixture
async def changed(conn: fluss.FlussConnection, path: fluss.TablePath) -> int:
    """The id of a table of two keys, one of which was updated."""
    table = await create(conn, path, IDS, primary_keys=["id"], bucket_count=1)
    writer = table.new_upsert().create_writer()
    for row in ({"id": 1, "text": "a"}, {"id": 2, "text": "b"}):
        writer.upsert(row)
    await writer.flush()
    writer.upsert({"id": 1, "text": "c"})
    await writer.flush()
    return int(table.get_table_info().table_id)
