"""Nothing of a lake table leaves the log before the lake has it.

The retention of a real tablet server, with the clock of the test: what is old enough to go is held
back by the lake, or by the state of a primary-key table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.log.support import append, batch, expire, open_log
from tests.tablet.support import TABLE, Tablet
from zufluss.cluster.image import ClusterNode, TableEntry, TablePut
from zufluss.cluster.replicas import LakeOffsets, assignments, lake_offsets_to_proto
from zufluss.config.values import Endpoint
from zufluss.errors import ZuflussError
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.model.table import TableBucket
from zufluss.net.services import RequestContext
from zufluss.tablet.coordinator_client import CoordinatorClient
from zufluss.tablet.link import CoordinatorLink
from zufluss.wire import messages as m

LAKE = {"table.datalake.enabled": "true", "table.log.ttl": "1ms"}
SMALL_SEGMENTS = {"log.segment.file-size": "1kb", "zufluss.log.flush": "os"}
LONG_AFTER = 1 << 50
ROWS = 3
"""Rows of one batch."""


def tablet(tmp_path: Path, **properties: str) -> Tablet:
    return Tablet(tmp_path, buckets=1, conf=SMALL_SEGMENTS, properties={**LAKE, **properties})


def log_of(server: Tablet) -> Log:
    return server.server.buckets.replica(TABLE, None, 0).log


async def fill(server: Tablet, batches: int = 20) -> Log:
    """A bucket of several segments, all of it older than the time to live."""
    for _ in range(batches):
        connection, request = await server.produce(0)
        await connection.produced(request)
    log = log_of(server)
    assert len(log._segments) > 3
    return log


async def tiered(server: Tablet, offset: int, snapshot: int = 1) -> None:
    bucket = TableBucket(TABLE, None, 0)
    await server.server.notify_lake_offsets([LakeOffsets(bucket, snapshot, offset)])


async def alter(server: Tablet, **properties: str) -> None:
    entry = server.image.table_by_id(TABLE)
    assert entry is not None
    descriptor = replace(
        entry.info.descriptor, properties={**entry.info.descriptor.properties, **properties}
    )
    info = replace(entry.info, descriptor=descriptor)
    await server.server.update_metadata([TablePut(TableEntry(info, entry.schemas, entry.buckets))])


def retention(server: Tablet) -> int:
    """One round of retention, long after everything was written; the first offset that is left."""
    server.server.logs.expire(LONG_AFTER)
    return log_of(server).log_start_offset


async def test_a_tiered_table_keeps_everything_until_the_coordinator_was_heard(
    tmp_path: Path,
) -> None:
    server = await tablet(tmp_path).start()
    await fill(server)
    assert retention(server) == 0
    await server.server.close()


async def test_what_the_lake_has_goes_and_what_it_lacks_stays(tmp_path: Path) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    second, third = log._bases[1:3]
    await tiered(server, third - 1)
    assert retention(server) == second, "the segment that reaches the tiered offset stays"
    await tiered(server, third, snapshot=2)
    assert retention(server) == third
    await tiered(server, log.log_end_offset, snapshot=3)
    assert retention(server) == log.log_end_offset == 20 * ROWS
    await server.server.close()


async def test_the_segment_being_written_is_not_closed_for_a_lake_that_lacks_it(
    tmp_path: Path,
) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    segments = len(log._segments)
    await tiered(server, log.log_end_offset - 1)
    retention(server)
    assert log._segments[-1].size > 0
    assert len(log._segments) < segments
    await server.server.close()


async def test_a_lower_offset_holds_more_again(tmp_path: Path) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    await tiered(server, log.log_end_offset)
    await tiered(server, 0, snapshot=2)
    assert retention(server) == 0
    await server.server.close()


async def test_turning_the_lake_off_releases_and_on_again_holds(tmp_path: Path) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    await tiered(server, log._bases[1])
    await alter(server, **{"table.datalake.enabled": "false"})
    await alter(server, **{"table.datalake.enabled": "true"})
    assert retention(server) == log._bases[0] > 0, "what was tiered stays known"
    start = log.log_start_offset
    assert retention(server) == start < log.log_end_offset
    await alter(server, **{"table.datalake.enabled": "false"})
    assert retention(server) == log.log_end_offset
    await server.server.close()


async def test_a_table_without_lake_expires_whatever_was_tiered(tmp_path: Path) -> None:
    server = await tablet(tmp_path, **{"table.datalake.enabled": "false"}).start()
    log = await fill(server)
    await tiered(server, 1)
    assert retention(server) == log.log_end_offset
    await server.server.close()


async def test_after_a_new_registration_everything_is_held_until_the_coordinator_was_heard(
    tmp_path: Path,
) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    await tiered(server, log.log_end_offset)
    await server.server.assign(server.image, assignments(server.image, 1))
    assert retention(server) == 0
    await tiered(server, log._bases[1])
    assert retention(server) > 0
    await server.server.close()


async def test_offsets_of_buckets_that_are_elsewhere_are_passed_over(tmp_path: Path) -> None:
    server = await tablet(tmp_path).start()
    await server.server.notify_lake_offsets(
        [LakeOffsets(TableBucket(*bucket), 1, 5) for bucket in ((TABLE, None, 9), (99, 4, 0))]
    )
    assert server.server.buckets.replica(TABLE, None, 0).tiered_offset is None
    await server.server.close()


async def test_a_server_of_its_own_hears_lake_offsets_over_the_wire(tmp_path: Path) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    link = CoordinatorLink(
        ClusterNode(1, (Endpoint("FLUSS", "localhost", 1),)), server.image, server.server,
        CoordinatorClient(_nobody), check_cluster=lambda _: None,
    )  # fmt: skip
    link._coordinator.epoch, link.server_epoch = 1, 4
    told = lake_offsets_to_proto(LakeOffsets(TableBucket(TABLE, None, 0), 1, log._bases[1]))
    request = m.NotifyLakeTableOffsetRequest(
        coordinator_epoch=1, server_epoch=4, notify_buckets_req=[told]
    )
    context = RequestContext(None, "FLUSS", 0, "test")
    await link.notify_lake_table_offset(request, context)
    assert retention(server) == log._bases[0] > 0
    request.server_epoch = 3
    with pytest.raises(ZuflussError, match="belongs to server epoch 3"):
        await link.notify_lake_table_offset(request, context)
    await server.server.close()


async def _nobody() -> None:
    raise AssertionError("nothing is sent")


OFFSETS = st.one_of(st.none(), st.integers(0, 60))


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=15),
    visible=st.floats(0, 1),
    rounds=st.lists(st.tuples(OFFSETS, OFFSETS, st.integers(0, 400)), min_size=1, max_size=5),
)
def test_retention_never_takes_what_recovery_or_the_lake_still_needs(
    sizes: Sequence[int],
    visible: float,
    rounds: Sequence[tuple[int | None, int | None, int]],
) -> None:
    with TemporaryDirectory() as directory:
        log = open_log(Path(directory), segment_bytes_max=200, ttl_ms=100)
        ends = []
        for at, records in enumerate(sizes):
            ends.append(append(log, batch(records), now_ms=10 * at, visible=False).end_offset)
        log.advance_high_watermark(ends[int(visible * (len(ends) - 1))])
        for needed_from, untiered_from, now in rounds:
            log.holds.set(Holder.KV_STATE, needed_from)
            log.holds.set(Holder.LAKE, untiered_from)
            before = log.log_start_offset
            expire(log, now)
            start = log.log_start_offset
            kept = [x for x in (needed_from, untiered_from) if x is not None]
            assert start == before or start <= min([log.high_watermark, *kept])
            assert log.log_end_offset == ends[-1]
            assert not log.held_back or needed_from is not None
        log.holds.set(Holder.KV_STATE, None)
        log.holds.set(Holder.LAKE, None)
        ends_of_segments = (*log._bases, log.log_end_offset)
        expire(log, 10**6)
        visible_end = log.high_watermark
        assert log.log_start_offset == max(x for x in ends_of_segments if x <= visible_end)
        log.close(clean=False)


async def test_the_state_of_a_primary_key_table_holds_its_changelog_beside_the_lake(
    tmp_path: Path,
) -> None:
    server = await tablet(tmp_path).start()
    log = await fill(server)
    needed_from = log._bases[1]
    log.holds.set(Holder.KV_STATE, needed_from)
    await tiered(server, log.log_end_offset)
    assert retention(server) == needed_from
    assert log.held_back, "a flush of the state would free the rest"
    log.holds.set(Holder.KV_STATE, log.log_end_offset)
    await tiered(server, log._bases[0], snapshot=2)
    retention(server)
    assert not log.held_back, "a flush would free nothing that the lake lacks"
    await server.server.close()
