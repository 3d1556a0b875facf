"""The handlers of log tables and the directory of buckets, without a tablet server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tablet.keyed import KEYED
from tests.tablet.parts import parts
from tests.tablet.support import SCHEMA, TABLE, Connection, batch, fetch_request
from zufluss.cluster.image import BucketState, TablePut
from zufluss.cluster.replicas import assignments
from zufluss.errors import (
    ErrorCode,
    InvalidTableError,
    LeaderNotAvailableError,
    LogStorageError,
    NonPrimaryKeyTableError,
    NotLeaderError,
    UnknownTableOrBucketError,
)
from zufluss.wire import messages as m


def produce_request(rows: int) -> m.ProduceLogRequest:
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    request.buckets_req.add(bucket_id=0, records=batch(rows))
    return request


@pytest.mark.parametrize("flush", ["os", "ack"])
async def test_an_entry_is_acknowledged_when_the_flush_mode_has_it_durable(
    tmp_path: Path, flush: str
) -> None:
    async with parts(tmp_path, SCHEMA, flush) as log_table:
        replica = await log_table.open()
        produce, connection = log_table.produce_handler(), Connection()
        sent = connection.send(produce.handle, produce_request(3))
        assert replica.log.log_end_offset == 3
        assert replica.log.high_watermark == (3 if flush == "os" else 0)
        assert await connection.produced(sent) == [(0, 0)]
        assert replica.log.high_watermark == 3


async def test_a_parked_fetch_is_woken_by_an_append(tmp_path: Path) -> None:
    async with parts(tmp_path, SCHEMA) as log_table:
        await log_table.open()
        fetch = log_table.fetch_handler()
        produce, connection = log_table.produce_handler(), Connection()
        fetched = connection.send(fetch.handle, fetch_request())
        assert len(fetch.parked) == 1
        writer = Connection()
        await writer.produced(writer.send(produce.handle, produce_request(2)))
        bucket = await connection.fetched(fetched)
        assert (bucket.high_watermark, bool(bucket.records)) == (2, True)
        assert not fetch.parked


async def test_a_bucket_that_is_closed_answers_its_waiters_and_is_not_open(tmp_path: Path) -> None:
    async with parts(tmp_path, SCHEMA, "ack") as log_table:
        replica = await log_table.open()
        produce, connection = log_table.produce_handler(), Connection()
        sent = connection.send(produce.handle, produce_request(3))
        log_table.close_bucket(replica, delete=True)
        storage, not_open = ErrorCode.LOG_STORAGE_EXCEPTION, LeaderNotAvailableError
        assert await connection.produced(sent) == [(0, storage)]
        assert log_table.events == ["opened", "closed"]
        assert not log_table.buckets.tables
        with pytest.raises(not_open, match="not any more; try again"):
            log_table.buckets.replica(TABLE, None, 0)


async def test_the_directory_says_why_a_bucket_is_not_there(tmp_path: Path) -> None:
    async with parts(tmp_path, SCHEMA) as log_table:
        buckets = log_table.buckets
        (assignment,) = assignments(buckets.image, 1)
        buckets.refuse(assignment, OSError("the disk is gone"), 0)
        with pytest.raises(LogStorageError, match="the disk is gone"):
            buckets.replica(TABLE, None, 0)
        replica = await log_table.open()
        assert buckets.replica(TABLE, None, 0) is replica, "a refusal ends when the bucket opens"
        with pytest.raises(NonPrimaryKeyTableError):
            buckets.kv_replica(TABLE, None, 0)


async def test_the_changelog_of_a_primary_key_table_is_not_written_by_clients(
    tmp_path: Path,
) -> None:
    async with parts(tmp_path, KEYED) as keyed:
        await keyed.open()
        assert isinstance(keyed.buckets.why_not(TABLE, None, 0), InvalidTableError)
        produce, connection = keyed.produce_handler(), Connection()
        sent = connection.send(produce.handle, produce_request(1))
        assert await connection.produced(sent) == [(0, ErrorCode.INVALID_TABLE_EXCEPTION)]


async def test_a_bucket_that_another_server_leads_is_not_unknown(tmp_path: Path) -> None:
    """Clients of Fluss look for the leader again after this error; operators are not misled."""
    async with parts(tmp_path, SCHEMA) as log_table:
        image = log_table.buckets.image
        entry = image.table_by_id(TABLE)
        assert entry is not None
        moved = BucketState((2,), 2, isr=(2,))
        image.apply([TablePut(replace(entry, buckets=(*entry.buckets, moved)))])
        with pytest.raises(NotLeaderError, match="led by tablet server 2, this is tablet server 1"):
            log_table.buckets.replica(TABLE, None, 1)
        for unknown in ((TABLE, None, 2), (TABLE, 5, 1), (TABLE + 1, None, 0)):
            with pytest.raises(UnknownTableOrBucketError):
                log_table.buckets.replica(*unknown)
        request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
        request.buckets_req.add(bucket_id=1, records=batch(1))
        connection = Connection()
        sent = connection.send(log_table.produce_handler().handle, request)
        assert await connection.produced(sent) == [(1, ErrorCode.NOT_LEADER_OR_FOLLOWER)]
        fetched = connection.send(log_table.fetch_handler().handle, fetch_request(1, max_wait_ms=0))
        assert (await connection.fetched(fetched)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
