"""Memory that runs out while the end of a bucket is written into the session of its new leader."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.shared.test_takeover import log_of, rows_of
from tests.tablet.support import TABLE, Tablet
from zufluss.log.manager import LogManager
from zufluss.log.shared.writer import ObjectWriter
from zufluss.model.table import TableBucket
from zufluss.tablet.reopen import Reopener
from zufluss.tablet.shared import session as session_module


async def taken_over_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *failing: int
) -> tuple[bytes, Tablet]:
    """Five batches, whose carry fails at these appends; the rows, and the server after the next."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(5):
        await written(tablet, 0)
    rows = rows_of(tablet)
    await killed(tablet)
    append, calls = ObjectWriter.append, [0]

    def short(self: ObjectWriter, *entry: Any, **more: Any) -> None:
        calls[0] += 1
        if calls[0] in failing:
            raise MemoryError
        append(self, *entry, **more)

    monkeypatch.setattr(ObjectWriter, "append", short)
    tablet = await cluster.start("two")
    await until(lambda: len(tablet.server.buckets.by_log) == 2)
    assert rows_of(tablet) == rows
    assert cluster.gateway.wal[log_bucket(tablet)].server_epoch == 2
    await written(tablet, 0)
    rows = rows_of(tablet)
    await killed(tablet)
    return rows, await cluster.start("three")


def log_bucket(tablet: Tablet) -> Any:
    return log_of(tablet).bucket


async def test_a_tail_that_could_not_be_carried_is_carried_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the session counts as the one that has the end, and has nothing."""
    rows, tablet = await taken_over_twice(tmp_path, monkeypatch, 1)
    assert rows_of(tablet) == rows
    await tablet.server.close()


async def test_a_tail_that_was_carried_half_way_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PART_BYTES", 1)  # each batch is a part
    rows, tablet = await taken_over_twice(tmp_path, monkeypatch, 3, 5)
    assert rows_of(tablet) == rows
    await tablet.server.close()


async def test_a_registration_that_fails_leaves_no_bucket_half_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next registration opens the same files, and two at once would destroy them."""
    cluster = SharedCluster(tmp_path)
    opened, gate, end = LogManager.open_shared, asyncio.Event(), Reopener.end
    under_way = [0]

    async def slow(self: LogManager, *what: Any, **more: Any) -> Any:
        under_way[0] += 1
        await gate.wait()
        under_way[0] -= 1
        return await opened(self, *what, **more)

    async def short(self: Reopener, buckets: Any) -> None:
        if TableBucket(TABLE, None, 0) in buckets:
            raise MemoryError
        await end(self, buckets)

    monkeypatch.setattr(LogManager, "open_shared", slow)
    monkeypatch.setattr(Reopener, "end", short)
    starting = asyncio.create_task(cluster.start("one"))
    await until(lambda: under_way[0] == 1)
    for _ in range(100):
        await asyncio.sleep(0)  # the other bucket fails meanwhile
    assert not starting.done()
    gate.set()
    with pytest.raises(MemoryError):
        await starting
    assert under_way == [0]
    assert cluster.tablet is not None
    await cluster.tablet.server.close()
