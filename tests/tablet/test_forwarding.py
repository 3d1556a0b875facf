"""Lookups for other leaders: who is asked, for whom, once, and what a silent leader costs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.end_to_end.kv import lookup_request, prefix_request
from tests.tablet.keyed import Keyed, many, serving
from tests.tablet.support import TABLE, Connection
from tests.waiting import eventually_async
from zufluss.cluster.image import BucketState, ClusterNode, NodesPut, TablePut
from zufluss.errors import ErrorCode, NetworkError, NotLeaderError
from zufluss.net.services import RequestContext
from zufluss.tablet import forwarding
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode

HERE, ELSEWHERE = 0, 1
"""A bucket that the server leads, and one that tablet server 2 leads."""
NOT_LEADER = int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
NOT_AVAILABLE = int(ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION)


class Leader:
    """Tablet server 2, as other servers see it: it has a row for every key."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.failure: Exception | None = None
        self.silent = False

    async def connect(self, node: ClusterNode) -> Leader:
        assert node.node_id == 2
        return self

    def send(
        self, api_key: int, body: Sequence[Any], *, timeout_ms: int
    ) -> asyncio.Future[memoryview]:
        lookup = api_key == ApiKey.LOOKUP
        request = decode(m.LookupRequest if lookup else m.PrefixLookupRequest, b"".join(body))
        self.asked.append(request)
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(self.failure)
        elif not self.silent:
            response: Any = m.LookupResponse() if lookup else m.PrefixLookupResponse()
            for bucket in request.buckets_req:
                entry = response.buckets_resp.add(bucket_id=bucket.bucket_id)
                for key in bucket.keys:
                    values = entry.values if lookup else entry.value_lists
                    values.add(values=key if lookup else [key, key])
            future.set_result(memoryview(response.SerializeToString()))
        return future


class Server(Keyed):
    """Tablet server 1, which leads one of two buckets."""

    def __init__(self, root: Path) -> None:
        self.leader = Leader()
        super().__init__(root, buckets=2, connect=self.leader.connect)
        entry = self.image.table_by_id(TABLE)
        assert entry is not None
        states = (BucketState((1,), 1), BucketState((2,), 2))
        nodes = (ClusterNode(1, ()), ClusterNode(2, ()))
        self.image.apply(
            [TablePut(dataclasses.replace(entry, buckets=states)), NodesPut(None, nodes)]
        )

    async def look_up(self, *buckets: int, software: str = "fluss-rust") -> dict[int, Any]:
        """Look one key up in each bucket; its value by bucket, or the code of the error."""
        request = m.LookupRequest(table_id=TABLE)
        for bucket in buckets:
            request.buckets_req.append(lookup_request(TABLE, [self.key], bucket).buckets_req[0])
        connection = Connection()
        connection.software = software
        answer = await connection.answer(connection.send(self.server.lookup.handle, request))
        entries = decode(m.LookupResponse, answer).buckets_resp
        return {e.bucket_id: e.error_code or e.values[0].values for e in entries}

    @property
    def key(self) -> bytes:
        return self.codec.key((1,))


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(Server(tmp_path)) as tablet:
        await tablet.put(*many(0, 3))
        yield tablet


async def test_a_lookup_of_pyfluss_is_answered_by_the_leader(server: Server) -> None:
    assert await server.look_up(ELSEWHERE) == {ELSEWHERE: server.key}
    (asked,) = server.leader.asked
    assert asked == lookup_request(TABLE, [server.key], ELSEWHERE)
    assert server.server.forwarding.answered == 1


async def test_a_request_for_several_buckets_is_cut_and_its_answers_are_joined(
    server: Server,
) -> None:
    answer = await server.look_up(HERE, ELSEWHERE)
    assert answer[ELSEWHERE] == server.key
    assert server.codec.value(answer[HERE]) == (1, "text 1")
    assert [[b.bucket_id for b in each.buckets_req] for each in server.leader.asked] == [[1]]


async def test_a_prefix_lookup_of_pyfluss_is_answered_by_the_leader(server: Server) -> None:
    connection = Connection()
    connection.software = "fluss-rust"
    context = RequestContext(None, "FLUSS", 0, "test", connection)
    request = prefix_request(TABLE, [server.key], ELSEWHERE)
    response = await server.server.lookup.prefix_lookup(request, context)
    (entry,) = decode(m.PrefixLookupResponse, b"".join(response.buffers)).buckets_resp
    assert list(entry.value_lists[0].values) == [server.key] * 2


@pytest.mark.parametrize("software", ["", "zufluss", "fluss-java", "zufluss:app"])
async def test_a_client_that_looks_for_the_leader_itself_is_told_to(
    server: Server, software: str
) -> None:
    """Nor is a lookup passed on that another server passed on: servers are such clients."""
    assert await server.look_up(ELSEWHERE, software=software) == {ELSEWHERE: NOT_LEADER}
    assert not server.leader.asked


async def test_what_the_leader_refuses_is_refused(server: Server) -> None:
    """Its lease is over, for example: then nobody else may answer."""
    server.leader.failure = NotLeaderError("no lease")
    assert await server.look_up(ELSEWHERE) == {ELSEWHERE: NOT_LEADER}
    assert server.server.forwarding.unanswered == 1


async def test_a_leader_that_is_away_or_silent_is_not_available(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "TIMEOUT_MS", 20)
    server.leader.failure = NetworkError("refused")
    assert await server.look_up(ELSEWHERE) == {ELSEWHERE: NOT_AVAILABLE}
    server.leader.failure, server.leader.silent = None, True
    assert await server.look_up(ELSEWHERE) == {ELSEWHERE: NOT_AVAILABLE}
    assert server.server.forwarding.unanswered == 2


async def test_a_leader_that_is_not_registered_is_not_asked(server: Server) -> None:
    server.image.apply([NodesPut(None, (ClusterNode(1, ()),))])
    assert await server.look_up(ELSEWHERE) == {ELSEWHERE: NOT_LEADER}
    assert not server.leader.asked


async def test_lookups_that_wait_for_a_silent_leader_are_few_and_hold_up_nobody_else(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "REQUESTS_MAX", 20)
    server.leader.silent = True
    waiting = [asyncio.create_task(server.look_up(ELSEWHERE)) for _ in range(20)]

    async def is_full() -> bool:
        return len(server.leader.asked) == forwarding.TO_ONE_LEADER_MAX

    await eventually_async(is_full, "the leader is asked")
    assert await server.look_up(ELSEWHERE) == {ELSEWHERE: NOT_AVAILABLE}, "too many wait"
    assert server.codec.value((await server.look_up(HERE))[HERE]) == (1, "text 1")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
