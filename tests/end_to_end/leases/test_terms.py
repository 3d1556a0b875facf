"""Takeovers of leases, and leases across crashes and restarts of the coordinator."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.coordinator.support import COORDINATOR
from tests.counts import rounds
from tests.end_to_end.leases.local_coordinator import Inside, inside
from tests.end_to_end.leases.stage import (
    HOUR_MS,
    Stage,
    connected,
    exist,
    rows,
    stage,
    unique,
)
from tests.end_to_end.locations.inspection import scrape
from tests.end_to_end.raw import ConnectionEndedError
from tests.servers import free_port
from tests.waiting import WAIT_SECONDS
from zufluss.client.sync.table import Table
from zufluss.coordinator.leases.records import head_path, table_path
from zufluss.coordinator.server import Coordinator
from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    ZuflussError,
)
from zufluss.meta.api import Delete, Op, Put
from zufluss.meta.embedded import DATABASE_FILE, EmbeddedStore
from zufluss.model.table import TableBucket
from zufluss.obs import metrics
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

MINUTE_MS = 60_000
CALLERS = 4


class Mortal:
    """A server that can be killed and restarted with the same addresses."""

    def __init__(self, it: Stage) -> None:
        self.server: DevServer = it.server
        self.ports = it.ports

    def restart(self) -> None:
        if self.server.running:
            self.server.kill()
        self.server.start()

    def change(self, ops: Sequence[Op]) -> None:
        """Change the metadata store of a server that is not running."""

        async def work() -> None:
            (found,) = self.server.data_dir.rglob(DATABASE_FILE)
            store = await EmbeddedStore.open(found.parent)
            await store.transact(ops)
            await store.close()

        self.server.kill()
        asyncio.run(work())


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    with stage(tmp_path_factory.mktemp("mortal"), {"zufluss.metrics.port": str(free_port())}) as it:
        yield Mortal(it)


# -- takeovers -----------------------------------------------------------------------------------


def test_after_a_takeover_the_old_holder_is_fenced_whatever_it_asks_for(it: Stage) -> None:
    table, (bucket,) = it.filled()
    lease_id, calls = unique("lease"), it.calls
    first = calls.latest(lease_id, [bucket])
    held = first.leased[bucket].snapshot_id
    with it.caller() as other:
        second = other.latest(lease_id)
    assert first.epoch is not None
    assert second.epoch is not None
    assert first.epoch < second.epoch
    assert second.leased == first.leased
    for number in range(2):
        it.take(table, range(8), f"newer {number}")
    for stale in (
        lambda: calls.renew(lease_id, epoch=first.epoch),
        lambda: calls.release(lease_id, [bucket], epoch=first.epoch),
        lambda: calls.drop(lease_id, epoch=first.epoch),
        lambda: calls.acquire(lease_id, {bucket: held + 1}, epoch=first.epoch),
        lambda: calls.latest(lease_id, [bucket], epoch=first.epoch),
    ):
        with pytest.raises(
            KvSnapshotLeaseFencedError, match=f"epoch {first.epoch}, the lease {second.epoch}"
        ):
            stale()
    assert calls.leased(lease_id) == {bucket: held}
    assert it.is_kept(bucket, held)
    assert calls.renew(lease_id, epoch=second.epoch) > 0
    calls.release(lease_id, [bucket], epoch=second.epoch)
    it.until_kept(table, [held + 1, held + 2])


def test_a_client_that_lost_its_lease_to_another_reads_no_further(it: Stage) -> None:
    table, (bucket,) = it.filled()
    lease_id = unique("job")
    with (
        it.admin.kv_snapshot_lease(table.path, lease_id=lease_id) as old,
        table.kv_snapshot(bucket, lease=old) as reader,
        it.admin.kv_snapshot_lease(lease_id=lease_id, resume=True) as new,
    ):
        for call in (old.renew, lambda: next(reader), lambda: old.release(bucket)):
            with pytest.raises(KvSnapshotLeaseFencedError):
                call()
        old.close()  # is not its lease to drop
        new.renew()
        assert new.snapshots == it.calls.lease(lease_id).snapshots  # type: ignore[union-attr]


# -- a coordinator that is killed ----------------------------------------------------------------


class Acquiring(threading.Thread):
    """Acquires leases of all buckets continuously, and remembers the answers."""

    def __init__(self, it: Stage, buckets: Sequence[TableBucket], some: threading.Event) -> None:
        super().__init__()
        self.it, self.buckets, self.some = it, buckets, some
        self.asked: list[str] = []
        self.answered: dict[str, dict[TableBucket, int]] = {}

    def run(self) -> None:
        with suppress(ConnectionEndedError, OSError), self.it.caller() as calls:
            while True:
                self.asked.append(unique("many"))
                found = calls.latest(self.asked[-1], self.buckets)
                self.answered[self.asked[-1]] = {
                    bucket: leased.snapshot_id for bucket, leased in found.leased.items()
                }
                if len(self.answered) == 3:
                    self.some.set()


def test_what_was_acknowledged_before_a_kill_is_there_and_the_rest_whole_or_not_at_all(
    mortal: Mortal,
) -> None:
    for _ in range(rounds(1, 20)):
        with connected(mortal.server, mortal.ports) as it:
            table, buckets = it.filled(buckets=2)
            some = threading.Event()
            threads = [Acquiring(it, buckets, some) for _ in range(CALLERS)]
            for thread in threads:
                thread.start()
            assert some.wait(WAIT_SECONDS)
            mortal.server.kill()
            for thread in threads:
                thread.join()
        mortal.restart()
        with connected(mortal.server, mortal.ports) as it:
            check_survivors(it, it.conn.table(table.path), threads)


def check_survivors(it: Stage, table: Table, threads: Sequence[Acquiring]) -> None:
    buckets, calls = threads[0].buckets, it.calls
    told = {i: found for thread in threads for i, found in thread.answered.items()}
    held = {b: s.snapshot_id for b, s in calls.latest(unique("all"), buckets).leased.items()}
    for thread in threads:
        for lease_id in thread.asked:
            assert calls.leased(lease_id) in ([told[lease_id]] if lease_id in told else [{}, held])
    for number in range(3):
        it.take(table, range(8 * len(buckets)), f"after {number}")
    for bucket in buckets:  # out of the window, and held
        assert exist(it.files(bucket, held[bucket]))
        assert rows(table, bucket, held[bucket])
    for lease in calls.leases():
        calls.drop(lease.lease_id)
    for bucket in buckets:  # nothing but leases held them
        newest = held[bucket] + 3
        it.until_kept(table, [newest - 1, newest], bucket.bucket_id)


@pytest.mark.parametrize("written", [False, True], ids=["before the write", "after the write"])
async def test_a_crash_around_the_write_leaves_no_ghost(tmp_path: Path, written: bool) -> None:
    async with inside(tmp_path) as it:
        await it.take(0)
        reached, transact = asyncio.Event(), it.cluster.store.transact

        async def deadly(ops: Sequence[Op]) -> None:
            if any(op.path.startswith(head_path("a")) for op in ops):
                if written:
                    await transact(ops)
                reached.set()
                await asyncio.Event().wait()  # the answer never comes
            await transact(ops)

        it.cluster.store.transact = deadly  # type: ignore[method-assign]
        asking = asyncio.ensure_future(
            it.leases.acquire_latest("a", HOUR_MS, [it.bucket], principal=None)
        )
        await reached.wait()
        assert it.leases.book.pins.pinned(it.bucket, 0)
        dead = it.cluster
        await dead.store.close()
        asking.cancel()
        for task in tuple(dead.coordinator.leases.book.tasks._tasks):
            task.cancel()
        await it.crash()
        for snapshot_id in (1, 2, 3):
            await it.take(snapshot_id)
        await it.settled()
        assert it.kept() == ([0, 2, 3] if written else [2, 3])
        assert it.leases.book.counts.snapshots == written


# -- the grace after a restart -------------------------------------------------------------------


async def test_a_coordinator_away_for_longer_than_the_time_left_gives_a_grace(
    tmp_path: Path,
) -> None:
    async with inside(tmp_path) as it:
        leased = await it.take(0)
        duration_ms, buckets = 10 * MINUTE_MS, [it.bucket]
        got = await it.leases.acquire_latest("a", duration_ms, buckets, principal=None)
        for snapshot_id in (1, 2, 3):
            await it.take(snapshot_id)
        await it.crash(away_seconds=30 * 60)
        await it.timer.expire()
        await it.settled()
        assert it.kept() == [0, 2, 3]
        [info] = it.leases.book.infos("a")
        assert info.remaining_ms == 10 * MINUTE_MS
        it.time.now += 9 * 60
        renewed = await it.ask(
            ApiKey.RENEW_KV_SNAPSHOT_LEASE,
            lease_id="a",
            lease_duration_ms=10 * MINUTE_MS,
            lease_epoch=got.epoch,
        )
        assert renewed.remaining_ms == 10 * MINUTE_MS
        it.time.now += 9 * 60
        await it.timer.expire()
        await it.settled()
        assert it.are_there([leased])


async def test_a_client_that_does_not_come_back_loses_its_lease_after_the_grace(
    tmp_path: Path,
) -> None:
    async with inside(tmp_path) as it:
        leased = await it.take(0)
        await it.leases.acquire_latest("a", 1, [it.bucket], principal=None)
        for snapshot_id in (1, 2):
            await it.take(snapshot_id)
        await it.crash(away_seconds=30 * 60)
        it.time.now += 599
        await it.timer.expire()
        await it.settled()
        assert it.are_there([leased])
        it.time.now += 1
        await it.timer.expire()
        await it.settled()
        assert not it.are_there([leased])
        assert it.kept() == [1, 2]


def test_a_killed_server_comes_back_after_the_time_of_a_lease_and_knows_it(
    mortal: Mortal,
) -> None:
    lease_id, duration_ms = unique("short"), 300
    with connected(mortal.server, mortal.ports) as it:
        table, (bucket,) = it.filled()
        until = time.monotonic() + duration_ms / 1000
        got = it.calls.latest(lease_id, [bucket], duration_ms)
        held = got.leased[bucket].snapshot_id
        mortal.server.kill()
    mortal.restart()
    assert time.monotonic() > until
    with connected(mortal.server, mortal.ports) as it:
        table = it.conn.table(table.path)
        assert it.calls.renew(lease_id, HOUR_MS, epoch=got.epoch) > 0
        for number in range(3):
            it.take(table, range(8), f"newer {number}")
        assert rows(table, bucket, held) == dict.fromkeys(range(8), "snapshot 0")
        it.calls.drop(lease_id)


# -- damaged records -----------------------------------------------------------------------------

DAMAGED = metrics.KV_SNAPSHOT_LEASES_DAMAGED.name


def test_of_a_lease_that_cannot_be_read_everything_stays_and_others_go_on(
    mortal: Mortal,
) -> None:
    with connected(mortal.server, mortal.ports) as it:
        leased = [it.filled() for _ in range(4)]
        paths = [table.path for table, _ in leased]
        buckets = [bucket for _, (bucket,) in leased]
        ids = [unique("lease") for _ in buckets]
        for lease_id, bucket in zip(ids, buckets, strict=True):
            it.calls.latest(lease_id, [bucket])
    mortal.change(
        [
            Put(table_path(ids[0], buckets[0].table_id), b"no pins"),
            Delete(table_path(ids[1], buckets[1].table_id)),
            Put(head_path(ids[2]), b""),
        ]
    )
    mortal.restart()
    with connected(mortal.server, mortal.ports) as it:
        tables = [it.conn.table(path) for path in paths]
        assert scrape(it.server)[DAMAGED] == 3
        assert it.server.log().count("lease_damaged") == 3
        for number in range(3):
            for table in tables:
                it.take(table, range(8), f"newer {number}")
        check_held(it, tables, buckets, ids)
        for lease_id in ids[:3]:
            it.calls.drop(lease_id)
        for table in tables[:3]:
            it.until_kept(table, [2, 3])
        assert scrape(it.server)[DAMAGED] == 0


def check_held(
    it: Stage, tables: Sequence[Table], buckets: Sequence[TableBucket], ids: Sequence[str]
) -> None:
    """Damage the leases of two tables, one by removing its head record; a third stays valid."""
    for table, wanted in zip(tables, ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3]), strict=False):
        it.until_kept(table, wanted)
    for table, bucket in zip(tables, buckets, strict=True):
        assert rows(table, bucket, 0) == dict.fromkeys(range(8), "snapshot 0")
    for lease_id in ids[:2]:
        with pytest.raises(CorruptRecordError, match="damaged"):
            it.calls.renew(lease_id)
        damaged = it.calls.lease(lease_id)
        assert damaged is not None
        assert damaged.damage is not None
    it.calls.release(ids[3], [buckets[3]])
    it.until_kept(tables[3], [2, 3])


# -- a coordinator that was replaced -------------------------------------------------------------


async def test_a_coordinator_that_was_replaced_ends_no_lease_and_deletes_nothing(
    tmp_path: Path,
) -> None:
    async with inside(tmp_path) as it:
        leased = await it.take(0)
        await it.leases.acquire_latest("a", HOUR_MS, [it.bucket], principal=None)
        for snapshot_id in (1, 2, 3):
            await it.take(snapshot_id)
        await it.settled()
        old = it.cluster
        new = await Coordinator.open(old.conf, old.store, COORDINATOR, old.clock, clock=lambda: 7.0)
        before = await it.stored()
        it.time.now += 2 * 3600
        await it.timer.expire()
        await refused_for_good(it)
        await old.coordinator.remote.snapshots.retain([it.bucket])
        await it.settled()
        assert await it.stored() == before
        assert it.are_there([leased])
        renewed = await new.leases.renew("a", HOUR_MS, principal=None)
        assert renewed.remaining_ms == HOUR_MS
        await new.stop()


async def refused_for_good(it: Inside) -> None:
    for call in (
        it.leases.renew("a", HOUR_MS, principal=None),
        it.leases.release("a", [it.bucket], principal=None),
        it.leases.drop("a", principal=None),
        it.leases.acquire_latest("b", HOUR_MS, [it.bucket], principal=None),
    ):
        with pytest.raises(ZuflussError) as refused:
            await call
        assert refused.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION


# -- clocks that jump ----------------------------------------------------------------------------


@pytest.mark.parametrize("days", [1, -1])
async def test_a_wall_clock_that_jumps_ends_no_lease_and_prolongs_none(
    tmp_path: Path, days: int
) -> None:
    async with inside(tmp_path) as it:
        leased = await it.take(0)
        await it.leases.acquire_latest("a", HOUR_MS, [it.bucket], principal=None)
        for snapshot_id in (1, 2, 3):
            await it.take(snapshot_id)
        it.time.now += 1800
        await it.timer.checkpoint()
        it.cluster.clock.now_ms += days * 24 * HOUR_MS
        await it.timer.expire()
        assert it.leases.book.infos("a")[0].remaining_ms == HOUR_MS // 2
        await it.crash(away_seconds=-days * 48 * 3600)
        await it.timer.expire()
        assert it.leases.book.infos("a")[0].remaining_ms == HOUR_MS // 2
        it.time.now += 1799
        await it.timer.expire()
        await it.settled()
        assert it.are_there([leased])
        it.time.now += 1
        await it.timer.expire()
        await it.settled()
        assert it.kept() == [2, 3]
        assert not it.are_there([leased])
        with pytest.raises(KvSnapshotLeaseNotFoundError):
            await it.leases.renew("a", HOUR_MS, principal=None)
