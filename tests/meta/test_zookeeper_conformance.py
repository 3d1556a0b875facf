"""The store on ZooKeeper keeps the promises of every metadata store, on an ensemble of three."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.meta.conformance import MetaStoreConformance
from tests.meta.zookeepers import ensemble, open_store, root_of
from zufluss.meta.api import MetaStore
from zufluss.testing.zookeeper import ZooKeeper

__all__ = ["ensemble"]


class TestZooKeeperStore(MetaStoreConformance):
    @pytest.fixture(autouse=True)
    def _use(self, ensemble: ZooKeeper) -> None:
        self.address = ensemble.address

    async def open_store(self, directory: Path) -> MetaStore:
        return await open_store(self.address, root_of(directory))
