"""GET_FILESYSTEM_SECURITY_TOKEN: who gets which tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from zufluss.cluster.image import ClusterImage, DatabaseEntry, DatabasePut, TableEntry, TablePut
from zufluss.cluster.refusal import RefusedLocationError, check_refusal, refusal_batch
from zufluss.cluster.token_service import (
    DroppedTables,
    MayRead,
    TokenService,
    everybody,
    no_dropped,
)
from zufluss.config.load import Configuration
from zufluss.errors import AuthorizationError, TableNotExistError
from zufluss.model.schema import Schema
from zufluss.model.table import DatabaseDescriptor, TableDescriptor, TableInfo, TablePath
from zufluss.net.services import RequestContext
from zufluss.record.header import iter_headers, verify_crc
from zufluss.remote.locations import Location, Locations
from zufluss.remote.sts import SecurityTokenError
from zufluss.remote.tokens import Tokens
from zufluss.testing.s3 import S3Server
from zufluss.wire import messages as m

ROLE = {"s3.assumed.role.arn": "arn:aws:iam::123456789012:role/reader"}
ANNA = RequestContext("anna", "CLIENT", 0, "test")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def image() -> ClusterImage:
    found = ClusterImage()
    found.apply([DatabasePut(DatabaseEntry("db", DatabaseDescriptor(), 0, 0))])
    schema = Schema.of("id BIGINT")
    for table_id, name in enumerate(("t", "u"), 1):
        info = TableInfo(TablePath("db", name), table_id, 1, TableDescriptor(schema), 0, 0)
        found.apply([TablePut(TableEntry(info, {1: schema}))])
    return found


def service(
    image: ClusterImage,
    uris: list[str],
    properties: dict[str, str],
    may_read: MayRead = everybody,
    dropped: DroppedTables = no_dropped,
) -> TokenService:
    locations = Locations(
        1, tuple(Location(i, uri) for i, uri in enumerate(uris, 1)), explicit=True
    )
    conf = Configuration.of(properties, origin="test")
    tokens = Tokens(conf, lambda: time.time_ns() // 10**6)
    return TokenService(image, lambda: locations, tokens, may_read, dropped)


async def ask(found: TokenService, *tables: str) -> m.GetFileSystemSecurityTokenResponse:
    paths = [m.PbPhysicalTablePath(database_name="db", table_name=name) for name in tables]
    return await found.get_filesystem_security_token(
        m.GetFileSystemSecurityTokenRequest(tables=paths), ANNA
    )


def prefixes(answer: m.GetFileSystemSecurityTokenResponse) -> list[str]:
    return [token.prefix for token in answer.tokens]


def only_t(principal: str | None, path: TablePath) -> bool:
    return path.table == "t"


async def test_there_is_one_entry_for_each_file_system(image: ClusterImage, s3: S3Server) -> None:
    uris = ["s3://one/a", "s3://two/b", "s3://one/c", "file:///data/remote"]
    answer = await ask(service(image, uris, s3.properties))
    assert prefixes(answer) == ["s3://one", "s3://two", "file://"]
    assert (answer.schema, answer.token) == ("s3", answer.tokens[0].token)
    assert answer.tokens[0].token
    assert answer.tokens[2].token == b""
    assert not any(token.path_scoped for token in answer.tokens)


async def test_an_old_client_gets_the_token_of_the_first_location(
    image: ClusterImage, s3: S3Server
) -> None:
    answer = await ask(service(image, ["file:///data/remote", "s3://one/a"], s3.properties))
    assert (answer.schema, answer.token, list(answer.addition_info)) == ("file", b"", [])


async def test_a_bucket_may_have_a_store_of_its_own(image: ClusterImage, s3: S3Server) -> None:
    properties = {
        **s3.properties,
        "s3.bucket.two.endpoint": s3.endpoint.replace("127.0.0.1", "localhost"),
        "s3.bucket.two.region": "eu-west-1",
    }
    answer = await ask(service(image, ["s3://one/a", "s3://two/b"], properties))
    info = {pair.key: pair.value for pair in answer.tokens[1].addition_info}
    assert "localhost" in info["fs.s3a.endpoint"]
    assert info["fs.s3a.endpoint.region"] == "eu-west-1"
    assert next(pair.value for pair in answer.addition_info) == s3.endpoint


async def test_a_role_limits_tokens_to_the_tables_that_are_named(
    image: ClusterImage, s3: S3Server
) -> None:
    found = service(image, ["s3://one/a", "s3://two"], {**s3.properties, **ROLE})
    answer = await ask(found, "t")
    assert prefixes(answer) == [
        "s3://one/a/log/db/t-1",
        "s3://one/a/kv/db/t-1",
        "s3://one/a/lake/db/t-1",
        "s3://two/log/db/t-1",
        "s3://two/kv/db/t-1",
        "s3://two/lake/db/t-1",
    ]
    assert all(token.path_scoped for token in answer.tokens)


async def test_a_dropped_table_that_leases_hold_is_opened_with_the_one_that_has_its_name(
    image: ClusterImage, s3: S3Server
) -> None:
    held = {TablePath("db", "t"): [1, 7], TablePath("db", "gone"): [9]}
    properties = {**s3.properties, **ROLE}
    found = service(image, ["s3://one"], properties, dropped=lambda path: held.get(path, []))
    opened = prefixes(await ask(found, "t"))
    assert [prefix for prefix in opened if "/kv/" in prefix] == [
        "s3://one/kv/db/t-1",
        "s3://one/kv/db/t-7",
    ]
    assert "s3://one/kv/db/gone-9" in prefixes(await ask(found, "gone"))
    with pytest.raises(TableNotExistError):
        await ask(found, "never")


async def test_users_who_may_read_everything_get_tokens_for_whole_locations(
    image: ClusterImage, s3: S3Server
) -> None:
    found = service(image, ["s3://one/a", "s3://one/b"], {**s3.properties, **ROLE})
    assert prefixes(await ask(found)) == ["s3://one/a", "s3://one/b"]


async def test_users_who_may_read_one_table_get_no_token_that_opens_another(
    image: ClusterImage, s3: S3Server
) -> None:
    found = service(image, ["s3://one/a"], {**s3.properties, **ROLE}, only_t)
    for answer in (await ask(found), await ask(found, "t")):
        assert all("/db/t-1" in prefix for prefix in prefixes(answer))
    with pytest.raises(AuthorizationError, match=r"anna may not read table db\.u"):
        await ask(found, "u")


@pytest.mark.parametrize("named", [(), ("t",)])
async def test_tokens_that_cannot_be_limited_are_for_users_who_may_read_everything(
    image: ClusterImage, s3: S3Server, named: tuple[str, ...]
) -> None:
    found = service(image, ["s3://one/a"], s3.properties, only_t)
    with pytest.raises(AuthorizationError, match=r"s3\.assumed\.role\.arn"):
        await ask(found, *named)


async def test_file_systems_without_secrets_are_for_everybody(
    image: ClusterImage, s3: S3Server
) -> None:
    found = service(image, ["s3://one/a", "file:///data/remote"], s3.properties, only_t)
    assert prefixes(await ask(found, "t")) == ["file://"]


async def test_a_token_service_that_fails_does_not_hide_the_other_locations(
    image: ClusterImage, s3: S3Server
) -> None:
    properties = {**s3.properties, "s3.bucket.dead.endpoint": "http://127.0.0.1:1"}
    found = service(image, ["s3://dead/a", "s3://one/b"], properties)
    answer = await ask(found, "t")
    assert prefixes(answer) == ["s3://one"]
    assert (answer.schema, answer.token) == ("s3", b"")
    with pytest.raises(SecurityTokenError):
        await ask(found)


async def test_a_table_that_does_not_exist_has_no_token(image: ClusterImage, s3: S3Server) -> None:
    with pytest.raises(TableNotExistError):
        await ask(service(image, ["file:///data/remote"], {}), "nothing")


# -- old clients ---------------------------------------------------------------------------------


def where(location_id: int) -> str:
    return f"s3://bucket-{location_id}"


def test_a_refusal_is_a_batch_whose_schema_tells_the_location() -> None:
    [(position, header)] = iter_headers(refusal_batch(7, 1234))
    assert (header.base_offset, header.record_count) == (1234, 1)
    assert verify_crc(refusal_batch(7, 1234), position, header)
    with pytest.raises(RefusedLocationError, match="remote location 7, s3://bucket-7"):
        check_refusal(header.schema_id, where)


@pytest.mark.parametrize("schema_id", [None, 0, 1, 32767, -1, -999])
def test_every_other_schema_id_is_no_refusal(schema_id: int | None) -> None:
    check_refusal(schema_id, where)


def test_the_highest_location_still_fits_into_a_schema_id() -> None:
    [(_, header)] = iter_headers(refusal_batch(10**6, 0))
    with pytest.raises(RefusedLocationError):
        check_refusal(header.schema_id, where)
