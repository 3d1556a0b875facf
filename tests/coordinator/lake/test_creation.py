"""CREATE TABLE with a lake, against other changes of the catalog: who has the name in the lake."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.support import COORDINATOR, TABLET, Cluster, table_json
from zufluss.cluster.image import TableEntry
from zufluss.coordinator.server import Coordinator
from zufluss.errors import TableAlreadyExistError
from zufluss.lake.creation import LakeTableCreator
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.table import TableInfo, TablePath

TIERED = {"table.datalake.enabled": "true"}
EVENTS = TablePath("fluss", "events")


class Lake(LakeTableCreator):
    """Knows which table had its lake table created last; never asks anything."""

    def __init__(self) -> None:
        super().__init__()
        self.last: TableInfo | None = None

    async def warm(self) -> None:
        """Start nothing."""

    async def prepare(
        self, table: TableInfo, format: str, properties: Mapping[str, str], limit_ms: int
    ) -> str | None:
        """Create the lake table of a table."""
        self.last = table
        return None


@pytest.mark.parametrize("first", ["plain", "tiered"])
async def test_of_two_tables_of_one_name_the_one_that_stays_can_be_tiered(
    tmp_path: Path, first: str
) -> None:
    """A lake table gives way to newer tables only, so what the loser leaves must not be newer."""
    cluster, lake = Cluster(tmp_path / "meta", {"datalake.format": "iceberg"}), Lake()
    cluster.store = await EmbeddedStore.open(cluster.directory)
    coordinator = await Coordinator.open(
        cluster.conf, cluster.store, COORDINATOR, cluster.clock, creator=lake
    )
    try:
        await coordinator.attach(TABLET, cluster.tablet)
        creations = {
            "plain": coordinator.catalog.create_table(EVENTS, table_json()),
            "tiered": coordinator.catalog.create_table(EVENTS, table_json(properties=TIERED)),
        }
        order: list[Any] = [creations.pop(first), *creations.values()]
        outcomes = await asyncio.gather(*order, return_exceptions=True)
        [stays] = [outcome for outcome in outcomes if isinstance(outcome, TableEntry)]
        assert sum(isinstance(outcome, TableAlreadyExistError) for outcome in outcomes) == 1
        assert lake.last is None or _age(lake.last) <= _age(stays.info)
    finally:
        await coordinator.stop()
        await cluster.store.close()


def _age(info: TableInfo) -> tuple[int, int]:
    return info.created_time, info.table_id
