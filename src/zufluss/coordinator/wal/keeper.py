"""Sessions of the shared log: begun with registrations, sealed before anybody takes over.

The invariant on which everything rests: what is acknowledged of a bucket is what the segments of
its manifest have, and behind them the entries of one session, `BucketState.wal`, from its floor to
its end. That session is live and its leader's own, or it has ended, or it has released the bucket.

| step | what changes |
|---|---|
| a server registers | its former sessions are closed and sealed; a new one begins; its buckets get the next leader epoch, so that nothing its former process has under way counts |
| the location of a session takes no new files any more, and another one works | its server registers again, one server after the other, and the new session begins in another location |
| a server is lost | its session is closed and sealed; its buckets get other leaders (`takeover.py`) |
| a leader has copied the end of a bucket into its session | `wal` names that session, if its leader epoch is still the bucket's |
| a live session has released a bucket (`handover.py`) | another server leads it, and `released` says up to where the session has it; nobody serves it before a leader has copied that |

**A location that was lost** takes the ends of its sessions with it. They end where they are known to
begin, as if their first object were missing: buckets that need them are refused, with the first
offset that cannot be read, until they are dropped. Nobody guesses which of them had nothing there,
because offsets that were acknowledged would get other rows.

**Lookups of a former leader** end by themselves (`tablet/shared/lease.py`), some time after the last
heartbeat that was confirmed. A new leader is told how long that may still be: not at all if the
former process has ended, and a whole lease from the start of a coordinator that has not heard of
it.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from zufluss.cluster.image import BucketState, ClusterImage, ImageChange
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import (
    OPEN_END,
    ReleasedBucket,
    StandbyReport,
    Takeover,
    WalSession,
    WalSource,
)
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.wal.book import REMOTE, SessionBook, SessionRecord, State
from zufluss.errors import ConfigError
from zufluss.log.shared.api import Session
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.locations import Health, Locations
from zufluss.remote.marked import MarkedObjects
from zufluss.remote.storage import NoLocationError, RemoteStorage
from zufluss.tasks import end, forgive

log = structlog.get_logger(__name__)


class WalKeeper:
    """Begins and ends sessions, and knows which of them has the end of each bucket."""

    def __init__(
        self,
        conf: Configuration,
        book: SessionBook,
        storage: RemoteStorage,
        catalog: Catalog,
        clock: Callable[[], float],
        clock_ms: Callable[[], int],
        reach: Callable[[str], None],
    ) -> None:
        """`clock` never jumps; `clock_ms` is the time by which things expire.

        `reach` is told the name of each step, where tests kill.
        """
        self.book = book
        self.lease_ms = conf.get(options.ZUFLUSS_LOOKUP_LEASE)
        """How long servers that register now answer lookups after a heartbeat."""
        self.image: ClusterImage = catalog.image
        self.clock = clock
        self._storage = storage
        self._catalog = catalog
        self._clock_ms = clock_ms
        self._reach = reach
        self._start = clock()
        self._confirmed: dict[int, float] = {}
        """When sessions that have ended were confirmed last, by server epoch."""
        self._ending: dict[int, asyncio.Task[None]] = {}
        """Sessions that are being ended, by server epoch."""
        self._awaited: dict[TableBucket, asyncio.Future[None]] = {}
        """Buckets whose next continuation somebody waits for."""
        self.on_unclaimed: Callable[[WalSession, ReleasedBucket], None] = lambda session, each: None
        """Called with a bucket that a session has released and no other one has continued."""

    @property
    def lease_seconds(self) -> float:
        """The same in seconds."""
        return self.lease_ms / 1000

    def check_locations(self, locations: Locations) -> None:
        """Raise `ConfigError` unless sessions have a place."""
        if not locations.explicit:
            raise ConfigError(
                f"{options.ZUFLUSS_LOG_DURABILITY.key} = {REMOTE} keeps acknowledged rows in "
                f"remote storage, and no location is configured; set "
                f"{options.REMOTE_DATA_DIR.key} to an object store or a mounted directory"
            )

    # Sessions

    async def begin(self, server_id: int, server_epoch: int) -> WalSession:
        """Begin the session of a registration, once the former ones have been sealed."""
        await self.end(server_id)
        session = WalSession(server_id, server_epoch, self._location())
        await self.book.begin(session, self.lease_ms)
        return session

    async def end(self, server_id: int) -> None:
        """Find out where the sessions of a server ended; none of them can go on then.

        `RemoteStorageError` if a location does not answer: nobody can take over then.
        """
        await self.end_sessions([record.session for record in self.book.of(server_id)])

    async def end_sessions(self, sessions: Sequence[WalSession]) -> None:
        """Find out where sessions ended; others of the same servers, which began since, go on.

        All at once, because the location of one may not answer. Whoever needs the end of the same
        session meanwhile gets the same outcome: servers repeat a registration that takes long, and
        these would wait for each other, and then all begin sessions.
        """
        outcomes = await asyncio.gather(
            *(asyncio.shield(self._begin_to_end(x)) for x in sessions if self._goes_on(x)),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _goes_on(self, session: WalSession) -> bool:
        record = self.book.get(session.server_epoch)
        return record is not None and not record.has_ended

    def _begin_to_end(self, session: WalSession) -> asyncio.Task[None]:
        epoch = session.server_epoch
        ending = self._ending.get(epoch)
        if ending is None:
            ending = self._ending[epoch] = asyncio.create_task(self._end(session))
            ending.add_done_callback(forgive)
            ending.add_done_callback(lambda _: self._ending.pop(epoch))
        return ending

    async def stop(self) -> None:
        """Seal nothing any more; the next coordinator goes on."""
        for ending in tuple(self._ending.values()):
            await end(ending)

    async def _end(self, session: WalSession) -> None:
        self._reach("wal-close")
        record = await self.book.begin_to_close(session)
        if self.is_lost(session):
            log.error("wal_session_lost", **session._asdict(), floor=record.floor)
            await self.book.give_up(session, self._clock_ms())
            return
        epoch = self._catalog.epoch
        self._reach("wal-seal")
        number = await self.shared_log(session).seal(self.name(session), record.floor, epoch)
        self._reach("wal-sealed")
        await self.book.seal(session, number, self._clock_ms())

    def confirmed(self, server_epoch: int, at: float) -> None:
        """A session was confirmed last at this time; it may answer lookups a while longer."""
        self._confirmed[server_epoch] = at

    def process_ended(self, server_epoch: int) -> None:
        """The process of a session is gone: it answers no lookups."""
        self._confirmed[server_epoch] = -float("inf")

    def _lease_ms(self, source: WalSource | None) -> int:
        """So long the server of a session may still answer lookups."""
        if source is None:
            return 0
        server_epoch = source.session.server_epoch
        record = self.book.get(server_epoch)
        lease_ms = self.lease_ms if record is None else record.lease_ms or self.lease_ms
        confirmed = self._confirmed.get(server_epoch, self._start)
        return math.ceil(max(0.0, lease_ms - 1000 * (self.clock() - confirmed)))

    def is_live(self, server_id: int, server_epoch: int) -> bool:
        """Whether a server may go on with a session that began under a former coordinator."""
        record = self.book.live(server_id)
        return (
            record is not None
            and (record.session.server_epoch, record.lease_ms) == (server_epoch, self.lease_ms)
            and server_epoch not in self._ending
        )

    def is_lost(self, session: WalSession) -> bool:
        """Whether the location of a session was given up as lost."""
        return self._storage.locations.get(session.location_id).is_gone

    def name(self, session: WalSession) -> Session:
        """A session as the shared log knows it."""
        cluster_id = self._storage.cluster_id
        assert cluster_id is not None
        return Session(cluster_id, session.server_id, session.server_epoch)

    def shared_log(self, session: WalSession) -> ObjectLog:
        """The shared log that has a session."""
        return ObjectLog(MarkedObjects(self._storage, session.location_id), WalSettings())

    def _location(self) -> int:
        """The first location that takes new files, and is not known to be down."""
        taking = [x.location_id for x in self._storage.locations.live if x.takes_files]
        for location_id in [*(x for x in taking if x not in self._down), *taking]:
            return location_id
        raise NoLocationError(
            "the shared log",
            "",
            "no location takes new files; activate or add one, or give one a weight, and try again",
        )

    def is_displaced(self, server_id: int) -> bool:
        """Whether the session of a server is to go on in another location.

        Its own takes no new files any more, and another one works: while there is none, the session
        goes on, because its server would have none at all.
        """
        record = self.book.live(server_id)
        if record is None:
            return False
        if self._storage.locations.get(record.session.location_id).takes_files:
            return False
        return self._location() not in self._down

    @property
    def _down(self) -> set[int]:
        """The locations that are known to be down."""
        return {r.location_id for r in self._storage.reports() if r.health is Health.DOWN}

    def is_settled(self, server_id: int) -> bool:
        """Whether the session of a server has the ends of all its buckets."""
        live = self.book.live(server_id)
        epoch = None if live is None else live.session.server_epoch
        return all(state.wal == epoch for _, _, state in self.led(server_id))

    # Buckets

    async def lead_again(self, server_id: int) -> list[ImageChange]:
        """Begin the next leader epoch of all buckets of a server that registers; exclusive."""

        def next_epochs() -> Mapping[TableBucket, BucketState]:
            return {b: led_by(s, server_id) for _, b, s in self.led(server_id)}

        _, changes = await self._catalog.states.change(next_epochs)
        return changes

    def led(self, server_id: int) -> list[tuple[PhysicalTablePath, TableBucket, BucketState]]:
        """All buckets that a server leads."""
        if not self.image.leaders[server_id]:
            return []
        return [each for each in self.image.buckets() if each[2].leader == server_id]

    def assignments(self, server_id: int) -> list[ReplicaAssignment]:
        """The buckets of a server whose session has begun, as orders to lead or to follow."""
        orders = []
        for path, bucket, state in self.image.buckets():
            if state.leader == server_id:
                orders.append(self.order(path, bucket, state))
            elif server_id in state.replicas:
                orders.append(ReplicaAssignment(bucket, path, state))
        return orders

    def order(
        self, path: PhysicalTablePath, bucket: TableBucket, state: BucketState
    ) -> ReplicaAssignment:
        """The order to lead a bucket, with where its end is."""
        source = self._source(state)
        silent = state.released is not None  # who released it answers no lookups
        lease_ms = 0 if silent else self._lease_ms(source)
        return ReplicaAssignment(bucket, path, state, source, lease_ms)

    def preparation(
        self, path: PhysicalTablePath, bucket: TableBucket, state: BucketState
    ) -> ReplicaAssignment:
        """The order to make ready to lead a bucket, with the live session of its leader."""
        assert state.wal is not None
        record = self.book.check_live(self.book.session(state.wal))
        source = WalSource(record.session, record.floor, OPEN_END)
        return ReplicaAssignment(bucket, path, state, source)

    def _source(self, state: BucketState) -> WalSource | None:
        """The session that has the end of a bucket; None if it is its leader's own."""
        assert state.wal is not None
        record = self.book.get(state.wal)
        if state.released is not None and record is not None and not record.has_ended:
            return WalSource(record.session, record.floor, state.released)
        live = self.book.live(state.leader)
        if live is not None and live.session.server_epoch == state.wal:
            return None
        return self.book.source(state.wal)

    async def commit_takeovers(
        self, session: WalSession, takeovers: Sequence[Takeover]
    ) -> set[TableBucket]:
        """Note that a live session has the end of buckets; returns which of them."""
        epochs = {each.bucket: each.leader_epoch for each in takeovers}
        own = (session.server_id, session.server_epoch)

        def taken_over() -> Mapping[TableBucket, BucketState]:
            self.book.check_live(session)
            states = {bucket: self.image.bucket_state(bucket) for bucket in epochs}
            return {
                bucket: replace(
                    state, wal=own[1], released=None, bucket_epoch=state.bucket_epoch + 1
                )
                for bucket, state in states.items()
                if state is not None
                and (state.leader, state.leader_epoch) == (own[0], epochs[bucket])
            }

        self._reach("wal-takeover")
        done, _ = await self._catalog.states.change(taken_over)
        self._reach("wal-taken-over")
        for bucket in done:
            awaited = self._awaited.pop(bucket, None)
            if awaited is not None and not awaited.done():
                awaited.set_result(None)
        return set(done)

    def continued(self, bucket: TableBucket) -> asyncio.Future[None]:
        """A future that ends when the next session continues a bucket; one caller at a time."""
        awaited = self._awaited[bucket] = asyncio.get_running_loop().create_future()
        return awaited

    async def report_released(
        self, session: WalSession, released: Sequence[ReleasedBucket]
    ) -> set[TableBucket]:
        """Buckets that a live session has released; returns those that do not need it any more.

        One that nobody leads yet, or whose leader does not know it, because the coordinator that
        asked for it was replaced, is gone on with (`on_unclaimed`).
        """
        self.book.check_live(session)
        adopted: set[TableBucket] = set()
        for each in released:
            state = self.image.bucket_state(each.bucket)
            if state is None or state.wal != session.server_epoch:
                adopted.add(each.bucket)
            elif state.released is None and state.leader_epoch > each.leader_epoch:
                adopted.add(each.bucket)  # it came back, and this session has continued it
            else:
                self.on_unclaimed(session, each)
        return adopted

    async def report_standbys(self, session: WalSession, reports: Sequence[StandbyReport]) -> None:
        """Note which standbys of a server have caught up; told to others if that has changed."""
        server_id, of_bucket = session.server_id, {each.bucket: each for each in reports}

        def in_sync() -> Mapping[TableBucket, BucketState]:
            self.book.check_live(session)
            states: dict[TableBucket, BucketState] = {}
            for bucket, report in of_bucket.items():
                state = self.image.bucket_state(bucket)
                if state is None or state.leader_epoch != report.leader_epoch:
                    continue
                isr = _in_sync(state, server_id, report.caught_up)
                if isr != state.isr:
                    states[bucket] = replace(state, isr=isr, bucket_epoch=state.bucket_epoch + 1)
            return states

        _, changes = await self._catalog.states.change(in_sync)
        if changes:
            await self._catalog.tell(changes)

    async def commit_wal_floor(self, session: WalSession, floor: int) -> None:
        """Note that objects of a live session below a number are not needed any more."""
        await self.book.raise_floor(session, floor)

    async def release_unused(self) -> list[SessionRecord]:
        """Note which sessions have no bucket any more; returns all of those."""
        sealed = [record for record in self.book if record.state is State.SEALED]
        if sealed:
            # In turn: a bucket that is created in a session, or taken over into one, is in the
            # image before it is released.
            def release() -> Awaitable[None]:
                return self._release_unused(sealed)

            between = self._catalog.states.between_changes
            await self._catalog.exclusive(lambda: between(release))
        return [record for record in self.book if record.state is State.RELEASED]

    async def _release_unused(self, sealed: Sequence[SessionRecord]) -> None:
        needed = {state.wal for _, _, state in self.image.buckets() if state.wal is not None}
        for record in sealed:
            if record.session.server_epoch not in needed:
                await self.book.release(record.session)

    async def forget(self, session: WalSession) -> None:
        """Remove a session of which nothing is left."""
        await self.book.forget(session)
        self._confirmed.pop(session.server_epoch, None)


def is_same_lead(before: BucketState, state: BucketState) -> bool:
    """Whether the same server leads in the same epoch; standbys come and go meanwhile."""
    return (before.leader, before.leader_epoch) == (state.leader, state.leader_epoch)


def led_by(state: BucketState, server_id: int) -> BucketState:
    """The state of a bucket that a server leads from now on, in a new epoch.

    Its other standbys follow the new leader. A former leader that is lost is one of them if the
    bucket has any: until another server takes that place (`standbys.py`), it may come back.
    """
    others = [server for server in state.replicas if server != server_id]
    in_sync = [server for server in state.isr if server not in (server_id, state.leader)]
    return replace(
        state,
        replicas=(server_id, *others)[: len(state.replicas)],
        leader=server_id,
        leader_epoch=state.leader_epoch + 1,
        isr=(server_id, *in_sync),
        bucket_epoch=state.bucket_epoch + 1,
    )


def _in_sync(state: BucketState, server_id: int, caught_up: bool) -> tuple[int, ...]:
    """The in-sync replicas of a bucket after what a standby told, in the order of the replicas."""
    if server_id not in state.replicas or server_id == state.leader:
        return state.isr
    isr = {*state.isr, server_id} if caught_up else {*state.isr} - {server_id}
    return tuple(server for server in state.replicas if server in isr)
