"""Lookups in a primary-key table: one key, many keys, or all keys with a prefix.

Single keys that are looked up in the same turn of the event loop are encoded, hashed, sent and
decoded together. Nothing waits for more keys: a lone lookup is sent alone. So many tasks that look
up one row each are nearly as fast as one task that looks up all of them.

| `lookup` of | returns |
|---|---|
| a value, a tuple of values, a dict that is one key | the row as a dict; None without a row |
| a list of those, a dict of columns, Arrow, pandas, polars | an Arrow table |

The table has the rows in the order of the keys. With `missing="null"` it has exactly one row per
key; a key without a row gives nulls in every column, and key columns are null only then. With
`missing="drop"` such rows are left out.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.convert import ColumnMismatchError, rows_to_batch, single_row, to_batches
from zufluss.client.core.keys import (
    check_primary_key,
    prefix_columns,
    prefix_encoder,
)
from zufluss.client.keyed.key_reader import LOOKUP, PREFIX_LOOKUP, KeyGroup, KeyReader
from zufluss.client.keyed.values import ValueDecoder, slices_of
from zufluss.errors import ZuflussError
from zufluss.model.html import html_table
from zufluss.model.table import TableInfo

Missing = Literal["null", "drop"]
"""Whether a key without a row gives a row of nulls or no row."""
Key: TypeAlias = dict[str, Any]
"""One key, by column."""
KeyValue: TypeAlias = (
    bool | int | float | str | bytes | Decimal | dt.date | dt.time | dt.datetime | np.generic
)
"""A value of a key column."""
SingleKey: TypeAlias = KeyValue | tuple[KeyValue, ...] | Mapping[str, KeyValue]
"""One key, as `lookup` takes it."""

_ARROW_INTERFACE: Final = ("__arrow_c_stream__", "__arrow_c_array__")
PIECE_KEYS: Final = 65_536
"""Keys of a large input that are looked up at a time."""


class Row(dict[str, Any]):
    """The row of a single lookup: a dict by column, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        return html_table(("column", "value"), [(name, _shown(self[name])) for name in self])


class AsyncLookup:
    """The lookups of one table; `table.lookup` and `table.prefix_lookup` use it."""

    def __init__(self, connection: ClusterConnection, info: TableInfo) -> None:
        from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

        check_primary_key(info, "lookup", "table.scan()")
        self._connection = connection
        self._info = info
        self._reader = KeyReader(connection, info, LOOKUP, KeyEncoder.of_stored_key(info))
        self._decoder = ValueDecoder(connection, info)
        self._waiting: list[tuple[Key, asyncio.Future[Row | None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        arrow = info.schema.arrow
        self._nullable = pa.schema([field.with_nullable(True) for field in arrow])

    # -- one key -------------------------------------------------------------------------------

    async def one(self, key: Key) -> Row | None:
        """The row of a key given by column, None if there is none."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Row | None] = loop.create_future()
        self._waiting.append((key, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._send_waiting)
        return await future

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._find(waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, waiting: list[tuple[Key, asyncio.Future[Row | None]]]) -> None:
        """Resolve all waiting lookups, with a row or an error."""
        try:
            await self._find_rows(waiting)
        except ColumnMismatchError as e:
            if len(waiting) > 1:  # one key does not fit; the others must not fail with it
                await asyncio.gather(*(self._find([single]) for single in waiting))
            else:
                _refuse(waiting, e)
        except ZuflussError as e:
            _refuse(waiting, e)
        except Exception as e:
            failure = ZuflussError(f"a lookup in table {self._info.path} failed: {e!r}")
            failure.__cause__ = e
            _refuse(waiting, failure)

    async def _find_rows(self, waiting: list[tuple[Key, asyncio.Future[Row | None]]]) -> None:
        async def deliver(answers: list[tuple[KeyGroup, list[bytes | None]]]) -> None:
            positions = np.concatenate([group.positions for group, _ in answers]).tolist()
            values = [value for _, results in answers for value in results]
            rows = iter(await self._rows(values))
            for position, value in zip(positions, values, strict=True):
                row = None if value is None else next(rows)
                if not waiting[position][1].done():
                    waiting[position][1].set_result(row)

        keys = rows_to_batch(
            [key for key, _ in waiting], self._info.schema.arrow, self._info.schema.primary_key
        )
        await self._reader.read(self._reader.groups(keys), deliver)

    async def _rows(self, values: Iterable[bytes | None]) -> list[Row]:
        present = [value for value in values if value is not None]
        if not present:
            return []
        decoded = await self._decoder.decode(slices_of(present))
        return [Row(row) for row in decoded.to_pylist()]

    # -- many keys -----------------------------------------------------------------------------

    async def many(self, keys: Iterable[pa.RecordBatch], missing: Missing) -> pa.Table:
        """Find the rows of batches of key columns; the module describes `missing`."""
        if missing not in ("null", "drop"):
            raise ValueError(f"missing {missing!r} is neither 'null' nor 'drop'")
        schema = self._nullable if missing == "null" else self._info.schema.arrow
        parts = [await self._piece(piece, missing) for piece in _pieces(keys)]
        return pa.Table.from_batches(parts, schema=schema)

    async def _piece(self, keys: pa.RecordBatch, missing: Missing) -> pa.RecordBatch:
        values: list[bytes | None] = [None] * keys.num_rows

        async def deliver(answers: list[tuple[KeyGroup, list[bytes | None]]]) -> None:
            for group, results in answers:
                for position, value in zip(group.positions.tolist(), results, strict=True):
                    values[position] = value

        await self._reader.read(self._reader.groups(keys), deliver)
        rows = await self._decoder.decode(slices_of(v for v in values if v is not None))
        if missing == "drop":
            return rows
        absent = np.fromiter((value is None for value in values), np.bool_, len(values))
        rows = pa.RecordBatch.from_arrays(rows.columns, schema=self._nullable)
        if not absent.any():
            return rows
        places = np.where(absent, 0, np.cumsum(~absent) - 1)
        return rows.take(pa.array(places, mask=absent))

    # -- prefixes ------------------------------------------------------------------------------

    async def prefix(self, prefixes: Iterable[pa.RecordBatch]) -> pa.Table:
        """Find the rows with these prefixes, by prefix and then by key."""
        info = self._info
        reader = KeyReader(self._connection, info, PREFIX_LOOKUP, prefix_encoder(info))
        parts = []
        for batch in _pieces(prefixes):
            lists: list[Sequence[bytes]] = [()] * batch.num_rows

            async def deliver(
                answers: list[tuple[KeyGroup, list[Sequence[bytes]]]],
                lists: list[Sequence[bytes]] = lists,
            ) -> None:
                for group, results in answers:
                    for position, values in zip(group.positions.tolist(), results, strict=True):
                        lists[position] = values

            await reader.read(reader.groups(batch), deliver)
            parts.append(await self._decoder.decode(slices_of(v for vs in lists for v in vs)))
        return pa.Table.from_batches(parts, schema=info.schema.arrow)


class KeyForm:
    """Converts keys in the forms that users write to key columns."""

    def __init__(self, info: TableInfo, columns: Sequence[str]) -> None:
        self._info = info
        self.columns = tuple(columns)
        """The columns of a key."""

    @classmethod
    def whole(cls, info: TableInfo) -> KeyForm:
        """The form of the keys of `lookup`."""
        check_primary_key(info, "lookup", "table.scan()")
        return cls(info, info.schema.primary_key)

    @classmethod
    def prefix(cls, info: TableInfo) -> KeyForm:
        """The form of the keys of `prefix_lookup`."""
        check_primary_key(info, "lookup", "table.scan()")
        return cls(info, prefix_columns(info))

    def single(self, keys: Any) -> Key | None:
        """The single key in `keys`, by column; None if `keys` are several keys."""
        if isinstance(keys, Mapping):
            row = single_row(keys, self._info.schema.arrow)
            return None if row is None else self._by_column(row)
        several = isinstance(keys, list) or bool(getattr(keys, "ndim", 0))
        if several or any(hasattr(keys, name) for name in _ARROW_INTERFACE):
            return None
        return self._by_column(keys)

    def batches(self, keys: Any) -> Iterator[pa.RecordBatch]:
        """Convert several keys to record batches of the key columns."""
        if isinstance(keys, list):
            keys = [self._by_column(key) for key in keys]
        elif len(self.columns) == 1 and _is_array(keys):
            keys = {self.columns[0]: keys}
        return to_batches(keys, self._info.schema.arrow, self.columns)

    def _by_column(self, key: Any) -> Key:
        if isinstance(key, Mapping):
            missing = [name for name in self.columns if name not in key]
            if missing:
                raise self._mismatch(f"lacks {', '.join(map(repr, missing))}")
            return dict(key)
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(self.columns):
            raise self._mismatch(f"has {len(values)} values")
        return dict(zip(self.columns, values, strict=True))

    def _mismatch(self, what: str) -> ColumnMismatchError:
        return ColumnMismatchError(
            f"a key for table {self._info.path} {what}; it must have {', '.join(self.columns)}, as "
            "a tuple in this order or as a dict"
        )


def _is_array(keys: Any) -> bool:
    """Whether `keys` is one column: an Arrow array, a numpy array, a series."""
    if isinstance(keys, pa.Array | pa.ChunkedArray):
        return True
    return getattr(keys, "ndim", None) == 1 or type(keys).__name__ == "Series"


def _shown(value: object) -> str:
    """A value as a notebook shows it; texts as they are."""
    return value if isinstance(value, str) else repr(value)


def _refuse(waiting: Iterable[tuple[Key, asyncio.Future[Row | None]]], why: ZuflussError) -> None:
    for _, future in waiting:
        if not future.done():
            future.set_exception(why)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for start in range(0, batch.num_rows, PIECE_KEYS):
            yield batch.slice(start, PIECE_KEYS)
