"""What leaders are told of producers, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.producer_cluster import (
    DAILY,
    PV,
    SEEN,
    TTL_MS,
    VIEWS,
    ProducerCluster,
    at,
    views_json,
)
from tests.coordinator.support import TABLET
from tests.coordinator.test_registration import Apart
from zufluss.cluster.producers import ProducerEntry, TableProducers
from zufluss.coordinator.producers.rules import InitCall
from zufluss.errors import LeaderNotAvailableError, NetworkError
from zufluss.model.table import TableBucket
from zufluss.tablet.service import LATEST
from zufluss.wire import messages as m

HOLD_SECONDS = 7 * 86_400


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ProducerCluster]:
    """Without the task that tells leaders: a test says when."""
    world = await ProducerCluster(tmp_path / "meta").begin()
    await world.producers.book.stop()
    yield world
    await world.stop()


async def test_leaders_know_a_producer_before_it_does(world: ProducerCluster) -> None:
    """It could write, and others too, before they were refused."""
    asked, ends = [], world.tablet.end_offsets

    async def end_offsets(buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        asked.append(world.told())
        return await ends(buckets)

    world.tablet.end_offsets = end_offsets  # type: ignore[method-assign]
    made = (await world.init("job", PV)).producer
    first = ProducerEntry(
        "job", made.number, 1, frozenset({PV}), exclusive=True, lost=False, holds=False
    )
    assert asked == [first], "its baseline is found out after that"
    assert made.baseline is not None
    assert world.told() == replace(first, baseline=made.baseline, holds=True)


async def test_checkpoints_let_the_changelog_go(world: ProducerCluster) -> None:
    await world.init()
    await world.checkpoint(1, 5, 6)
    await world.producers.book.tell_all()
    assert world.told().baseline == at(5, 6)


async def test_a_checkpoint_that_changes_nothing_tells_nothing(world: ProducerCluster) -> None:
    await world.init()
    await world.checkpoint(1, 5, 6)
    await world.producers.book.tell_all()
    version = world.tablet.producers[world.table_id].version
    await world.checkpoint(1, 5, 6)
    await world.checkpoint(1)
    await world.producers.book.tell_all()
    assert world.tablet.producers[world.table_id].version == version


async def test_the_changelog_is_not_kept_for_ever_for_a_silent_producer(
    world: ProducerCluster,
) -> None:
    await world.init("a", PV)
    await world.init("b", SEEN)
    world.time.now += HOLD_SECONDS
    await world.checkpoint(1, producer_id="b")
    world.time.now += 1
    await world.producers.book.look_for_silence()
    await world.producers.book.tell_all()
    assert (world.told("a").holds, world.told("b").holds) == (False, True)
    await world.checkpoint(1, producer_id="a")
    await world.producers.book.tell_all()
    assert world.told("a").holds, "it lives after all"


async def test_puts_keep_the_changelog(world: ProducerCluster) -> None:
    made = await world.init()
    await world.producers.book.tell_all()
    world.tablet.idle_ms = {made.producer.number: 1000}
    world.time.now += HOLD_SECONDS + 1
    await world.producers.book.look_for_silence()
    assert not world.producers.book._untold
    world.time.now += HOLD_SECONDS + 1
    world.tablet.deaf = NetworkError("gone")
    await world.producers.book.look_for_silence()
    assert world.told().holds, "nobody says that it is silent"


async def test_a_release_that_cannot_be_told_is_told_later(world: ProducerCluster) -> None:
    await world.init()
    world.tablet.deaf = NetworkError("gone")
    await world.release()
    assert world.all_told()
    world.tablet.deaf = None
    assert await world.producers.book.tell_all()
    assert world.all_told() == ()


async def test_the_task_tells_by_itself(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta").begin()
    await world.init()
    told = asyncio.Event()
    update = world.tablet.update_producers

    async def noticed(tables: list[TableProducers]) -> None:
        await update(tables)
        told.set()

    world.tablet.update_producers = noticed  # type: ignore[method-assign,assignment]
    await world.checkpoint(1, 5, 6)
    await told.wait()
    assert world.told().baseline == at(5, 6)
    await world.stop()


async def test_a_new_partition_knows_producers_before_it_serves(world: ProducerCluster) -> None:
    """Its first put would otherwise not be checked."""
    table = views_json(
        columns="k INT NOT NULL, d STRING NOT NULL, pv BIGINT SUM",
        key=("k", "d"),
        partitions=("d",),
    )
    world.table_id = (await world.catalog.create_table(DAILY, table)).info.table_id
    made = await world.init()
    assert made.producer.baseline == {}
    assert world.all_told() == (), "the table has no leader yet"
    start, known = world.tablet.start_replicas, []

    async def looked_at(replicas: object) -> None:
        known.append(world.told().epoch)
        await start(replicas)  # type: ignore[arg-type]

    world.tablet.start_replicas = looked_at  # type: ignore[method-assign]
    await world.catalog.create_partition(DAILY, {"d": "1"})
    assert known == [1]
    assert world.told().holds, "the partition is kept from 0 on"


async def test_a_server_that_joins_knows_all(world: ProducerCluster) -> None:
    await world.init()
    world.coordinator.tablets.detach(1)
    with pytest.raises(LeaderNotAvailableError):
        await world.init()
    world.tablet.producers.clear()
    await world.coordinator.attach(TABLET, world.tablet)
    assert world.told().epoch == 2


async def test_apart_the_same_travels_in_messages(tmp_path: Path) -> None:
    """Registration, update, activity and offsets, each through its message."""
    apart = Apart(tmp_path / "meta")
    await apart.start_coordinator()
    await apart.link.join()
    ends = {0: 11, 1: 12}

    async def list_offsets(request: m.ListOffsetsRequest, _: object) -> m.ListOffsetsResponse:
        assert request.offset_type == LATEST
        answers = [
            m.PbListOffsetsRespForBucket(bucket_id=i, offset=ends[i]) for i in request.bucket_id
        ]
        return m.ListOffsetsResponse(buckets_resp=answers)

    apart.list_offsets = list_offsets
    made = await apart.coordinator.catalog.create_table(VIEWS, views_json())
    producers = apart.coordinator.producers
    call = InitCall("job", made.info.table_id, TTL_MS, (PV,))
    found = (await producers.init(call)).producer
    assert found.baseline == at(11, 12)
    assert apart.tablet.producers[made.info.table_id].producers[0].epoch == 1
    apart.tablet.idle_ms = {found.number: 5}
    assert [each.producer for each in await producers.producers()] == [found]
    apart.tablet.producers.clear()
    await apart.link.join()
    (entry,) = apart.tablet.producers[made.info.table_id].producers
    assert (entry.epoch, entry.baseline, entry.holds) == (1, at(11, 12), True)
    apart.to_tablet.down = True
    with pytest.raises(LeaderNotAvailableError) as refused:
        await producers.init(call)
    assert refused.value.retriable
    await apart.stop_coordinator()


async def test_the_answer_of_a_bucket_that_failed_counts(tmp_path: Path) -> None:
    apart = Apart(tmp_path / "meta")
    await apart.start_coordinator()
    await apart.link.join()

    async def refuse(request: m.ListOffsetsRequest, _: object) -> m.ListOffsetsResponse:
        answer = m.PbListOffsetsRespForBucket(bucket_id=0, error_code=12, error_message="moved")
        return m.ListOffsetsResponse(buckets_resp=[answer])

    apart.list_offsets = refuse
    made = await apart.coordinator.catalog.create_table(VIEWS, views_json(buckets=1))
    bucket = TableBucket(made.info.table_id, None, 0)
    with pytest.raises(LeaderNotAvailableError, match=f"{bucket}: moved"):
        await apart.coordinator.producers.init(InitCall("job", made.info.table_id, TTL_MS))
    await apart.stop_coordinator()
