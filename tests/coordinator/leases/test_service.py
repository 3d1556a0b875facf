"""The calls of leases as they travel: what is asked for, what is answered, who is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.remotes import (
    BY_DAY,
    KEYED,
    LOGGED,
    keyed_json,
    locations,
    snapshot,
)
from tests.coordinator.support import DAY_MS, Cluster, Seconds, table_json
from zufluss.cluster.authority import Authority, users
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases import service as lease_service
from zufluss.coordinator.leases.service import LeaseService
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    NonPrimaryKeyTableError,
    UnknownTableOrBucketError,
)
from zufluss.meta.api import Put
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket, TablePath
from zufluss.net.services import RequestContext, Services
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey

ACQUIRE = ApiKey.ACQUIRE_KV_SNAPSHOT_LEASE
LATEST = ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE
RENEW = ApiKey.RENEW_KV_SNAPSHOT_LEASE
RELEASE = ApiKey.RELEASE_KV_SNAPSHOT_LEASE
DROP = ApiKey.DROP_KV_SNAPSHOT_LEASE
LIST = ApiKey.LIST_KV_SNAPSHOT_LEASES
HOUR_MS = 3_600_000


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with a super user, and a table whose buckets 0 and 1 have two snapshots each."""
    conf = locations(tmp_path) | {"super.users": "User:admin"}
    cluster = Cluster(tmp_path / "meta", conf)
    cluster.seconds = Seconds()
    await cluster.start()
    entry = await cluster.catalog.create_table(KEYED, keyed_json(buckets=3))
    for bucket_id in (0, 1):
        await fill(cluster, TableBucket(entry.info.table_id, None, bucket_id), 2)
    yield cluster
    await cluster.stop()


@pytest.fixture
def table_id(cluster: Cluster) -> int:
    return cluster.image.table(KEYED).info.table_id


async def fill(cluster: Cluster, bucket: TableBucket, count: int) -> None:
    for snapshot_id in range(count):
        _, data = await snapshot(cluster, bucket, snapshot_id)
        await cluster.coordinator.remote.commit_snapshot(data, 0)


async def ask(cluster: Cluster, key: ApiKey, principal: Any = None, **fields: Any) -> Any:
    """Ask as the network would for a principal: through the message, both ways."""
    api, handler = cluster.services.handlers[key]
    request = api.request.FromString(api.request(**fields).SerializeToString())
    response = await handler(request, RequestContext(principal, "CLIENT", 0, "test"))
    return api.response.FromString(response.SerializeToString())


async def acquire(
    cluster: Cluster,
    wanted: dict[int, list[tuple[int, int]]],
    principal: str | None = None,
    **fields: Any,
) -> Any:
    tables = [
        m.PbKvSnapshotLeaseForTable(
            table_id=table_id,
            bucket_snapshots=[
                m.PbKvSnapshotLeaseForBucket(bucket_id=b, snapshot_id=s) for b, s in snapshots
            ],
        )
        for table_id, snapshots in wanted.items()
    ]
    fields = {"lease_id": "l", "lease_duration_ms": HOUR_MS, "snapshots_to_lease": tables} | fields
    return await ask(cluster, ACQUIRE, principal, **fields)


async def latest(cluster: Cluster, *targets: m.PbLeaseTarget, **fields: Any) -> Any:
    fields = {"lease_id": "l", "lease_duration_ms": HOUR_MS, "targets": targets} | fields
    principal = fields.pop("principal", None)
    return await ask(cluster, LATEST, principal, **fields)


def columns(found: m.PbLeasedSnapshots) -> list[tuple[int, int, int]]:
    return list(zip(found.bucket_ids, found.snapshot_ids, found.log_offsets, strict=True))


async def listed(cluster: Cluster, lease_id: str | None = None) -> list[m.PbLease]:
    return list((await ask(cluster, LIST, lease_id=lease_id)).leases)


# Acquiring


async def test_a_request_for_more_buckets_than_are_allowed_leases_nothing(
    cluster: Cluster, table_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_service, "BUCKETS_MAX", 2)
    with pytest.raises(ConfigError, match="more than 2 buckets"):
        await latest(cluster, m.PbLeaseTarget(table_id=table_id, bucket_ids=[0, 1, 7]))
    assert not cluster.coordinator.leases.book.infos()


async def test_a_table_that_is_named_again_and_again_is_refused_as_many_buckets(
    cluster: Cluster, table_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 1.2 MB named 300,000 times all buckets of a table, for minutes of the loop."""
    monkeypatch.setattr(lease_service, "BUCKETS_MAX", 10)
    with pytest.raises(ConfigError, match="more than 10 buckets"):
        await latest(cluster, *[m.PbLeaseTarget(table_id=table_id)] * 4)
    assert not cluster.coordinator.leases.book.infos()


async def test_what_cannot_be_leased_is_listed_with_its_reason(
    cluster: Cluster, table_id: int
) -> None:
    found = await acquire(cluster, {table_id: [(0, 1), (1, 7), (2, 0), (9, 0)]})
    assert found.lease_epoch == 1
    (table,) = found.unavailable_snapshots
    assert table.table_id == table_id
    assert [(b.bucket_id, b.snapshot_id, b.unavailable) for b in table.bucket_snapshots] == [
        (1, 7, Unavailable.GONE),
        (2, 0, Unavailable.NO_SNAPSHOT),
        (9, 0, Unavailable.NO_BUCKET),
    ]
    (lease,) = await listed(cluster, "l")
    assert [columns(each) for each in lease.leased] == [[(0, 1, 10)]]


async def test_an_acquire_that_gets_nothing_makes_no_lease(cluster: Cluster, table_id: int) -> None:
    found = await acquire(cluster, {table_id: [(2, 0)]})
    assert not found.HasField("lease_epoch")
    assert await listed(cluster) == []


async def test_an_acquire_without_snapshots_renews_and_makes_nothing(
    cluster: Cluster, table_id: int
) -> None:
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await acquire(cluster, {})
    await acquire(cluster, {table_id: [(0, 0)]}, lease_duration_ms=1000)
    await acquire(cluster, {})
    (lease,) = await listed(cluster)
    assert (lease.remaining_ms, lease.duration_ms) == (HOUR_MS, HOUR_MS)


async def test_one_lease_cannot_have_two_snapshots_of_a_bucket(
    cluster: Cluster, table_id: int
) -> None:
    with pytest.raises(ConfigError, match="take another lease"):
        await acquire(cluster, {table_id: [(0, 0), (0, 1)]})
    await acquire(cluster, {table_id: [(0, 1), (0, 1)]})
    assert await listed(cluster)


async def test_the_latest_snapshots_of_a_whole_table_are_leased(
    cluster: Cluster, table_id: int
) -> None:
    found = await latest(cluster, m.PbLeaseTarget(table_id=table_id))
    assert (found.lease_epoch, found.remaining_ms) == (1, HOUR_MS)
    assert [columns(each) for each in found.leased] == [[(0, 1, 10), (1, 1, 10)]]
    (missing,) = found.unavailable
    assert (list(missing.bucket_ids), list(missing.reasons)) == ([2], [Unavailable.NO_SNAPSHOT])


async def test_targets_may_overlap_and_name_buckets_that_there_are_not(
    cluster: Cluster, table_id: int
) -> None:
    some = m.PbLeaseTarget(table_id=table_id, bucket_ids=[1, 8, -1])
    other = m.PbLeaseTarget(table_id=table_id, bucket_ids=[1, 0])
    odd = m.PbLeaseTarget(table_id=table_id, partition_id=5, bucket_ids=[0])
    found = await latest(cluster, some, other, odd)
    assert [columns(each) for each in found.leased] == [[(1, 1, 10), (0, 1, 10)]]
    reasons = {
        (each.HasField("partition_id"), bucket_id): reason
        for each in found.unavailable
        for bucket_id, reason in zip(each.bucket_ids, each.reasons, strict=True)
    }
    assert reasons == dict.fromkeys([(False, 8), (False, -1), (True, 0)], Unavailable.NO_BUCKET)


async def test_all_partitions_are_leased_where_none_is_named(cluster: Cluster) -> None:
    entry = await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    whole = m.PbLeaseTarget(table_id=entry.info.table_id)
    nothing = await latest(cluster, whole)
    assert (nothing.HasField("lease_epoch"), nothing.remaining_ms) == (False, 0)
    made = [await cluster.catalog.create_partition(BY_DAY, {"d": d}) for d in ("a", "b", "c")]
    for each in made[:2]:
        await fill(cluster, TableBucket(each.table_id, each.partition_id, 0), 1)
    found = await latest(cluster, whole)
    assert [each.partition_id for each in found.leased] == [p.partition_id for p in made[:2]]
    assert [each.partition_id for each in found.unavailable] == [made[2].partition_id]
    one = m.PbLeaseTarget(table_id=entry.info.table_id, partition_id=made[1].partition_id)
    found = await latest(cluster, one, lease_id="m")
    assert [each.partition_id for each in found.leased] == [made[1].partition_id]


async def test_a_table_without_partitions_changes_nothing_of_a_lease_but_its_time(
    cluster: Cluster, table_id: int
) -> None:
    await latest(cluster, m.PbLeaseTarget(table_id=table_id), lease_duration_ms=1000)
    entry = await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    found = await latest(cluster, m.PbLeaseTarget(table_id=entry.info.table_id), lease_epoch=1)
    assert (found.lease_epoch, found.remaining_ms, list(found.leased)) == (1, HOUR_MS, [])


async def test_a_takeover_gets_everything_and_fences_who_had_it(
    cluster: Cluster, table_id: int
) -> None:
    await latest(cluster, m.PbLeaseTarget(table_id=table_id, bucket_ids=[0]))
    found = await latest(cluster)
    assert (found.lease_epoch, columns(found.leased[0])) == (2, [(0, 1, 10)])
    stale = {"lease_id": "l", "lease_epoch": 1}
    for key, more in (
        (RENEW, {"lease_duration_ms": 1}),
        (RELEASE, {}),
        (DROP, {}),
        (ACQUIRE, {"lease_duration_ms": 1}),
        (LATEST, {"lease_duration_ms": 1}),
    ):
        with pytest.raises(KvSnapshotLeaseFencedError):
            await ask(cluster, key, **stale, **more)


async def test_columns_of_many_buckets_are_read_and_filled_in_pieces(
    cluster: Cluster, table_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_service, "BUCKETS_AT_ONCE", 2)
    found = await acquire(cluster, {table_id: [(b, 0) for b in range(7)]})
    (table,) = found.unavailable_snapshots
    assert [b.bucket_id for b in table.bucket_snapshots] == [2, 3, 4, 5, 6]
    found = await latest(cluster, m.PbLeaseTarget(table_id=table_id, bucket_ids=range(8)))
    assert [b for b, _, _ in columns(found.leased[0])] == [0, 1]
    assert list(found.unavailable[0].bucket_ids) == [2, 3, 4, 5, 6, 7]


# Refused


async def test_a_table_that_there_is_not_or_without_a_key_refuses_the_whole_call(
    cluster: Cluster, table_id: int
) -> None:
    logged = (await cluster.catalog.create_table(LOGGED, table_json())).info.table_id
    for other, error in ((999, UnknownTableOrBucketError), (logged, NonPrimaryKeyTableError)):
        with pytest.raises(error):
            await acquire(cluster, {table_id: [(0, 0)], other: [(0, 0)]})
        with pytest.raises(error):
            await latest(
                cluster, m.PbLeaseTarget(table_id=table_id), m.PbLeaseTarget(table_id=other)
            )
    assert await listed(cluster) == []


@pytest.mark.parametrize("lease_id", ["", "a" * 300, "a/b", "..", ".", "a\0b", "ä", "a b"])
async def test_a_bad_id_is_refused_by_every_call(
    cluster: Cluster, table_id: int, lease_id: str
) -> None:
    timed = {"lease_duration_ms": HOUR_MS}
    for key in (ACQUIRE, LATEST, RENEW, RELEASE, DROP, LIST):
        fields = timed if "lease_duration_ms" in APIS[key].request.DESCRIPTOR.fields_by_name else {}
        with pytest.raises(ConfigError, match="is not the id of a lease"):
            await ask(cluster, key, lease_id=lease_id, **fields)


@pytest.mark.parametrize("duration_ms", [0, -1, 8 * DAY_MS, 2**63 - 1, -(2**63)])
async def test_a_bad_duration_is_refused(cluster: Cluster, table_id: int, duration_ms: int) -> None:
    await latest(cluster, m.PbLeaseTarget(table_id=table_id))
    for key in (ACQUIRE, LATEST, RENEW):
        with pytest.raises(ConfigError, match="duration-max"):
            await ask(cluster, key, lease_id="l", lease_duration_ms=duration_ms)
    (lease,) = await listed(cluster)
    assert (lease.remaining_ms, lease.lease_epoch) == (HOUR_MS, 1)


# Releasing, dropping, listing


async def test_what_a_lease_does_not_have_is_released_without_a_word(
    cluster: Cluster, table_id: int
) -> None:
    await ask(cluster, DROP, lease_id="l")
    await ask(cluster, RELEASE, lease_id="l")
    await latest(cluster, m.PbLeaseTarget(table_id=table_id))
    odd = [(table_id, 9, None), (table_id, 0, 4), (999, 0, None), (table_id, -1, None)]
    buckets = [m.PbTableBucket(table_id=t, bucket_id=b, partition_id=p) for t, b, p in odd]
    await ask(cluster, RELEASE, lease_id="l", buckets_to_release=buckets)
    (lease,) = await listed(cluster)
    assert [table.snapshots for table in lease.tables] == [2]
    mine = m.PbTableBucket(table_id=table_id, bucket_id=0)
    await ask(cluster, RELEASE, lease_id="l", buckets_to_release=[mine])
    (lease,) = await listed(cluster, "l")
    assert columns(lease.leased[0]) == [(1, 1, 10)]
    await ask(cluster, DROP, lease_id="l")
    assert await listed(cluster) == []


async def test_the_list_tells_everything_of_a_lease(cluster: Cluster, table_id: int) -> None:
    await latest(cluster, m.PbLeaseTarget(table_id=table_id), principal="anna")
    cluster.clock.now_ms += 2000
    assert isinstance(cluster.seconds, Seconds)
    cluster.seconds.now += 2
    (lease,) = await listed(cluster)
    assert (lease.lease_id, lease.owner, lease.lease_epoch) == ("l", "anna", 1)
    assert (lease.duration_ms, lease.remaining_ms, lease.age_ms) == (HOUR_MS, HOUR_MS - 2000, 2000)
    (table,) = lease.tables
    assert (table.table_id, table.table, table.snapshots) == (table_id, str(KEYED), 2)
    assert table.bytes == 20
    assert not lease.leased
    assert not lease.HasField("damage")
    await cluster.catalog.drop_table(KEYED)
    (lease,) = await listed(cluster)
    assert not lease.tables[0].HasField("table")
    assert await listed(cluster, "other") == []


async def test_a_damaged_lease_is_shown_and_can_only_be_dropped(
    cluster: Cluster, table_id: int
) -> None:
    await latest(cluster, m.PbLeaseTarget(table_id=table_id))
    damaged = Put(lease_records.table_path("l", table_id), b"no pins")
    await cluster.catalog.ledger.commit([damaged])
    again = await cluster.restart()
    (lease,) = await listed(again)
    assert lease.damage
    assert [table.table_id for table in lease.tables] == [table_id]
    await ask(again, DROP, lease_id="l")
    assert await listed(again) == []
    await again.stop()
    await cluster.start()


# Who may


@pytest.mark.parametrize("other", ["bert", None])
async def test_nobody_but_a_super_user_uses_the_lease_of_another(
    cluster: Cluster, table_id: int, other: str | None
) -> None:
    target = m.PbLeaseTarget(table_id=table_id)
    await latest(cluster, target, principal="anna")
    timed = {"lease_id": "l", "lease_duration_ms": HOUR_MS}
    calls: list[tuple[ApiKey, dict[str, Any]]] = [
        (ACQUIRE, timed),
        (LATEST, timed),
        (RENEW, timed),
        (RELEASE, {"lease_id": "l"}),
        (DROP, {"lease_id": "l"}),
    ]
    for key, fields in calls:
        with pytest.raises(AuthorizationError, match="belongs to anna"):
            await ask(cluster, key, other, **fields)
    (lease,) = await listed(cluster)
    assert lease.lease_epoch == 1
    for key, fields in calls:
        await ask(cluster, key, "admin", **fields)
    assert await listed(cluster) == []


async def test_who_may_not_read_a_table_cannot_lease_it_nor_drop_its_leases(
    cluster: Cluster, table_id: int
) -> None:
    closed = {"bert"}

    def may_read(principal: str | None, path: TablePath) -> bool:
        return principal not in closed

    leases, authority = cluster.coordinator.leases, cluster.coordinator.authority
    cluster.services = Services()
    cluster.services.attach(LeaseService(leases, cluster.image, authority, may_read))
    target = m.PbLeaseTarget(table_id=table_id)
    with pytest.raises(AuthorizationError, match=r"bert may not read table fluss\.keyed"):
        await latest(cluster, target, principal="bert")
    with pytest.raises(AuthorizationError, match=r"bert may not read"):
        await acquire(cluster, {table_id: [(0, 0)]}, "bert")
    closed.clear()
    await latest(cluster, target, principal="bert")
    closed |= {"bert", "admin"}
    await ask(cluster, RENEW, "bert", lease_id="l", lease_duration_ms=HOUR_MS)
    with pytest.raises(AuthorizationError, match="bert may not read"):
        await ask(cluster, DROP, "bert", lease_id="l")
    await latest(cluster, target, principal="admin")
    await ask(cluster, DROP, "admin", lease_id="l")
    assert await listed(cluster) == []


def test_super_users_are_users_with_semicolons_between() -> None:
    assert users(Configuration.of({}), options.SUPER_USERS) == frozenset()
    several = Configuration.of({"super.users": "User:admin; User:a:b ;"})
    assert users(several, options.SUPER_USERS) == {"admin", "a:b"}
    authority = Authority(Configuration.of({"super.users": "User:admin"}))
    assert [authority.is_super(each) for each in ("admin", "anna", "", None)] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["admin", "User:", "Group:admins", "user:admin", "User:a,b;x"])
def test_what_is_no_principal_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"super\.users: .* is not a principal"):
        Authority(Configuration.of({"super.users": text}))
