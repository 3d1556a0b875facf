"""Drops of many key-value buckets, beside the work of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.tablet.keyed import Keyed, keyed
from zufluss.kv.store import KvStore

DROPPED = range(1, 30)


@pytest_asyncio.fixture
async def tablet(tmp_path: Path) -> AsyncIterator[Keyed]:
    async with keyed(tmp_path, buckets=len(DROPPED) + 1) as server:
        yield server


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of states that were removed, in order."""
    directories: list[Path] = []
    destroy = KvStore.destroy

    def noted(store: KvStore) -> None:
        directories.append(store.directory)
        destroy(store)

    monkeypatch.setattr(KvStore, "destroy", noted)
    return directories


async def test_a_put_does_not_wait_for_all_buckets_of_a_table_that_is_dropped(
    tablet: Keyed, destroyed: list[Path]
) -> None:
    for bucket in DROPPED:
        tablet.server.kv.stop(tablet.replica(bucket), delete=True, failed=False)
    await tablet.put((1, "one"))
    assert len(destroyed) < len(DROPPED) // 2
    while len(destroyed) < len(DROPPED):
        await asyncio.sleep(0.001)
    await tablet.server.kv.settled()
    assert not any(tablet.kv_directory(bucket).exists() for bucket in DROPPED)


async def test_states_of_dropped_buckets_are_removed_before_a_stop_or_an_open_of_the_same(
    tablet: Keyed, destroyed: list[Path]
) -> None:
    for bucket in DROPPED:
        tablet.server.kv.stop(tablet.replica(bucket), delete=True, failed=False)
    again = tablet.replica(DROPPED[-1])
    opened = await tablet.server.kv.open(again, again.tablet.table)
    assert len(destroyed) == len(DROPPED)
    assert opened.store.directory.exists()
