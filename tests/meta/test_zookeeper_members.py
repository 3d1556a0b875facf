"""The store on ZooKeeper while members of the ensemble are killed and frozen under load."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.meta.zookeepers import ensemble, open_store, root_of
from zufluss.meta.api import Create, Put
from zufluss.meta.zookeeper import ZooKeeperStore
from zufluss.testing.zookeeper import ZooKeeper

__all__ = ["ensemble"]


async def _pairs(store: ZooKeeperStore, done: Callable[[], bool]) -> int:
    """Create pairs, each with the number of a counter; returns how many were acknowledged."""
    count = 0
    while not done():
        found = await store.read("/next")
        assert found is not None
        assert int(found.value) == count, "an increment was lost, or took place twice"
        await store.transact(
            [
                Create(f"/left/{count}", b"x"),
                Put("/next", b"%d" % (count + 1), found.version),
                Create(f"/right/{count}", b"y"),
            ]
        )
        count += 1
    return count


@pytest.mark.parametrize("what", ["kill", "freeze"])
async def test_every_transaction_takes_place_once_while_members_fail(
    ensemble: ZooKeeper, tmp_path: Path, what: str
) -> None:
    """The only writer sees no error at all, and counts what the store counts."""
    seed = int(os.environ.get("ZUFLUSS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    print(f"ZUFLUSS_SEED={seed}")
    chance = random.Random(seed)
    store = await open_store(ensemble.address, root_of(tmp_path), session_timeout_ms=2000)
    await store.transact([Create("/next", b"0")])
    ended = False
    load = asyncio.create_task(_pairs(store, lambda: ended))
    for number in range(rounds(3, 60)):
        leads = [each for each in ensemble.members if each.leads]
        victim = leads[0] if leads and number % 2 else chance.choice(ensemble.members)
        await asyncio.sleep(chance.random() * 0.3)
        if what == "kill":
            victim.kill()
            await asyncio.sleep(chance.random())
            await asyncio.to_thread(victim.start)
        else:
            victim.pause()
            await asyncio.sleep(chance.random() * 4)
            victim.resume()
        assert not load.done() or load.result()
    ended = True
    count = await load
    sides = [{int(name) for name in await store.children(side)} for side in ("/left", "/right")]
    await store.close()
    assert count > 0
    assert sides == [set(range(count))] * 2


async def test_a_majority_that_is_away_only_delays_a_transaction(
    ensemble: ZooKeeper, tmp_path: Path
) -> None:
    """The transaction was sent, so nobody else can say what became of it; it waits."""
    store = await open_store(ensemble.address, root_of(tmp_path), session_timeout_ms=2000)
    await store.transact([Create("/n", b"0")])
    commit, sent = store._client.commit, asyncio.Event()

    async def tell(operations: list[object]) -> list[object]:
        for member in ensemble.members[:2]:
            member.kill()
        sent.set()
        return await commit(operations)

    store._client.commit = tell  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(store.transact([Put("/n", b"1")]))
    await sent.wait()
    store._client.commit = commit  # type: ignore[method-assign]
    done, _ = await asyncio.wait([task], timeout=3)
    assert not done
    await asyncio.to_thread(ensemble.start)
    await task
    found = await store.read("/n")
    assert found is not None
    assert found.value == b"1"
    await store.close()
