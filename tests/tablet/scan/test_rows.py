"""Rows of a scan on the server: what a client would make of all of them, in any schema."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.test_predicate import EXPRESSIONS, SCHEMA, canonical_row, holds, rows, stored
from zufluss.errors import CorruptRecordError, InvalidColumnProjectionError, SchemaNotExistError
from zufluss.kv.table import KvTable
from zufluss.model.ddl import parse_type
from zufluss.model.expression import Expression, col
from zufluss.model.predicate import InvalidPredicateError, Leaf, LeafFunction
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.record.batch.kv import parse_value_batch, split_values
from zufluss.record.slices import Slices
from zufluss.tablet.scan.rows import DECODED_BYTES_MAX, RowReader, value_batch

KEY = Column("id", parse_type("BIGINT NOT NULL"), id=100)


def versions() -> dict[int, Schema]:
    """A table that began with ten columns, and got the others one after the other."""
    columns = [KEY, *SCHEMA.columns]
    return {
        i + 1: Schema(tuple(columns[: 10 + i]), primary_key=("id",))
        for i in range(len(columns) - 9)
    }


VERSIONS = versions()
LATEST = max(VERSIONS)


def table_of(kv_format: str = "COMPACTED") -> KvTable:
    descriptor = TableDescriptor(
        VERSIONS[LATEST], bucket_count=1, properties={"table.kv.format": kv_format}
    )
    return KvTable(TableInfo(TablePath("db", "t"), 1, LATEST, descriptor, 0, 0), VERSIONS)


TABLE = table_of()


def value(schema_id: int, row: dict[str, Any]) -> bytes:
    """A row as it was stored under a schema."""
    schema = VERSIONS[schema_id]
    batch = pa.RecordBatch.from_pylist([{n: row[n] for n in schema.names}], schema=schema.arrow)
    (coded,) = TABLE.codec_of(schema_id).encode(batch).tolist()
    assert coded is not None
    return schema_id.to_bytes(2, "little") + coded


def _in_a_row(row: dict[str, Any]) -> dict[str, Any]:
    """What a stored row has of it: times in milliseconds."""
    row = stored(row)
    time = row["t6"]
    if time is not None:
        row["t6"] = time.replace(microsecond=time.microsecond // 1000 * 1000)
    return row


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[bytes], list[dict[str, Any]]]:
    """Stored values of several schemas, and their rows under the latest one."""
    known = draw(st.lists(st.tuples(st.sampled_from([1, 5, LATEST]), rows()), max_size=8))
    values, full = [], []
    for i, (schema_id, row) in enumerate(known):
        row = {**_in_a_row(row), "id": i}
        values.append(value(schema_id, row))
        there = VERSIONS[schema_id].names
        full.append({name: v if name in there else None for name, v in row.items()})
    return values, full


@given(
    tables(),
    st.none() | EXPRESSIONS,
    st.sampled_from([LATEST, LATEST, 7]),
    st.data(),
    st.integers(1, 9),
)
@settings(max_examples=100)
def test_a_scan_on_the_server_gets_what_a_client_makes_of_all_rows(
    made: tuple[list[bytes], list[dict[str, Any]]],
    expression: Expression | None,
    schema_id: int,
    data: st.DataObject,
    limit: int,
) -> None:
    values, full = made
    schema = VERSIONS[schema_id]
    if expression is not None and not expression.columns <= set(schema.names):
        expression = None
    columns = data.draw(st.lists(st.sampled_from(range(len(schema.columns))), unique=True))
    predicate = None if expression is None else expression.resolve(schema)
    reader = RowReader(TABLE, schema, columns, predicate)
    found = reader.read(Slices.of(values), limit)
    arrow = pa.schema([schema.arrow.field(i) for i in columns or range(len(schema.columns))])
    kept = [
        row
        for row in full
        if predicate is None or holds(predicate, canonical_row({**row, "arr": None}))
    ]
    wanted = [{name: row[name] for name in arrow.names} for row in kept[:limit]]
    if not wanted:
        assert found == (None, 0, None)
        return
    assert found.records is not None
    batch = pa.ipc.read_record_batch(pa.py_buffer(found.records), arrow)
    batch.validate(full=True)
    assert batch.to_pylist() == pa.Table.from_pylist(wanted, schema=arrow).to_pylist()
    assert found.count == batch.num_rows
    more = predicate is not None and len(kept) > limit
    last = kept[limit - 1]["id"].to_bytes(1, "little") if more else None
    assert found.cut_key == last, "the scan goes on behind another row than the last one"
    if expression is not None and expression.columns <= {*arrow.names} and not more:
        exact = pa.Table.from_pylist(full, schema=VERSIONS[LATEST].arrow)
        exact = exact.filter(expression.to_arrow(schema)).select(arrow.names)
        assert exact.to_pylist() == batch.filter(expression.to_arrow(schema)).to_pylist()


def simple(count: int) -> Slices:
    row = dict.fromkeys(SCHEMA.names)
    return Slices.of([value(LATEST, {**row, "id": i, "s": "x" * 50}) for i in range(count)])


def test_projection_and_filter_send_fewer_bytes() -> None:
    everything = RowReader(TABLE, VERSIONS[LATEST]).read(simple(100), 100)
    few = (col("id") < 10).resolve(VERSIONS[LATEST])
    filtered = RowReader(TABLE, VERSIONS[LATEST], (), few).read(simple(100), 100)
    narrow = RowReader(TABLE, VERSIONS[LATEST], (0,), few).read(simple(100), 100)
    assert filtered.count == narrow.count == 10
    assert everything.records is not None
    assert filtered.records is not None
    assert narrow.records is not None
    assert len(narrow.records) < len(filtered.records) < len(everything.records)


def test_rows_that_are_decoded_at_once_are_bounded_by_their_columns() -> None:
    reader = RowReader(TABLE, VERSIONS[LATEST])
    _, rows = split_values(simple(640))
    located = TABLE.codec.locate(rows)
    assert 1 < reader.rows_max * located.cells.nbytes // 640 <= DECODED_BYTES_MAX


@pytest.mark.parametrize("columns", [[-1], [0, 0], [len(SCHEMA.columns) + 1]])
def test_columns_that_cannot_be_projected_are_refused(columns: list[int]) -> None:
    with pytest.raises(InvalidColumnProjectionError, match="each once"):
        RowReader(TABLE, VERSIONS[LATEST], columns)


def test_a_column_that_the_schema_of_the_request_lacks_cannot_be_projected() -> None:
    with pytest.raises(InvalidColumnProjectionError):
        RowReader(TABLE, VERSIONS[1], [len(VERSIONS[1].columns)])


def test_a_literal_that_no_value_can_equal_is_refused_before_a_row_is_read() -> None:
    column = VERSIONS[LATEST].column("big")
    leaf = Leaf(LeafFunction.EQUAL, column.id, (Decimal(2**127),))
    with pytest.raises(InvalidPredicateError, match="not a value of the column"):
        RowReader(TABLE, VERSIONS[LATEST], (), leaf)


def test_a_stored_row_of_an_unknown_schema_is_an_error_and_no_missing_row() -> None:
    wrong = (LATEST + 1).to_bytes(2, "little") + b"\0" * 30
    with pytest.raises(CorruptRecordError, match=f"schema {LATEST + 1}"):
        RowReader(TABLE, VERSIONS[LATEST]).read(Slices.of([wrong]), 1)


def test_a_stored_row_that_is_damaged_is_an_error_and_no_missing_row() -> None:
    good = value(1, {**dict.fromkeys(SCHEMA.names), "id": 1})
    with pytest.raises(CorruptRecordError):
        RowReader(TABLE, VERSIONS[LATEST]).read(Slices.of([good[:-1]]), 1)


def test_clients_of_fluss_get_stored_rows_in_the_format_of_the_table() -> None:
    values = simple(3)
    assert parse_value_batch(value_batch(TABLE, values)).tolist() == values.tolist()
    indexed = table_of("INDEXED")
    (first, *_) = parse_value_batch(value_batch(indexed, values)).tolist()
    assert first is not None
    assert first[:2] == LATEST.to_bytes(2, "little")
    decoded = indexed.codec_of(LATEST, "INDEXED").decode(Slices.of([first[2:]]))
    assert decoded.column("s").to_pylist() == ["x" * 50]


def test_a_schema_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(SchemaNotExistError):
        TABLE.schema_of(LATEST + 1)
