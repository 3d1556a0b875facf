"""Producers over crashes, stores that fail and restarts: no epoch goes back, no number repeats."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.producer_cluster import (
    PV,
    SEEN,
    VIEWS,
    ProducerCluster,
    StoreBrokenError,
    at,
    views_json,
)
from tests.paths import ROOT
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.producers import records as producer_records
from zufluss.coordinator.producers.rules import ProducerCounts, ProducerRecord
from zufluss.coordinator.records import CatalogDamagedError
from zufluss.errors import (
    ColumnLockedError,
    LeaderNotAvailableError,
    NetworkError,
    ProducerFencedError,
    ProducerStateError,
    ZuflussError,
)
from zufluss.meta.api import Put, StoreClosedError


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ProducerCluster]:
    world = await ProducerCluster(tmp_path / "meta").begin()
    yield world
    await world.stop()


# Restarts


async def test_a_restart_keeps_everything_but_gives_the_full_time_again(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta").begin()
    world.end_at(3, 4)
    await world.init("a", PV)
    await world.init("a", PV)
    await world.checkpoint(2, 8, 8, producer_id="a", checkpoint_id=5)
    await world.init("b", SEEN)
    world.time.now += 59
    before = list(world.producers.book)
    world = await world.again()
    assert list(world.producers.book) == before
    assert {each.producer_id: each.epoch for each in world.all_told()} == {"a": 2, "b": 1}
    world.time.now += 59
    with pytest.raises(ColumnLockedError):
        await world.init("c", PV)
    assert (await world.init("a", PV)).producer.epoch == 3
    await world.stop()


async def test_a_lost_producer_stays_lost(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta").begin()
    await world.init("a", PV)
    world.time.now += 61
    await world.init("b", PV)
    world = await world.again()
    with pytest.raises(ProducerFencedError):
        await world.init("a", PV)
    assert world.producers.counts == ProducerCounts(2, 1)
    await world.stop()


async def test_versions_grow_over_restarts(tmp_path: Path) -> None:
    """A leader that lived on would otherwise take new producers for old news."""
    world = await ProducerCluster(tmp_path / "meta").begin()
    for _ in range(5):
        await world.init()
    before = world.tablet.producers[world.table_id].version
    world = await world.again()
    assert world.tablet.producers[world.table_id].version > before
    await world.stop()


async def test_a_dropped_table_takes_its_producers_with_it(world: ProducerCluster) -> None:
    await world.init()
    await world.catalog.drop_table(VIEWS)
    await world.producers.book.stop()
    assert await world.stored() == []
    assert world.producers.counts == ProducerCounts(0, 0)


async def test_what_a_crash_left_of_a_dropped_table_is_deleted_at_the_start(
    tmp_path: Path,
) -> None:
    world = await ProducerCluster(tmp_path / "meta").begin()
    await world.init()
    world.catalog._changes = Feed()  # as if the process died right after the transaction
    await world.catalog.drop_table(VIEWS)
    assert await world.stored()
    world = await world.again()
    assert await world.stored() == []
    await world.stop()


async def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta").begin()
    await world.init()
    path = producer_records.head_path(world.table_id, "job")
    await world.catalog.ledger.commit([Put(path, b"{}")])
    with pytest.raises(CatalogDamagedError, match=path):
        await world.again()
    await world.store.close()


async def test_a_killed_process_takes_no_epoch_back(tmp_path: Path) -> None:
    """Over SIGKILLs every acknowledged epoch of an id is newer than all before it."""
    chance = random.Random(7)
    seen: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}
    released: set[int] = set()
    for run in range(5):
        for kind, name, *rest in killed(tmp_path / "meta", run, chance.randint(1, 60)):
            if kind == "epoch":
                seen[name].append((int(rest[0]), int(rest[1])))
                assert seen[name][-1][0] not in released
            elif kind == "released":
                released.add(seen[name][-1][0])
    assert sum(map(len, seen.values())) > 5
    for epochs in seen.values():
        assert epochs == sorted(set(epochs))
    numbers = [{number for number, _ in epochs} for epochs in seen.values()]
    assert len(set().union(*numbers)) == sum(map(len, numbers)), "no two ids have one number"


def killed(directory: Path, seed: int, lines: int) -> list[list[str]]:
    """What the process acknowledged until it was killed."""
    command = [sys.executable, "-m", "tests.coordinator.producer_maker", str(directory), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        seen = "".join(child.stdout.readline() for _ in range(lines))
        child.kill()
        seen += child.stdout.read()
    return [line.split() for line in seen.split("\n")[:-1]]


# Failures at every step


STEPS = 3
"""Commits of the first epoch of a producer: its number, the epoch, the baseline."""


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("restart", [False, True], ids=["goes_on", "restarts"])
async def test_a_store_that_fails_at_any_step_gives_no_epoch_twice(
    tmp_path: Path, step: int, applied: bool, restart: bool
) -> None:
    """The outcome of a failed commit is unknown, so the store is read before the next call."""
    world = await ProducerCluster(tmp_path / "meta").begin()
    world.end_at(3, 4)
    whole = world.store.transact
    world.break_store(step, applied=applied)
    with pytest.raises(StoreBrokenError):
        await world.init()
    world.store.transact = whole  # type: ignore[method-assign]
    told = {(entry.number, entry.epoch) for entry in world.all_told()}
    world.end_at(6, 6)
    if restart:
        world = await world.again()
    made = await world.init()
    assert (made.producer.number, made.producer.epoch) > max(told, default=(0, 0))
    durable_baseline = step == 2 and applied
    assert made.producer.baseline == (at(3, 4) if durable_baseline else at(6, 6))
    assert made.created is not durable_baseline
    assert world.told().epoch == made.producer.epoch
    await world.stop()


async def test_a_store_that_is_closed_changes_nothing(world: ProducerCluster) -> None:
    await world.init()
    whole = world.store.transact
    world.break_store(0, applied=False, kind=lambda: StoreClosedError("closed"))
    with pytest.raises(StoreClosedError):
        await world.init()
    world.store.transact = whole  # type: ignore[method-assign]
    assert (await world.init()).producer.epoch == 2


@pytest.mark.parametrize("applied", [False, True])
async def test_a_release_whose_end_is_unknown_is_looked_up(
    world: ProducerCluster, applied: bool
) -> None:
    await world.init("a", PV)
    whole = world.store.transact
    world.break_store(0, applied=applied)
    with pytest.raises(StoreBrokenError):
        await world.release(1, producer_id="a")
    world.store.transact = whole  # type: ignore[method-assign]
    if applied:
        assert (await world.init("b", PV)).created
    else:
        with pytest.raises(ColumnLockedError):
            await world.init("b", PV)


@pytest.mark.parametrize("applied", [False, True])
async def test_a_takeover_is_done_whole_or_not_at_all(
    world: ProducerCluster, applied: bool
) -> None:
    """One transaction has the new epoch and the end of the old owner."""
    await world.init("a", PV)
    await world.init("b", SEEN)
    await world.release(1, producer_id="b")
    world.time.now += 61
    await world.init("b", SEEN)
    whole = world.store.transact
    world.break_store(1, applied=applied)
    with pytest.raises(StoreBrokenError):
        await world.init("c", PV)
    world.store.transact = whole  # type: ignore[method-assign]
    if applied:
        with pytest.raises(ProducerFencedError):
            await world.init("a", PV)
    else:
        assert (await world.init("a", PV)).producer.epoch == 2


async def test_an_epoch_is_finished_when_its_caller_goes_away(world: ProducerCluster) -> None:
    task = asyncio.ensure_future(world.init())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await world.producers.book.stop()
    assert (await world.init()).producer.epoch == 2


@pytest.mark.parametrize("seed", range(6))
async def test_under_random_failures_answered_epochs_only_grow(tmp_path: Path, seed: int) -> None:
    """Whatever fails, an answered epoch is above all earlier ones, and the leader has it."""
    chance = random.Random(seed)
    world = await ProducerCluster(tmp_path / "meta").begin()
    answered: list[tuple[int, int]] = []
    numbers: set[int] = set()
    whole = world.store.transact
    for _ in range(40):
        world.store.transact = whole  # type: ignore[method-assign]
        world.tablet.deaf = NetworkError("gone") if chance.random() < 0.2 else None
        if chance.random() < 0.4:
            world.break_store(chance.randrange(3), applied=chance.random() < 0.5)
        ended = chance.random() < 0.1
        with suppress(ZuflussError, StoreBrokenError):
            if ended:
                await world.release()
                numbers |= {number for number, _ in answered}
            else:
                made = (await world.init()).producer
                assert made.number not in numbers, "a released number is over"
                answered.append((made.number, made.epoch))
                told = world.told()
                assert (told.number, told.epoch) == answered[-1]
        if chance.random() < 0.15:
            world.store.transact = whole  # type: ignore[method-assign]
            world = await world.again()
            whole = world.store.transact
    assert len(set(answered)) == len(answered)
    assert answered == sorted(answered)
    world.store.transact = whole  # type: ignore[method-assign]
    await world.stop()


async def test_a_failed_push_is_made_up_for_by_the_task(world: ProducerCluster) -> None:
    """A producer that lost its columns must not go on at a leader that was away."""
    await world.producers.book.stop()  # its rounds are made here
    await world.init("a", PV)
    await world.producers.book.tell_all()
    world.time.now += 61
    update, calls = world.tablet.update_producers, []

    async def once(tables: object) -> None:
        calls.append(tables)
        if len(calls) == 1:
            raise NetworkError("gone")
        await update(tables)  # type: ignore[arg-type]

    world.tablet.update_producers = once  # type: ignore[method-assign]
    with pytest.raises(LeaderNotAvailableError):
        await world.init("b", PV)
    assert await world.producers.book.tell_all()
    assert world.told("a").lost


# Records


def test_offsets_of_many_buckets_are_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_records, "BUCKETS_PER_PART", 3)
    offsets = {(i % 4 or None, i): 2**63 - 1 - i for i in range(10)}
    parts = producer_records.encode_parts(offsets)
    assert len(parts) == producer_records.part_count(offsets) == 4
    assert producer_records.decode_parts("/x", parts) == offsets


def test_the_largest_part_fits_a_value() -> None:
    chance = random.Random(3)
    count = producer_records.BUCKETS_PER_PART
    offsets = {(2**62 + i, chance.randrange(2**31)): chance.randrange(2**63) for i in range(count)}
    (part,) = producer_records.encode_parts(offsets)
    assert len(part) < 1_000_000


async def test_parts_that_are_not_needed_any_more_are_deleted(
    world: ProducerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_records, "BUCKETS_PER_PART", 1)
    await world.init()
    assert len(await world.stored()) == 3
    await world.release()
    assert await world.stored() == []


def test_a_damaged_part_is_named() -> None:
    with pytest.raises(CatalogDamagedError, match="/producers/x"):
        producer_records.decode_parts("/producers/x", [b"\x00garbage"])


async def test_a_checkpoint_of_many_buckets_is_read_back(tmp_path: Path) -> None:
    """More than fit on the event loop at once go through a thread."""
    conf = {"max.bucket.num": "20000"}
    world = await ProducerCluster(tmp_path / "meta", conf).begin(views_json(buckets=10_000))
    made = (await world.init()).producer
    assert len(made.baseline or {}) == 10_000
    await world.checkpoint(1, *range(10_000), checkpoint_id=1)
    world = await world.again()
    (found,) = world.producers.book
    assert isinstance(found, ProducerRecord)
    assert found.baseline == at(*range(10_000))
    with pytest.raises(ProducerStateError, match="9999 of the 10000"):
        await world.init(restored=at(*range(9_999)))
    await world.stop()
