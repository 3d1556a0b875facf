"""GET_TABLE_STATS: rows per bucket, and why some cannot be told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tablet.support import TABLE, Tablet
from zufluss.errors import ErrorCode, RecordTooLargeError
from zufluss.net.services import RequestContext
from zufluss.wire import messages as m
from zufluss.wire.hot.buckets import BUCKETS_MAX

CONTEXT = RequestContext(None, "FLUSS", 0, "test")


def kv_state(row_count: int | None) -> Any:
    """What a bucket asks of its key-value state to count and to stop."""
    store = SimpleNamespace(directory=Path("kv-0"))
    return SimpleNamespace(row_count=row_count, store=store, close=lambda: None)


async def stats(tablet: Tablet, *buckets: int, **fields: int) -> list[m.PbTableStatsRespForBucket]:
    request = m.GetTableStatsRequest(table_id=TABLE, target_columns=[0])
    for bucket in buckets:
        request.buckets_req.add(bucket_id=bucket, **fields)
    response = await tablet.server.service.get_table_stats(request, CONTEXT)
    return list(response.buckets_resp)


async def test_a_log_bucket_counts_what_is_durable(tmp_path: Path) -> None:
    """Rows from the start of the log to the high watermark; what is not durable is not there."""
    tablet = await Tablet(tmp_path).start()
    connection, sent = await tablet.produce(0)
    await connection.answer(sent)
    await tablet.produce(1)
    counts = {entry.bucket_id: entry.row_count for entry in await stats(tablet, 0, 1)}
    assert counts == {0: 3, 1: 0}
    await tablet.server.close()


async def test_a_bucket_of_a_primary_key_table_counts_its_keys(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    tablet.server.buckets.replica(TABLE, None, 0).kv = kv_state(41)
    (entry,) = await stats(tablet, 0)
    assert (entry.row_count, entry.HasField("error_code")) == (41, False)
    await tablet.server.close()


async def test_rows_that_are_not_counted_are_an_error_that_says_why(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    tablet.server.buckets.replica(TABLE, None, 0).kv = kv_state(None)
    (entry,) = await stats(tablet, 0)
    assert entry.error_code == ErrorCode.INVALID_TABLE_EXCEPTION
    assert "table.changelog.image = WAL" in entry.error_message
    assert not entry.HasField("row_count")
    await tablet.server.close()


async def test_an_unknown_bucket_does_not_spoil_the_others(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    found = [
        (e.bucket_id, e.error_code, e.HasField("row_count")) for e in await stats(tablet, 9, 0)
    ]
    assert found == [(9, ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION, False), (0, 0, True)]
    await tablet.server.close()


async def test_the_answer_names_the_partition_of_the_request(tmp_path: Path) -> None:
    """Absence is echoed as absence: table, partition and bucket are the key of an entry."""
    tablet = await Tablet(tmp_path).start()
    (plain,) = await stats(tablet, 0)
    assert not plain.HasField("partition_id")
    (partitioned,) = await stats(tablet, 0, partition_id=0)
    assert partitioned.HasField("partition_id")
    assert partitioned.error_code == ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
    await tablet.server.close()


async def test_too_many_buckets_at_once_are_refused(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    with pytest.raises(RecordTooLargeError, match="send several"):
        await stats(tablet, *[0] * (BUCKETS_MAX + 1))
    await tablet.server.close()
