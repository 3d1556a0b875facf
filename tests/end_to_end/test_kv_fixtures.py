"""What the Java client put into a real Fluss server, put into ours: the same answers, same effect.

The KV batches of `fixtures/put-kv` are sent in their order, with the writer ids and sequences they
were captured with. The answers to puts, lookups, prefix lookups and limit scans must then be those
of Fluss, bytes of values included, and the changelog must decode to what Fluss's changelog says.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import fluss
import pyarrow as pa
import pytest
from google.protobuf.message import Message

from tests.end_to_end.helpers import in_time
from tests.end_to_end.kv import changelog, limit_values, lookups, records_of
from tests.end_to_end.raw import RawClient, fetch_request
from tests.end_to_end.test_java_fixtures import create_table, plain
from tests.paths import FIXTURES
from tests.record.rows.plain_rows import decode_compacted, decode_indexed
from tests.record.rows.plain_values import batch_of_rows
from zufluss.model.schema import Schema
from zufluss.record.header import iter_headers
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey

TABLES = ("kv_all", "kv_nested", "kv_prefix", "kv_indexed")
STAMPED = slice(13, 21)
"""Where the commit time stands in a magic 0 batch."""
READ_BY_PYFLUSS = ("kv_all", "kv_nested", "kv_prefix")


def fixture(folder: str, name: str) -> dict[str, Any]:
    fixture: dict[str, Any] = json.loads((FIXTURES / folder / f"{name}.json").read_bytes())
    return fixture


def names(folder: str, table: str) -> list[str]:
    return sorted(p.stem for p in (FIXTURES / folder).glob(f"{table}-*.bin"))


def schema_of(table: str) -> Schema:
    stored = json.loads((FIXTURES / "tables" / f"{table}.stored.json").read_bytes())
    return Schema.from_json(stored["schema"])


def request_of(key: ApiKey, case: dict[str, Any], table_id: int) -> Message:
    """The captured request, about our table."""
    request = APIS[key].request.FromString(bytes.fromhex(case["request_hex"]))
    request.table_id = table_id  # type: ignore[attr-defined]
    return request


def put_all(raw: RawClient, path: fluss.TablePath, table: str) -> int:
    """Create the table of a fixture and send its puts; the table's id."""
    table_id = create_table(raw, path, table)
    for name in names("put-kv", table):
        case = fixture("put-kv", name)
        answer = raw.call(ApiKey.PUT_KV, request_of(ApiKey.PUT_KV, case, table_id), 2)
        (entry,) = answer.buckets_resp
        assert not entry.error_code, f"{name}: {entry.error_message}"
        assert entry.log_end_offset == case["response"]["log_end_offset"], name
    return table_id


def plain_rows(batch: pa.RecordBatch) -> list[list[Any]]:
    """Rows in the form of the fixtures."""
    columns = [[plain(v, c.type) for v in c] for c in batch.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def decoded(values: list[bytes], table: str) -> list[list[Any]]:
    """Stored values in the form of the fixtures."""
    schema = schema_of(table)
    types = [c.data_type for c in schema.columns]
    decode = decode_indexed if table == "kv_indexed" else decode_compacted
    rows = []
    for value in values:
        assert struct.unpack_from("<h", value)[0] == 1, "schema id"
        rows.append(decode(memoryview(value), 2, len(value), types))
    return plain_rows(batch_of_rows(rows, schema))


@pytest.mark.parametrize("table", TABLES)
def test_the_puts_of_the_java_client_get_the_answers_of_fluss(
    raw: RawClient, path: fluss.TablePath, table: str
) -> None:
    table_id = put_all(raw, path, table)
    last = fixture("put-kv", names("put-kv", table)[-1])["response"]["log_end_offset"]
    assert raw.end_offset(table_id) == last


@pytest.mark.parametrize("table", TABLES)
def test_the_puts_of_the_java_client_can_be_repeated(
    raw: RawClient, path: fluss.TablePath, table: str
) -> None:
    """The last five are known by their writer and sequence, and get their first answers again."""
    table_id = put_all(raw, path, table)
    end = raw.end_offset(table_id)
    for name in names("put-kv", table)[-5:]:
        case = fixture("put-kv", name)
        answer = raw.call(ApiKey.PUT_KV, request_of(ApiKey.PUT_KV, case, table_id), 2)
        (entry,) = answer.buckets_resp
        expected = case["response"]["log_end_offset"]
        assert (entry.error_code, entry.log_end_offset) == (0, expected), name
    assert raw.end_offset(table_id) == end


LOOKUPS = [(table, name) for table in TABLES for name in names("lookup", table)]


@pytest.mark.parametrize(("table", "name"), LOOKUPS, ids=[name for _, name in LOOKUPS])
def test_a_lookup_gets_the_answer_of_fluss_byte_for_byte(
    raw: RawClient, path: fluss.TablePath, table: str, name: str
) -> None:
    case = fixture("lookup", name)
    request = request_of(ApiKey.LOOKUP, case, put_all(raw, path, table))
    (entry,) = raw.call(ApiKey.LOOKUP, request, 1).buckets_resp
    captured = m.LookupResponse.FromString((FIXTURES / "lookup" / f"{name}.bin").read_bytes())
    assert entry == captured.buckets_resp[0]
    (value,) = entry.values
    assert value.HasField("values") == (case["expected"] is not None)
    if case["expected"] is not None:
        assert decoded([value.values], table) == [case["expected"]]


@pytest.mark.parametrize("name", names("prefix-lookup", "kv_prefix"))
def test_a_prefix_lookup_gets_the_answer_of_fluss_byte_for_byte(
    raw: RawClient, path: fluss.TablePath, name: str
) -> None:
    case = fixture("prefix-lookup", name)
    request = request_of(ApiKey.PREFIX_LOOKUP, case, put_all(raw, path, "kv_prefix"))
    answer = raw.call(ApiKey.PREFIX_LOOKUP, request, 1)
    data = (FIXTURES / "prefix-lookup" / f"{name}.bin").read_bytes()
    assert answer == m.PrefixLookupResponse.FromString(data)
    (values,) = answer.buckets_resp[0].value_lists
    assert decoded(list(values.values), "kv_prefix") == case["expected"]


def test_a_limit_scan_gets_the_rows_of_fluss(raw: RawClient, path: fluss.TablePath) -> None:
    case = fixture("limit-scan", "kv_all-0")
    request = request_of(ApiKey.LIMIT_SCAN, case, put_all(raw, path, "kv_all"))
    answer = raw.call(ApiKey.LIMIT_SCAN, request)
    assert not answer.error_code
    assert not answer.is_log_table
    assert answer.records == bytes.fromhex(case["response"]["records"])
    assert decoded(limit_values(answer.records), "kv_all") == case["expected"]


def test_a_lookup_that_inserts_fills_the_auto_increment_column(
    raw: RawClient, path: fluss.TablePath
) -> None:
    case = fixture("lookup-insert", "kv_auto-0")
    table_id = create_table(raw, path, "kv_auto")
    request = request_of(ApiKey.LOOKUP, case, table_id)
    captured = (FIXTURES / "lookup-insert" / "kv_auto-0.bin").read_bytes()
    for _ in range(2):
        answer = raw.call(ApiKey.LOOKUP, request, 1)
        assert answer == m.LookupResponse.FromString(captured)
    (value,) = answer.buckets_resp[0].values
    assert decoded([value.values], "kv_auto") == [case["expected"]]
    assert raw.end_offset(table_id) == 1, "the second lookup found it"


def fetched(raw: RawClient, table_id: int, columns: tuple[int, ...] | None) -> bytes:
    request = fetch_request(table_id, 0, columns=columns)
    (table,) = raw.call(ApiKey.FETCH_LOG, request).tables_resp
    (entry,) = table.buckets_resp
    assert not entry.error_code, entry.error_message
    return bytes(entry.records)


def projection(case: dict[str, Any]) -> tuple[tuple[int, ...] | None, Schema]:
    """The projected columns of a fetch fixture, and the schema they leave."""
    whole = schema_of("kv_all")
    if case["projected_fields"] is None:
        return None, whole
    columns = tuple(case["projected_fields"])
    return columns, Schema(tuple(whole.columns[i] for i in columns))


def described_batches(data: bytes) -> list[dict[str, int]]:
    return [
        {
            "base": h.base_offset,
            "magic": h.magic,
            "schema_id": h.schema_id,
            "attributes": h.attributes,
            "delta": h.last_offset_delta,
            "writer": h.writer_id,
            "seq": h.batch_sequence,
            "count": h.record_count,
        }
        for _, h in iter_headers(data)
    ]


def described_records(data: bytes, schema: Schema) -> list[dict[str, Any]]:
    records = records_of(data, schema)
    rows = plain_rows(batch_of_rows([row for _, _, row in records], schema))
    return [
        {"offset": offset, "change": kind, "row": row}
        for (offset, kind, _), row in zip(records, rows, strict=True)
    ]


@pytest.mark.parametrize("name", ["kv_all", "kv_all-projected"])
def test_the_changelog_of_fluss_is_read_as_the_fixture_says(name: str) -> None:
    case = fixture("fetch-log", name)
    data = (FIXTURES / "fetch-log" / f"{name}.bin").read_bytes()
    assert described_records(data, projection(case)[1]) == case["expected"]


@pytest.mark.parametrize("name", ["kv_all", "kv_all-projected"])
def test_our_changelog_says_what_that_of_fluss_says(
    raw: RawClient, path: fluss.TablePath, name: str
) -> None:
    case = fixture("fetch-log", name)
    columns, schema = projection(case)
    data = fetched(raw, put_all(raw, path, "kv_all"), columns)
    expected = [{k: v for k, v in b.items() if k != "bytes"} for b in case["batches"]]
    assert described_batches(data) == expected
    assert described_records(data, schema) == case["expected"]


def test_a_put_that_changes_nothing_makes_the_empty_batch_of_fluss(
    raw: RawClient, path: fluss.TablePath
) -> None:
    """Byte for byte, the commit time aside."""
    data = fetched(raw, put_all(raw, path, "kv_all"), None)
    (ours,) = (data[at : at + h.size] for at, h in iter_headers(data) if not h.record_count)
    theirs = (FIXTURES / "fetch-log" / "empty-batch.bin").read_bytes()
    assert len(ours) == len(theirs)
    assert ours[: STAMPED.start] == theirs[: STAMPED.start]
    assert ours[STAMPED.stop :] == theirs[STAMPED.stop :]


@pytest.mark.parametrize("table", READ_BY_PYFLUSS)
async def test_what_the_java_client_put_is_read_by_pyfluss(
    conn: fluss.FlussConnection, raw: RawClient, path: fluss.TablePath, table: str
) -> None:
    """Found by key and in the changelog; what the Java client wrote is what pyfluss sees."""
    put_all(raw, path, table)
    opened = await in_time(conn.get_table(path))
    puts = [e for name in names("put-kv", table) for e in fixture("put-kv", name)["expected"]]
    keys = schema_of(table).primary_key
    records = await changelog(opened, len(puts) if table != "kv_all" else 13)
    state = {tuple(r[k] for k in keys): r for _, kind, r in records if kind != "-D"}
    for _, kind, row in records:
        if kind == "-D":
            state.pop(tuple(row[k] for k in keys))
    assert await lookups(opened, [list(key) for key in state]) == list(state.values())


def test_the_fixtures_are_all_here() -> None:
    assert len(names("put-kv", "kv_all")) == 10
    assert len(LOOKUPS) == 5
    assert len(names("prefix-lookup", "kv_prefix")) == 2
