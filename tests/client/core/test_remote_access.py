"""Tokens of a connection: the prefix that each one opens, and their renewal in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.client.read.test_log_scan import fill, ids
from tests.client.remotes import RemoteBucket
from tests.remote.iam import Iam
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.remote_access import RemoteAccess
from zufluss.errors import CorruptMessageError, ErrorCode, error
from zufluss.model.table import TableBucket, TablePath
from zufluss.remote.objects import LocationUnavailableError, ObjectForbiddenError, Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

TABLE = TablePath("fluss", "t")
FOREVER_MS = 10**16


@pytest.fixture(scope="module")
def iam() -> Iterator[Iam]:
    with S3Server() as server:
        for bucket in ("logs", "more"):
            server.bucket(bucket)
        yield Iam(server)


def token(prefix: str, keys: dict[str, str], expires_ms: int | None = None) -> m.PbFileSystemToken:
    fields = {"access_key_id": keys["s3.access-key"], "access_key_secret": keys["s3.secret-key"]}
    return m.PbFileSystemToken(
        prefix=prefix,
        schema="s3",
        token=json.dumps(fields).encode(),
        expiration_time=expires_ms,
        addition_info=[
            m.PbKeyValue(key="fs.s3a.endpoint", value=keys["s3.endpoint"]),
            m.PbKeyValue(key="fs.s3a.endpoint.region", value=keys["s3.region"]),
            m.PbKeyValue(key="fs.s3a.path.style.access", value="true"),
        ],
        path_scoped=False,
    )


def answer(cluster: FakeCluster, *tokens: m.PbFileSystemToken) -> None:
    """Have the cluster give these tokens from now on."""
    cluster.token = m.GetFileSystemSecurityTokenResponse(
        schema="s3", token=tokens[0].token, tokens=tokens
    )


async def read(connection: AsyncConnection, uri: str, size: int = 5) -> bytes:
    return await connection.remote.read(TABLE, parse_location(uri, "test"), 0, size)


async def test_the_longest_prefix_counts(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam
) -> None:
    good = iam.user("longest")
    bad = {**good, "s3.access-key": "AKIANOBODY0000000000"}
    await Objects(parse_location("s3://logs/x", "test"), good).put("y/file", b"hello")
    with iam.enforced():
        answer(cluster, token("s3://logs", bad), token("s3://logs/x/y", good), token("s3://", bad))
        assert await read(connection, "s3://logs/x/y/file") == b"hello"
        with pytest.raises(ObjectForbiddenError):
            await read(connection, "s3://logs/x/yy/file")


async def test_tables_in_two_buckets_keep_their_own_tokens(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam
) -> None:
    keys = {name: iam.user(f"two-{name}") for name in ("logs", "more")}
    remotes = {}
    for bucket in keys:
        info = cluster.create(bucket, "id BIGINT, name STRING")
        for start in range(0, 30, 10):
            fill(cluster, info, list(range(start, start + 10)))
        location = Objects(parse_location(f"s3://{bucket}/two", "test"), keys[bucket])
        remotes[info.table_id] = RemoteBucket(location)
        await remotes[info.table_id].upload(cluster.log(TableBucket(info.table_id, None, 0)))

    async def tokens(request: m.GetFileSystemSecurityTokenRequest) -> Any:
        [path] = request.tables
        found = token(f"s3://{path.table_name}", keys[path.table_name])
        return m.GetFileSystemSecurityTokenResponse(schema="s3", token=b"", tokens=[found])

    cluster.handlers[ApiKey.GET_FILESYSTEM_SECURITY_TOKEN] = tokens
    cluster.remote = lambda bucket, offset: remotes[bucket.table_id].info(offset)
    with iam.enforced():
        for _ in range(2):
            for name in keys:
                table = await connection.table(name)
                assert ids(await table.scan().to_arrow()) == list(range(30))
    assert cluster.received[ApiKey.GET_FILESYSTEM_SECURITY_TOKEN] == 2


async def test_a_token_that_ends_while_a_file_is_read_is_renewed_and_reading_goes_on(
    cluster: FakeCluster, iam: Iam
) -> None:
    first = iam.user("ending")
    second = iam.keys("ending")
    info = cluster.create("t", "id BIGINT, name STRING")
    for start in range(0, 1000, 10):
        fill(cluster, info, list(range(start, start + 10)))
    remote = RemoteBucket(Objects(parse_location("s3://logs/ending", "test"), first))
    await remote.upload(cluster.log(TableBucket(info.table_id, None, 0)), 100)
    cluster.remote = lambda bucket, offset: remote.info(offset)
    answer(cluster, token("s3://logs", first))
    small = {**FAST, "client.scanner.log.fetch.max-bytes": "4kb"}
    with iam.enforced():
        async with await connect_async(cluster.bootstrap, **small) as connection:
            table = await connection.table("t")
            async with await table.scan().open() as scanner:
                seen = ids(await scanner.next_batch())
                iam.revoke("ending", first)
                answer(cluster, token("s3://logs", second))
                while (batch := await scanner.next_batch()) is not None:
                    seen += ids(batch)
    assert seen == list(range(1000))
    assert len(cluster.token_requests) == 2
    assert remote.asked == [0]  # it went on where it was


async def test_a_file_that_stays_forbidden_fails_the_scan_after_a_second_try(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam
) -> None:
    keys = iam.user("forbidden")
    info = cluster.create("t", "id BIGINT, name STRING")
    fill(cluster, info, [1, 2, 3])
    remote = RemoteBucket(Objects(parse_location("s3://logs/forbidden", "test"), keys))
    await remote.upload(cluster.log(TableBucket(info.table_id, None, 0)))
    cluster.remote = lambda bucket, offset: remote.info(offset)
    answer(cluster, token("s3://logs", {**keys, "s3.access-key": "AKIANOBODY0000000000"}))
    with iam.enforced():
        table = await connection.table("t")
        with pytest.raises(ObjectForbiddenError, match=remote.segments[0].segment_id):
            await table.scan().to_arrow()
    assert remote.asked == [0, 0]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = time.time()

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


@pytest.fixture
def clock(connection: AsyncConnection) -> Clock:
    """The clock of the tokens of `connection`."""
    clock = Clock()
    connection.remote = RemoteAccess(
        connection.call_any,
        connection.call_coordinator,
        timeout_ms=connection.options.request_timeout_ms,
        clock=clock.monotonic,
        clock_ms=clock.wall_ms,
    )
    return clock


async def test_a_token_is_renewed_when_four_fifths_of_its_life_are_over(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam, clock: Clock
) -> None:
    keys = iam.user("renewed")
    await Objects(parse_location("s3://logs", "test"), keys).put("renewed", b"hello")
    answer(cluster, token("s3://logs", keys, int((clock.now + 1000) * 1000)))
    for passed, asked in ((0, 1), (790, 1), (20, 2)):
        clock.now += passed
        answer(cluster, token("s3://logs", keys, int((clock.now + 1000) * 1000)))
        assert await read(connection, "s3://logs/renewed") == b"hello"
        assert len(cluster.token_requests) == asked


async def test_a_good_token_is_used_while_the_cluster_gives_no_new_one(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam, clock: Clock
) -> None:
    keys = iam.user("kept")
    await Objects(parse_location("s3://logs", "test"), keys).put("kept", b"hello")
    answer(cluster, token("s3://logs", keys, int((clock.now + 1000) * 1000)))
    assert await read(connection, "s3://logs/kept") == b"hello"

    async def refuse(request: Any) -> Any:
        return error(ErrorCode.SECURITY_TOKEN_EXCEPTION, "the token service is away")

    cluster.handlers[ApiKey.GET_FILESYSTEM_SECURITY_TOKEN] = refuse
    clock.now += 900
    assert await read(connection, "s3://logs/kept") == b"hello"
    clock.now += 200
    with pytest.raises(LocationUnavailableError, match="the token service is away"):
        await read(connection, "s3://logs/kept")


async def test_a_token_that_is_no_json_is_refused(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam
) -> None:
    broken = m.PbFileSystemToken(
        prefix="s3://logs", schema="s3", token=b"not json", path_scoped=False
    )
    answer(cluster, broken)
    with pytest.raises(CorruptMessageError, match="s3://logs"):
        await read(connection, "s3://logs/file")


@pytest.mark.parametrize("known", [True, False])
async def test_the_coordinator_is_asked_where_no_other_server_gives_a_token(
    connection: AsyncConnection, cluster: FakeCluster, iam: Iam, known: bool
) -> None:
    """A table dropped while a lease holds it: unknown to servers, or another one by that name."""
    keys = iam.user(f"leased-{known}")
    await Objects(parse_location("s3://logs", "test"), keys).put("old-1/file", b"hello")
    asked = 0

    async def tokens(request: m.GetFileSystemSecurityTokenRequest) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1 and not known:
            return error(ErrorCode.TABLE_NOT_EXIST, "table 'fluss.t' does not exist")
        found = token(f"s3://logs/{'new-2' if asked == 1 else 'old-1'}", keys)
        return m.GetFileSystemSecurityTokenResponse(schema="s3", token=b"", tokens=[found])

    cluster.handlers[ApiKey.GET_FILESYSTEM_SECURITY_TOKEN] = tokens
    with iam.enforced():
        for _ in range(2):
            assert await read(connection, "s3://logs/old-1/file") == b"hello"
    assert asked == 2
