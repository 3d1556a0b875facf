"""A bucket with the aggregation engine, put to by rows and read back as rows; no server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from zufluss.kv.memory import KvMemory
from zufluss.kv.store import KvStore
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.log.files import Files
from zufluss.model.aggregate import AggFunction
from zufluss.model.ddl import parse_type
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.record.batch.kv import build_kv_batch
from zufluss.record.rows.codec import LocatedRows, RowCodec
from zufluss.record.slices import ABSENT, Slices

Row = tuple[Any, ...]
Change = tuple[int, Row]
AGGREGATION = {"table.merge-engine": "aggregation"}


def column(name: str, data_type: str, function: str | None = None, **parameters: object) -> Column:
    """A column with a function."""
    named = None if function is None else AggFunction.named(function, parameters)
    return Column(name, parse_type(data_type), agg_function=named)


def schema_of(*columns: Column, key: Sequence[str] = ("k",)) -> Schema:
    """A schema with the key column `k` in front, unless the columns have the key."""
    named = {c.name for c in columns}
    keys = [column(name, "INT NOT NULL") for name in key if name not in named]
    return Schema.of([*keys, *columns], primary_key=key)


def comparable(value: Any) -> Any:
    """A value that equals another one only if their bits do."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (value, math.copysign(1, value))
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    return value


def arrow(schema: Schema, rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as a batch."""
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema.columns]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema.arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.arrow)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """A batch as rows."""
    return list(zip(*(c.to_pylist() for c in batch.columns), strict=True)) if batch else []


@dataclass
class Bucket:
    """One bucket of a table; `schemas` are its versions."""

    directory: Path
    schemas: Sequence[Schema]
    properties: Mapping[str, str] = field(default_factory=lambda: AGGREGATION)
    value_bytes_max: int = 1 << 24

    def __post_init__(self) -> None:
        self.memory = KvMemory(1 << 24, _at_once)
        store = KvStore.open(self.directory, self.memory, Files())
        self.tablet = KvTablet(self.table(1), store, self.value_bytes_max)

    @property
    def schema(self) -> Schema:
        """The one the bucket knows last."""
        return self.tablet.table.schema

    def table(self, version: int) -> KvTable:
        """The table at a version of its schema."""
        schema = self.schemas[version - 1]
        descriptor = TableDescriptor(
            schema, bucket_keys=schema.primary_key, bucket_count=1, properties=self.properties
        )
        info = TableInfo(TablePath("db", "t"), 1, version, descriptor, 0, 0)
        return KvTable(info, dict(enumerate(self.schemas[:version], 1)))

    def alter(self, version: int) -> None:
        """Go over to a version of the schema."""
        self.tablet.table = self.table(version)

    def put(
        self,
        *records: Row,
        mode: int = MergeMode.AGGREGATE,
        targets: Sequence[str] = (),
        version: int | None = None,
    ) -> list[Change]:
        """Put rows, and deletes as rows of a key alone; what the changelog has of it."""
        return self.prepared(*records, mode=mode, targets=targets, version=version)[0]

    def prepared(
        self,
        *records: Row,
        mode: int = MergeMode.AGGREGATE,
        targets: Sequence[str] = (),
        version: int | None = None,
    ) -> tuple[list[Change], int]:
        """As `put`; and the end offset."""
        table = self.tablet.table
        schema_id = version or table.info.schema_id
        schema = self.schemas[schema_id - 1]
        rows = [r if len(r) == len(schema.columns) else self._with_key(schema, r) for r in records]
        keys = Slices.contiguous(*table.key.encode(arrow(schema, rows)))
        coded = RowCodec(schema).encode(arrow(schema, rows))
        deletes = np.array([len(r) < len(schema.columns) for r in records], bool)
        coded = coded._replace(starts=np.where(deletes, ABSENT, coded.starts))
        batch = np.frombuffer(build_kv_batch(schema_id, keys, coded), np.uint8)
        positions = tuple(table.schema.index_of(name) for name in targets)
        prepared = self.tablet.prepare(batch, positions, mode, 0)
        assert prepared.changes is not None
        view, _ = prepared.changes.encode()
        assert len(view)
        self.tablet.store.horizon = prepared.end_offset
        made = prepared.changes.rows
        columns = table.codec.columns(made) if isinstance(made, LocatedRows) else made
        kinds = prepared.changes.kinds.tolist()
        return list(zip(kinds, rows_of(columns), strict=True)), prepared.end_offset

    def rows(self, *keys: Row) -> list[Row | None]:
        """The rows stored under keys."""
        table = self.tablet.table
        whole = arrow(table.schema, [self._with_key(table.schema, key) for key in keys])
        coded = Slices.contiguous(*table.key.encode(whole))
        found: list[Row | None] = []
        for value in self.tablet.store.get_at(coded, 1 << 60).tolist():
            if value is None:
                found.append(None)
                continue
            counts = np.array([table.field_counts[int.from_bytes(value[:2], "little")]], np.int32)
            found += rows_of(table.codec.decode(Slices.of([value[2:]]), counts))
        return found

    def _with_key(self, schema: Schema, key: Row) -> Row:
        values = dict(zip(schema.primary_key, key, strict=True))
        return tuple(values.get(c.name) for c in schema.columns)

    def close(self) -> None:
        """Give the memory back."""
        self.tablet.store.abandon()
        self.memory.close()


def _at_once(free: Callable[[], None]) -> None:
    free()
