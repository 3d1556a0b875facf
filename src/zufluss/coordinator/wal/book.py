"""Every session of the shared log, durable.

A session is one registration of a tablet server (`log/shared/api.py`). Its life:

| state | what is true |
|---|---|
| live | its server appends, and may have its floor raised |
| closing | nothing is granted to its server any more; where it ended is being found out |
| sealed | it ended before the number `end`; buckets may be taken over from it |
| released | no bucket needs it: its data is deleted, its seals stay for a while |

A state never goes back. The floor is noted before anything below it is deleted, and never after the
session began to close: so whoever seals knows a floor at which nothing is missing.

| path | value |
|---|---|
| `/wal/durability` | text: the `zufluss.log.durability` of the cluster; absent in older clusters, which means `local` |
| `/wal/sessions/SERVER_EPOCH` | `server_id`, `location_id`, `lease_ms`, `floor`, `state`, `end` (of a sealed session), `ended_ms` (when it was sealed), `lost` (if its location was, before it was sealed) |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

from zufluss.cluster.wal import WalSession, WalSource
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ConfigError, LeaderNotAvailableError, NotLeaderError
from zufluss.meta.api import Create, Delete, MetaStore, Put
from zufluss.model.schema import dump_object
from zufluss.remote.files import Usage

DURABILITY_PATH: Final = "/wal/durability"
SESSIONS_PATH: Final = "/wal/sessions"
LOCAL: Final = "local"
REMOTE: Final = "remote"


class State(StrEnum):
    """How far the life of a session has got."""

    LIVE = "live"
    CLOSING = "closing"
    SEALED = "sealed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session of the shared log."""

    session: WalSession
    """Whose it is, and where its objects are."""
    lease_ms: int = 0
    """How long its server answers lookups after a confirmation; 0 if that was not noted."""
    state: State = State.LIVE
    """How far its life has got."""
    floor: int = 0
    """Objects below this number may be deleted."""
    end: int = 0
    """The number behind the last object, once the session is sealed."""
    ended_ms: int = 0
    """When it was sealed, epoch milliseconds."""
    lost: bool = False
    """Its location was given up as lost: nobody knows where it ended. Its first number is what
    everybody finds missing, so that buckets that need it are refused."""

    @property
    def has_ended(self) -> bool:
        """Whether its end is known."""
        return self.state in (State.SEALED, State.RELEASED)

    def to_json(self) -> bytes:
        """Encode the record as it is stored."""
        value: dict[str, Any] = {
            "server_id": self.session.server_id,
            "location_id": self.session.location_id,
            "lease_ms": self.lease_ms,
            "floor": self.floor,
            "state": self.state,
        }
        if self.has_ended:
            value |= {"end": self.end, "ended_ms": self.ended_ms}
        if self.lost:
            value["lost"] = True
        return dump_object(value)

    @classmethod
    def from_json(cls, server_epoch: int, data: bytes) -> SessionRecord:
        """Decode a stored record; ValueError, KeyError or TypeError if it is malformed."""
        value = json.loads(data)
        return cls(
            WalSession(value["server_id"], server_epoch, value["location_id"]),
            value.get("lease_ms", 0),
            State(value["state"]),
            value["floor"],
            value.get("end", 0),
            value.get("ended_ms", 0),
            value.get("lost", False),
        )


class SessionBook:
    """All sessions by server epoch. Open it with `SessionBook.open`."""

    def __init__(self, ledger: Ledger, durability: str | None) -> None:
        self._ledger = ledger
        self._durability = durability
        self._sessions: dict[int, SessionRecord] = {}
        self._live: dict[int, SessionRecord] = {}
        """The live sessions by server; orders for many buckets ask for them."""
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, store: MetaStore, ledger: Ledger) -> SessionBook:
        """Load the sessions; `CatalogDamagedError` if one cannot be read."""
        durability = await store.read(DURABILITY_PATH)
        book = cls(ledger, None if durability is None else durability.value.decode())
        for entry in await store.tree(SESSIONS_PATH):
            epoch = int(entry.path.rsplit("/", 1)[1])
            read = partial(SessionRecord.from_json, epoch)
            book._set(records.guarded(entry.path, read, entry.value))
        return book

    async def settle_durability(self, configured: str, *, has_tables: bool) -> None:
        """Note where the rows of the cluster are durable; `ConfigError` unless it stays so.

        A cluster without tables may change.
        """
        known = self._durability or LOCAL
        if known != configured and has_tables:
            raise ConfigError(
                f"zufluss.log.durability is {configured} here, but the tables of this cluster were "
                f"created with {known}; set it to {known}, or begin a new cluster with "
                f"{configured} and copy the tables"
            )
        if self._durability != configured:
            before, value = self._durability, configured.encode()
            path = DURABILITY_PATH
            await self._ledger.commit([Create(path, value) if before is None else Put(path, value)])
            self._durability = configured

    def __iter__(self) -> Iterator[SessionRecord]:
        """All sessions, in the order of their epochs."""
        return iter([self._sessions[epoch] for epoch in sorted(self._sessions)])

    @property
    def counts(self) -> dict[str, int]:
        """How many sessions are in each state."""
        counts = Counter(record.state for record in self._sessions.values())
        return {state.value: counts[state] for state in State}

    def get(self, server_epoch: int) -> SessionRecord | None:
        """The session of a registration."""
        return self._sessions.get(server_epoch)

    def session(self, server_epoch: int) -> WalSession:
        """The session of a registration, by its epoch."""
        return self._sessions[server_epoch].session

    def live(self, server_id: int) -> SessionRecord | None:
        """The live session of a server."""
        return self._live.get(server_id)

    def wal_of(self, server_id: int) -> int | None:
        """The session in which new buckets of a server begin; None without a shared log."""
        if self._durability != REMOTE:
            return None
        record = self.live(server_id)
        if record is None:
            raise LeaderNotAvailableError(
                f"tablet server {server_id} has no session of the shared log at present; try again"
            )
        return record.session.server_epoch

    def of(self, server_id: int) -> list[SessionRecord]:
        """All sessions of a server."""
        return [record for record in self if record.session.server_id == server_id]

    def check_live(self, session: WalSession) -> SessionRecord:
        """Return the record of a live session; `NotLeaderError` for another one."""
        record = self._sessions.get(session.server_epoch)
        if record is None or record.session != session or record.state is not State.LIVE:
            raise NotLeaderError(
                f"the session of tablet server {session.server_id} with epoch "
                f"{session.server_epoch} has ended; register again"
            )
        return record

    def source(self, server_epoch: int) -> WalSource:
        """A session that has ended, as one from which a bucket is taken over."""
        record = self._sessions[server_epoch]
        assert record.has_ended, f"{record} has not ended"
        return WalSource(record.session, record.floor, record.end)

    def live_usage(self) -> dict[int, Usage]:
        """Sessions that somebody needs as files of their locations, so that these are kept."""
        locations = [x.session.location_id for x in self if x.state is not State.RELEASED]
        return {i: Usage(locations.count(i), 0) for i in set(locations)}

    def check_unused(self, location_id: int) -> None:
        """Raise `ConfigError` if a location has a session that goes on or that a bucket needs.

        Its server would go on at the former address, and whoever seals it at the new one.
        """
        needed = [
            record.session.server_id
            for record in self
            if record.session.location_id == location_id and record.state is not State.RELEASED
        ]
        if needed:
            servers = ", ".join(map(str, sorted(set(needed))))
            raise ConfigError(
                f"location {location_id} has the shared log of tablet servers {servers}, and "
                "cannot be moved: what they write would go to one address and be looked for at the "
                "other. Give it weight 0, with another location that takes files, and try again in "
                "a minute: servers begin new sessions there, and buckets follow them"
            )

    # Changes take turns. Memory follows the store, so after a failure it may be behind: a floor
    # that is higher in the store than here was never granted, and a state is put again.

    async def begin(self, session: WalSession, lease_ms: int) -> SessionRecord:
        """Note a new session."""
        async with self._turn:
            record = SessionRecord(session, lease_ms)
            await self._ledger.commit([Create(_path(session), record.to_json())])
            return self._set(record)

    async def raise_floor(self, session: WalSession, floor: int) -> None:
        """Note a higher floor of a live session; `NotLeaderError` if it has ended."""
        async with self._turn:
            record = self.check_live(session)
            if floor > record.floor:
                await self._put(replace(record, floor=floor))

    async def begin_to_close(self, session: WalSession) -> SessionRecord:
        """Grant nothing to a session any more; returns its record, with the last floor."""
        async with self._turn:
            record = self._sessions[session.server_epoch]
            if record.state is not State.LIVE:
                return record
            return await self._put(replace(record, state=State.CLOSING))

    async def seal(self, session: WalSession, end: int, now_ms: int) -> None:
        """Note where a session ended."""
        async with self._turn:
            record = self._sessions[session.server_epoch]
            if record.state is State.CLOSING:
                await self._put(
                    replace(record, state=State.SEALED, end=end, ended_ms=self._not_before(now_ms))
                )

    async def give_up(self, session: WalSession, now_ms: int) -> None:
        """Note that a session was lost with its location, at whatever number it ended."""
        async with self._turn:
            record = self._sessions[session.server_epoch]
            if record.state is State.CLOSING:
                lost = replace(record, state=State.SEALED, end=record.floor + 1, lost=True)
                await self._put(replace(lost, ended_ms=self._not_before(now_ms)))

    def _not_before(self, now_ms: int) -> int:
        """The time at which a session ends: after all that have ended, wherever the clock is.

        By a clock that was behind for a while its seals would be old as soon as it is right again.
        """
        return max([now_ms, *(record.ended_ms for record in self._sessions.values())])

    async def release(self, session: WalSession) -> None:
        """Note that no bucket needs a session that has ended."""
        async with self._turn:
            record = self._sessions[session.server_epoch]
            assert record.has_ended, f"{record} has not ended"
            await self._put(replace(record, state=State.RELEASED))

    async def forget(self, session: WalSession) -> None:
        """Remove a session of which nothing is left."""
        async with self._turn:
            await self._ledger.commit([Delete(_path(session))])
            del self._sessions[session.server_epoch]

    async def _put(self, record: SessionRecord) -> SessionRecord:
        await self._ledger.commit([Put(_path(record.session), record.to_json())])
        return self._set(record)

    def _set(self, record: SessionRecord) -> SessionRecord:
        server_id, server_epoch, _ = record.session
        self._sessions[server_epoch] = record
        live = self._live.get(server_id)
        if record.state is State.LIVE:
            self._live[server_id] = record
        elif live is not None and live.session.server_epoch == server_epoch:
            del self._live[server_id]
        return record

    def __repr__(self) -> str:
        return f"SessionBook({self._durability}, {len(self._sessions)} sessions)"


def _path(session: WalSession) -> str:
    return f"{SESSIONS_PATH}/{session.server_epoch}"
