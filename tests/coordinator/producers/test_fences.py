"""Producers that own nothing: fences of primary-key tables, numbers of log tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.producer_cluster import PV, ProducerCluster
from tests.coordinator.support import EVENTS, table_json
from zufluss.coordinator.producers.rules import InitResult
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    InvalidTableError,
    LeaderNotAvailableError,
    NetworkError,
    ProducerFencedError,
    ProducerStateError,
)
from zufluss.model.producer import EPOCH_MAX
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor

HOLD_SECONDS = 7 * 24 * 3600


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ProducerCluster]:
    world = await ProducerCluster(tmp_path / "meta").begin()
    yield world
    await world.stop()


async def fence(world: ProducerCluster, producer_id: str = "job", **more: object) -> InitResult:
    return await world.init(producer_id, fence_only=True, **more)


async def test_every_epoch_of_a_fence_is_told_to_the_leaders_before_it_is_answered(
    world: ProducerCluster,
) -> None:
    for epoch in (1, 2):
        made = await fence(world)
        assert (made.producer.number, made.producer.epoch) == (1, epoch)
        assert (made.created, made.undo_needed) == (epoch == 1, False)
        told = world.told()
        assert (told.epoch, told.exclusive, told.holds, told.column_ids) == (
            epoch,
            False,
            False,
            frozenset(),
        )
    world.tablet.deaf = NetworkError("gone")
    with pytest.raises(LeaderNotAvailableError):
        await fence(world)
    world.tablet.deaf = None
    assert (await fence(world)).producer.epoch == 4


async def test_a_fence_is_there_after_a_restart_of_the_coordinator(world: ProducerCluster) -> None:
    await fence(world)
    back = await world.again()
    assert (await fence(back)).producer.epoch == 2
    with pytest.raises(ProducerStateError, match="is for plain upserts"):
        await back.init("job")
    await back.stop()


async def test_a_fence_and_an_owner_of_columns_do_not_disturb_each_other(
    world: ProducerCluster,
) -> None:
    await fence(world)
    await world.init("owner", PV)
    await fence(world)
    assert not world.told("owner").lost
    with pytest.raises(ProducerStateError, match="is for writes that can be undone"):
        await fence(world, "owner")


@pytest.mark.parametrize("columns", ["k INT NOT NULL, v STRING", "k INT NOT NULL"])
async def test_a_fence_needs_no_old_rows_and_no_columns(tmp_path: Path, columns: str) -> None:
    table = TableDescriptor(
        Schema.of(columns, ("k",)), bucket_count=2, properties={"table.changelog.image": "WAL"}
    )
    world = await ProducerCluster(tmp_path / "meta").begin(table.to_json())
    assert (await fence(world)).producer.epoch == 1
    with pytest.raises(InvalidTableError, match="producers need FULL"):
        await world.init("owner")
    await world.stop()


async def test_after_its_last_epoch_a_fence_has_another_number(world: ProducerCluster) -> None:
    made = await fence(world)
    table = world.producers.book.tables[world.table_id]
    table.producers["job"] = replace(made.producer, epoch=EPOCH_MAX)
    after = await fence(world)
    assert (after.producer.number, after.producer.epoch) == (2, 1)
    assert [entry.number for entry in world.all_told()] == [2]  # the old number writes no more


async def test_a_fence_belongs_to_its_owner_and_counts(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta", {"zufluss.producer.count-max": "1"}).begin()
    await fence(world, principal="ann")
    with pytest.raises(AuthorizationError, match="belongs to ann"):
        await fence(world, principal="bob")
    with pytest.raises(ConfigError, match="at most 1 are allowed"):
        await fence(world, "other")
    await world.stop()


async def test_who_owns_nothing_is_forgotten_after_a_silence(world: ProducerCluster) -> None:
    await fence(world, "silent")
    await fence(world, "alive")
    await world.init("owner", PV)
    world.time.now += HOLD_SECONDS
    await fence(world, "alive")
    world.time.now += 1
    await world.producers.book.look_for_silence()
    await world.producers.book.tell_all()
    assert {entry.producer_id for entry in world.all_told()} == {"alive", "owner"}
    assert not [path for path in await world.stored() if path.endswith("/silent")]
    with pytest.raises(ProducerFencedError):
        await world.checkpoint(1, producer_id="alive")


async def test_a_fence_whose_tasks_write_is_not_silent(world: ProducerCluster) -> None:
    made = await fence(world)
    world.tablet.idle_ms = {made.producer.number: 1000}
    world.time.now += HOLD_SECONDS + 1
    await world.producers.book.look_for_silence()
    assert (await fence(world)).producer.epoch == 2


async def test_numbers_of_log_tables_are_forgotten_after_a_silence(world: ProducerCluster) -> None:
    made = await world.catalog.create_table(EVENTS, table_json(), ignore_if_exists=True)
    world.table_id = made.info.table_id
    first, other = await world.init("nightly"), await world.init("stream")
    world.time.now += HOLD_SECONDS
    assert (await world.init("stream")).producer.number == other.producer.number
    world.time.now += 1
    await world.producers.book.look_for_silence()
    assert [info.producer.producer_id for info in await world.producers.producers()] == ["stream"]
    assert (await world.init("nightly")).producer.number > first.producer.number


async def test_nobody_is_forgotten_within_an_hour(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta", {"zufluss.producer.hold-max": "0ms"}).begin()
    await fence(world)
    world.time.now += 3600
    await world.producers.book.look_for_silence()
    assert (await fence(world)).producer.epoch == 2
    world.time.now += 3601
    await world.producers.book.look_for_silence()
    assert (await fence(world)).producer.epoch == 1
    await world.stop()
