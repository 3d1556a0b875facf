"""Tokens for remote files: for which tables, for which clients, and for how long."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.locations.inspection import METRICS, patient, scrape
from tests.end_to_end.locations.stage import (
    DIRS,
    PLACEMENT,
    Stage,
    everything,
    rows,
    rows_by_pyfluss,
    write,
)
from tests.remote.iam import Iam
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.cluster.image import ClusterImage, DatabaseEntry, DatabasePut, TableEntry, TablePut
from zufluss.cluster.token_service import TokenService
from zufluss.config import Configuration
from zufluss.errors import AuthorizationError
from zufluss.model.schema import Schema
from zufluss.model.table import DatabaseDescriptor, TableDescriptor, TableInfo, TablePath
from zufluss.net.services import RequestContext
from zufluss.remote.locations import Location, Locations
from zufluss.remote.objects import ObjectForbiddenError, Objects
from zufluss.remote.tokens import Tokens, session_policy
from zufluss.remote.uri import parse_location
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

TOKENS_ASKED = 'zufluss_requests_total{api="GET_FILESYSTEM_SECURITY_TOKEN"}'


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def buckets(s3_server: S3Server) -> list[str]:
    """The names of two buckets."""
    names = [f"e{uuid.uuid4()}" for _ in range(2)]
    for name in names:
        s3_server.bucket(name)
    return names


def ask(it: Stage, *tables: str) -> m.GetFileSystemSecurityTokenResponse:
    """The tokens for some tables; without tables, as an old client asks."""
    paths = [m.PbPhysicalTablePath(database_name="fluss", table_name=name) for name in tables]
    request = m.GetFileSystemSecurityTokenRequest(tables=paths)
    answer = it.conn.call_coordinator(ApiKey.GET_FILESYSTEM_SECURITY_TOKEN, request)
    assert isinstance(answer, m.GetFileSystemSecurityTokenResponse)
    return answer


def filled(it: Stage, name: str, location_id: int) -> Table:
    """A table whose old segments are in one location only."""
    table = it.create(name, **{PLACEMENT: f"pinned:{location_id}"})
    write(table, 0, 9)
    it.until_copied(table, 9)
    it.until_gone(table)
    return table


# -- tokens by file system -----------------------------------------------------------------------


def test_there_is_a_token_for_each_file_system_and_tables_keep_their_own(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy, buckets: list[str]
) -> None:
    one, two = buckets
    conf = {
        **s3_server.properties,
        DIRS: f"s3://{one}/a,s3://{two}/b,s3://{one}/c,{tmp_path / 'near'}",
        f"s3.bucket.{two}.endpoint": proxy.endpoint,
    }
    with patient(tmp_path, conf) as it:
        tables = [filled(it, f"t{location_id}", location_id) for location_id in (1, 2, 4)]
        answer = ask(it, "t1")
        assert [x.prefix for x in answer.tokens] == [f"s3://{one}", f"s3://{two}", "file://"]
        assert [endpoint(x) for x in answer.tokens] == [s3_server.endpoint, proxy.endpoint, None]
        proxy.seen.clear()
        for _ in range(2):
            for table in tables:
                assert rows(table) == everything(9)
        read = {seen.path.split("/")[1] for seen in proxy.seen if seen.method == "GET"}
        assert read == {two}, "the other bucket is read with a token of its own"


def endpoint(token: m.PbFileSystemToken) -> str | None:
    return {x.key: x.value for x in token.addition_info}.get("fs.s3a.endpoint")


# -- old clients ---------------------------------------------------------------------------------


def test_an_old_client_reads_the_first_place_and_is_told_of_others(
    tmp_path: Path, s3_server: S3Server, buckets: list[str]
) -> None:
    near = tmp_path / "near"
    conf = {**s3_server.properties, DIRS: f"s3://{buckets[0]}/a,{near}"}
    with patient(tmp_path, conf) as it:
        filled(it, "first", 1)
        filled(it, "other", 2)
        answer = ask(it)
        assert (answer.schema, answer.token) == ("s3", answer.tokens[0].token)
        assert set(json.loads(answer.token)) >= {"access_key_id", "access_key_secret"}
        assert rows_by_pyfluss(it.server.bootstrap, "first") == everything(9)
        with pytest.raises(fluss.FlussError, match=f"location 2.*{near}"):
            rows_by_pyfluss(it.server.bootstrap, "other")


# -- tokens by table -----------------------------------------------------------------------------


def only_t(principal: str | None, path: TablePath) -> bool:
    return path.table == "t"


async def test_who_may_read_one_table_gets_no_token_that_opens_another(
    buckets: list[str],
) -> None:
    root = parse_location(f"s3://{buckets[0]}/root", "place")
    image = ClusterImage()
    image.apply([DatabasePut(DatabaseEntry("db", DatabaseDescriptor(), 0, 0))])
    schema = Schema.of("id BIGINT")
    for table_id, name in enumerate(("t", "u"), 1):
        info = TableInfo(TablePath("db", name), table_id, 1, TableDescriptor(schema), 0, 0)
        image.apply([TablePut(TableEntry(info, {1: schema}))])
    with S3Server() as s3:  # of its own: it checks everything
        s3.bucket(buckets[0])
        iam = Iam(s3)
        keys = iam.user("server")
        prefixes = [f"root/{kind}/db/t-1" for kind in ("log", "kv", "lake")]
        role = iam.role("reads-t", session_policy(buckets[0], prefixes))
        store = Objects(root, keys)
        for table in ("t-1", "u-2", "t-11"):
            await store.put(f"log/db/{table}/file", b"content")
        locations = Locations(1, (Location(1, root.text),), explicit=True)
        conf = Configuration.of({**keys, "s3.assumed.role.arn": role}, origin="test")
        tokens = Tokens(conf, lambda: time.time_ns() // 10**6)
        service = TokenService(image, lambda: locations, tokens, only_t)
        with iam.enforced():
            for named in ([], ["t"]):
                answer = await service.get_filesystem_security_token(request_for(named), ANNA)
                assert [x.prefix for x in answer.tokens] == [
                    f"s3://{buckets[0]}/{p}" for p in prefixes
                ]
                assert all(x.path_scoped for x in answer.tokens)
            with pytest.raises(AuthorizationError, match=r"anna may not read table db\.u"):
                await service.get_filesystem_security_token(request_for(["u"]), ANNA)
            reader = opened(answer.tokens[0], s3)
            assert await reader.get("log/db/t-1/file", limit=100) == b"content"
            for table in ("u-2", "t-11"):
                with pytest.raises(ObjectForbiddenError):
                    await reader.get(f"log/db/{table}/file", limit=100)


ANNA = RequestContext("anna", "CLIENT", 0, "test")


def request_for(tables: list[str]) -> m.GetFileSystemSecurityTokenRequest:
    paths = [m.PbPhysicalTablePath(database_name="db", table_name=name) for name in tables]
    return m.GetFileSystemSecurityTokenRequest(tables=paths)


def opened(token: m.PbFileSystemToken, s3: S3Server) -> Objects:
    """Open the location of a token with nothing but the token."""
    keys = json.loads(token.token)
    root = token.prefix.partition("/log/")[0]
    properties = {
        **s3.properties,
        "s3.access-key": keys["access_key_id"],
        "s3.secret-key": keys["access_key_secret"],
        "s3.session-token": keys["security_token"],
    }
    return Objects(parse_location(root, "token"), properties)


def test_a_server_with_a_role_gives_tokens_for_the_tables_that_are_named(
    tmp_path: Path, s3_server: S3Server, buckets: list[str]
) -> None:
    roots = [f"s3://{name}/place" for name in buckets]
    role = {"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/reader"}
    with patient(tmp_path, {**s3_server.properties, **role, DIRS: ",".join(roots)}) as it:
        table, _ = filled(it, "t", 2), it.create("t2")
        answer = ask(it, "t")
        assert all(x.path_scoped for x in answer.tokens)
        assert {x.prefix for x in answer.tokens} == {
            f"{root}/{kind}/fluss/t-{table.info.table_id}"
            for root in roots
            for kind in ("log", "kv", "lake")
        }
        assert rows(table) == everything(9)


def test_a_table_with_twenty_locations_in_one_bucket_is_read_with_limited_tokens(
    tmp_path: Path, s3_server: S3Server, buckets: list[str]
) -> None:
    roots = [f"s3://{buckets[0]}/place-{number}" for number in range(20)]
    role = {"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/reader"}
    with patient(tmp_path, {**s3_server.properties, **role, DIRS: ",".join(roots)}) as it:
        table = it.create("t")
        write(table, 0, 22)
        it.until_copied(table, 22)
        it.until_gone(table)
        answer = ask(it, "t")
        assert {x.prefix for x in answer.tokens} == {
            f"{root}/{kind}/fluss/t-{table.info.table_id}"
            for root in roots
            for kind in ("log", "kv", "lake")
        }
        assert answer.token == answer.tokens[0].token, "a client of Fluss reads the first location"
        assert answer.tokens[0].prefix.startswith(roots[0])
        assert rows(table) == everything(22)


# -- expiry --------------------------------------------------------------------------------------


def test_a_token_that_ends_during_a_download_is_renewed_and_the_download_goes_on(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy, buckets: list[str]
) -> None:
    conf = {
        **s3_server.properties,
        **METRICS,
        DIRS: f"s3://{buckets[0]}/a",
        "s3.endpoint": proxy.endpoint,
        "log.segment.file-size": "1mb",
    }
    with patient(tmp_path, conf) as it:
        table, ids = it.create("t"), range(4000)
        with table.append() as writer:
            for start in ids[::400]:
                part = list(ids[start : start + 400])
                writer.write(pa.table({"id": part, "text": ["x" * 1000] * 400}))
                writer.flush()
        eventually(lambda: it.copied(table) >= 2000, "copied")
        expired = Fault("status_403", methods=("GET",), every=2, count=1, path_contains=".log")
        proxy.set([expired])
        before = scrape(it.server).get(TOKENS_ASKED, 0)
        assert rows(table) == list(ids)
        ranges = [x for x in proxy.seen if x.method == "GET" and x.path.endswith(f"{0:020d}.log")]
        assert len(ranges) >= 2, "the first file takes several ranges"
        assert [x.faults for x in proxy.seen].count(("status_403",)) == 1
        assert scrape(it.server)[TOKENS_ASKED] == before + 2
