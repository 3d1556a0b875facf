"""The shared log of a tablet server: its live session, and the sessions it takes buckets over from.

A session begins with each registration. It ends when somebody else ends it (*fenced*), or when the
server registers again. In between there is no session: nothing is appended, no bucket is opened.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from zufluss.cluster.remote import RemoteGateway
from zufluss.cluster.wal import WalSession, WalSource
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError, NotLeaderError, StorageBackpressureError, reason_of
from zufluss.log.shared.api import OnDurable, SessionCounts, SessionFencedError, Waiting
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.model.table import TableBucket
from zufluss.remote.marked import MarkedObjects
from zufluss.remote.storage import RemoteStorage
from zufluss.tablet.shared.lease import SILENT_SECONDS_MAX, LookupLease
from zufluss.tablet.shared.session import ServerSession
from zufluss.tablet.shared.sources import Sources, Tail

log = structlog.get_logger(__name__)


class SharedHost:
    """Begins and ends the sessions of this server."""

    def __init__(
        self,
        conf: Configuration,
        storage: RemoteStorage,
        gateway: RemoteGateway,
        on_durable: OnDurable,
        on_fenced: Callable[[NotLeaderError], None],
        reach: Callable[[str], None] = lambda step: None,
    ) -> None:
        """`on_fenced` is called when the live session has ended without `begin` or `close`.

        `reach` is told the name of each step, where tests kill. Raises `ConfigError` if this server
        would copy no segments.
        """
        if not conf.get(options.REMOTE_LOG_TASK_INTERVAL_DURATION):
            raise ConfigError(
                f"{options.REMOTE_LOG_TASK_INTERVAL_DURATION.key} = 0 copies no segments to remote "
                f"storage, so with {options.ZUFLUSS_LOG_DURABILITY.key} = remote the shared log "
                "would grow for ever; set it to a time, such as 1min"
            )
        self.reach = reach
        self._storage = storage
        self._gateway = gateway
        self._on_durable = on_durable
        self._on_fenced = on_fenced
        self._settings = WalSettings(interval_seconds=conf.get(options.ZUFLUSS_WAL_INTERVAL) / 1000)
        self._close_seconds = conf.get(options.ZUFLUSS_SHUTDOWN_TIMEOUT) / 1000
        self.lease = LookupLease(conf.get(options.ZUFLUSS_LOOKUP_LEASE) / 1000)
        """Until when this server may answer for the present state of its buckets."""
        self.live: ServerSession | None = None
        """The session of this server; None while it has none."""
        self._closing = False
        """The live session takes nothing any more; what it has is still made durable."""
        self.fenced = 0
        """Sessions of this process that others ended."""
        self._ended = SessionCounts()
        self._sources: Sources | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    @property
    def session(self) -> ServerSession:
        """The live session; `NotLeaderError` while there is none."""
        if self.live is None or self._closing:
            raise NotLeaderError(
                "this tablet server has no session of the shared log at present, so it leads "
                "nothing; refresh the metadata and try again"
            )
        return self.live

    @property
    def counts(self) -> SessionCounts:
        """What all sessions of this process wrote."""
        total = replace(self._ended)
        if self.live is not None:
            total.add(self.live.writer.counts)
        return total

    @property
    def waiting(self) -> Waiting:
        """What is not durable yet."""
        return Waiting(0, 0.0, "") if self.live is None else self.live.writer.waiting

    def admit(self) -> None:
        """Raise if nothing may be appended at present."""
        if self.session.writer.full:
            raise StorageBackpressureError(
                "too many bytes wait for the shared log, because its location is slow or does not "
                "answer; try again after a pause"
            )

    async def begin(self, identity: WalSession) -> ServerSession:
        """Begin the session of a new registration, after a look whether the location can have it.

        No bucket of the former session is open.
        `UnsafeLocationError` if the location does not create an object only once.
        """
        await self.end()
        shared = self._shared_log(identity.location_id)
        await shared.probe()
        self.live = ServerSession(
            identity, self._cluster_id, shared, self._gateway, self._durable, self._end_fenced
        )
        self.lease.begin()
        log.info("wal_session_begun", **identity._asdict())
        return self.live

    async def end(self) -> None:
        """Acknowledge nothing any more: the session was ended, or another one begins."""
        self.lease.end()
        session = self._taken()
        if session is not None:
            await session.stop()

    async def close(self) -> None:
        """Make everything durable and say that the session ended, because the server stops.

        What becomes durable meanwhile is acknowledged. A location that does not answer is not
        waited for longer than the server has to stop.
        """
        session, self._closing = self.live, True
        try:
            if session is not None:
                async with asyncio.timeout(self._close_seconds):
                    await session.close()
        except (SessionFencedError, TimeoutError) as e:
            log.warning("wal_session_not_closed", reason=reason_of(e))
        finally:
            await self.end()

    def go_on(self) -> None:
        """Do what a lack of memory has interrupted; called each second."""
        if self.live is not None:
            self.live.writer.go_on()

    async def tail(self, source: WalSource, bucket: TableBucket, start: int) -> Tail:
        """What a session has of a bucket from an offset on; `LostOffsetsError` if some is lost."""
        if self._sources is None:
            self._sources = Sources(self._cluster_id, self._shared_log)
        return await self._sources.tail(source, bucket, start)

    def drop_unused(self) -> None:
        """Drop what was read of sessions that no bucket asked for lately."""
        if self._sources is not None:
            self._sources.drop_unused()

    def _durable(self, ends: list[tuple[TableBucket, int]]) -> None:
        """Acknowledge entries, unless the seal that may have ended the session can be gone."""
        if self.lease.silent_seconds > SILENT_SECONDS_MAX:
            days = SILENT_SECONDS_MAX / (24 * 3600)
            self._end_fenced(
                SessionFencedError(
                    f"the coordinator has not confirmed this server for {days:g} days"
                )
            )
        elif self.live is not None:
            self._on_durable(ends)

    def _end_fenced(self, error: SessionFencedError) -> None:
        session = self._taken()
        if session is None:
            return
        self.fenced += 1
        self.lease.end()
        stopping = asyncio.create_task(session.stop())
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        if not self._closing:
            self._on_fenced(error)

    def _taken(self) -> ServerSession | None:
        """Take the live session, which ends here."""
        session, self.live = self.live, None
        if session is not None:
            self._ended.add(session.writer.counts)
        return session

    def _shared_log(self, location_id: int) -> ObjectLog:
        return ObjectLog(MarkedObjects(self._storage, location_id), self._settings)

    @property
    def _cluster_id(self) -> str:
        assert self._storage.cluster_id is not None, "the server has not joined a cluster"
        return self._storage.cluster_id
