"""The messages of producers, as a client sends them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.producer_cluster import NAMES, PV, SEEN, TTL_MS, ProducerCluster, at
from zufluss.errors import ProducerStateError
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import offsets_from_proto, offsets_to_proto


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ProducerCluster]:
    world = await ProducerCluster(tmp_path / "meta").begin()
    yield world
    await world.stop()


async def init(world: ProducerCluster, **more: object) -> m.InitProducerResponse:
    fields = {"producer_id": "job", "table_id": world.table_id, "ttl_ms": TTL_MS} | more
    return await world.call(ApiKey.INIT_PRODUCER, **fields)


async def test_a_producer_through_its_life(world: ProducerCluster) -> None:
    world.end_at(3, 4)
    made = await init(world, column_ids=[SEEN, PV])
    assert (made.producer_number, made.epoch, made.created) == (1, 1, True)
    assert (made.exclusive, made.undo_needed) == (True, True)
    assert list(made.column_ids) == [PV, SEEN]
    assert offsets_from_proto(made.baseline) == at(3, 4)
    assert not made.HasField("checkpoint_id")
    here = {"producer_id": "job", "table_id": world.table_id, "epoch": 1}
    renewed = await world.call(ApiKey.CHECKPOINT_PRODUCER, **here)
    assert renewed.remaining_ms == TTL_MS
    offsets = offsets_to_proto(at(5, 6))
    world.end_at(5, 6)
    await world.call(ApiKey.CHECKPOINT_PRODUCER, **here, baseline=offsets, checkpoint_id=8)
    again = await init(world, column_ids=[PV, SEEN])
    assert (again.epoch, again.created, again.checkpoint_id) == (2, False, 8)
    assert offsets_from_proto(again.baseline) == at(5, 6)
    await world.call(ApiKey.RELEASE_PRODUCER, **(here | {"epoch": 2}))
    assert not (await world.call(ApiKey.LIST_PRODUCERS)).producers


async def test_a_restore_goes_back_to_its_offsets(world: ProducerCluster) -> None:
    made = await init(world)
    world.end_at(1, 2)
    again = await init(
        world,
        is_restore=True,
        restored=offsets_to_proto(at(1, 2)),
        restored_number=made.producer_number,
    )
    assert offsets_from_proto(again.baseline) == at(1, 2)
    with pytest.raises(ProducerStateError, match="0 of the 2"):
        await init(world, is_restore=True)


async def test_a_checkpoint_beyond_the_end_of_a_log_is_refused_and_changes_nothing(
    world: ProducerCluster,
) -> None:
    """Later changes before the offset could never be undone, because baselines do not go back."""
    await init(world)
    here = {"producer_id": "job", "table_id": world.table_id, "epoch": 1}
    world.end_at(5, 6)
    for untrue in (at(6, 6), at(5, 10**15)):
        baseline = offsets_to_proto(untrue)
        with pytest.raises(ProducerStateError, match="whose log ends at"):
            await world.call(ApiKey.CHECKPOINT_PRODUCER, **here, baseline=baseline)
    again = await init(world)
    assert offsets_from_proto(again.baseline) == at(0, 0)
    await world.call(
        ApiKey.CHECKPOINT_PRODUCER, **(here | {"epoch": 2}), baseline=offsets_to_proto(at(5, 6))
    )


async def test_offsets_without_is_restore_do_not_count(world: ProducerCluster) -> None:
    made = await init(world, restored=offsets_to_proto(at(1, 2)))
    assert offsets_from_proto(made.baseline) == at(0, 0)


@pytest.mark.parametrize(
    "offsets",
    [
        m.PbBucketOffsets(bucket_ids=[0, 1], log_offsets=[5]),
        m.PbBucketOffsets(bucket_ids=[0, 0], log_offsets=[5, 6]),
    ],
    ids=["one_is_missing", "one_is_there_twice"],
)
async def test_malformed_offsets_are_refused(
    world: ProducerCluster, offsets: m.PbBucketOffsets
) -> None:
    await init(world)
    with pytest.raises(ProducerStateError, match="malformed"):
        await init(world, is_restore=True, restored=[offsets])


async def test_a_list_names_tables_and_columns(world: ProducerCluster) -> None:
    await init(world, producer_id="a", column_ids=[PV])
    await init(world, producer_id="b", column_ids=[SEEN, NAMES])
    world.time.now += 2
    found = (await world.call(ApiKey.LIST_PRODUCERS)).producers
    assert [(p.producer_id, p.table, list(p.column_names)) for p in found] == [
        ("a", "fluss.views", ["pv"]),
        ("b", "fluss.views", ["seen", "names"]),
    ]
    assert {(p.idle_ms, p.ttl_ms, p.lost, p.checkpointed) for p in found} == {
        (2000, TTL_MS, False, False)
    }
    assert not any(p.baseline or p.HasField("owner") for p in found)
    one = (await world.call(ApiKey.LIST_PRODUCERS, table_id=world.table_id)).producers
    assert [offsets_from_proto(p.baseline) for p in one] == [at(0, 0)] * 2


async def test_many_offsets_travel(world: ProducerCluster) -> None:
    many = {(i % 3 or None, i): i for i in range(9_000)}
    assert offsets_from_proto(offsets_to_proto(many)) == many
    await init(world)
    with pytest.raises(ProducerStateError, match="buckets, with offsets"):
        await init(world, is_restore=True, restored=offsets_to_proto(many))
