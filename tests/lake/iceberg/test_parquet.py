"""Columns in the lake's types, as Parquet takes them."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zufluss.lake.iceberg.parquet import convert_array

VALUES = {
    "number": (pa.int32(), 7),
    "text": (pa.string(), "x"),
    "flag": (pa.bool_(), True),
    "list": (pa.list_(pa.int64()), [1, None]),
    "map": (pa.map_(pa.string(), pa.int64()), [("k", 1)]),
    "row": (pa.struct([("y", pa.int32())]), {"y": 2}),
}


def struct_with(kind: pa.DataType, values: list) -> pa.StructArray:
    """Structs of one field; where it is None the struct is NULL."""
    child = pa.array([values[0], *values], kind).slice(1)
    mask = pa.array([value is None for value in values])
    return pa.StructArray.from_arrays([child], names=["x"], mask=mask)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("start", [0, 1])
def test_a_null_struct_with_required_fields_can_be_written(name: str, start: int) -> None:
    kind, value = VALUES[name]
    wanted = pa.struct([pa.field("x", kind, nullable=False)])
    rows = struct_with(kind, [value, None, value, None]).slice(start)
    made = convert_array(rows, wanted)
    made.validate(full=True)
    file = io.BytesIO()
    pq.write_table(pa.table({"c": made}), file)
    assert pq.read_table(file)["c"].to_pylist() == rows.to_pylist()


def test_a_required_field_that_is_missing_in_a_row_that_is_there_is_refused() -> None:
    rows = pa.StructArray.from_arrays([pa.array([1, None])], names=["x"])
    made = convert_array(rows, pa.struct([pa.field("x", pa.int64(), nullable=False)]))
    with pytest.raises(pa.ArrowInvalid, match="non-nullable"):
        pq.write_table(pa.table({"c": made}), io.BytesIO())
