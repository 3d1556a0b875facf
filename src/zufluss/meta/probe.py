"""Asks the metadata store from time to time whether it still answers (`/ready`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from zufluss.errors import reason_of
from zufluss.meta.api import MetaStore
from zufluss.obs.pulse import UNREADY, PartState, ReadPart
from zufluss.tasks import end

PERIOD_SECONDS: Final = 5.0
"""How often the store is asked."""
ANSWER_SECONDS: Final = 10.0
"""A store that needs longer for one read does not answer."""
PROBE_PATH: Final = "/zufluss/probe"
"""A path that has no value; reading it reads the index of the store."""


@asynccontextmanager
async def store_probe(store: MetaStore) -> AsyncIterator[ReadPart]:
    """The state of the store for the length of a block, as it was at the last question."""
    probe = StoreProbe(store)
    task = asyncio.create_task(probe.run(), name="store-probe")
    try:
        yield probe.state
    finally:
        await end(task)


class StoreProbe:
    """The last answer of a metadata store."""

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self._problem: str | None = None

    def state(self) -> PartState:
        """Whether the store answered the last time."""
        if self._problem is None:
            return PartState()
        return PartState(UNREADY, (f"the metadata store does not answer: {self._problem}",))

    async def run(self) -> None:
        """Ask again and again."""
        while True:
            await self.ask()
            await asyncio.sleep(PERIOD_SECONDS)

    async def ask(self) -> None:
        """Ask once, and note the outcome."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._store.read(PROBE_PATH)
        except TimeoutError:
            self._problem = f"no answer within {ANSWER_SECONDS:.0f} s"
        except Exception as problem:  # of any kind: the disk, SQLite, a closed store
            self._problem = reason_of(problem)
        else:
            self._problem = None
