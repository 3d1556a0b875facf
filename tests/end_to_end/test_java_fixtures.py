"""What the Java client sent to a real Fluss server, sent to ours, and read back by pyfluss.

The table descriptors come back as Fluss keeps them, the batches byte for byte, and where pyfluss
reads the log format, the values are those of the fixture.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import fluss
import numpy as np
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import create, ids, in_time, read_arrow, read_records
from tests.end_to_end.raw import RawClient, table_path
from tests.paths import FIXTURES
from zufluss.errors import ConfigError
from zufluss.record.header import build_batch, iter_headers, seal
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

TABLES = sorted(
    p.name.removesuffix(".request.json") for p in FIXTURES.glob("tables/*.request.json")
)
WITHOUT_FUNCTIONS = ("agg", "rich")
"""Tables with columns that Fluss aggregates in a way that nobody asked for."""
BATCHES = sorted(p.stem for p in FIXTURES.glob("produce-log/*.bin"))
READ_BY_PYFLUSS = [name for name in BATCHES if name not in ("log_indexed", "log_compacted")]
STAMPED = 21
"""Bytes of a magic 0 or 1 batch before its CRC: what the server sets, and length and magic."""


def create_table(raw: RawClient, path: fluss.TablePath, name: str) -> int:
    """Create the table of a fixture; its id."""
    request = m.CreateTableRequest(
        table_path=table_path(path.database_name, path.table_name),
        table_json=(FIXTURES / "tables" / f"{name}.request.json").read_bytes(),
        ignore_if_exists=False,
    )
    raw.call(ApiKey.CREATE_TABLE, request)
    return raw.table_id(path.database_name, path.table_name)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in WITHOUT_FUNCTIONS])
def test_a_table_is_kept_as_fluss_keeps_it(
    raw: RawClient, path: fluss.TablePath, name: str
) -> None:
    create_table(raw, path, name)
    where = table_path(path.database_name, path.table_name)
    answer = raw.call(ApiKey.GET_TABLE_INFO, m.GetTableInfoRequest(table_path=where))
    stored = json.loads((FIXTURES / "tables" / f"{name}.stored.json").read_bytes())
    assert json.loads(answer.table_json) == stored


@pytest.mark.parametrize("name", WITHOUT_FUNCTIONS)
def test_a_table_whose_columns_lack_functions_is_refused(
    raw: RawClient, path: fluss.TablePath, name: str
) -> None:
    with pytest.raises(ConfigError, match="has no aggregation function; name one"):
        create_table(raw, path, name)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_the_java_client_is_kept_byte_for_byte(
    raw: RawClient, path: fluss.TablePath, name: str
) -> None:
    table_id = create_table(raw, path, name)
    records = (FIXTURES / "produce-log" / f"{name}.bin").read_bytes()
    entry = raw.produce(table_id, records)
    assert (entry.error_code, entry.base_offset) == (0, 0), entry.error_message
    kept = raw.fetch(table_id).records
    assert len(kept) == len(records)
    (header,) = (header for _, header in iter_headers(kept))
    assert header.base_offset == 0
    assert header.timestamp > 0
    assert kept[8:13] == records[8:13]
    assert kept[STAMPED:] == records[STAMPED:]
    assert raw.end_offset(table_id) == header.record_count


@pytest.mark.parametrize("name", READ_BY_PYFLUSS)
async def test_a_batch_of_the_java_client_is_read_by_pyfluss(
    conn: fluss.FlussConnection, raw: RawClient, path: fluss.TablePath, name: str
) -> None:
    raw.produce(
        create_table(raw, path, name), (FIXTURES / "produce-log" / f"{name}.bin").read_bytes()
    )
    expected = json.loads((FIXTURES / "produce-log" / f"{name}.json").read_bytes())["expected"]
    rows = await read_arrow(await in_time(conn.get_table(path)))
    columns = [[plain(v, c.type) for v in c] for c in rows.columns]
    assert [list(row) for row in zip(*columns, strict=True)] == expected
    for index, name in enumerate(rows.schema.names):
        one = await read_arrow(await in_time(conn.get_table(path)), columns=[name])
        assert [plain(v, one.column(0).type) for v in one.column(0)] == columns[index]


def plain(value: pa.Scalar, kind: pa.DataType) -> Any:
    """A value in the form of the fixtures."""
    if not value.is_valid:
        return None
    if pa.types.is_map(kind):
        pairs = [tuple(pair.values()) for pair in value.values]
        return {
            "keys": [plain(k, kind.key_type) for k, _ in pairs],
            "values": [plain(v, kind.item_type) for _, v in pairs],
        }
    if pa.types.is_list(kind):
        return [plain(v, kind.value_type) for v in value.values]
    if pa.types.is_struct(kind):
        return [plain(value[i], kind.field(i).type) for i in range(kind.num_fields)]
    return _scalar(value, kind)


def _scalar(value: pa.Scalar, kind: pa.DataType) -> Any:
    if pa.types.is_timestamp(kind):
        nanos = value.value * {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[kind.unit]
        return {"ms": nanos // 10**6, "ns": nanos % 10**6}
    if pa.types.is_time(kind):
        return value.value * 1000 // {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
    if pa.types.is_date(kind):
        return (value.as_py() - dt.date(1970, 1, 1)).days
    if pa.types.is_decimal(kind):
        return f"{value.as_py():f}"
    if pa.types.is_float32(kind):
        return float(str(np.float32(value.as_py())))  # the shortest text that means this float
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return {"hex": value.as_py().hex()}
    return value.as_py()


@pytest.mark.parametrize("magic", [0, 1, 2])
async def test_a_batch_of_every_magic_is_stored_and_read_by_pyfluss(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient, magic: int
) -> None:
    table = await create(conn, path)
    table_id = table.get_table_info().table_id
    batch = build_batch(1, ids(0, 5).serialize().to_pybytes(), 5, magic=magic)
    for _ in range(2):
        assert raw.produce(table_id, bytes(batch)).error_code == 0
    headers = raw.batches(table_id)
    assert [h.magic for h in headers] == [magic, magic]
    assert [h.base_offset for h in headers] == [0, 5]
    assert len({h.leader_epoch for h in headers}) == 1
    records = await read_records(table, 10)
    assert [(r.offset, r.row["id"]) for r in records] == [(i, i % 5) for i in range(10)]
    projected = await read_arrow(table, columns=["text"])
    assert projected.column(0).to_pylist() == [f"row {i % 5}" for i in range(10)]


async def test_what_the_server_sets_is_set_whatever_the_client_wrote_there(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    """Base offset, commit time and leader epoch lie outside the CRC; a client's are ignored."""
    table = await create(conn, path)
    table_id = table.get_table_info().table_id
    batch = build_batch(1, ids(0, 5).serialize().to_pybytes(), 5, magic=2)
    batch[0:8] = (10**12).to_bytes(8, "little")
    batch[13:25] = b"\xff" * 12
    seal(batch, 0)
    assert raw.produce(table_id, bytes(batch)).error_code == 0
    (header,) = raw.batches(table_id)
    assert header.base_offset == 0
    assert 0 < header.timestamp < 2**44
    assert header.leader_epoch >= 0
