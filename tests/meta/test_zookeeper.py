"""The store on ZooKeeper while connections, members and other stores get in its way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss

from tests.meta.zookeepers import ensemble, open_store, root_of
from tests.waiting import eventually_async
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.meta import zookeeper
from zufluss.meta.api import (
    Create,
    Delete,
    MetaStoreError,
    Put,
    StoreClosedError,
    TransactionTooLargeError,
)
from zufluss.meta.zookeeper import ZooKeeperStore
from zufluss.testing.tcp import TcpProxy
from zufluss.testing.zookeeper import ZooKeeper

__all__ = ["ensemble"]

SESSION_MS = 1500
"""A short session, so that tests see its end."""


@pytest.fixture
def root(tmp_path: Path) -> str:
    return root_of(tmp_path)


@pytest.fixture
def proxy(ensemble: ZooKeeper) -> Iterator[TcpProxy]:
    """All connections of the store under test; tests look at ZooKeeper beside it."""
    with TcpProxy("127.0.0.1", ensemble.members[0].port) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def store(proxy: TcpProxy, root: str) -> AsyncIterator[ZooKeeperStore]:
    store = await open_store(proxy.address, root, session_timeout_ms=SESSION_MS)
    yield store
    proxy.heal()
    await store.close()


@pytest_asyncio.fixture
async def other(
    ensemble: ZooKeeper, root: str, store: ZooKeeperStore
) -> AsyncIterator[ZooKeeperStore]:
    """A second store on the same root, on another member, without the proxy."""
    other = await open_store(ensemble.members[1].address, root)
    yield other
    await other.close()


@pytest.fixture
def kazoo(ensemble: ZooKeeper) -> Iterator[KazooClient]:
    client = KazooClient(ensemble.members[0].address, timeout=6)
    client.start(60)
    yield client
    client.stop()
    client.close()


# Connections that end


async def test_a_transaction_whose_answer_is_lost_took_place_once(
    proxy: TcpProxy,
    store: ZooKeeperStore,
    other: ZooKeeperStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trying it again would be refused: the path would be there already."""
    _before_the_next_commit(store, proxy.lose_answers, monkeypatch)
    task = asyncio.create_task(store.compare_and_set("/a", b"1", None))
    await eventually_async(lambda: _sees(other, "/a"))
    proxy.cut()
    version = await task
    await store.transact([Put("/a", b"2", version)])
    assert [entry.value for entry in await (await _in_sync(other)).tree("/")] == [b"2"]


async def test_a_transaction_that_never_arrived_is_sent_again(
    proxy: TcpProxy, store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.transact([Create("/n", b"0")])
    task = await _sent_and_held(proxy, store, monkeypatch)
    proxy.cut()
    await task
    assert await _number(store) == 1


async def test_a_request_that_arrives_late_changes_nothing(
    proxy: TcpProxy, store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was resolved as not having taken place, so it must not take place any more."""
    await store.transact([Create("/n", b"0")])
    task = await _sent_and_held(proxy, store, monkeypatch)
    proxy.cut()
    await task
    proxy.release()
    for _ in range(5):
        await store.transact([Put("/n", b"%d" % (await _number(store) + 1))])
    assert await _number(store) == 6


async def test_the_token_alone_keeps_a_late_request_out(
    kazoo: KazooClient, store: ZooKeeperStore, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing else does: here the request is carried out by another client, later."""
    late: list[Sequence[Any]] = []
    commit = store._client.commit

    async def lose_first(operations: Sequence[Any]) -> list[Any]:
        if not late:
            late.append(operations)
            raise ConnectionLoss
        return await commit(operations)

    monkeypatch.setattr(store._client, "commit", lose_first)
    await store.transact([Create("/a", b"once")])
    await store.transact([Delete("/a")])
    transaction = kazoo.transaction()
    transaction.operations = list(late[0])
    results = transaction.commit()
    assert any(isinstance(result, Exception) for result in results)
    assert await store.read("/a") is None


@pytest.mark.parametrize("seed", range(3))
async def test_increments_are_counted_once_while_connections_are_cut(
    proxy: TcpProxy, store: ZooKeeperStore, seed: int
) -> None:
    """Every increment is acknowledged, and the sum says that each took place once."""
    chance = random.Random(seed)
    await store.transact([Create("/n", b"0")])
    load = asyncio.create_task(_increments(store, 60))
    while not load.done():
        chance.choice([proxy.lose_answers, proxy.hold_requests, proxy.heal])()
        await asyncio.sleep(chance.random() * 0.05)
        proxy.cut()
        proxy.heal()
        await asyncio.sleep(chance.random() * 0.1)
        if chance.random() < 0.3:
            proxy.release()
    await load
    assert await _number(store) == 60


async def test_a_store_goes_on_in_a_new_session(
    proxy: TcpProxy, store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    """After the end of its session a store sees what others committed meanwhile, and can write."""
    await store.transact([Create("/n", b"0")])
    before = store._client._kazoo.client_id
    proxy.refuse()
    await eventually_async(lambda: _session_is_gone(other, before[0]))
    await other.transact([Put("/n", b"5")])
    proxy.heal()
    assert await _number(store) == 5
    assert store._client._kazoo.client_id != before
    await store.transact([Put("/n", b"6")])
    assert await _number(await _in_sync(other)) == 6


async def test_without_zookeeper_requests_fail_and_change_nothing(
    proxy: TcpProxy, store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper, "ANSWER_SECONDS", 0.5)
    await store.transact([Create("/a", b"1")])
    proxy.refuse()
    for request in (store.read("/a"), store.tree("/"), store.transact([Put("/a", b"2")])):
        with pytest.raises(MetaStoreError, match="did not answer within") as refused:
            await request
        assert refused.value.retriable
    monkeypatch.setattr(zookeeper, "ANSWER_SECONDS", 60.0)
    proxy.heal()
    assert [entry.value for entry in await store.tree("/")] == [b"1"]


async def test_the_event_loop_goes_on_however_much_is_asked_without_zookeeper(
    proxy: TcpProxy, store: ZooKeeperStore
) -> None:
    """kazoo keeps requests without a connection, and blocks whoever asks for the 279th."""
    proxy.refuse()
    proxy.cut()
    await eventually_async(lambda: _is_away(store), "the connection is gone")
    for _ in range(400):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await store.read("/a")


async def _is_away(store: ZooKeeperStore) -> bool:
    return not store._client._kazoo.connected


async def test_transactions_behind_one_in_doubt_fail_in_time_and_change_nothing(
    proxy: TcpProxy,
    store: ZooKeeperStore,
    other: ZooKeeperStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await store.transact([Create("/n", b"0")])
    doubtful = await _sent_and_held(proxy, store, monkeypatch)
    monkeypatch.setattr(zookeeper, "ANSWER_SECONDS", 0.5)
    behind = [store.transact([Create(f"/behind-{i}", b"")]) for i in range(3)]
    for answer in await asyncio.gather(*behind, return_exceptions=True):
        assert isinstance(answer, MetaStoreError)
        assert "nothing was changed" in str(answer)
    monkeypatch.undo()
    proxy.cut()
    await doubtful
    assert [entry.path for entry in await (await _in_sync(other)).tree("/")] == ["/n"]


async def test_closing_ends_a_transaction_in_doubt_and_says_so(
    proxy: TcpProxy, store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StoreClosedError` would mean that nothing was changed."""
    monkeypatch.setattr(zookeeper, "CLOSE_SECONDS", 0.1)
    await store.transact([Create("/n", b"0")])
    task = await _sent_and_held(proxy, store, monkeypatch)
    proxy.refuse()
    await store.close()
    with pytest.raises(MetaStoreError, match="cannot be found out") as unknown:
        await task
    assert not isinstance(unknown.value, StoreClosedError)


async def test_open_says_when_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the reason once, not with each of the attempts to connect."""
    monkeypatch.setattr("zufluss.meta.zookeeper_client.CONNECT_SECONDS", 1.0)
    monkeypatch.setattr("zufluss.meta.zookeeper_client._NEWS._last", "")
    with pytest.raises(MetaStoreError, match=r"zookeeper\.address = 127\.0\.0\.1:1 let this one"):
        await open_store("127.0.0.1:1")
    refused = [message for message in caplog.messages if "Connection refused" in message]
    assert len(refused) == 1


# Several stores


async def test_a_second_ledger_fences_the_first(
    store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    first = await Ledger.open(store)
    await first.commit([Create("/a", b"1")])
    second = await Ledger.open(other)
    assert (second.epoch, second.cluster_id) == (first.epoch + 1, first.cluster_id)
    with pytest.raises(ZuflussError) as refused:
        await first.commit([Put("/a", b"2")])
    assert refused.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    await second.commit([Put("/a", b"3")])
    assert (await store.read(records.EPOCH_PATH)).value == b"2"


async def test_two_stores_agree_on_paths_with_common_parents(
    store: ZooKeeperStore, other: ZooKeeperStore, kazoo: KazooClient, root: str
) -> None:
    """One removes a parent while the other needs it; neither fails, and nothing is left over."""

    async def come_and_go(at: ZooKeeperStore, name: str) -> None:
        for _ in range(15):
            await at.transact([Create(f"/p/q/{name}", b"")])
            await at.transact([Delete(f"/p/q/{name}")])

    await asyncio.gather(come_and_go(store, "one"), come_and_go(other, "other"))
    assert await (await _in_sync(store)).tree("/") == []
    kazoo.sync("/")
    assert kazoo.get_children(f"{root}/store") == []


async def test_stores_that_were_not_closed_leave_few_nodes(
    ensemble: ZooKeeper, kazoo: KazooClient, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store whose node is cleaned up while it is idle goes on with another one."""
    monkeypatch.setattr(zookeeper, "WRITERS_KEPT", 2)
    stores = [await open_store(ensemble.members[0].address, root) for _ in range(4)]
    for number, each in enumerate(stores):
        await each.transact([Create(f"/{number}", b"")])
    last = await open_store(ensemble.members[0].address, root)
    kazoo.sync("/")
    assert len(kazoo.get_children(f"{root}/writers")) == 2
    await stores[0].transact([Create("/again", b"")])
    for each in [*stores, last]:
        await each.close()
    kazoo.sync("/")
    assert len(kazoo.get_children(f"{root}/writers")) <= 1


# Limits, and other things at the root


async def test_a_transaction_that_is_too_large_is_refused_before_it_is_sent(
    store: ZooKeeperStore,
) -> None:
    """ZooKeeper would end the connection, and whether it took place would not be known."""
    session = store._client._kazoo.client_id
    many = [Create(f"/many/{number:060}", b"") for number in range(10_000)]
    with pytest.raises(TransactionTooLargeError, match=r"10001 steps has .* at most 1030000"):
        await store.transact(many)
    large = [Create(f"/large/{number}", bytes(600_000)) for number in range(2)]
    with pytest.raises(TransactionTooLargeError) as refused:
        await store.transact(large)
    assert not refused.value.retriable
    assert await store.tree("/") == []
    assert store._client._kazoo.client_id == session


async def test_the_largest_transaction_is_taken_by_all_members(
    ensemble: ZooKeeper, store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    """Members exchange records that are larger than the request."""
    count = zookeeper.TRANSACTION_BYTES_MAX // 170
    while True:
        ops = [Create(f"/m/{number:04}", b"") for number in range(count)]
        try:
            await store.transact(ops)
        except TransactionTooLargeError:
            count -= 100
            continue
        break
    assert count > 5_000
    last = await open_store(ensemble.members[2].address, store._root)
    assert len(await last.children("/m")) == count
    await last.close()
    assert len(await (await _in_sync(other)).tree("/m")) == count


async def test_a_root_with_something_else_is_refused(
    ensemble: ZooKeeper, kazoo: KazooClient, root: str
) -> None:
    kazoo.create(f"{root}/store", b"zufluss metadata 9", makepath=True)
    with pytest.raises(MetaStoreError, match=r"choose another zookeeper\.path\.root"):
        await open_store(ensemble.members[0].address, root)


async def test_a_node_that_no_store_wrote_is_an_error_and_never_an_answer(
    kazoo: KazooClient, store: ZooKeeperStore, root: str
) -> None:
    kazoo.create(f"{root}/store/foreign", b"data")
    with pytest.raises(MetaStoreError, match="was not written by a metadata store"):
        await store.read("/foreign")
    with pytest.raises(MetaStoreError, match="was not written by a metadata store"):
        await store.tree("/")


async def _sent_and_held(
    proxy: TcpProxy, store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> asyncio.Task[None]:
    """A put of 1 to `/n` that was sent and does not arrive; what it read came through."""
    _before_the_next_commit(store, proxy.hold_requests, monkeypatch)
    task = asyncio.create_task(store.transact([Put("/n", b"1")]))

    async def held() -> bool:
        return proxy.held_bytes() > 0

    await eventually_async(held)
    return task


def _before_the_next_commit(
    store: ZooKeeperStore, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do something between what a transaction reads and what it sends."""
    commit = store._client.commit

    async def do_and_commit(operations: Sequence[Any]) -> list[Any]:
        monkeypatch.setattr(store._client, "commit", commit)
        do()
        return await commit(operations)

    monkeypatch.setattr(store._client, "commit", do_and_commit)


async def _in_sync(store: ZooKeeperStore) -> ZooKeeperStore:
    """The store when its member has everything that others committed."""
    await store._client.sync(store._store)
    return store


async def _sees(store: ZooKeeperStore, path: str) -> bool:
    return await (await _in_sync(store)).read(path) is not None


async def _session_is_gone(store: ZooKeeperStore, session: int) -> bool:
    loop = asyncio.get_running_loop()
    answer = await loop.run_in_executor(None, store._client._kazoo.command, b"dump")
    return f"0x{session:x}" not in answer


async def _number(store: ZooKeeperStore) -> int:
    found = await store.read("/n")
    assert found is not None
    return int(found.value)


async def _increments(store: ZooKeeperStore, count: int) -> None:
    for _ in range(count):
        found = await store.read("/n")
        assert found is not None
        await store.compare_and_set("/n", b"%d" % (int(found.value) + 1), found.version)
