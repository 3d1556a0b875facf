"""A bucket that a live server releases, and that another one continues from its session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tablet.shared.cluster import SharedCluster, renamed, until, written
from tests.tablet.shared.test_takeover import log_of, rows_of
from tests.tablet.support import TABLE, Connection, Tablet, batch
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import BucketState, TablePut
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import OPEN_END, WalSession, WalSource
from zufluss.errors import ErrorCode, LeaderNotAvailableError, NotLeaderError
from zufluss.model.table import TableBucket
from zufluss.net.services import Services
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.marked import MarkedObjects
from zufluss.tablet.shared import held, release
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

BUCKET = TableBucket(TABLE, None, 0)


class TwoServers(SharedCluster):
    """The first server stays when the second one begins: its session is not sealed."""

    released = 0
    idle = False
    """Whether a server that starts gets no bucket."""

    def assignments(self, sources: Mapping[WalSession, WalSource]) -> list[ReplicaAssignment]:
        return [] if self.idle else super().assignments(sources)

    async def sealed(self, session: WalSession) -> WalSource:
        return WalSource(session, self.gateway.floors.get(session.server_epoch, 0), self.released)

    async def hand_over(self, tablet: Tablet) -> None:
        for bucket in (0, 1):
            end = await tablet.server.release_bucket(TableBucket(TABLE, None, bucket), self.epoch)
            self.released = max(self.released, end)


async def produced(
    tablet: Tablet, sequences: Mapping[int, int] | None = None
) -> tuple[Connection, int]:
    """Send a batch to bucket 0 as clients do, or numbered batches of a writer to some buckets."""
    services = Services()
    tablet.server.register(services)
    _, handle = services.raw[ApiKey.PRODUCE_LOG]
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    if sequences is None:
        request.buckets_req.add(bucket_id=0, records=batch())
    for bucket, sequence in (sequences or {}).items():
        request.buckets_req.add(bucket_id=bucket, records=batch(writer_id=7, sequence=sequence))
    connection = Connection()
    return connection, connection.send(handle, request)


async def test_a_released_bucket_has_every_acknowledged_row_at_the_next_leader(
    tmp_path: Path,
) -> None:
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    for _ in range(3):
        await written(one, 0, 1)
    before = rows_of(one)
    await cluster.hand_over(one)
    two = await cluster.start("two")
    assert rows_of(two) == before
    await written(two, 0)
    assert log_of(two).high_watermark == 12
    await two.server.close()
    await one.server.close()


async def test_a_write_during_the_release_waits_and_then_asks_for_the_next_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither lost nor acknowledged by who does not lead any more."""
    monkeypatch.setattr(held, "HELD_SECONDS", 0.2)
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    await written(one, 0)
    releasing = asyncio.create_task(one.server.release_bucket(BUCKET, 1))
    await until(lambda: one.server.held.buckets)
    connection, request = await produced(one)
    assert await releasing == 2
    ((_, code),) = await connection.produced(request)
    assert code == ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION
    with pytest.raises(LeaderNotAvailableError):
        one.server.buckets.replica(*BUCKET)
    two = await cluster_after(cluster, one)
    assert log_of(two).high_watermark == 3
    await two.server.close()
    await one.server.close()


async def test_writes_that_wait_for_another_bucket_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer numbers its batches per bucket, and sends some of several buckets together."""
    monkeypatch.setattr(held, "HELD_SECONDS", 0.2)
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    await written(one, 0)
    releasing = asyncio.create_task(one.server.release_bucket(BUCKET, 1))
    await until(lambda: one.server.held.buckets)
    both, for_both = await produced(one, {0: 0, 1: 0})
    second, for_second = await produced(one, {1: 1})
    await releasing
    assert dict(await both.produced(for_both)) == {0: 44, 1: 0}
    assert await second.produced(for_second) == [(1, 0)]
    await one.server.close()


async def cluster_after(cluster: TwoServers, one: Tablet) -> Tablet:
    await one.server.release_bucket(BUCKET._replace(bucket_id=1), 1)
    cluster.released = 3
    return await cluster.start("two")


async def test_a_bucket_whose_writes_do_not_become_durable_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is slow for a moment; who waits gets an acknowledgement, not an error."""
    monkeypatch.setattr(release, "QUIET_SECONDS", 0.1)
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    store = MarkedObjects.create

    async def away(self: MarkedObjects, path: str, data: object) -> None:
        raise LocationUnavailableError("file:///", path, "it is slow today")

    monkeypatch.setattr(MarkedObjects, "create", away)
    connection, request = await produced(one)
    releasing = asyncio.create_task(one.server.release_bucket(BUCKET, 1))
    await until(lambda: one.server.held.buckets)
    other, waiting = await produced(one)
    with pytest.raises(LeaderNotAvailableError, match=r"did not become durable within 0\.1 s"):
        await releasing
    monkeypatch.setattr(MarkedObjects, "create", store)
    assert await connection.produced(request) == [(0, 0)]
    assert await other.produced(waiting) == [(0, 0)]
    assert log_of(one).high_watermark == 6
    await one.server.close()


async def test_a_release_that_is_asked_for_again_has_the_same_end(tmp_path: Path) -> None:
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    await written(one, 0)
    end = await one.server.release_bucket(BUCKET, 1)
    await written(one, 1)
    assert await one.server.release_bucket(BUCKET, 1) == end
    with pytest.raises(NotLeaderError, match="epoch 5"):
        await one.server.release_bucket(BUCKET._replace(bucket_id=1), 5)
    await one.server.close()


async def test_a_release_does_not_wait_for_more_entries(tmp_path: Path) -> None:
    """Writers wait for it, whatever the interval between two objects is."""
    cluster = TwoServers(tmp_path, zufluss__wal__interval="10min")
    one = await cluster.start("one")
    await written(one, 0)
    async with asyncio.timeout(WAIT_SECONDS):
        assert await one.server.release_bucket(BUCKET, 1) == 2
    await one.server.close()


async def test_what_a_released_bucket_needs_is_not_trimmed_before_it_was_continued(
    tmp_path: Path,
) -> None:
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    shared, trimmer = one.server.shared, one.server.trimmer
    assert shared is not None
    assert trimmer is not None
    for _ in range(3):
        await written(one, 0)
    await one.server.release_bucket(BUCKET, 1)
    one.image.apply([led_by_another(one)])
    for _ in range(20):
        await written(one, 1)
    await trimmer.trim(shared.session)
    assert cluster.gateway.floors.get(1, 0) == 0
    assert trimmer.held is not None
    assert trimmer.held[0] == BUCKET
    shared.session.adopted(BUCKET, 1)
    await trimmer.trim(shared.session)
    assert trimmer.held is None
    await one.server.close()


async def test_a_prepared_bucket_needs_only_what_was_written_since(tmp_path: Path) -> None:
    """The rehearsal leaves a cache, from which the bucket comes up without the older objects."""
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    for _ in range(3):
        await written(one, 0, 1)
    before = rows_of(one)
    session = cluster.gateway.live
    assert session is not None
    order = renamed(cluster.assignments({})[0], source=WalSource(session, 0, OPEN_END))
    cluster.idle = True
    two = await cluster.start("two", seal=False)
    two.image.apply([led_by_another(two)])
    await two.server.prepare_bucket(order)
    assert two.server.buckets.find(*BUCKET) is None, "it is not served"
    for number in range(3):
        cluster.object(1, number).unlink()
    end = await one.server.release_bucket(BUCKET, 1)
    taken = renamed(order, source=WalSource(session, 3, end))
    two.server.assignments.retries.begin()
    two.image.apply([led_by_another(two, 1)])
    cluster.gateway.leader_epoch = taken.leader_epoch
    await two.server.start_replicas([taken])
    await until(lambda: two.server.buckets.find(*BUCKET) is not None)
    assert rows_of(two) == before
    await two.server.close()
    await one.server.close()


def led_by_another(tablet: Tablet, leader: int = 9) -> TablePut:
    """The table, as the metadata say it when another server leads its buckets."""
    entry = tablet.image.table_by_id(TABLE)
    assert entry is not None
    return TablePut(replace(entry, buckets=(BucketState((leader,), leader),) * 2))


async def test_a_released_bucket_is_not_opened_again_by_a_coordinator_that_does_not_know_of_it(
    tmp_path: Path,
) -> None:
    """What followed the release in its session would be acknowledged, and never read."""
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    await written(one, 0)
    await one.server.release_bucket(BUCKET, cluster.epoch)
    orders = cluster.assignments({})
    await one.server.assign(one.image, orders, (), goes_on=True)
    assert one.server.buckets.find(*BUCKET) is None
    assert one.server.buckets.find(TABLE, None, 1) is not None, "the others stay open"
    later = replace(orders[0], state=replace(orders[0].state, leader_epoch=cluster.epoch + 1))
    await one.server.start_replicas([later])
    assert one.server.buckets.find(*BUCKET) is not None
    await one.server.close()


async def test_an_order_that_is_sent_again_does_not_open_a_bucket_that_was_released_since(
    tmp_path: Path,
) -> None:
    """Nobody would read what is acknowledged behind the number that the coordinator has."""
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    await written(one, 0)
    (order, _) = cluster.assignments({})
    again = renamed(order, source=WalSource(WalSession(9, 90, 1), 0, 0))
    one.server.assignments.retries.begin()
    await one.server.release_bucket(BUCKET, cluster.epoch)
    await one.server.start_replicas([order])
    assert one.server.buckets.find(*BUCKET) is None
    await one.server.start_replicas([again])
    await until(lambda: not one.server.assignments.retries.waiting)
    assert one.server.buckets.find(*BUCKET) is None
    await one.server.close()


@pytest.mark.parametrize("when", ["asked", "released again"])
async def test_a_bucket_that_is_released_again_while_it_is_reported_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The answer is about the former release; the next leader needs what the session has."""
    monkeypatch.setattr(release, "REPORT_SECONDS", 0.0)
    cluster = TwoServers(tmp_path)
    one = await cluster.start("one")
    shared, releases, gateway = one.server.shared, one.server.releases, cluster.gateway
    assert shared is not None
    assert releases is not None
    await written(one, 0)
    await one.server.release_bucket(BUCKET, 1)

    async def adopted(session: WalSession, released: object) -> set[TableBucket]:
        (order, _) = cluster.assignments({})
        await one.server.start_replicas(
            [renamed(order, state=replace(order.state, leader_epoch=2))]
        )
        if when == "released again":
            await one.server.release_bucket(BUCKET, 2)
            one.image.apply([led_by_another(one)])
        return {BUCKET}

    monkeypatch.setattr(gateway, "report_released", adopted)
    await releases.report()
    expected = {BUCKET: 2} if when == "released again" else {}
    assert shared.session.released == expected
    await one.server.close()
