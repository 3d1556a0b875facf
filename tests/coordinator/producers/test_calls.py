"""Producers: epochs, numbers, columns, state, and who may do what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.producer_cluster import (
    DAILY,
    NAMES,
    PV,
    SEEN,
    TTL_MS,
    VIEWS,
    ProducerCluster,
    at,
    views_json,
)
from tests.coordinator.support import EVENTS, table_json
from zufluss.coordinator.producers import book
from zufluss.coordinator.producers.rules import InitResult, ProducerCounts
from zufluss.errors import (
    AuthorizationError,
    ColumnLockedError,
    ConfigError,
    InvalidProducerIdError,
    InvalidTableError,
    InvalidTargetColumnError,
    LeaderNotAvailableError,
    NetworkError,
    ProducerFencedError,
    ProducerNotFoundError,
    ProducerStateError,
    UnknownTableOrBucketError,
)
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TablePath


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ProducerCluster]:
    world = await ProducerCluster(tmp_path / "meta").begin()
    yield world
    await world.stop()


# Epochs


async def test_a_new_producer_owns_all_columns_from_where_the_logs_end(
    world: ProducerCluster,
) -> None:
    world.end_at(7, 9)
    made = await world.init()
    assert (made.producer.number, made.producer.epoch, made.created) == (1, 1, True)
    assert made.undo_needed
    assert made.producer.exclusive
    assert made.producer.column_ids == {PV, SEEN, NAMES}
    assert made.producer.baseline == at(7, 9)


async def test_each_start_fences_the_one_before_at_the_leaders(world: ProducerCluster) -> None:
    """Without this a writer that was thought dead could go on."""
    world.end_at(7, 9)
    await world.init()
    world.end_at(20, 30)
    again = await world.init()
    assert (again.producer.number, again.producer.epoch, again.created) == (1, 2, False)
    assert again.producer.baseline == at(7, 9), "what the first epoch wrote is undone"
    assert world.told().epoch == 2


async def test_numbers_of_producers_are_not_used_again(world: ProducerCluster) -> None:
    first = await world.init()
    await world.release(1)
    second = await world.init()
    assert second.producer.number > first.producer.number
    assert (second.producer.epoch, second.created) == (1, True)


async def test_an_epoch_is_not_given_while_a_leader_cannot_be_told(world: ProducerCluster) -> None:
    """A leader that does not know the epoch would let the old one write."""
    await world.init()
    world.tablet.deaf = NetworkError("gone")
    with pytest.raises(LeaderNotAvailableError, match="tablet server 1") as refused:
        await world.init()
    assert refused.value.retriable
    world.tablet.deaf = None
    assert (await world.init()).producer.epoch == 3


async def test_an_epoch_is_not_given_while_a_leader_is_not_there(world: ProducerCluster) -> None:
    world.coordinator.tablets.detach(1)
    with pytest.raises(LeaderNotAvailableError, match="is not there"):
        await world.init()


async def test_a_producer_without_answer_has_nothing_to_undo(world: ProducerCluster) -> None:
    """Nobody got its number, so the baseline is the end of the logs at the second try."""
    world.tablet.deaf = NetworkError("gone")
    with pytest.raises(LeaderNotAvailableError):
        await world.init()
    world.tablet.deaf = None
    world.end_at(5, 5)
    made = await world.init()
    assert (made.created, made.producer.epoch) == (True, 2)
    assert made.producer.baseline == at(5, 5)


async def test_the_last_epoch_is_refused(
    world: ProducerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zufluss.coordinator.producers.rules.EPOCH_MAX", 2)
    await world.init()
    await world.init()
    with pytest.raises(ProducerStateError, match="another id"):
        await world.init()


# Columns


async def test_other_columns_are_free(world: ProducerCluster) -> None:
    await world.init("a", PV)
    assert (await world.init("b", SEEN, NAMES)).producer.column_ids == {SEEN, NAMES}


async def test_columns_of_a_producer_that_lives_are_refused_by_name(world: ProducerCluster) -> None:
    await world.init("a", PV, SEEN)
    world.time.now += 20
    with pytest.raises(ColumnLockedError, match=r"'a' owns the columns seen .* 40000 ms"):
        await world.init("b", SEEN, NAMES)
    assert world.coordinator.producers.counts == ProducerCounts(1, 0)


async def test_columns_of_a_silent_producer_are_taken_for_good(world: ProducerCluster) -> None:
    await world.init("a", PV)
    world.time.now += 61
    await world.init("b", PV)
    assert world.told("a").lost
    assert not world.told("b").lost
    for attempt in (world.init("a", PV), world.checkpoint(1, producer_id="a")):
        with pytest.raises(ProducerFencedError, match="cannot come back"):
            await attempt
    assert world.coordinator.producers.counts == ProducerCounts(2, 1)
    await world.release(producer_id="a")
    assert (await world.init("a", SEEN)).producer.number == 3


async def test_puts_that_only_leaders_saw_keep_the_columns(world: ProducerCluster) -> None:
    """A writer that writes, but whose renewals do not come through, lives."""
    made = await world.init("a", PV)
    world.time.now += 90
    world.tablet.idle_ms = {made.producer.number: 10_000}
    with pytest.raises(ColumnLockedError, match="50000 ms"):
        await world.init("b", PV)


async def test_nothing_is_taken_while_a_leader_does_not_say_who_wrote(
    world: ProducerCluster,
) -> None:
    await world.init("a", PV)
    world.time.now += 90
    world.tablet.deaf = NetworkError("gone")
    with pytest.raises(LeaderNotAvailableError):
        await world.init("b", PV)
    world.tablet.deaf = None
    assert (await world.init("a", PV)).producer.epoch == 2


async def test_a_renewal_keeps_the_columns(world: ProducerCluster) -> None:
    await world.init("a", PV)
    world.time.now += 50
    assert await world.checkpoint(1, producer_id="a") == TTL_MS
    world.time.now += 50
    with pytest.raises(ColumnLockedError):
        await world.init("b", PV)


async def test_released_columns_are_free_at_once(world: ProducerCluster) -> None:
    await world.init("a", PV)
    await world.release(1, producer_id="a")
    assert world.all_told() == ()
    assert (await world.init("b", PV)).created


@pytest.mark.parametrize(("column", "what"), [(0, "of the key"), (77, "unknown")])
async def test_columns_that_nobody_can_own_are_refused(
    world: ProducerCluster, column: int, what: str
) -> None:
    with pytest.raises(InvalidTargetColumnError, match=what):
        await world.init("a", column)


async def test_a_producer_keeps_its_columns(world: ProducerCluster) -> None:
    """Changes of earlier epochs to columns that it gives up could not be undone."""
    await world.init("a", PV, SEEN)
    for columns in ((PV,), (PV, SEEN, NAMES), ()):
        with pytest.raises(ProducerStateError, match="pv, seen"):
            await world.init("a", *columns)
    assert (await world.init("a", SEEN, PV)).producer.epoch == 2


async def test_a_producer_of_all_columns_gets_new_ones(world: ProducerCluster) -> None:
    await world.init("a")
    wider = Schema.of(
        "k INT NOT NULL, pv BIGINT SUM, seen BIGINT MAX, names STRING LISTAGG, more INT MAX", ("k",)
    )
    await world.catalog.alter_table(VIEWS, lambda info: replace(info.descriptor, schema=wider))
    assert (await world.init("a")).producer.column_ids == {PV, SEEN, NAMES, 4}


# Shared columns


async def test_shared_columns_may_have_several_producers(tmp_path: Path) -> None:
    shared = {"table.column-lock.enabled": "false"}
    world = await ProducerCluster(tmp_path / "meta").begin(views_json(properties=shared))
    a, b = await world.init("a", PV, SEEN), await world.init("b", PV)
    assert not a.producer.exclusive
    assert not b.producer.exclusive
    with pytest.raises(InvalidTargetColumnError, match=r"'names'.*listagg"):
        await world.init("c", NAMES)
    await world.stop()


async def test_what_can_be_deleted_cannot_be_shared(tmp_path: Path) -> None:
    """A delete removes the additions of all producers, which cannot be told apart after."""
    properties = {"table.column-lock.enabled": "false", "table.delete.behavior": "ALLOW"}
    world = await ProducerCluster(tmp_path / "meta").begin(views_json(properties=properties))
    with pytest.raises(InvalidTargetColumnError, match=r"'pv'.*ALLOW"):
        await world.init("a", PV)
    assert not (await world.init("a", SEEN)).producer.exclusive
    await world.stop()


async def test_a_plain_table_is_shared(world: ProducerCluster) -> None:
    plain = TableDescriptor(Schema.of("k INT NOT NULL, v INT", ("k",)), bucket_count=1).to_json()
    world.table_id = (await world.catalog.create_table(EVENTS, plain)).info.table_id
    assert not (await world.init("a")).producer.exclusive
    assert (await world.init("b")).created


async def test_a_sum_of_floats_cannot_be_shared(tmp_path: Path) -> None:
    """The additions of one producer cannot be undone exactly after others have added."""
    table = views_json(
        columns="k INT NOT NULL, pv DOUBLE SUM", properties={"table.column-lock.enabled": "false"}
    )
    world = await ProducerCluster(tmp_path / "meta").begin(table)
    with pytest.raises(InvalidTargetColumnError, match=r"sum of DOUBLE"):
        await world.init("a", PV)
    await world.stop()


# Undo


async def test_columns_that_can_be_replayed_need_no_undo(world: ProducerCluster) -> None:
    assert not (await world.init("a", SEEN)).undo_needed
    assert (await world.init("b", PV)).undo_needed


async def test_with_deletes_every_column_needs_an_undo(tmp_path: Path) -> None:
    table = views_json(properties={"table.delete.behavior": "ALLOW"})
    world = await ProducerCluster(tmp_path / "meta").begin(table)
    assert (await world.init("a", SEEN)).undo_needed
    await world.stop()


# State


async def test_without_state_a_producer_with_checkpoints_is_refused(world: ProducerCluster) -> None:
    """Its source would begin too early, or its checkpoint would be lost."""
    await world.init()
    await world.checkpoint(1, 3, 4)
    with pytest.raises(ProducerStateError, match="restore its latest one"):
        await world.init()
    assert (await world.init(restored=at(3, 4))).producer.epoch == 2


async def test_a_checkpoint_with_its_id_is_state_enough(world: ProducerCluster) -> None:
    made = await world.init()
    assert made.producer.checkpoint_id is None
    await world.checkpoint(1, 3, 4, checkpoint_id=17)
    again = await world.init()
    assert (again.producer.checkpoint_id, again.producer.epoch) == (17, 2)
    assert again.producer.baseline == at(3, 4)
    await world.checkpoint(2, 5, 5)
    with pytest.raises(ProducerStateError, match="checkpoints"):
        await world.init()


async def test_the_id_of_checkpoints_never_goes_back(world: ProducerCluster) -> None:
    await world.init()
    await world.checkpoint(1, 3, 4, checkpoint_id=17)
    await world.checkpoint(1, 3, 4, checkpoint_id=17)
    with pytest.raises(ProducerStateError, match="17"):
        await world.checkpoint(1, 9, 9, checkpoint_id=16)
    assert (await world.init()).producer.baseline == at(3, 4)


async def test_a_restored_state_is_undone_from(world: ProducerCluster) -> None:
    made = await world.init()
    world.end_at(50, 60)
    again = await world.init(restored=at(30, 40), restored_number=made.producer.number)
    assert (again.created, again.producer.baseline) == (False, at(30, 40))
    with pytest.raises(ProducerStateError, match="checkpoints"):
        await world.init()


async def test_a_state_of_a_producer_that_was_dropped_is_refused(world: ProducerCluster) -> None:
    """Its changes have another number and would not be undone."""
    made = await world.init()
    await world.release()
    with pytest.raises(ProducerNotFoundError, match="released or dropped"):
        await world.init(restored=at(1, 1))
    await world.init()
    with pytest.raises(ProducerStateError, match="dropped since"):
        await world.init(restored=at(1, 1), restored_number=made.producer.number)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({}, "0 of the 2 buckets"),
        (at(1), "1 of the 2 buckets"),
        (at(1, 2, 3), "bucket 2"),
        (at(1, -2), "offset -2"),
        ({(7, 0): 1, (7, 1): 1}, "no partition id 7"),
    ],
)
async def test_a_state_that_does_not_fit_is_refused(
    world: ProducerCluster, state: dict[tuple[int | None, int], int], what: str
) -> None:
    await world.init()
    with pytest.raises(ProducerStateError, match=what):
        await world.init(restored=state)
    assert (await world.init()).producer.epoch == 2


async def test_partitions_that_are_gone_fall_out_of_a_state(world: ProducerCluster) -> None:
    key = "k INT NOT NULL, d STRING NOT NULL, pv BIGINT SUM"
    table = views_json(columns=key, key=("k", "d"), partitions=("d",))
    daily = await world.catalog.create_table(DAILY, table)
    world.table_id = daily.info.table_id
    one = (await world.catalog.create_partition(DAILY, {"d": "1"})).partition_id
    two = (await world.catalog.create_partition(DAILY, {"d": "2"})).partition_id
    made = await world.init()
    assert set(made.producer.baseline or {}) == {(i, b) for i in (one, two) for b in (0, 1)}
    state = {(one, 0): 5, (one, 1): 6, (two, 0): 7, (two, 1): 8}
    await world.catalog.drop_partition(DAILY, {"d": "1"})
    again = await world.init(restored=state)
    assert again.producer.baseline == {(two, 0): 7, (two, 1): 8}
    with pytest.raises(ProducerStateError, match="1 of the 2 buckets"):
        await world.init(restored={(two, 0): 7})
    with pytest.raises(ProducerStateError, match="no buckets without partition"):
        await world.init(restored=at(1, 1))


async def test_a_state_of_another_table_is_refused(world: ProducerCluster) -> None:
    key = "k INT NOT NULL, d STRING NOT NULL, pv BIGINT SUM"
    table = views_json(columns=key, key=("k", "d"), partitions=("d",))
    await world.catalog.create_table(DAILY, table)
    foreign = (await world.catalog.create_partition(DAILY, {"d": "1"})).partition_id
    other = await world.catalog.create_table(TablePath("fluss", "other"), table)
    world.table_id = other.info.table_id
    await world.init()
    with pytest.raises(ProducerStateError, match=r"not of table 'fluss\.other'"):
        await world.init(restored={(foreign, 0): 1, (foreign, 1): 1})


async def test_a_baseline_only_goes_forward(world: ProducerCluster) -> None:
    world.end_at(5, 5)
    await world.init()
    await world.checkpoint(1, 9, 3, checkpoint_id=1)
    assert (await world.init()).producer.baseline == at(9, 5)


async def test_the_offsets_of_a_checkpoint_are_of_the_table(world: ProducerCluster) -> None:
    await world.init()
    with pytest.raises(ProducerStateError, match="bucket 2"):
        await world.checkpoint(1, 1, 1, 1)


# Calls of others


async def test_a_call_of_an_earlier_epoch_is_fenced(world: ProducerCluster) -> None:
    await world.init()
    await world.init()
    for attempt in (world.checkpoint(1), world.checkpoint(1, 3, 3), world.release(1)):
        with pytest.raises(ProducerFencedError, match="epoch 2"):
            await attempt


async def test_a_producer_that_is_not_there(world: ProducerCluster) -> None:
    with pytest.raises(ProducerNotFoundError, match=r"'fluss\.views'"):
        await world.checkpoint(1)
    with pytest.raises(ProducerNotFoundError):
        await world.release()
    await world.release(1)
    world.table_id = 999
    await world.release(1)
    with pytest.raises(ProducerNotFoundError, match="999"):
        await world.checkpoint(1)
    with pytest.raises(UnknownTableOrBucketError):
        await world.init()


async def test_only_the_owner_and_super_users_act_for_a_producer(tmp_path: Path) -> None:
    conf = {"super.users": "User:root"}
    world = await ProducerCluster(tmp_path / "meta", conf).begin()
    await world.init(principal="ann")
    for attempt in (
        world.init(principal="bob"),
        world.init(),
        world.checkpoint(1, principal="bob"),
        world.release(principal="bob"),
    ):
        with pytest.raises(AuthorizationError, match="belongs to ann"):
            await attempt
    assert (await world.init(principal="root")).producer.owner == "ann"
    await world.release(principal="root")
    assert world.producers.counts.producers == 0
    await world.stop()


async def test_a_stranger_does_not_keep_a_producer_alive(world: ProducerCluster) -> None:
    await world.init("a", PV, principal="ann")
    world.time.now += 61
    with pytest.raises(AuthorizationError):
        await world.checkpoint(1, producer_id="a", principal="bob")
    assert (await world.init("b", PV)).created


@pytest.mark.parametrize("producer_id", ["", "../x", "x" * 300, ".."])
async def test_an_id_that_is_none_is_refused(world: ProducerCluster, producer_id: str) -> None:
    with pytest.raises(InvalidProducerIdError):
        await world.init(producer_id)


@pytest.mark.parametrize("ttl_ms", [0, 8 * 86_400_000])
async def test_a_ttl_that_is_not_allowed_is_refused(world: ProducerCluster, ttl_ms: int) -> None:
    with pytest.raises(ConfigError, match=r"zufluss\.producer\.ttl-max"):
        await world.init(ttl_ms=ttl_ms)


async def test_a_table_remembers_so_many_producers_and_no_more(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta", {"zufluss.producer.count-max": "2"}).begin()
    await world.init("a", PV)
    await world.init("b", SEEN)
    with pytest.raises(ConfigError, match="2 producers"):
        await world.init("c", NAMES)
    assert (await world.init("a", PV)).producer.epoch == 2
    await world.stop()


async def test_a_changelog_without_old_rows_has_no_producers(world: ProducerCluster) -> None:
    wal = TableDescriptor(
        Schema.of("k INT NOT NULL, v INT", ("k",)),
        bucket_count=1,
        properties={"table.changelog.image": "WAL"},
    ).to_json()
    world.table_id = (await world.catalog.create_table(EVENTS, wal)).info.table_id
    with pytest.raises(InvalidTableError, match="FULL"):
        await world.init()


async def test_a_list_says_who_was_heard_of_last(world: ProducerCluster) -> None:
    a = await world.init("a", PV)
    await world.init("b", SEEN)
    world.time.now += 30
    world.tablet.idle_ms = {a.producer.number: 2_000}
    found = {each.producer.producer_id: each.idle_ms for each in await world.producers.producers()}
    assert found == {"a": 2_000, "b": 30_000}
    assert await world.producers.producers(999) == []
    world.tablet.deaf = NetworkError("gone")
    assert len(await world.producers.producers(world.table_id)) == 2


async def test_a_producer_that_is_renewed_begins_where_the_logs_end_and_knows_its_checkpoint(
    world: ProducerCluster,
) -> None:
    await world.init("job", PV)
    await world.checkpoint(1, 3, 4, checkpoint_id=8)
    world.end_at(7, 9)
    made = await world.init("job", PV, renew=True)
    assert (made.producer.number, made.producer.epoch, made.created) == (2, 1, True)
    assert (made.producer.baseline, made.producer.checkpoint_id) == (at(7, 9), 8)
    assert [entry.number for entry in world.all_told()] == [2]
    back = await world.again()
    again = await back.init("job", PV)
    assert (again.producer.number, again.producer.epoch) == (2, 2)
    assert (again.producer.baseline, again.producer.checkpoint_id) == (at(7, 9), 8)
    await back.stop()


async def test_a_renewal_that_is_interrupted_goes_on(world: ProducerCluster) -> None:
    await world.init("job", PV)
    await world.checkpoint(1, 3, 4, checkpoint_id=8)
    world.tablet.deaf = NetworkError("gone")
    with pytest.raises(LeaderNotAvailableError):
        await world.init("job", PV, renew=True)
    world.tablet.deaf = None
    world.end_at(7, 9)
    made = await world.init("job", PV)
    assert (made.producer.number, made.created) == (2, True)
    assert (made.producer.baseline, made.producer.checkpoint_id) == (at(7, 9), 8)


# Log tables


async def log_table(world: ProducerCluster) -> None:
    made = await world.catalog.create_table(EVENTS, table_json(buckets=2))
    world.table_id = made.info.table_id


def number_of(made: InitResult) -> int:
    assert (made.producer.epoch, made.undo_needed) == (1, False)
    assert not made.producer.column_ids
    return made.producer.number


async def test_on_a_log_table_a_producer_is_its_number(world: ProducerCluster) -> None:
    """Tasks of a job that run again append nothing twice, because of the number alone."""
    await log_table(world)
    made, again = await world.init("job"), await world.init("job")
    assert number_of(made) == number_of(again)
    assert (made.created, again.created) == (True, False)
    assert world.all_told() == ()
    with pytest.raises(AuthorizationError):
        await world.init("job", principal="bob")
    await world.release()
    assert number_of(await world.init("job")) > number_of(made)


async def test_on_a_log_table_no_id_gives_a_number_that_is_forgotten(
    world: ProducerCluster,
) -> None:
    await log_table(world)
    numbers = [number_of(await world.init("")) for _ in range(3)]
    assert len(set(numbers)) == 3
    assert await world.stored() == []


async def test_nobody_uses_up_the_numbers_of_the_cluster(
    world: ProducerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without an id: a table has so many new producers an hour, other tables go on."""
    monkeypatch.setattr(book, "NUMBERS_PER_HOUR_MAX", 3)
    views = world.table_id
    await log_table(world)
    first = number_of(await world.init(""))
    await world.init("job")
    await world.release()
    await world.init("job")
    for producer_id in ("", "other"):
        with pytest.raises(ConfigError, match="3 new producers within an hour"):
            await world.init(producer_id)
    assert not (await world.init("job")).created
    assert (await world.init("job", table_id=views)).producer.number == first + 3
    world.time.now += 3600
    assert number_of(await world.init("")) == first + 4


async def test_a_producer_of_a_log_table_reports_checkpoints(world: ProducerCluster) -> None:
    await log_table(world)
    await world.init()
    await world.checkpoint(1, checkpoint_id=4)
    assert (await world.init()).producer.checkpoint_id == 4
    assert [each.idle_ms for each in await world.producers.producers()] == [0]
