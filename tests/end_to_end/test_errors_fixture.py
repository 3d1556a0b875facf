"""The requests of `fixtures/errors.json` and the codes a real Fluss server gave to them.

Where we answer otherwise on purpose, `OURS` says what and why.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any

import fluss
import pyarrow as pa
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

import zufluss
from tests.end_to_end.helpers import append, create
from tests.end_to_end.raw import RawClient, versions_request
from tests.paths import FIXTURES
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.frame import ResponseFrame

FIXTURE = FIXTURES / "errors.json"
CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads(FIXTURE.read_text())["cases"]
}
DATABASE = "errors_fixture"
NO_SUCH_TABLE = 987_654
UNSUPPORTED = 2

"""APIs that are not served yet."""

OURS: dict[str, tuple[int, str]] = {
    # Fluss takes it and answers with base offset -1; a client that lost its bytes should know
    "produce: empty records": (14, "bucket"),
    # Fluss fails inside; a batch we cannot read is a corrupt record like any other
    "produce: magic 3": (14, "bucket"),
    # Fluss fails inside; a lookup of a log table says what it is
    "put: log table": (20, "bucket"),
    # Fluss refuses it, or its client cannot read the answer; who asks for no column counts rows
    "fetch: projection empty": (0, "none"),
    # Fluss does not verify the CRC of what it is sent
    "put: bad crc": (14, "bucket"),
    # Fluss hides the reason behind -1
    "put: partial on first_row": (35, "bucket"),
    # an unusable request is refused as a whole, with a reason
    "list offsets: time missing": (-1, "frame"),
    "list offsets: type 9": (-1, "frame"),
    # Fluss hides what is missing behind -1
    "metadata: unknown table": (7, "frame"),
    # Fluss answers 0 or -1, depending on whether there is a partition
    "list partitions: unknown key": (43, "frame"),
}
"""Code and place where we differ from the fixture, each with its reason."""


KEYED = "k INT NOT NULL, v STRING"
KEYED_TABLES: dict[str, tuple[Schema, dict[str, str]]] = {
    "nn": (Schema.of(f"{KEYED}, w INT NOT NULL", primary_key=["k"]), {}),
    "first": (Schema.of(KEYED, primary_key=["k"]), {"table.merge-engine": "first_row"}),
    "nodel": (Schema.of(KEYED, primary_key=["k"]), {"table.delete.behavior": "DISABLE"}),
    "auto": (
        Schema.of("k INT NOT NULL, i BIGINT, v STRING", ["k"], auto_increment_column=["i"]), {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def table_ids(conn: fluss.FlussConnection, dev_server: DevServer) -> dict[str, int]:
    """The tables of the fixture and their ids."""
    ids = asyncio.run(_create_tables(conn))
    with zufluss.connect(dev_server.bootstrap) as ours:
        for name, (schema, properties) in KEYED_TABLES.items():
            path = f"{DATABASE}.{name}"
            ours.admin.create_table(path, schema, properties=properties)
            ids[name] = ours.admin.table_info(path).table_id
    return ids


async def _create_tables(conn: fluss.FlussConnection) -> dict[str, int]:
    await conn.get_admin().drop_database(DATABASE, ignore_if_not_exists=True, cascade=True)
    await conn.get_admin().create_database(DATABASE)
    plain = pa.schema([("a", pa.int32()), ("b", pa.string())])
    keyed = pa.schema([("k", pa.int32()), ("v", pa.string())])
    daily = pa.schema([("d", pa.string()), ("v", pa.string())])
    log = await create(conn, fluss.TablePath(DATABASE, "lg"), plain)
    await append(log, pa.record_batch([[1, 2], ["x", "y"]], schema=plain))
    kv = await create(conn, fluss.TablePath(DATABASE, "kv"), keyed, primary_keys=["k"])
    pt = await create(conn, fluss.TablePath(DATABASE, "pt"), daily, partition_keys=["d"])
    ids = {"lg": log, "kv": kv, "pt": pt}
    return {
        **{name: table.get_table_info().table_id for name, table in ids.items()},
        "none": NO_SUCH_TABLE,
    }


def fill_in(value: Any, table_ids: Mapping[str, int]) -> Any:
    """The request as JSON for protobuf: names resolved, bytes in base64, nothing left null."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return base64.b64encode(bytes.fromhex(value["hex"])).decode()
        return {k: fill_in(v, table_ids) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [fill_in(v, table_ids) for v in value]
    if value == "$db":
        return DATABASE
    if isinstance(value, str) and value.startswith("$"):
        return table_ids[value[1:]]
    return value


def outcome(key: int, frame: ResponseFrame) -> tuple[int, str]:
    """The error code of an answer, and where it stands."""
    if frame.error is not None:
        return int(frame.error.code), "frame"
    response = decode(APIS[key].response, frame.body)
    code = getattr(response, "error_code", 0)
    if code:
        return code, "body"
    code = _bucket_code(response)
    return code, "bucket" if code else "none"


def _bucket_code(response: Message) -> int:
    buckets = [
        *getattr(response, "buckets_resp", ()),
        *(b for table in getattr(response, "tables_resp", ()) for b in table.buckets_resp),
    ]
    return next((b.error_code for b in buckets if b.error_code), 0)


def send(raw: RawClient, name: str, table_ids: Mapping[str, int]) -> tuple[int, str]:
    case = CASES[name]
    key = case["api_key"]
    request = ParseDict(fill_in(case["request"], table_ids), APIS[key].request())
    return outcome(key, raw.request(key, request, case["version"]))


@pytest.mark.parametrize("name", CASES)
def test_a_bad_request_gets_the_code_of_the_fixture_or_ours(
    raw: RawClient, table_ids: dict[str, int], name: str
) -> None:
    expected = OURS.get(name, (CASES[name]["code"], CASES[name]["where"]))
    assert send(raw, name, table_ids) == expected
    assert raw.end_offset(table_ids["lg"]) == 2, "nothing was written"
    assert raw.alive()


def test_what_is_advertised_is_what_is_served(raw: RawClient) -> None:
    answer = raw.call(ApiKey.API_VERSIONS, versions_request())
    advertised = {v.api_key for v in answer.api_versions}
    assert not answer.HasField("server_type"), "one port serves both roles"
    for key in ApiKey:
        if key not in advertised:
            body = APIS[key].request().SerializePartialToString()
            assert raw.error_code(key, body) in (UNSUPPORTED, 48), key.name


def test_the_differences_are_cases_of_the_fixture() -> None:
    assert OURS.keys() <= CASES.keys()
