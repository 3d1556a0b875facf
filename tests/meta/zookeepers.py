"""Fixtures of the tests on ZooKeeper: an ensemble of three for each module."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from zufluss.meta.api import MetaStore
from zufluss.meta.zookeeper import ZooKeeperStore
from zufluss.meta.zookeeper_client import ZooKeeperAccess
from zufluss.testing.zookeeper import ZooKeeper


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("ensemble"), members=3) as zookeeper:
        yield zookeeper


def root_of(directory: Path) -> str:
    """A root of its own for each directory."""
    return "/" + "-".join(directory.parts[-2:])


async def open_store(
    address: str, root: str = "/zufluss", *, session_timeout_ms: int = 6000
) -> ZooKeeperStore:
    return await ZooKeeperStore.open(ZooKeeperAccess(address, session_timeout_ms), root)


def opener(address: str) -> Callable[[Path], Awaitable[MetaStore]]:
    """Opens stores in ZooKeeper as others do in a directory."""

    async def open_one(directory: Path) -> MetaStore:
        return await open_store(address, root_of(directory))

    return open_one
