"""The shared log over one location: a directory, S3, or another object store."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from random import Random
from secrets import token_bytes

from zufluss.clock import Clock
from zufluss.log.shared import ending, probe, reading
from zufluss.log.shared.api import LostObject, OnDurable, OnFenced, Session
from zufluss.log.shared.store import ObjectStore, WalSettings
from zufluss.log.shared.writer import ObjectWriter
from zufluss.remote.wal import HEADER_BYTES, NONCE_BYTES, WalName, WalObject, session_directory


class ObjectLog:
    """A `SharedLog` of objects. One object serves many sessions of an event loop."""

    def __init__(
        self,
        store: ObjectStore,
        settings: WalSettings,
        *,
        clock: Clock = time.monotonic,
        random: Random | None = None,
        nonce: Callable[[], bytes] = lambda: token_bytes(NONCE_BYTES),
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._random = random or Random()
        self._nonce = nonce

    async def probe(self) -> None:
        """Raise UnsafeLocationError unless the location creates an object only once."""
        await probe.probe(self._store, self._nonce)

    def begin(self, session: Session, on_durable: OnDurable, on_fenced: OnFenced) -> ObjectWriter:
        """Begin a new session: each session is begun once."""
        return ObjectWriter(
            self._store,
            session,
            self._settings,
            on_durable,
            on_fenced,
            clock=self._clock,
            random=self._random,
            nonce=self._nonce,
        )

    async def seal(self, session: Session, floor: int, coordinator_epoch: int) -> int:
        """End a session and return its end, the number behind its last object."""
        in_flight = self._settings.in_flight
        return await ending.seal(
            self._store, session, floor, coordinator_epoch, in_flight, self._nonce
        )

    def read(
        self, session: Session, floor: int, end: int | None
    ) -> AsyncGenerator[WalObject | LostObject, None]:
        """Yield each number from `floor` to before `end`; without an end, to the first gap."""
        return reading.read(self._store, session, floor, end)

    async def trim(self, session: Session, recorded_floor: int) -> int:
        """Delete what is below a floor that the metadata has; return how many objects went.

        Seals stay, whatever the floor: a free name could be taken by a request under way.
        """
        paths = [
            info.path
            async for page in self._store.list(session_directory(session.server_epoch))
            for info in page
            if info.size != HEADER_BYTES
            and (name := WalName.parse(info.path)) is not None
            and name.number < recorded_floor
        ]
        await self._store.delete(paths)
        return len(paths)

    async def forget(self, session: Session) -> None:
        """Delete everything of a session, its seals, too; long after it ended."""
        async for page in self._store.list(session_directory(session.server_epoch)):
            await self._store.delete([info.path for info in page])

    def __repr__(self) -> str:
        return f"ObjectLog({self._store.uri.text})"
