"""Damage on the disk of a server whose rows are in the shared log: the disk is a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.shared.test_takeover import log_of, rows_of
from tests.tablet.support import TABLE
from zufluss.errors import CorruptRecordError
from zufluss.log.segment import DELETED_SUFFIX
from zufluss.tablet.shared.copy import SharedCopy


def damage(directory: Path, bucket: int = 0, at: int = 100) -> None:
    """Flip a bit in the first batch of a bucket."""
    (segment,) = directory.rglob(f"log-{bucket}/*.log")
    data = bytearray(segment.read_bytes())
    data[at] ^= 1
    segment.write_bytes(data)


async def test_a_damaged_cache_is_discarded_and_the_bucket_served(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(5):
        await written(tablet, 0)
    before = rows_of(tablet)
    await tablet.server.close()
    damage(tmp_path / "one")
    tablet = await cluster.start("one")
    assert not list(tablet.server.buckets.refused())
    assert rows_of(tablet) == before
    await written(tablet, 0)
    after = rows_of(tablet)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert rows_of(tablet) == after
    await tablet.server.close()


async def test_a_cache_is_discarded_once_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still damaged then is damaged elsewhere: it is refused, not read again and again."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0, 1)
    await killed(tablet)
    tries = [0]

    async def refused(self: SharedCopy, replica: object) -> None:
        tries[0] += 1
        raise CorruptRecordError("the test says so")

    monkeypatch.setattr(SharedCopy, "adopt", refused)
    tablet = await cluster.start("one")
    assert len(list(tablet.server.buckets.refused())) == 2
    assert tries[0] == 2 * 3, "as it is, without the log, without the state"
    assert tablet.server.assignments.retries.waiting == 0
    await killed(tablet)


async def test_a_cache_is_discarded_although_an_earlier_try_left_something_of_it(
    tmp_path: Path,
) -> None:
    """A full disk, or a lack of descriptors, may have ended that try half-way."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    replica, before = tablet.server.buckets.replica(TABLE, None, 0), rows_of(tablet)
    left = replica.log.directory.with_name(replica.log.directory.name + DELETED_SUFFIX)
    left.mkdir()
    (left / f"{7:020d}.log").touch()
    tablet.server.logs.distrust(replica.bucket)
    replica.fail("the test says so")
    await until(lambda: tablet.server.buckets.find(*replica.bucket) not in (None, replica))
    assert rows_of(tablet) == before
    assert not left.exists()
    await written(tablet, 0)
    await tablet.server.close()


async def test_a_log_that_is_distrusted_is_discarded_when_its_bucket_opens_again(
    tmp_path: Path,
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    replica, before = tablet.server.buckets.replica(TABLE, None, 0), rows_of(tablet)
    damage(tmp_path / "one")
    tablet.server.logs.distrust(replica.bucket)
    replica.fail("the test found it damaged")
    await until(lambda: tablet.server.buckets.find(*replica.bucket) not in (None, replica))
    assert rows_of(tablet) == before
    assert log_of(tablet).tail(0).read(), "each batch is whole"
    await tablet.server.close()
