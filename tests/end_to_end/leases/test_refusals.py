"""Invalid lease ids, tables without snapshots, and the permissions of users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from google.protobuf.message import Message

from tests.coordinator.remotes import BY_DAY, KEYED, keyed_json
from tests.end_to_end.leases.local_coordinator import Inside, inside
from tests.end_to_end.leases.stage import (
    HOUR_MS,
    USERS,
    Caller,
    Stage,
    acquire_request,
    rows,
    unique,
)
from zufluss.coordinator.leases.service import LeaseService
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    ErrorCode,
    KvSnapshotLeaseNotFoundError,
    NonPrimaryKeyTableError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.model.table import TableBucket, TablePath
from zufluss.net.services import Services
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

ACQUIRE = ApiKey.ACQUIRE_KV_SNAPSHOT_LEASE
LATEST = ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE
RENEW = ApiKey.RENEW_KV_SNAPSHOT_LEASE
RELEASE = ApiKey.RELEASE_KV_SNAPSHOT_LEASE
DROP = ApiKey.DROP_KV_SNAPSHOT_LEASE
LIST = ApiKey.LIST_KV_SNAPSHOT_LEASES
MARK = "zz-outside"
"""Text in lease ids that must not become part of a file name."""
BAD_IDS = [
    "",
    "x" * 300,
    "x" * 129,
    ".",
    "..",
    f"../{MARK}",
    f"../../../{MARK}",
    f"a/{MARK}",
    f"/{MARK}",
    f"{MARK}/",
    f"{MARK}\0",
    f"{MARK}\n",
    f"{MARK} ",
    f"{MARK}\\a",
    f"{MARK}%2f..",
    f"{MARK}ä",
    f"{MARK}\u202e",
]
GOOD_IDS = ["a", "x" * 128, "...", ".hidden", "A.b_c:d-9", "-rf", "expiry", "tables"]


def requests_of(lease_id: str, bucket: TableBucket) -> dict[ApiKey, Message]:
    """One request of every lease RPC."""
    target = m.PbLeaseTarget(table_id=bucket.table_id)
    return {
        ACQUIRE: acquire_request(lease_id, {bucket: 0}),
        LATEST: m.AcquireLatestKvSnapshotLeaseRequest(
            lease_id=lease_id, lease_duration_ms=HOUR_MS, targets=[target]
        ),
        RENEW: m.RenewKvSnapshotLeaseRequest(lease_id=lease_id, lease_duration_ms=HOUR_MS),
        RELEASE: m.ReleaseKvSnapshotLeaseRequest(lease_id=lease_id),
        DROP: m.DropKvSnapshotLeaseRequest(lease_id=lease_id),
        LIST: m.ListKvSnapshotLeasesRequest(lease_id=lease_id),
    }


@pytest_asyncio.fixture
async def within(tmp_path: Path) -> AsyncIterator[Inside]:
    """A coordinator in this process, with a super user and a snapshot of its bucket."""
    async with inside(tmp_path, {"super.users": "User:admin"}) as it:
        await it.take(0)
        yield it


@pytest.fixture
def users(it: Stage) -> Iterator[dict[str | None, Caller]]:
    """A connection of each user, and an anonymous one."""
    with ExitStack() as stack:
        yield {user: stack.enter_context(it.caller(user)) for user in (*USERS, None)}


# -- lease ids -----------------------------------------------------------------------------------


def test_a_bad_id_is_refused_by_every_call_and_becomes_no_file(it: Stage) -> None:
    _, (bucket,) = it.filled(1)
    before = it.calls.leases()
    for lease_id in BAD_IDS:
        for key, request in requests_of(lease_id, bucket).items():
            with pytest.raises(ConfigError, match="is not the id of a lease"):
                it.calls.raw.call(key, request)
    assert [lease.lease_id for lease in it.calls.leases()] == [b.lease_id for b in before]
    assert list(it.server.data_dir.parent.rglob(f"*{MARK}*")) == []


def test_an_id_that_is_no_utf8_is_refused_by_every_call(it: Stage) -> None:
    _, (bucket,) = it.filled(1)
    before = it.calls.leases()
    for bad in (b"\xff\xfe\xfd\xfc", b"ok\xc3(", b"\xed\xa0\x80x"):
        for key, request in requests_of("abcd", bucket).items():
            body = request.SerializeToString().replace(b"abcd", bad)
            code = it.calls.raw.error_code(key, body)
            assert code == ErrorCode.CORRUPT_MESSAGE, f"{key}: {code}"
    assert it.calls.raw.alive()
    assert [lease.lease_id for lease in it.calls.leases()] == [b.lease_id for b in before]


async def test_nothing_is_written_outside_the_lease_area(within: Inside) -> None:
    await within.leases.acquire_latest("first", HOUR_MS, [within.bucket], principal=None)
    await within.leases.drop("first", principal=None)  # epochs are reserved for many leases
    before = await within.stored()
    for lease_id in BAD_IDS:
        for key, request in requests_of(lease_id, within.bucket).items():
            fields = {field.name: value for field, value in request.ListFields()}
            with pytest.raises(ConfigError):
                await within.ask(key, **{"lease_id": "", **fields})
    assert await within.stored() == before
    for lease_id in GOOD_IDS:
        await within.leases.acquire_latest(lease_id, HOUR_MS, [within.bucket], principal=None)
        new = (await within.stored()).keys() - before.keys()
        area = f"/leases/kv-snapshot/{lease_id}"
        assert area in new
        assert all(path == area or path.startswith(f"{area}/") for path in new)
        await within.leases.drop(lease_id, principal=None)
        assert await within.stored() == before


async def test_ids_whose_paths_look_like_each_other_are_different_leases(
    within: Inside,
) -> None:
    for lease_id in GOOD_IDS:
        await within.leases.acquire_latest(lease_id, HOUR_MS, [within.bucket], principal=None)
    assert [lease.lease_id for lease in within.leases.book.infos()] == sorted(GOOD_IDS)
    for lease_id in GOOD_IDS:
        await within.leases.drop(lease_id, principal=None)
        assert within.leases.book.infos(lease_id) == []
    assert await within.cluster.store.tree("/leases") == []


# -- tables without snapshots --------------------------------------------------------------------


def test_tables_without_snapshots_and_unknown_ones_are_typed_errors(it: Stage) -> None:
    table, (good,) = it.filled(1)
    log = it.create("id INT, text STRING")
    by_day = it.create("id INT, day STRING", partition_keys=["day"])
    lease_id = unique("lease")
    wrong: list[tuple[int, type[ZuflussError], str]] = [
        (log.info.table_id, NonPrimaryKeyTableError, str(log.path)),
        (by_day.info.table_id, NonPrimaryKeyTableError, str(by_day.path)),
        (2**40, UnknownTableOrBucketError, str(2**40)),
        (-1, UnknownTableOrBucketError, "-1"),
    ]
    for table_id, kind, named in wrong:
        bad = TableBucket(table_id, None, 0)
        for call in (
            lambda bad=bad: it.calls.acquire(lease_id, {good: 0, bad: 0}),
            lambda bad=bad: it.calls.latest(lease_id, [good, bad]),
        ):
            with pytest.raises(kind, match=named):
                call()
        assert it.calls.lease(lease_id) is None, "nothing of the request was done"
    with pytest.raises(NonPrimaryKeyTableError):
        it.admin.kv_snapshot_lease(log.path)
    with pytest.raises(NonPrimaryKeyTableError):
        it.admin.kv_snapshot_lease([table.path, log.path])


def test_a_lease_that_is_there_is_not_touched_by_a_refused_acquire(it: Stage) -> None:
    table, (good,) = it.filled(1)
    lease_id = unique("lease")
    epoch = it.calls.latest(lease_id, [good]).epoch
    for number in range(1, 4):
        it.take(table, range(8), f"snapshot {number}")
    with pytest.raises(UnknownTableOrBucketError):
        it.calls.latest(lease_id, [good, TableBucket(2**40, None, 0)])
    lease = it.calls.lease(lease_id)
    assert lease is not None
    assert (lease.epoch, it.calls.leased(lease_id)) == (epoch, {good: 0})
    assert rows(table, good, 0) == dict.fromkeys(range(8), "snapshot 0")


def test_a_table_that_was_dropped_is_unknown(it: Stage) -> None:
    table, (bucket,) = it.filled(1)
    it.admin.drop_table(table.path)
    with pytest.raises(UnknownTableOrBucketError):
        it.calls.latest(unique("lease"), [bucket])


# -- owners --------------------------------------------------------------------------------------


def test_nobody_but_its_owner_and_a_super_user_can_use_a_lease(
    it: Stage, users: dict[str | None, Caller]
) -> None:
    table, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    epoch = users["anna"].latest(lease_id, [bucket]).epoch
    for number in range(1, 4):
        it.take(table, range(8), f"snapshot {number}")
    for other in ("bert", None):
        for call in uses(users[other], lease_id, bucket):
            with pytest.raises(AuthorizationError, match="belongs to anna"):
                call()
    lease = it.calls.lease(lease_id)
    assert lease is not None
    assert (lease.owner, lease.epoch) == ("anna", epoch)
    assert it.calls.leased(lease_id) == {bucket: 0}
    assert it.kept(table) == [0, 2, 3]
    assert users["anna"].renew(lease_id, epoch=epoch) > 0
    for call in uses(users["admin"], lease_id, bucket):
        call()
    assert it.calls.lease(lease_id) is None
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        users["anna"].renew(lease_id)
    it.until_kept(table, [2, 3])


def uses(caller: Caller, lease_id: str, bucket: TableBucket) -> list[Callable[[], object]]:
    """Every call that can be made about a lease."""
    return [
        lambda: caller.renew(lease_id),
        lambda: caller.acquire(lease_id, {}),
        lambda: caller.acquire(lease_id, {bucket: 3}),
        lambda: caller.latest(lease_id),
        lambda: caller.latest(lease_id, [bucket]),
        lambda: caller.release(lease_id, [TableBucket(bucket.table_id, None, 9)]),
        lambda: caller.release(lease_id, [bucket]),
        lambda: caller.drop(lease_id),
    ]


def test_a_lease_without_an_owner_is_not_that_of_a_user(
    it: Stage, users: dict[str | None, Caller]
) -> None:
    _, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    users[None].latest(lease_id, [bucket])
    with pytest.raises(AuthorizationError):
        users["anna"].drop(lease_id)
    users["admin"].renew(lease_id)
    users[None].drop(lease_id)


def test_an_id_that_is_free_again_belongs_to_who_takes_it(
    it: Stage, users: dict[str | None, Caller]
) -> None:
    _, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    users["anna"].latest(lease_id, [bucket])
    users["anna"].drop(lease_id)
    users["bert"].latest(lease_id, [bucket])
    with pytest.raises(AuthorizationError, match="belongs to bert"):
        users["anna"].renew(lease_id)
    users["bert"].drop(lease_id)


async def test_who_may_not_read_a_table_cannot_lease_it_nor_drop_what_holds_it(
    within: Inside,
) -> None:
    open_table = await within.cluster.catalog.create_table(BY_DAY, keyed_json())
    other = TableBucket(open_table.info.table_id, None, 0)
    await within.take(0, bucket=other)
    closed = {("bert", KEYED), ("admin", KEYED)}

    def may_read(principal: str | None, path: TablePath) -> bool:
        return (principal, path) not in closed

    coordinator = within.cluster.coordinator
    service = LeaseService(
        within.leases, within.cluster.image, coordinator.authority, may_read=may_read
    )
    within.cluster.services = Services()
    within.cluster.services.attach(service)
    both = [m.PbLeaseTarget(table_id=b.table_id) for b in (other, within.bucket)]
    timed = {"lease_id": "l", "lease_duration_ms": HOUR_MS}
    wanted = acquire_request("l", {other: 0, within.bucket: 0}).snapshots_to_lease
    for key, fields in ((LATEST, {"targets": both}), (ACQUIRE, {"snapshots_to_lease": wanted})):
        with pytest.raises(AuthorizationError, match=r"bert may not read table fluss\.keyed"):
            await within.ask(key, "bert", **timed, **fields)
    assert within.leases.book.infos() == [], "not even what may be read was leased"
    await within.ask(LATEST, "bert", **timed, targets=both[:1])
    closed.clear()
    await within.ask(LATEST, "bert", **timed, targets=both)
    closed.add(("bert", KEYED))
    with pytest.raises(AuthorizationError, match="bert may not read"):
        await within.ask(DROP, "bert", lease_id="l")
    assert [lease.lease_id for lease in within.leases.book.infos()] == ["l"]
    closed.add(("admin", KEYED))
    await within.ask(DROP, "admin", lease_id="l")
    assert within.leases.book.infos() == []
