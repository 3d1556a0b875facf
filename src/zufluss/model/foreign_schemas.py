"""Schemas of other libraries as Arrow schemas: of polars, of pandas, of anything with columns.

| source | read as |
|---|---|
| an Arrow schema, table, batch or reader | its schema |
| a polars `Schema`, `DataFrame` or `LazyFrame` | what polars exports to Arrow |
| a pandas `DataFrame` | what Arrow infers from dtypes, and from the values of object columns |
| the `dtypes` of a pandas frame | the same, without values to look at |
| an object with `__arrow_c_schema__` or `__arrow_c_stream__` | the schema that it exports |

Rows are never read, except those of a pandas frame with object columns. The packages are not
imported here unless an object of them is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zufluss.errors import InvalidTableError

if TYPE_CHECKING:
    import pyarrow as pa


def arrow_schema_of(source: Any) -> pa.Schema | None:
    """The Arrow schema of an object of another library; None if the object is none of these."""
    import pyarrow as pa

    if isinstance(source, pa.Schema):
        return source
    if isinstance(source, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return source.schema
    package = type(source).__module__.split(".")[0]
    if package == "polars":
        return _polars_schema(source)
    if package == "pandas":
        return _pandas_schema(source)
    if hasattr(source, "__arrow_c_schema__"):
        return pa.schema(source)
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source).schema
    return None


def _polars_schema(source: Any) -> pa.Schema | None:
    import polars

    if isinstance(source, polars.DataFrame | polars.LazyFrame):
        source = source.collect_schema()
    if not isinstance(source, polars.Schema):
        return None
    import pyarrow as pa

    fields = []
    for name, kind in source.items():  # one by one, so that an error can name its column
        problem: Exception | None = None
        try:
            empty = polars.DataFrame(schema={name: kind})
            fields.append(empty.to_arrow(compat_level=polars.CompatLevel.oldest()).schema.field(0))
        except Exception as e:  # polars has errors of many kinds for types that Arrow lacks
            problem = e
        if problem is not None or kind == polars.Object:  # which would be pointers in Arrow
            raise InvalidTableError(
                f"column {name!r}: the polars type {kind} has no column type; cast the column "
                "first, for instance to polars.String"
            ) from problem
    return pa.schema(fields)


def _pandas_schema(source: Any) -> pa.Schema | None:
    import pandas
    import pyarrow as pa

    if isinstance(source, pandas.Series) and source.dtype == object:
        source = pandas.DataFrame({n: pandas.Series(dtype=kind) for n, kind in source.items()})
    if not isinstance(source, pandas.DataFrame):
        return None
    fields = []
    for name, series in source.items():
        try:
            kind = pa.Array.from_pandas(series).type
        except (pa.ArrowException, TypeError, ValueError) as e:
            raise InvalidTableError(
                f"column {name!r}: no column type has its values ({e}); convert the column to one "
                "type first"
            ) from e
        if pa.types.is_null(kind):
            raise InvalidTableError(
                f"column {name!r} has the dtype {series.dtype} and no value that tells its type; "
                f"give it one, for instance with frame.astype({{{name!r}: 'string'}})"
            )
        fields.append(pa.field(str(name), kind))
    return pa.schema(fields)
