"""Tokens for clients: the requests to a token service, and what the tokens open."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.remote.iam import Iam
from zufluss.clock import wall_ms
from zufluss.config.load import Configuration
from zufluss.remote.objects import ObjectForbiddenError, Objects, RemoteStorageError
from zufluss.remote.sts import AwsKeys, SecurityTokenError, call, session_of, signed_headers
from zufluss.remote.tokens import (
    KEPT_MAX,
    POLICY_CHARS_MAX,
    FileSystemToken,
    Tokens,
    session_policy,
)
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

ROOT = parse_location("s3://logs/root", "test")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.bucket("logs")
        yield server


@pytest.fixture(scope="module")
def iam(s3: S3Server) -> Iam:
    return Iam(s3)


@pytest.fixture(scope="module")
def server_keys(iam: Iam) -> dict[str, str]:
    return iam.user("server")


@pytest.fixture
def enforced(iam: Iam, server_keys: dict[str, str]) -> Iterator[Iam]:
    with iam.enforced():
        yield iam


def tokens(properties: dict[str, str], clock: Any = None, **more: str) -> Tokens:
    pairs = {"remote.data.dir": ROOT.text, **properties, **more}
    return Tokens(
        Configuration.of(pairs, origin="test"), clock or (lambda: time.time_ns() // 10**6)
    )


def opened(token: FileSystemToken) -> Objects:
    """The location as a client sees it that has this token."""
    keys = json.loads(token.token)
    return Objects(
        ROOT,
        {
            "s3.endpoint": token.info["fs.s3a.endpoint"],
            "s3.region": token.info["fs.s3a.endpoint.region"],
            "s3.access-key": keys["access_key_id"],
            "s3.secret-key": keys["access_key_secret"],
            "s3.session-token": keys["security_token"],
        },
    )


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["https://sts.eu-west-1.amazonaws.com", "http://h:9000/sts"])
@pytest.mark.parametrize("session", [None, "session+token/=="])
def test_a_signature_is_the_one_botocore_makes(
    endpoint: str, session: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: now.replace(tzinfo=None))
    body = b"Action=GetSessionToken&Version=2011-06-15"
    keys = AwsKeys("AKIAEXAMPLE", "secret/key+", session)
    found = signed_headers(endpoint, "eu-west-1", keys, body, now)
    request = AWSRequest("POST", endpoint, {"content-type": found["content-type"]}, body.decode())
    SigV4Auth(Credentials(keys.access_key, keys.secret_key, session), "sts", "eu-west-1").add_auth(
        request
    )
    assert found["x-amz-date"] == request.headers["X-Amz-Date"]
    assert found["authorization"] == request.headers["Authorization"]


async def test_a_token_service_that_refuses_is_an_error_with_its_reason(
    enforced: Iam, s3: S3Server
) -> None:
    keys = AwsKeys("AKIANOBODY", "x")
    with pytest.raises(SecurityTokenError, match="refused GetSessionToken: 403"):
        await call(s3.endpoint, "us-east-1", keys, {"Action": "GetSessionToken"}, 5000, wall_ms())


async def test_a_token_service_that_is_not_there_is_an_error_that_names_the_keys() -> None:
    keys = AwsKeys("a", "b")
    with pytest.raises(SecurityTokenError, match=r"s3\.assumed\.role\.sts\.endpoint"):
        await call(
            "http://127.0.0.1:1", "us-east-1", keys, {"Action": "GetSessionToken"}, 5000, wall_ms()
        )


def test_an_answer_without_credentials_is_no_session() -> None:
    with pytest.raises(ValueError, match="isoformat"):
        session_of("<html>hello</html>")


def test_secrets_are_not_shown() -> None:
    assert "b-secret" not in repr(AwsKeys("a", "b-secret", "c-secret"))
    assert "c-secret" not in repr(AwsKeys("a", "b-secret", "c-secret"))
    assert "b-secret" not in repr(FileSystemToken("p", "s3", b"b-secret"))


# -- what they open ------------------------------------------------------------------------------


async def test_the_keys_of_the_server_alone_give_a_session_that_is_not_limited(
    server_keys: dict[str, str], enforced: Iam, s3: S3Server
) -> None:
    [token] = await tokens(server_keys).token(ROOT, [f"{ROOT}/log/a"])
    assert token.prefix == "s3://logs"
    assert not token.path_scoped
    assert token.info == {
        "fs.s3a.endpoint": s3.endpoint,
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.path.style.access": "true",
    }
    assert token.expires_ms is not None
    assert token.expires_ms > time.time() * 1000
    assert json.loads(token.token).keys() == {
        "access_key_id",
        "access_key_secret",
        "security_token",
    }


async def test_a_role_gives_credentials_that_read(
    server_keys: dict[str, str], iam: Iam, s3: S3Server
) -> None:
    role = iam.role("reads-all")
    await Objects(ROOT, server_keys).put("log/a/file", b"content")
    with iam.enforced():
        made = tokens(server_keys, **{"s3.assumed.role.arn": role})
        [token] = await made.token(ROOT, [f"{ROOT}/log/a"])
        assert token.path_scoped
        assert token.prefix == "s3://logs/root/log/a"
        assert await opened(token).get("log/a/file", limit=100) == b"content"


async def test_the_policy_of_a_token_opens_its_prefixes_and_nothing_else(
    server_keys: dict[str, str], iam: Iam, s3: S3Server
) -> None:
    role = iam.role("reads-a", session_policy("logs", ["root/log/a", "root/kv/a"]))
    own = Objects(ROOT, server_keys)
    for path in ("log/a/file", "kv/a/file", "log/ab/file", "log/b/file"):
        await own.put(path, b"content")
    with iam.enforced():
        made = tokens(server_keys, **{"s3.assumed.role.arn": role})
        [token] = await made.token(ROOT, [f"{ROOT}/log/a"])
        reader = opened(token)
        assert await reader.get("log/a/file", limit=100) == b"content"
        assert await reader.get("kv/a/file", limit=100) == b"content"
        for path in ("log/ab/file", "log/b/file"):
            with pytest.raises(ObjectForbiddenError):
                await reader.get(path, limit=100)
        with pytest.raises(ObjectForbiddenError):
            await reader.put("log/a/new", b"")
        with pytest.raises(RemoteStorageError, match="AccessDenied"):
            await reader.delete(["log/a/file"])


def test_a_policy_reads_and_lists_below_its_prefixes() -> None:
    assert session_policy("b", ["x/log/t-1"])["Statement"] == [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": ["arn:aws:s3:::b/x/log/t-1/*"]},
        {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": "arn:aws:s3:::b",
            "Condition": {"StringLike": {"s3:prefix": ["x/log/t-1/*"]}},
        },
    ]


async def test_a_request_with_a_role_carries_the_policy(
    s3: S3Server, server_keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    async def spy(endpoint: str, region: str, keys: AwsKeys, form: dict[str, str], *ms: int) -> Any:
        seen.append(form)
        return await call(endpoint, region, keys, form, *ms)

    monkeypatch.setattr("zufluss.remote.sts.call", spy)
    made = tokens(server_keys, **{"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/r"})
    await made.token(ROOT, [f"{ROOT}/log/a"])
    assert seen[0]["Action"] == "AssumeRole"
    assert json.loads(seen[0]["Policy"]) == session_policy("logs", ["root/log/a"])


async def test_prefixes_that_no_policy_holds_together_get_several_sessions(
    s3: S3Server, server_keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody reads a table with five locations in one bucket."""
    policies: list[str] = []

    async def spy(endpoint: str, region: str, keys: AwsKeys, form: dict[str, str], *ms: int) -> Any:
        policies.append(form["Policy"])
        return await call(endpoint, region, keys, form, *ms)

    monkeypatch.setattr("zufluss.remote.sts.call", spy)
    made = tokens(server_keys, **{"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/r"})
    prefixes = [f"{ROOT}/place-{i}/{kind}/db/t-1" for i in range(20) for kind in ("log", "kv")]
    answer = await made.token(ROOT, prefixes)
    assert [token.prefix for token in answer] == prefixes
    assert all(token.path_scoped for token in answer)
    assert 1 < len({token.token for token in answer}) == len(policies)
    assert max(map(len, policies)) <= POLICY_CHARS_MAX
    named = [path for policy in policies for path in json.loads(policy)["Statement"][0]["Resource"]]
    assert sorted(named) == sorted(f"arn:aws:s3:::{p.removeprefix('s3://')}/*" for p in prefixes)


async def test_more_sessions_than_a_request_may_need_are_refused(
    server_keys: dict[str, str],
) -> None:
    made = tokens(server_keys, **{"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/r"})
    with pytest.raises(SecurityTokenError, match="more than 256 sessions; ask for fewer tables"):
        await made.token(ROOT, [f"{ROOT}/log/db/table-{i}".ljust(900, "x") for i in range(300)])
    with pytest.raises(SecurityTokenError, match="2048 are allowed; use a location with a shorter"):
        await made.token(ROOT, [f"{ROOT}/{'x' * 1000}"])


async def test_a_role_without_a_prefix_gives_no_token(server_keys: dict[str, str]) -> None:
    made = tokens(server_keys, **{"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/r"})
    assert await made.token(ROOT, []) == []


@pytest.mark.parametrize(
    ("uri", "more"),
    [
        ("file:///data/remote", {}),
        ("gs://bucket/x", {}),
        ("s3://logs/root", {"zufluss.remote.tokens": "none"}),
        ("s3://logs/root", {"s3.session-token": "mine"}),
    ],
)
async def test_a_client_that_must_bring_its_own_gets_an_empty_token(
    server_keys: dict[str, str], uri: str, more: dict[str, str]
) -> None:
    location = parse_location(uri, "test")
    [token] = await tokens(server_keys, **more).token(location, [uri])
    assert token.token == b""
    assert token.prefix == location.fs_key
    assert token.expires_ms is None


async def test_a_server_without_keys_of_its_own_gives_none(s3: S3Server) -> None:
    [token] = await tokens({"s3.endpoint": s3.endpoint}).token(ROOT, [ROOT.text])
    assert token.token == b""
    assert token.info["fs.s3a.endpoint"] == s3.endpoint


# -- kept ----------------------------------------------------------------------------------------


async def test_a_token_is_handed_out_again_until_half_of_its_life_is_over(
    s3: S3Server, server_keys: dict[str, str]
) -> None:
    now = time.time_ns() // 10**6
    role = {"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/r"}
    made = tokens(server_keys, lambda: now, **role)
    first = await made.token(ROOT, [f"{ROOT}/log/a"])
    now += 25 * 60_000
    assert await made.token(ROOT, [f"{ROOT}/log/a"]) == first
    assert await made.token(ROOT, [f"{ROOT}/log/b"]) != first
    now += 10 * 60_000
    assert await made.token(ROOT, [f"{ROOT}/log/a"]) != first


async def test_concurrent_callers_share_one_request(
    s3: S3Server, server_keys: dict[str, str]
) -> None:
    made = tokens(server_keys, **{"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/r"})
    found = await asyncio.gather(*(made.token(ROOT, [f"{ROOT}/log/a"]) for _ in range(10)))
    assert len({token.token for [token] in found}) == 1


async def test_a_failure_is_not_remembered(s3: S3Server, server_keys: dict[str, str]) -> None:
    properties = {**server_keys, "s3.assumed.role.sts.endpoint": "http://127.0.0.1:1"}
    made = tokens(properties)
    for _ in range(2):
        with pytest.raises(SecurityTokenError):
            await made.token(ROOT, [])
    assert len(made._cached) <= KEPT_MAX
