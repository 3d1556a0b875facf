"""Lookups that reach a server which does not lead their buckets are passed on to the leader.

A client whose lookup is refused with NOT_LEADER_OR_FOLLOWER is expected to ask who leads the bucket
by now. Those that are built on fluss-rust, such as pyfluss 1.0.0, do not: they ask the same server
again, without a pause and without end. For these clients, known by the name that they give in
API_VERSIONS, the server asks the leader itself. All others get the refusal, and learn the leader.

A lookup is passed on once at most: between servers the connection has another name, so whoever is
asked and does not lead either refuses. Whether an answer is the present state decides the leader,
by its own lease (`shared/lease.py`); nothing is kept here.

| limit | what happens at it |
|---|---|
| `REQUESTS_MAX` requests, or `BYTES_MAX` bytes of them, under way | LEADER_NOT_AVAILABLE |
| `TO_ONE_LEADER_MAX` of them at one leader | the next one waits |
| no answer in `TIMEOUT_MS` | LEADER_NOT_AVAILABLE; less than clients wait for an answer |

A leader that is slow or away delays the lookups of its own buckets only. An answer is sent when the
client has read its earlier ones; the leader bounds its size.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from zufluss.cluster.image import ClusterNode
from zufluss.errors import LeaderNotAvailableError, NetworkError, RequestTimeoutError, ZuflussError
from zufluss.net.services import Reader
from zufluss.pacing import paced
from zufluss.tablet.answers import Buffer
from zufluss.tablet.buckets import Buckets
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.tables import bucket_in_table

CLIENTS: Final = frozenset({"fluss-rust"})
"""Names of clients that never look for another leader of a lookup."""
REQUESTS_MAX: Final = 1024
"""Requests that are passed on at a time."""
BYTES_MAX: Final = 16 << 20
"""Their bytes."""
TO_ONE_LEADER_MAX: Final = 16
"""Requests that one leader is asked at a time, each with its answer in memory."""
TIMEOUT_MS: Final = 10_000
"""How long the leader may take, the connection to it included."""
PAUSE_SECONDS: Final = 0.1
"""Delay of the refusal when the leader does not answer, as the clients try again at once."""

Lookup = TypeVar("Lookup", m.LookupRequest, m.PrefixLookupRequest)


class Peer(Protocol):
    """A connection to another tablet server."""

    def send(
        self, api_key: int, body: Sequence[Buffer], *, timeout_ms: int
    ) -> asyncio.Future[memoryview]:
        """Send a request; the future gives the body of the answer."""


Connect: TypeAlias = Callable[[ClusterNode], Awaitable[Peer]]
"""Returns an open connection to a tablet server; many callers share it."""


class Forwarding:
    """Asks the leaders of other buckets. Belongs to the event loop."""

    def __init__(self, buckets: Buckets, connect: Connect | None) -> None:
        """`connect` is None in a cluster of one process."""
        self._buckets = buckets
        self._connect = connect
        self._requests = self._bytes = 0
        self._turns: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(TO_ONE_LEADER_MAX)
        )
        self.answered = 0
        """Requests that a leader answered."""
        self.unanswered = 0
        """Requests that no leader answered, or that were too many."""

    async def split(
        self, request: Lookup, reader: Reader
    ) -> tuple[Lookup, list[tuple[ClusterNode, Lookup]]]:
        """Returns the part of a request that is for this server, and parts for other leaders."""
        if self._connect is None or reader.software not in CLIENTS:
            return request, []
        here, parts = _without_buckets(request), dict[int, tuple[ClusterNode, Lookup]]()
        entries: Any = request.buckets_req
        async for entry in paced(entries):
            node = self._leader_elsewhere(request.table_id, entry)
            part = here
            if node is not None:
                _, part = parts.setdefault(node.node_id, (node, _without_buckets(request)))
            part.buckets_req.append(entry)
        return (here, list(parts.values())) if parts else (request, [])

    def _leader_elsewhere(self, table_id: int, entry: Any) -> ClusterNode | None:
        """The server that leads a bucket, if it is another one and registered."""
        bucket = bucket_in_table(table_id, entry)
        if not self._buckets.is_elsewhere(bucket):
            return None
        leader = self._buckets.image.leader(bucket)
        return None if leader is None else self._buckets.image.tablets.get(leader[0])

    async def answer(
        self, key: ApiKey, node: ClusterNode, request: Lookup, reader: Reader
    ) -> Buffer:
        """Ask a leader; returns its answer, or one that refuses each bucket."""
        body = request.SerializeToString()
        await reader.has_read()
        try:
            if self._requests >= REQUESTS_MAX or self._bytes + len(body) > BYTES_MAX:
                raise LeaderNotAvailableError(
                    f"{self._requests} lookups of {self._bytes} bytes wait for other tablet "
                    f"servers, at most {REQUESTS_MAX} of {BYTES_MAX} bytes may; try again"
                )
            answer = await self._ask(key, node, body)
        except ZuflussError as refusal:
            self.unanswered += 1
            return _refused(key, request, refusal)
        self.answered += 1
        return answer

    async def _ask(self, key: ApiKey, node: ClusterNode, body: bytes) -> Buffer:
        """Ask a leader within the limits; raises `LeaderNotAvailableError` without an answer."""
        assert self._connect is not None
        self._requests += 1
        self._bytes += len(body)
        try:
            async with asyncio.timeout(TIMEOUT_MS / 1000), self._turns[node.node_id]:
                peer = await self._connect(node)
                return await peer.send(key, [body], timeout_ms=TIMEOUT_MS)
        except (NetworkError, RequestTimeoutError, TimeoutError) as e:
            await asyncio.sleep(PAUSE_SECONDS)
            raise LeaderNotAvailableError(
                f"tablet server {node.node_id} leads the bucket and did not answer: "
                f"{e or f'nothing within {TIMEOUT_MS} ms'}; try again"
            ) from e
        finally:
            self._requests -= 1
            self._bytes -= len(body)


def _without_buckets(request: Lookup) -> Lookup:
    """A request with everything but the buckets of another one."""
    copy = type(request)()
    for field, value in request.ListFields():
        if field.name != "buckets_req":
            setattr(copy, field.name, value)
    return copy


def _refused(
    key: ApiKey, request: m.LookupRequest | m.PrefixLookupRequest, refusal: ZuflussError
) -> bytes:
    """The answer that refuses every bucket of a request."""
    response: Any = APIS[key].response()
    entries: Any = request.buckets_req
    for entry in entries:
        refused = response.buckets_resp.add(
            bucket_id=entry.bucket_id, error_code=refusal.code, error_message=refusal.message
        )
        if entry.HasField("partition_id"):
            refused.partition_id = entry.partition_id
    encoded: bytes = response.SerializeToString()
    return encoded
