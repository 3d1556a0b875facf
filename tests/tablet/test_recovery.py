"""A bucket that failed is opened again by itself, from its log, and loses nothing acknowledged."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.log.disk import SilentFiles
from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed, many, serving
from tests.tablet.support import TABLE, Tablet
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.remote import BucketRemote
from zufluss.cluster.replicas import assignments
from zufluss.errors import ErrorCode, LogStorageError
from zufluss.kv.store import KvStore
from zufluss.kv.tablet import KvTablet
from zufluss.log.files import OpenFile
from zufluss.log.holds import Holder
from zufluss.log.manager import LogManager
from zufluss.model.table import TableBucket
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.put import PutHandler

STORAGE = int(ErrorCode.LOG_STORAGE_EXCEPTION)


class SickFiles(SilentFiles):
    """Files whose operations fail while they are named."""

    def __init__(self) -> None:
        super().__init__()
        self.sick: dict[str, int] = {}

    def _check(self, operation: str) -> None:
        if (number := self.sick.get(operation)) is not None:
            raise OSError(number, os.strerror(number))

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        self._check("write")
        return os.pwrite(fd, data, position)

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        self._check("fdatasync")

    def truncate(self, fd: int, size: int) -> None:
        self._check("truncate")
        os.ftruncate(fd, size)

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        self._check("open")
        return super().open(path, create=create)


async def produced(tablet: Tablet, *buckets: int) -> list[tuple[int, int]]:
    connection, sent = await tablet.produce(*buckets)
    return await connection.produced(sent)


async def until_open(tablet: Tablet) -> None:
    for _ in range(3):
        await asyncio.sleep(0)  # a bucket that fails is closed in the next turn
    async with asyncio.timeout(WAIT_SECONDS):
        while tablet.server.assignments.retries.waiting:
            await asyncio.sleep(0.01)


async def test_a_log_bucket_takes_writes_again_when_syncs_work_again(tmp_path: Path) -> None:
    files = SickFiles()
    tablet = await Tablet(tmp_path, files).start()
    assert await produced(tablet, 0, 1) == [(0, 0), (1, 0)]
    files.sick = {"fdatasync": errno.EIO}
    assert await produced(tablet, 0) == [(0, STORAGE)]
    await asyncio.sleep(0)
    with pytest.raises(LogStorageError, match=r"recovering since .*, tried \d+ times") as refused:
        tablet.server.buckets.replica(TABLE, None, 0)
    assert refused.value.retriable
    assert await produced(tablet, 0) == [(0, STORAGE)]
    files.sick = {}
    await until_open(tablet)
    assert await produced(tablet, 0, 1) == [(0, 0), (1, 0)]
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    assert replica.log.high_watermark in (6, 9), "what was refused may be there"
    await tablet.server.close()


async def test_a_write_that_cannot_be_undone_closes_the_bucket_until_it_can(tmp_path: Path) -> None:
    files = SickFiles()
    tablet = await Tablet(tmp_path, files).start()
    assert await produced(tablet, 0) == [(0, 0)]
    files.sick = {"write": errno.ENOSPC, "truncate": errno.EIO}
    assert await produced(tablet, 0) == [(0, STORAGE)]
    await asyncio.sleep(0)
    assert tablet.server.buckets.find(TABLE, None, 0) is None
    files.sick = {}
    await until_open(tablet)
    assert await produced(tablet, 0) == [(0, 0)]
    assert tablet.server.buckets.replica(TABLE, None, 0).log.high_watermark == 6
    await tablet.server.close()


@pytest.mark.parametrize("sick", [{"write": errno.ENOSPC}, {"fdatasync": errno.EIO}])
async def test_a_primary_key_bucket_takes_writes_again_when_the_disk_has_room(
    tmp_path: Path, sick: dict[str, int]
) -> None:
    """Its state is ahead of its log after a failed append, and is built again from the log."""
    files = SickFiles()
    tablet = Keyed(tmp_path, files=files, conf={"zufluss.log.flush": "ack"})
    async with serving(tablet):
        await tablet.put(*many(0, 100))
        files.sick = sick
        with pytest.raises(AssertionError, match="by itself"):
            await tablet.put((1, "refused"), (200, "refused"))
        files.sick = {}
        await until_open(tablet)
        refused = await tablet.rows()
        assert refused[1] in ("text 1", "refused")
        await tablet.put((1, "later"))
        assert await tablet.rows() == refused | {1: "later"}
        assert tablet.replica().row_count() == len(refused)


async def test_a_put_without_memory_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"))
        replica = tablet.replica()
        with monkeypatch.context() as patch:

            def get(*arguments: Any) -> Any:
                raise MemoryError

            patch.setattr(KvStore, "get", get)
            with pytest.raises(AssertionError, match="no memory"):
                await tablet.put((1, "refused"))
        assert tablet.replica() is replica, "it was not closed"
        await tablet.put((2, "two"))
        assert await tablet.rows() == {1: "one", 2: "two"}


async def test_a_put_that_is_half_applied_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"))
        replica = tablet.replica()
        with monkeypatch.context() as patch:

            def count(*arguments: Any) -> Any:
                raise MemoryError

            patch.setattr(KvTablet, "_count", count)
            with pytest.raises(AssertionError, match="by itself"):
                await tablet.put((1, "refused"))
        await until_open(tablet)
        assert tablet.replica() is not replica
        assert await tablet.rows() == {1: "one"}
        await tablet.put((2, "two"))
        assert await tablet.rows() == {1: "one", 2: "two"}


async def test_a_bucket_that_cannot_be_opened_at_the_start_is_opened_later(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    assert await produced(tablet, 0, 1) == [(0, 0), (1, 0)]
    tablet.server.logs._timer.cancel()  # type: ignore[union-attr]
    for log in tablet.server.logs.logs:
        log.close(clean=False)
    files = SickFiles()
    later = Tablet(tmp_path, files)
    files.sick = {"open": errno.EMFILE}
    await later.start()
    assert await produced(later, 0) == [(0, STORAGE)]
    files.sick = {}
    await until_open(later)
    assert await produced(later, 0, 1) == [(0, 0), (1, 0)]
    assert later.server.buckets.replica(TABLE, None, 0).log.high_watermark == 6
    await later.server.close()


async def test_a_bucket_that_is_being_recovered_can_be_dropped(tmp_path: Path) -> None:
    files = SickFiles()
    tablet = await Tablet(tmp_path, files).start()
    files.sick = {"fdatasync": errno.EIO}
    assert await produced(tablet, 0) == [(0, STORAGE)]
    await asyncio.sleep(0)
    await tablet.drop(0)
    assert not tablet.server.assignments.retries.waiting
    assert not (tmp_path / "db" / f"t-{TABLE}" / "log-0").exists()
    files.sick = {}
    await tablet.server.close()


async def test_a_writer_that_only_the_log_has_forgotten_harms_nobody(tmp_path: Path) -> None:
    """The state decides about writers. Log and state forget them at different moments."""
    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"), writer_id=5, sequence=0)
        replica = tablet.replica()
        replica.log.writers.forget_expired(1 << 60)
        await tablet.put((2, "two"), writer_id=5, sequence=1)
        assert tablet.replica() is replica
        assert await tablet.rows() == {1: "one", 2: "two"}


class SlowGateway(Gateway):
    """A coordinator that answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[TableBucket] = []
        self.answers = asyncio.Event()

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        self.asked.extend(buckets)
        await self.answers.wait()
        return await super().bucket_remotes(buckets)


async def test_an_order_for_a_bucket_that_is_being_opened_again_opens_it_once(
    tmp_path: Path,
) -> None:
    gateway = SlowGateway()
    gateway.answers.set()
    tablet = await Tablet(tmp_path, gateway=gateway).start()
    assert await produced(tablet, 0, 1) == [(0, 0), (1, 0)]
    gateway.answers.clear()
    gateway.asked.clear()
    tablet.server.buckets.replica(TABLE, None, 1).fail("a test")
    async with asyncio.timeout(WAIT_SECONDS):
        while not gateway.asked:
            await asyncio.sleep(0.01)
    # As if the bucket had failed after the order ended the tries of before.
    order = asyncio.ensure_future(
        tablet.server.assignments.open_all(assignments(tablet.server.image, 1))
    )
    await asyncio.sleep(0)
    gateway.answers.set()
    await order
    await until_open(tablet)
    assert len(tablet.server.buckets.by_log) == 2
    assert not list(tablet.server.buckets.refused())
    assert await produced(tablet, 0, 1) == [(0, 0), (1, 0)]
    await tablet.server.close()


async def test_an_order_asks_for_the_remote_part_of_a_bucket_that_failed_meanwhile(
    tmp_path: Path,
) -> None:
    """Otherwise the server would open the bucket as if it had no remote segments."""
    gateway = SlowGateway()
    gateway.answers.set()
    tablet = await Tablet(tmp_path, gateway=gateway).start()
    gateway.asked.clear()
    tablet.server.assignments.retries._sleep = lambda _: asyncio.Event().wait()
    orders = assignments(tablet.server.image, 1)
    order = asyncio.ensure_future(tablet.server.assignments.open_all(orders))
    await asyncio.sleep(0)
    failed = tablet.server.buckets.replica(*orders[-1].table_bucket)
    failed.fail("a test")
    await order
    assert gateway.asked == [failed.bucket]
    assert tablet.server.buckets.find(*failed.bucket) is not None
    await tablet.server.close()


async def test_a_log_that_fails_while_its_bucket_comes_up_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hears of the failure, since the bucket is not served yet."""
    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"))
        replica = tablet.replica()
        opened = KvHost.open
        failures = [OSError(errno.EIO, "a sync")]

        async def open_and_fail(host: KvHost, replica: Any, *arguments: Any) -> KvTablet:
            result = await opened(host, replica, *arguments)
            if failures:
                replica.log.fail(failures.pop())
            return result

        monkeypatch.setattr(KvHost, "open", open_and_fail)
        replica.fail("a test")
        await until_open(tablet)
        await tablet.put((2, "two"))
        assert await tablet.rows() == {1: "one", 2: "two"}
        assert not failures


async def test_a_bucket_that_was_opened_again_knows_how_far_the_lake_got(tmp_path: Path) -> None:
    """Otherwise retention keeps everything until the next commit of a lake snapshot."""
    tablet = await Tablet(
        tmp_path, properties={"table.datalake.enabled": "true", "table.datalake.format": "iceberg"}
    ).start()
    assert await produced(tablet, 0) == [(0, 0)]
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    replica.lake_reached(2)
    tablet.gateway.lake_offsets[replica.bucket] = 2
    replica.fail("a test")
    await until_open(tablet)
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    assert replica.log.holds.offset(Holder.LAKE) == 2
    await tablet.server.close()


async def test_a_bucket_that_fails_while_the_server_stops_is_not_opened_again(
    tmp_path: Path,
) -> None:
    """Its log would be taken from those that are being closed."""
    tablet = await Tablet(tmp_path).start()
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    await tablet.server.assignments.stop()
    replica.fail("a test")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not tablet.server.assignments.retries.waiting
    assert tablet.server.logs.log(replica.bucket) is replica.log
    await tablet.server.close()


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (LogManager, "let_go"), (KvHost, "stop"), (Replica, "release"), (Buckets, "refuse"),
        (LogManager, "settle"), (Buckets, "add"), (KvHost, "open"),
    ],
)  # fmt: skip
async def test_a_bucket_whose_recovery_was_interrupted_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """Memory runs out once, in one of the steps from the failure to the open bucket."""
    real = getattr(owner, step)
    failures = [MemoryError()]

    def fails_once(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **named)

    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"))
        replica = tablet.replica()
        monkeypatch.setattr(owner, step, fails_once)
        with suppress(MemoryError):
            replica.fail("the test says so")
        async with asyncio.timeout(WAIT_SECONDS):
            while tablet.server.buckets.find(TABLE, None, 0) in (None, replica):
                await asyncio.sleep(0.01)
        assert not failures
        await tablet.put((2, "two"))
        assert await tablet.rows() == {1: "one", 2: "two"}


async def test_a_put_that_is_not_in_the_log_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its changelog got lost between two threads; the client sends it again."""
    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"), writer_id=5, sequence=0)
        with monkeypatch.context() as patch:
            dropped = asyncio.Event()
            patch.setattr(PutHandler, "_prepared", lambda *arguments: dropped.set())
            lost = asyncio.ensure_future(tablet.put((2, "two"), writer_id=5, sequence=1))
            await dropped.wait()
        with pytest.raises(AssertionError, match="not in the log"):
            await tablet.put((2, "two"), writer_id=5, sequence=1)
        lost.cancel()
        await until_open(tablet)
        await tablet.put((2, "two"), writer_id=5, sequence=1)
        assert await tablet.rows() == {1: "one", 2: "two"}
