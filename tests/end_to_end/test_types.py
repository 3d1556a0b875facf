"""Every data type through pyfluss: appended as Arrow and as rows, read back as both."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import fluss
import pandas as pd
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import append, create, fresh_path, in_time, read_arrow, read_records
from tests.end_to_end.samples import ALL_TYPES, SAMPLES, Sample, all_types_batch

COMPRESSIONS = ["ZSTD", "LZ4_FRAME", "NONE"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
async def test_a_type_appended_as_arrow_comes_back_as_arrow(
    conn: fluss.FlussConnection, path: fluss.TablePath, sample: Sample
) -> None:
    table = await create(conn, path, pa.schema([("x", sample.type)]))
    await append(table, pa.record_batch([sample.array()], names=["x"]))
    got = (await read_arrow(table)).column("x").combine_chunks()
    assert got.equals(sample.array()), got.to_pylist()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
async def test_a_type_appended_as_rows_comes_back_as_records_and_arrow(
    conn: fluss.FlussConnection, path: fluss.TablePath, sample: Sample
) -> None:
    table = await create(conn, path, pa.schema([("x", sample.type)]))
    expected = sample.row_array()
    writer = table.new_append().create_writer()
    for value in expected.to_pylist():
        writer.append({"x": value})
    await in_time(writer.flush())
    got = (await read_arrow(table)).column("x").combine_chunks()
    assert got.equals(expected), got.to_pylist()
    records = await read_records(table, len(expected))
    assert [r.row["x"] for r in records] == expected.to_pylist()


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
async def test_not_a_number_comes_back_as_itself(
    conn: fluss.FlussConnection, path: fluss.TablePath, kind: pa.DataType
) -> None:
    table = await create(conn, path, pa.schema([("x", kind)]))
    await append(table, pa.record_batch([pa.array([math.nan, None, 1.0], kind)], names=["x"]))
    got = (await read_arrow(table)).column("x").to_pylist()
    assert math.isnan(got[0])
    assert got[1:] == [None, 1.0]


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_every_type_at_once_survives_every_compression(
    conn: fluss.FlussConnection, path: fluss.TablePath, compression: str
) -> None:
    properties = {"table.log.arrow.compression.type": compression}
    table = await create(conn, path, ALL_TYPES, properties=properties)
    batch = all_types_batch(200)
    await append(table, batch, batch.slice(3, 1))
    expected = pa.Table.from_batches([batch, batch.slice(3, 1)])
    assert (await read_arrow(table)).equals(expected)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
async def test_the_server_cuts_a_single_column_out_of_every_type(
    conn: fluss.FlussConnection,
    every_type: dict[str, fluss.FlussTable],
    sample: Sample,
    compression: str,
) -> None:
    got = await read_arrow(every_type[compression], columns=[sample.name])
    assert got.schema.names == [sample.name]
    expected = all_types_batch(50).column(sample.name)
    assert got.column(0).combine_chunks().equals(expected)


@pytest.fixture(scope="module")
def every_type(conn: fluss.FlussConnection) -> dict[str, fluss.FlussTable]:
    """A filled table with every type per compression."""
    return asyncio.run(_every_type(conn))


async def _every_type(conn: fluss.FlussConnection) -> dict[str, fluss.FlussTable]:
    tables = {}
    for compression in COMPRESSIONS:
        path = fresh_path(f"every_type_{compression}")
        properties = {"table.log.arrow.compression.type": compression}
        tables[compression] = await create(conn, path, ALL_TYPES, properties=properties)
        await append(tables[compression], all_types_batch(50))
    return tables


async def test_all_nulls_and_no_nulls_come_back(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, ALL_TYPES)
    nulls = pa.RecordBatch.from_arrays([pa.nulls(9, f.type) for f in ALL_TYPES], schema=ALL_TYPES)
    full = pa.RecordBatch.from_arrays(
        [s.array().drop_null().take(pa.array([0] * 9)) for s in SAMPLES], schema=ALL_TYPES
    )
    await append(table, nulls, full)
    assert (await read_arrow(table)).equals(pa.Table.from_batches([nulls, full]))


WIDER: list[tuple[pa.DataType, pa.DataType, list[Any]]] = [
    (pa.uint8(), pa.int8(), [0, 127, None]),
    (pa.uint32(), pa.int32(), [0, 2**31 - 1, None]),
    (pa.large_string(), pa.string(), ["a", None, ""]),
    (pa.large_binary(), pa.binary(), [b"a", None, b""]),
]


@pytest.mark.parametrize(("given", "stored", "values"), WIDER, ids=lambda v: str(v)[:20])
async def test_a_foreign_arrow_type_is_stored_as_its_nearest(
    conn: fluss.FlussConnection,
    path: fluss.TablePath,
    given: pa.DataType,
    stored: pa.DataType,
    values: list[Any],
) -> None:
    table = await create(conn, path, pa.schema([("x", given)]))
    assert table.arrow_schema.field("x").type == stored
    await append(table, pa.record_batch([pa.array(values, stored)], names=["x"]))
    assert (await read_arrow(table)).column("x").to_pylist() == values


async def test_a_pandas_frame_comes_back_as_a_pandas_frame(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string()), ("f", pa.float64())])
    table = await create(conn, path, schema)
    frame = pd.DataFrame({"n": [1, 2, 3], "s": ["a", "b", "c"], "f": [0.5, 1.5, -2.0]})
    writer = table.new_append().create_writer()
    writer.write_pandas(frame)
    await in_time(writer.flush())
    scanner = await table.new_scan().create_record_batch_log_scanner()
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    got = await in_time(scanner.to_pandas())
    assert got.to_dict("list") == frame.to_dict("list")


async def test_rows_given_as_lists_tuples_and_partial_dicts_are_the_same_rows(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    writer = table.new_append().create_writer()
    writer.append([1, "list"])
    writer.append((2, "tuple"))
    writer.append({"id": 3})
    await in_time(writer.flush())
    records = await read_records(table, 3)
    assert [r.row for r in records] == [
        {"id": 1, "text": "list"},
        {"id": 2, "text": "tuple"},
        {"id": 3, "text": None},
    ]
    assert all(r.change_type == fluss.ChangeType.AppendOnly for r in records)
