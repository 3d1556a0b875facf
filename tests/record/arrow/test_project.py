"""Projection: the bytes change, the wanted columns do not; all three ways give the same bytes."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.arrow.projection import project
from tests.record.arrow_samples import (
    CODECS,
    NESTED,
    NESTED_ROWS,
    SMALL,
    SMALL_ROWS,
    array,
    log_batch,
    message,
    only,
    tables,
)
from tests.record.record_samples import fixture, same, table_schema
from tests.record.rows.plain_values import rows_of_batch
from zufluss.errors import CorruptRecordError, SchemaNotExistError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Schema
from zufluss.record.arrow.message import decode, parse_message
from zufluss.record.arrow.project import MAX_PLANS, Projector
from zufluss.record.header import build_batch, iter_headers, read_header

PROJECTED = ["kv_all", "log_lz4", "log_nested", "log_none", "log_stats", "log_zstd"]


def chosen(schema: Schema, columns: tuple[int, ...]) -> Schema:
    return Schema(tuple(schema.columns[i] for i in columns))


def one_by_one(projector: Projector, data: bytes, columns: tuple[int, ...]) -> bytes:
    pieces = []
    for pos, header in iter_headers(data):
        pieces += project(projector, data, pos, header, columns)
    return b"".join(pieces)


def projected(projector: Projector, data: bytes, columns: tuple[int, ...]) -> bytes:
    """The projection, found equal by both ways."""
    result = b"".join(projector.project_all(data, columns))
    assert one_by_one(projector, data, columns) == result
    return result


def rows_in(data: bytes, schema: Schema) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for pos, header in iter_headers(data):
        batch, _ = decode(data, pos, header, schema.arrow)
        batch.validate(full=True)
        rows += rows_of_batch(batch, schema)
    return rows


@settings(max_examples=100)
@given(tables(), st.sampled_from(CODECS), st.sampled_from([0, 1, 2]), st.data())
def test_a_projection_holds_the_wanted_columns_of_any_schema(
    table: tuple[Schema, pa.RecordBatch], codec: str | None, magic: int, data: st.DataObject
) -> None:
    schema, rows = table
    indexes = st.sets(st.integers(0, len(schema.columns) - 1), min_size=1)
    columns = tuple(sorted(data.draw(indexes)))
    batch = bytes(log_batch(rows, codec, magic=magic, writer_id=5, sequence=6))
    result = projected(Projector(only(schema), schema), batch * 3, columns)
    wanted = chosen(schema, columns)
    assert same(rows_in(result, wanted), rows_of_batch(rows.select(list(columns)), wanted) * 3)
    before, after = read_header(batch), read_header(result)
    assert after == before._replace(length=after.length, statistics_length=0)


@settings(max_examples=30)
@given(tables(), st.sampled_from(CODECS), st.sampled_from([0, 1, 2]), st.booleans())
def test_a_projection_to_no_columns_counts_records(
    table: tuple[Schema, pa.RecordBatch], codec: str | None, magic: int, append_only: bool
) -> None:
    schema, rows = table
    changes = None if append_only else b"\x01" * rows.num_rows
    batch = log_batch(rows, codec, magic=magic, append_only=append_only, change_types=changes)
    result = projected(Projector(only(schema), schema), bytes(batch) * 2, ())
    headers = list(iter_headers(result))
    assert len(headers) == 2
    for pos, header in headers:
        assert (header.record_count, header.change_types_size) == (
            rows.num_rows,
            len(changes or b""),
        )
        message = parse_message(result, pos + header.body_offset, pos + header.size)
        assert (message.length, message.node_count, message.buffer_count) == (rows.num_rows, 0, 0)
        decoded, _ = decode(result, pos, header, pa.schema([]))
        assert (decoded.num_rows, decoded.num_columns) == (rows.num_rows, 0)


@settings(max_examples=60)
@given(tables(), tables(), st.sampled_from(CODECS))
def test_a_column_that_an_older_batch_lacks_is_null(
    old: tuple[Schema, pa.RecordBatch], new: tuple[Schema, pa.RecordBatch], codec: str | None
) -> None:
    schema, rows = old
    latest = schema
    for i, column in enumerate(new[0].columns):
        latest = latest.add_column(f"n{i}", column.data_type.as_nullable(True), None)
    columns = (0, *range(len(schema.columns), len(latest.columns)))
    batch = bytes(log_batch(rows, codec))
    result = projected(Projector({1: schema, 2: latest}.get, latest), batch, columns)
    wanted = chosen(latest, columns)
    found = rows_in(result, wanted)
    assert same([row[0] for row in found], [row[0] for row in rows_of_batch(rows, schema)])
    assert all(value is None for row in found for value in row[1:])


@pytest.mark.parametrize("name", PROJECTED)
def test_our_projection_decodes_like_that_of_a_real_server(name: str) -> None:
    described, theirs = fixture(f"fetch-log/{name}-projected")
    _, whole = fixture(f"fetch-log/{name}")
    schema = table_schema(described["table"])
    columns = tuple(described["projected_fields"])
    ours = projected(Projector(only(schema), schema), whole, columns)
    wanted = chosen(schema, columns)
    assert rows_in(ours, wanted) == rows_in(theirs, wanted)
    for (_, mine), (_, other) in zip(iter_headers(ours), iter_headers(theirs), strict=True):
        assert mine._replace(length=0) == other._replace(length=0)


def test_change_types_stay_and_statistics_go() -> None:
    batch = build_batch(
        1,
        message(SMALL_ROWS),
        3,
        magic=1,
        append_only=False,
        change_types=b"\x01\x02\x03",
        statistics=b"any bytes",
    )
    result = projected(Projector(only(SMALL), SMALL), bytes(batch), (1,))
    decoded, changes = decode(result, 0, read_header(result), chosen(SMALL, (1,)).arrow)
    assert changes is not None
    assert changes.tolist() == [1, 2, 3]
    assert decoded.column(0).to_pylist() == ["eins", None, "dreiß €"]
    assert read_header(result).statistics_length == 0


def test_empty_batches_pass_unchanged() -> None:
    _, empty = fixture("fetch-log/empty-batch")
    assert projected(Projector(only(SMALL), SMALL), empty, (1,)) == empty


def test_batches_of_several_schemas_follow_each_other() -> None:
    wider = SMALL.add_column("z", parse_type("STRING"), None)
    rows = SMALL_ROWS.append_column(wider.arrow.field("z"), pa.array(["x", None, "y"]))
    old, new = bytes(log_batch(SMALL_ROWS)), bytes(log_batch(rows, schema_id=2))
    projector = Projector({1: SMALL, 2: wider}.get, wider)
    result = projected(projector, old + new + old, (0, 5))
    found = rows_in(result, chosen(wider, (0, 5)))
    nothing = [(1, None), (2, None), (3, None)]
    assert found == [*nothing, (1, "x"), (2, None), (3, "y"), *nothing]


def test_a_result_larger_than_its_source_still_fits() -> None:
    latest = SMALL
    for i in range(40):
        latest = latest.add_column(f"z{i}", parse_type("BINARY(100)"), None)
    rows = pa.concat_batches([SMALL_ROWS] * 20)
    projector = Projector({1: SMALL, 2: latest}.get, latest)
    columns = tuple(range(5, 45))
    result = projected(projector, bytes(log_batch(rows)), columns)
    assert len(rows_in(result, chosen(latest, columns))) == rows.num_rows


@pytest.mark.parametrize("codec", CODECS)
def test_a_plan_needs_only_the_metadata_of_the_batch(codec: str | None) -> None:
    data = bytes(log_batch(NESTED_ROWS, codec, magic=2))
    header = read_header(data)
    body = parse_message(data, header.body_offset, len(data)).body_start
    projector = Projector(only(NESTED), NESTED)
    prefix, pieces = projector.plan(data[:body], 0, header, (0, 2))
    result = bytes(prefix)
    for piece in pieces:
        result += data[piece[0] : sum(piece)] if isinstance(piece, tuple) else piece
    assert result == projected(projector, data, (0, 2))


def test_adjacent_columns_are_one_piece() -> None:
    data = bytes(log_batch(SMALL_ROWS))
    _, pieces = Projector(only(SMALL), SMALL).plan(data, 0, read_header(data), (1, 2, 3))
    assert len(pieces) == 1


def test_an_unknown_schema_id_is_an_error() -> None:
    data = bytes(log_batch(SMALL_ROWS, schema_id=8))
    with pytest.raises(SchemaNotExistError, match="unknown schema 8"):
        Projector(only(SMALL), SMALL).project_all(data, (1,))


def test_damage_on_disk_is_an_error_in_both_ways_and_never_a_crash() -> None:
    """A stored batch may rot; the kernel must not read outside because of it."""
    projector = Projector(only(NESTED), NESTED)
    for codec in CODECS:
        data = bytes(log_batch(NESTED_ROWS, codec, magic=1))
        for position in range(8, len(data)):
            for value in (0x00, 0x7F, 0xFF):
                changed = bytearray(data)
                changed[position] = value
                outcomes = []
                for way in (
                    lambda d: b"".join(projector.project_all(d, (1, 3))),
                    lambda d: one_by_one(projector, d, (1, 3)),
                ):
                    try:
                        outcomes.append(way(bytes(changed)))
                    except (CorruptRecordError, SchemaNotExistError):
                        outcomes.append(None)
                framed = struct.unpack_from("<i", changed, 8)[0] + 12 == len(data)
                assert outcomes[0] == outcomes[1] or not framed


def test_a_cut_batch_is_refused_by_the_fast_way() -> None:
    data = bytes(log_batch(SMALL_ROWS))
    projector = Projector(only(SMALL), SMALL)
    for size in range(1, len(data)):
        with pytest.raises(CorruptRecordError):
            projector.project_all(data + data[:size], (0,))


def test_plans_are_bounded() -> None:
    many = Schema.of(", ".join(f"c{i} INT" for i in range(MAX_PLANS + 9)))
    rows = pa.record_batch([pa.array([1], pa.int32())] * len(many.columns), schema=many.arrow)
    data = bytes(log_batch(rows))
    projector = Projector(only(many), many)
    for i in range(len(many.columns)):
        projector.project_all(data, (i,))
    assert repr(projector) == f"Projector({MAX_PLANS} plans)"


def test_the_fast_way_reads_any_buffer() -> None:
    data = bytes(log_batch(SMALL_ROWS))
    projector = Projector(only(SMALL), SMALL)
    expected = b"".join(projector.project_all(data, (1,)))
    for view in (bytearray(data), memoryview(data), memoryview(array(data))):
        assert b"".join(projector.project_all(view, (1,))) == expected
