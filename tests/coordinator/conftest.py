from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.coordinator.support import Cluster


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with one tablet server."""
    cluster = await Cluster(tmp_path / "meta").start()
    yield cluster
    await cluster.stop()
