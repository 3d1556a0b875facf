"""Reads rows from parquet, csv and ndjson files or standard input as record batches.

The table's schema says how to read text, so digits stay text in a STRING column. Columns are
matched by name. A column that the input lacks is left out of the batch (the writer fills in nulls);
a column that the table lacks is an error.

ndjson is read as it arrives, so `tail -f x | zufluss append t -` delivers line by line. pyarrow
parses plain columns; a table with dates, decimals, binary or maps goes through the slower
`jsonvalues`, which reads the forms that `zufluss scan` prints.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.types as pat

from zufluss.cli import jsonvalues
from zufluss.cli.formats import Format

BATCH_ROWS = 64 * 1024
"""Rows per parquet batch."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of a text file that are read at once."""


def read_batches(
    path: Path | None, form: Format, schema: pa.Schema
) -> Iterator[tuple[pa.RecordBatch, float | None]]:
    """Yield the batches of a file, or of stdin if None, with the share read so far (0 to 1)."""
    source: BinaryIO = sys.stdin.buffer if path is None else path.open("rb")
    with source:
        readers: dict[Format, Callable[[BinaryIO, pa.Schema], Iterator[pa.RecordBatch]]]
        readers = {Format.PARQUET: _parquet, Format.CSV: _csv, Format.NDJSON: _ndjson}
        size = path.stat().st_size if path and form is not Format.PARQUET else 0
        try:
            for batch in readers[form](source, schema):
                yield batch, source.tell() / size if size and not source.closed else None
        except pa.ArrowException as problem:
            raise ValueError(str(problem)) from None


def _parquet(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet  # loads the clients of all object stores

    seekable = source if source.seekable() else io.BytesIO(source.read())
    yield from pyarrow.parquet.ParquetFile(seekable).iter_batches(batch_size=BATCH_ROWS)


def _csv(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    types = {field.name: field.type for field in schema if not pat.is_nested(field.type)}
    reader = pyarrow.csv.open_csv(
        source,
        read_options=pyarrow.csv.ReadOptions(block_size=CHUNK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    nested = [name for name in reader.schema.names if name in schema.names and name not in types]
    if nested:
        raise ValueError(f"csv cannot hold the nested columns {', '.join(nested)}; use ndjson")
    yield from reader


def _ndjson(source: BinaryIO, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    parse = _parse_plain if all(_is_plain(field.type) for field in schema) else _parse_any
    for lines in _whole_lines(source):
        yield from parse(lines, schema)


def _whole_lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that have arrived, only whole ones; at the end the rest."""
    read = getattr(source, "read1", source.read)
    pieces: list[bytes] = []
    while piece := read(CHUNK_BYTES):
        head, newline, tail = piece.rpartition(b"\n")
        if newline:
            lines = b"".join((*pieces, head, newline))
            pieces = [tail]
            if lines.strip():
                yield lines
        else:
            pieces.append(piece)
    rest = b"".join(pieces)
    if rest.strip():
        yield rest


def _parse_plain(lines: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    try:
        table = pyarrow.json.read_json(
            io.BytesIO(lines),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="error"
            ),
        )
    except pa.ArrowInvalid:
        yield from _parse_any(lines, schema)  # raises an error that names the wrong column
    else:
        yield from table.to_batches()


def _parse_any(lines: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    rows = [json.loads(line, parse_float=Decimal) for line in lines.splitlines() if line.strip()]
    for row in rows:
        _check_row(row, schema)
    columns = [_column(rows, field) for field in schema]
    yield pa.RecordBatch.from_arrays(columns, names=schema.names)


def _column(rows: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    convert = jsonvalues.converter(field.type)
    item: Any = None
    try:
        values = [convert(item := row.get(field.name)) for row in rows]
    except (ValueError, TypeError, AttributeError, ArithmeticError) as problem:
        raise ValueError(
            f"column {field.name}: {item!r:.80} is no {field.type}: {problem}"
        ) from None
    try:
        column = pa.array(values, field.type)
    except (pa.ArrowException, OverflowError) as problem:
        raise ValueError(f"column {field.name} is {field.type}: {problem}") from None
    if column.null_count and not field.nullable:
        raise ValueError(
            f"column {field.name!r} is NOT NULL; {column.null_count} rows have no value"
        )
    return column


def _check_row(row: Any, schema: pa.Schema) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80} is not a row; allowed: one JSON object per line")
    unknown = row.keys() - set(schema.names)
    if unknown:
        raise ValueError(
            f"the table has no column {', '.join(sorted(unknown))}; "
            f"it has {', '.join(schema.names)}"
        )


def _is_plain(data_type: pa.DataType) -> bool:
    """Whether pyarrow's JSON parser reads the type in every form that `zufluss scan` prints."""
    if pat.is_list(data_type):
        return _is_plain(data_type.value_type)
    if pat.is_struct(data_type):
        return all(_is_plain(field.type) for field in data_type)
    plain = (pat.is_integer, pat.is_float32, pat.is_float64, pat.is_boolean, pat.is_string)
    return any(is_one(data_type) for is_one in plain)
