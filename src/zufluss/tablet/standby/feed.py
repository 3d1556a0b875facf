"""Reads the buckets that one server leads and this one follows, all of them in one fetch.

The fetch is a long poll as clients send it, with the id of this server, so the leader pays for one
request however many buckets it leads. What one answer brings is applied before the next is taken,
and has a limit, so the memory of a standby does not grow with the lag. A leader that does not
answer is asked ever more rarely.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import groupby
from typing import Final, Protocol

import structlog

from zufluss.errors import ErrorCode, ZuflussError, reason_of
from zufluss.model.table import TableBucket
from zufluss.periodic import pause
from zufluss.tablet.standby.standby import RETRY_SECONDS, DisagreementError, Standby
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import Buffer
from zufluss.wire.hot.fetch import BucketAnswer, read_fetch_response

log = structlog.get_logger(__name__)

WAIT_MS: Final = 500
"""How long the leader waits for new data."""
TIMEOUT_MS: Final = 10_000
"""A leader that has not answered for so long besides is asked over another connection."""
FETCH_BYTES: Final = 4 << 20
"""Bytes of an answer, unless one batch is larger."""
BUCKET_BYTES: Final = 1 << 20
"""Bytes of one bucket in an answer; so long the key-value worker is busy with it at most."""
BUCKETS_AT_ONCE: Final = 1_000
"""Buckets in one fetch; more are read in turn."""
PAUSE_SECONDS: Final = (0.1, 5.0)
"""First and longest pause when a leader does not answer."""


class Connection(Protocol):
    """A connection to the leader (`net.client.RpcConnection`)."""

    def send(
        self, api_key: int, body: Sequence[Buffer], *, timeout_ms: int
    ) -> Awaitable[memoryview]:
        """Send a request; the body of the answer."""


class Feed:
    """Reads from one leader."""

    def __init__(
        self,
        leader: int,
        server_id: int,
        connect: Callable[[int], Awaitable[Connection]],
        ready: Callable[[int], list[Standby]],
        broken: Callable[[Standby, Exception, bool], None],
        state_needed: Callable[[Standby], None],
    ) -> None:
        """`ready` are the standbys of a leader that read at present.

        `broken` is called with a standby that cannot go on, and whether what it has is wrong;
        `state_needed` with one whose state has to be brought up.
        """
        self.leader = leader
        self.wake = asyncio.Event()
        """Set when there may be something to read."""
        self._server_id = server_id
        self._connect = connect
        self._ready = ready
        self._broken = broken
        self._state_needed = state_needed
        self._loop = asyncio.get_running_loop()
        self._not_before: dict[TableBucket, float] = {}
        """Buckets that their leader refused lately."""
        self._turn = 0

    async def run(self) -> None:
        """Read for ever."""
        seconds = PAUSE_SECONDS[0]
        while True:
            self.wake.clear()
            some = self._some()
            if not some:
                await pause(RETRY_SECONDS, self.wake)
                continue
            try:
                await self._read(some)
                seconds = PAUSE_SECONDS[0]
            except (ZuflussError, OSError) as problem:
                log.warning("leader_not_read", leader=self.leader, reason=reason_of(problem))
                await pause(seconds)
                seconds = min(2 * seconds, PAUSE_SECONDS[1])
            except Exception:
                log.exception("leader_not_read", leader=self.leader)
                await pause(PAUSE_SECONDS[1])

    def _some(self) -> list[Standby]:
        """The standbys whose turn it is."""
        now = self._loop.time()
        self._not_before = {b: at for b, at in self._not_before.items() if at > now}
        ready = [each for each in self._ready(self.leader) if each.bucket not in self._not_before]
        if len(ready) <= BUCKETS_AT_ONCE:
            return ready
        at = self._turn = self._turn % len(ready)
        self._turn += BUCKETS_AT_ONCE
        return (ready + ready)[at : at + BUCKETS_AT_ONCE]

    async def _read(self, some: Sequence[Standby]) -> None:
        connection = await self._connect(self.leader)
        asked = self._loop.time()
        request = fetch_request(self._server_id, some)
        body = await connection.send(
            ApiKey.FETCH_LOG, [request.SerializeToString()], timeout_ms=TIMEOUT_MS + WAIT_MS
        )
        standbys = {each.bucket: each for each in some}
        for answer in read_fetch_response(body):
            standby = standbys.get(answer.bucket)
            if standby is not None and standby.reads:
                await self._take(standby, answer, asked)

    async def _take(self, standby: Standby, answer: BucketAnswer, asked: float) -> None:
        if answer.error_code == ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION:
            self._broken(standby, DisagreementError(answer.error_message), True)
        elif answer.error_code or answer.high_watermark is None:
            self._not_before[answer.bucket] = self._loop.time() + RETRY_SECONDS
        elif len(answer.remote):
            problem = ZuflussError(f"{answer.bucket}: the leader has this only in remote storage")
            self._broken(standby, problem, False)
        else:
            try:
                await standby.take(answer.records, answer.high_watermark, asked)
            except DisagreementError as problem:
                self._broken(standby, problem, True)
            except Exception as problem:
                self._broken(standby, problem, False)
            else:
                if standby.behind:
                    self._state_needed(standby)


def fetch_request(server_id: int, standbys: Iterable[Standby]) -> m.FetchLogRequest:
    """The fetch of a follower for several buckets."""
    request = m.FetchLogRequest(
        follower_server_id=server_id, max_bytes=FETCH_BYTES, min_bytes=1, max_wait_ms=WAIT_MS
    )
    ordered = sorted(standbys, key=lambda each: each.bucket.table_id)
    for table_id, of_table in groupby(ordered, key=lambda each: each.bucket.table_id):
        table = request.tables_req.add(table_id=table_id, projection_pushdown_enabled=False)
        for each in of_table:
            table.buckets_req.add(
                partition_id=each.bucket.partition_id,
                bucket_id=each.bucket.bucket_id,
                fetch_offset=each.fetch_offset,
                max_fetch_bytes=BUCKET_BYTES,
            )
    return request
