"""The statistics of a Parquet file for its Iceberg manifest, taken from its footer.

| statistic | of | from |
|---|---|---|
| column sizes | every column | compressed bytes over all row groups |
| value and null counts | columns not inside a list or map | the same sums |
| lower and upper bounds | the same, with min and max in every row group that has values | below |
| split offsets | the file | where row groups start |

Bounds are single values in Iceberg's binary form: numbers, dates and times little-endian in 4 or 8
bytes, booleans one byte, decimals big-endian in as few bytes as hold them, texts and bytes as they
are. Texts are cut to 16 code points and bytes to 16; a cut upper bound is made larger in its last
position that can be, and left out where none can. NaNs are in no bound.

`write.metadata.metrics.default` and `write.metadata.metrics.column.<name>` decide per column:
`none`, `counts`, `truncate(n)` (the default, n = 16) or `full`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from zufluss.lake.iceberg.parquet import field_id, leaves

_DEFAULT_MODE: Final = "truncate(16)"
_TRUNCATE = re.compile(r"truncate\((\d+)\)")
_CODE_POINT_MAX: Final = 0x10FFFF
_SURROGATES: Final = range(0xD800, 0xE000)


class FileStatistics(TypedDict):
    """The statistics fields of `FileWritten`."""

    records: int
    column_sizes: dict[int, int]
    value_counts: dict[int, int]
    null_counts: dict[int, int]
    lower_bounds: dict[int, bytes]
    upper_bounds: dict[int, bytes]
    split_offsets: tuple[int, ...]


def file_statistics(
    footer: pq.FileMetaData, schema: pa.Schema, properties: Mapping[str, str]
) -> FileStatistics:
    """The statistics of a file that was written with `schema`."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    out = FileStatistics(
        records=footer.num_rows,
        column_sizes={},
        value_counts={},
        null_counts={},
        lower_bounds={},
        upper_bounds={},
        split_offsets=tuple(_start(group) for group in groups),
    )
    for position, (field, repeated) in enumerate(leaves(schema)):
        chunks = [group.column(position) for group in groups]
        _add_column(out, field, chunks, _mode(chunks, properties), repeated)
    return out


def _start(group: pq.RowGroupMetaData) -> int:
    first = group.column(0)
    data: int = first.data_page_offset
    return min(data, first.dictionary_page_offset) if first.has_dictionary_page else data


def _mode(chunks: list[pq.ColumnChunkMetaData], properties: Mapping[str, str]) -> str:
    default = properties.get("write.metadata.metrics.default", _DEFAULT_MODE)
    if not chunks:
        return default
    return properties.get(f"write.metadata.metrics.column.{chunks[0].path_in_schema}", default)


def _add_column(
    out: FileStatistics, field: pa.Field, chunks: list[Any], mode: str, repeated: bool
) -> None:
    id = field_id(field)
    assert id is not None, f"column {field.name} was written without a field id"
    out["column_sizes"][id] = sum(chunk.total_compressed_size for chunk in chunks)
    statistics = [chunk.statistics for chunk in chunks]
    if repeated or mode == "none" or any(s is None or not s.has_null_count for s in statistics):
        return
    out["value_counts"][id] = sum(chunk.num_values for chunk in chunks)
    out["null_counts"][id] = sum(s.null_count for s in statistics)
    valued = [s for s in statistics if s.num_values]
    if mode == "counts" or not valued or not all(s.has_min_max for s in valued):
        return
    low, high = min(s.min_raw for s in valued), max(s.max_raw for s in valued)
    if pa.types.is_decimal(field.type) and isinstance(low, bytes):
        low = min((s.min_raw for s in valued), key=_signed)
        high = max((s.max_raw for s in valued), key=_signed)
    length = int(cut[1]) if (cut := _TRUNCATE.fullmatch(mode)) else None
    out["lower_bounds"][id] = _cut(bound_bytes(low, field.type), field.type, length)
    upper = _cut_up(bound_bytes(high, field.type), field.type, length)
    if upper is not None:
        out["upper_bounds"][id] = upper


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


def bound_bytes(raw: Any, kind: pa.DataType) -> bytes:
    """A value as Parquet stores it, in Iceberg's binary form."""
    if pa.types.is_decimal(kind):
        number = _signed(raw) if isinstance(raw, bytes) else int(raw)
        magnitude = number if number >= 0 else ~number
        return number.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)
    if isinstance(raw, bytes):
        return raw
    return struct.pack(_PACK[_width(kind)], raw)


_PACK: Final = {"bool": "?", "float": "<f", "double": "<d", "int": "<i", "long": "<q"}


def _width(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_floating(kind):
        return "float" if kind.bit_width == 32 else "double"
    return "int" if kind.bit_width == 32 else "long"


def bound_value(bound: bytes, kind: pa.DataType) -> Any:
    """The value of a bound, comparable with Arrow's integers, or with bytes for texts and bytes."""
    if pa.types.is_decimal(kind):
        return _signed(bound)
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return bound
    return struct.unpack(_PACK[_width(kind)], bound)[0]


def _cut(bound: bytes, kind: pa.DataType, length: int | None) -> bytes:
    if length is None or len(bound) <= length:
        return bound
    if pa.types.is_string(kind):
        return bound.decode()[:length].encode()
    return bound[:length] if pa.types.is_binary(kind) else bound


def _cut_up(bound: bytes, kind: pa.DataType, length: int | None) -> bytes | None:
    cut = _cut(bound, kind, length)
    if cut == bound:
        return bound
    if pa.types.is_string(kind):
        code = _raised([ord(c) for c in cut.decode()], _CODE_POINT_MAX, _next_code_point)
        return None if code is None else "".join(map(chr, code)).encode()
    raised = _raised(list(cut), 0xFF, lambda byte: byte + 1)
    return None if raised is None else bytes(raised)


def _raised(units: list[int], largest: int, after: Callable[[int], int]) -> list[int] | None:
    """The smallest sequence of at most this length above every sequence with this prefix."""
    while units and units[-1] == largest:
        units = units[:-1]
    return [*units[:-1], after(units[-1])] if units else None


def _next_code_point(point: int) -> int:
    return _SURROGATES.stop if point + 1 in _SURROGATES else point + 1
