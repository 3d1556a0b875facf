"""Rows from files: formats, types, and the errors of bad files."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zufluss.cli.files import _ndjson, _whole_lines, read_batches
from zufluss.cli.formats import Format, format_of

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("day", pa.date32())])
PLAIN = pa.schema([("id", pa.int64()), ("name", pa.string())])


def read(path: Path, schema: pa.Schema) -> list[dict[str, object]]:
    batches = read_batches(path, format_of(path), schema)
    return [row for batch, _ in batches for row in batch.to_pylist()]


def test_parquet_rows_come_as_they_are(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "name": ["a", None]}, schema=PLAIN)
    pq.write_table(table, tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet", PLAIN) == table.to_pylist()


def test_csv_values_take_the_types_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('name,id,day\n007,1,2026-01-31\n"",2,\n,3,\n"two\nlines",4,\n')
    rows = read(path, SCHEMA)
    assert [row["name"] for row in rows] == ["007", "", None, "two\nlines"]
    assert [row["id"] for row in rows] == [1, 2, 3, 4]
    assert str(rows[0]["day"]) == "2026-01-31"


def test_csv_refuses_a_table_with_nested_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a\n1\n")
    with pytest.raises(ValueError, match="csv cannot hold the nested columns a; use ndjson"):
        read(path, pa.schema([("a", pa.list_(pa.int8()))]))


@pytest.mark.parametrize("schema", [PLAIN, SCHEMA], ids=["pyarrow", "python"])
def test_ndjson_fills_missing_columns_with_null(tmp_path: Path, schema: pa.Schema) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text('{"id": 1}\n\n{"name": "b", "id": 2}')
    assert [(row["id"], row["name"]) for row in read(path, schema)] == [(1, None), (2, "b")]


@pytest.mark.parametrize("schema", [PLAIN, SCHEMA], ids=["pyarrow", "python"])
@pytest.mark.parametrize("line", ['{"idd": 1}', '{"id": "x"}', '{"name": 5}', "{", "[1]"])
def test_a_bad_line_of_ndjson_is_refused(tmp_path: Path, schema: pa.Schema, line: str) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r".+"):
        read(path, schema)


@pytest.mark.parametrize(
    ("column", "data_type", "text", "problem"),
    [
        ("day", pa.date32(), '"31.1.2026"', "Invalid isoformat"),
        ("at", pa.timestamp("ms"), '"2026-01-31T08:00:00.0001"', "finer than the column's unit"),
        ("at", pa.timestamp("ms"), '"2026-01-31T08:00:00Z"', "no time zone"),
        ("raw", pa.binary(), '"§"', "ASCII"),
        ("sum", pa.decimal128(5, 2), '"a"', "Conversion"),
        ("rate", pa.float64(), '"1.5"', "a number"),
        ("tiny", pa.int8(), "300", "out of bounds|too large|not in range"),
        ("huge", pa.int64(), "9" * 30, "too"),
        ("parts", pa.struct([("a", pa.date32())]), "7", "no attribute"),
    ],
)
def test_a_value_that_does_not_fit_names_its_column(
    column: str, data_type: pa.DataType, text: str, problem: str
) -> None:
    schema = pa.schema([(column, data_type), ("other", pa.date32())])
    with pytest.raises(ValueError, match=rf"column {column}.*({problem})"):
        list(_ndjson(io.BytesIO(f'{{"{column}": {text}}}'.encode()), schema))


def test_a_map_is_read_from_pairs_and_from_an_object() -> None:
    schema = pa.schema([("m", pa.map_(pa.string(), pa.int32()))])
    text = b'{"m": [["a", 1]]}\n{"m": {"b": 2}}\n'
    (batch,) = _ndjson(io.BytesIO(text), schema)
    assert batch.column(0).to_pylist() == [[("a", 1)], [("b", 2)]]


class Pipe(io.RawIOBase):
    """A source that delivers one piece per read, as a pipe does."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)

    def read1(self, size: int) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def test_lines_are_delivered_as_they_arrive_and_never_torn() -> None:
    # `tail -f | zufluss append` would otherwise wait for megabytes, or parse half a line.
    pipe = Pipe(b"a\nb", b"b", b"b\n", b"\n", b"c\nd")
    assert list(_whole_lines(pipe)) == [b"a\n", b"bbb\n", b"c\n", b"d"]  # type: ignore[arg-type]


def test_the_progress_grows_to_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text('{"id": 1}\n')
    assert [part for _, part in read_batches(path, Format.NDJSON, PLAIN)] == [1.0]


def test_an_unknown_suffix_asks_for_the_format() -> None:
    with pytest.raises(ValueError, match="give --format parquet, csv, ndjson"):
        format_of(Path("rows.xlsx"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": null}', "column 'id' is NOT NULL; 1 rows have no value"),
        ('{"id": 1, "nope": 2}', "the table has no column nope; it has id, name"),
        ('{"id": "one"}', "column id"),
    ],
)
def test_a_line_that_does_not_fit_is_refused_with_the_column(
    tmp_path: Path, line: str, reason: str
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    path = tmp_path / "rows.ndjson"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=reason):
        list(read_batches(path, Format.NDJSON, schema))
