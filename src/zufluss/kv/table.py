"""What the buckets of a primary-key table share: codecs, key encoding, merge engines, checks.

A `KvTable` belongs to one schema version. An altered table gets a new one; its buckets switch
between two batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.config import table_options as t
from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    InvalidTableError,
    InvalidTargetColumnError,
    SchemaNotExistError,
    ZuflussError,
)
from zufluss.kv.changelog import ChangelogEncoder
from zufluss.kv.merge.aggregation import Aggregation
from zufluss.kv.merge.base import MergeEngine
from zufluss.kv.merge.first_row import FirstRow
from zufluss.kv.merge.gather import prefixed
from zufluss.kv.merge.last_row import LastRow
from zufluss.kv.merge.partial import PartialUpdate
from zufluss.kv.merge.versioned import HighestVersion
from zufluss.model.merge import MergeMode, merge_engine
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo
from zufluss.record.aggregate.registry import check_targets, operations
from zufluss.record.batch.kv import split_values
from zufluss.record.keys.encoding import KeyEncoder
from zufluss.record.rows.codec import LocatedRows, RowCodec, RowFormat
from zufluss.record.slices import ABSENT, Slices

OVERWRITE = int(MergeMode.OVERWRITE)
"""`agg_mode` that puts rows as they are, past the merge engine."""


class KvTable:
    """A primary-key table under one schema version."""

    def __init__(self, info: TableInfo, schemas: Mapping[int, Schema]) -> None:
        self.info = info
        self.schemas = schemas
        self.schema = info.schema
        self.codec = RowCodec(info.schema)
        """Codec of stored rows, of this and earlier schemas."""
        self.changelog = ChangelogEncoder(info, self.codec)
        self.before_images = info.property(t.TABLE_CHANGELOG_IMAGE) == "FULL"
        self.deletes: str = self._delete_behavior()
        self.indexed = info.property(t.TABLE_KV_FORMAT) == "INDEXED"
        """Clients send and get indexed rows; they are stored compacted."""
        self.key = KeyEncoder.of_stored_key(info)
        """Encoder of the stored keys."""
        self.key_columns = [self.schema.index_of(name) for name in self.key.columns]
        self._key_codec = RowCodec(Schema.of([self.schema.columns[i] for i in self.key_columns]))
        self.auto_increment = self._auto_increment_column()
        """Position of the auto-increment column, None if the table has none."""
        self.field_counts = self._count_fields()
        """Number of fields by schema id."""
        self._merges = merge_engine(info.descriptor.properties)
        self._engine = self._configured_engine()
        self._overwrite = LastRow(before_images=self.before_images, ignore_deletes=False)

    def __repr__(self) -> str:
        return f"KvTable({self.info.path}, schema {self.info.schema_id})"

    def schema_of(self, schema_id: int) -> Schema:
        """Return a schema of the table; raises `SchemaNotExistError`."""
        schema = self.schemas.get(schema_id) if schema_id <= self.info.schema_id else None
        if schema is None:
            raise SchemaNotExistError(
                f"{self.info.path} has no schema {schema_id}; it has 1 to {self.info.schema_id}"
            )
        return schema

    @cache  # noqa: B019  its schemas are few, and go with the table
    def codec_of(self, schema_id: int, row_format: RowFormat = "COMPACTED") -> RowCodec:
        """Return the codec of rows of one schema."""
        return RowCodec(self.schema_of(schema_id), row_format)

    def to_compacted(self, rows: Slices, schema_id: int) -> Slices:
        """Return the rows that an INDEXED table was sent as compacted ones; absent stay absent."""
        return self._recoded(rows, schema_id, "INDEXED", "COMPACTED")

    def for_clients(self, values: Slices) -> list[bytes | None]:
        """Return stored values as clients get them: schema id and row in the table's format."""
        if not self.indexed:
            return values.tolist()
        out: list[bytes | None] = [None] * values.count
        there = np.flatnonzero(values.starts != ABSENT)
        schema_ids, rows = split_values(values.take(there))
        for schema_id in np.unique(schema_ids).tolist():
            mine = np.flatnonzero(schema_ids == schema_id)
            coded = self._recoded(rows.take(mine), schema_id, "COMPACTED", "INDEXED")
            prefix = int(schema_id).to_bytes(2, "little")
            for i, row in zip(there[mine].tolist(), coded.tolist(), strict=True):
                out[i] = prefix + (row or b"")
        return out

    def rows_of_keys(self, keys: Slices) -> pa.RecordBatch:
        """Return rows with these keys and NULL elsewhere.

        Raises `InvalidTableError` if keys of this encoding cannot be decoded.
        """
        if self.key.encoding != "compacted":
            raise InvalidTableError(
                f"{self.info.path} has keys in the {self.key.encoding} encoding, which cannot be "
                "turned back into columns; insert its rows with a put"
            )
        fields = self._key_codec.decode(self._keys_as_rows(keys))
        columns = [
            fields.column(field.name)
            if field.name in self.key.columns
            else pa.nulls(keys.count, field.type)
            for field in self.schema.arrow
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema.arrow)

    def _keys_as_rows(self, keys: Slices) -> Slices:
        """Return compacted keys as compacted rows of the key columns: null bits are added."""
        return prefixed(keys, 0, -(-len(self.key_columns) // 8))

    def _recoded(self, rows: Slices, schema_id: int, old: RowFormat, new: RowFormat) -> Slices:
        there = np.flatnonzero(rows.starts != ABSENT)
        batch = self.codec_of(schema_id, old).decode(rows.take(there))
        coded = self.codec_of(schema_id, new).encode(batch)
        starts, ends = rows.starts.copy(), rows.ends.copy()
        starts[there], ends[there] = coded.starts, coded.ends
        return Slices(coded.data, starts, ends)

    def engine(
        self, targets: Sequence[int], mode: int
    ) -> MergeEngine | PartialUpdate | Aggregation:
        """Return the engine for batches that write these columns (none: all).

        An overwrite goes past the merge engine of the table and past its delete behavior.
        Raises `InvalidTargetColumnError` for columns that cannot be written like that.
        """
        if self._merges == "aggregation" and mode != OVERWRITE:
            return self._aggregation(tuple(targets), mode)
        if mode not in (MergeMode.AGGREGATE, OVERWRITE):
            raise ZuflussError(
                f"agg_mode {mode} is for tables with the merge engine aggregation, which "
                f"{self.info.path} is not; use 0 or 1",
                code=ErrorCode.UNSUPPORTED_VERSION,
            )
        if targets or self.auto_increment is not None:
            return self._partial(tuple(targets), mode)
        if mode == OVERWRITE:
            return self._overwrite
        return self._engine

    def check_deletes(self, keys: Slices, mode: int) -> None:
        """Refuse deletes if the table takes none in this mode, and keys that no row can have."""
        if self.deletes == "DISABLE" and mode != OVERWRITE:
            raise ZuflussError(
                "Delete operations are disabled for this table. The table.delete.behavior is set "
                f"to 'disable'. So {self.info.path} takes no deletes",
                code=ErrorCode.DELETION_DISABLED_EXCEPTION,
            )
        if self.key.encoding == "compacted":
            try:
                self._key_codec.locate(self._keys_as_rows(keys))
            except CorruptRecordError as e:
                raise CorruptRecordError(
                    f"the key of a delete is not one of {', '.join(self.key.columns)}: {e.message}"
                ) from None

    def check_keys(self, located: LocatedRows, keys: Slices) -> None:
        """Refuse a row whose key is not the encoding of its columns."""
        if self.key.encoding == "compacted":
            self.check_compacted_keys(located.rows, located.field_counts, keys)
        else:
            self._refuse_key(self._encoded_mismatch(located, keys), keys)

    def check_compacted_keys(
        self, rows: Slices, field_counts: npt.NDArray[np.int32], keys: Slices
    ) -> None:
        """Do as `check_keys` for compacted keys, of rows that were validated."""
        wrong = self.codec.row_mismatch(rows, field_counts, self.key_columns, keys)
        self._refuse_key(wrong, keys)

    def _refuse_key(self, wrong: int, keys: Slices) -> None:
        if wrong >= 0:
            raise CorruptRecordError(
                f"a row of the batch has the key {keys.item(wrong)!r}, which is not the "
                f"{self.key.encoding} encoding of its columns {', '.join(self.key.columns)}"
            )

    def _encoded_mismatch(self, located: LocatedRows, keys: Slices) -> int:
        there = np.flatnonzero(located.rows.starts != ABSENT)
        data, offsets = self.key.encode(self.codec.columns(located, there))
        for i, row in enumerate(there.tolist()):
            if data[offsets[i] : offsets[i + 1]].tobytes() != keys.item(row):
                return row
        return -1

    def _delete_behavior(self) -> str:
        text = self.info.descriptor.properties.get(t.TABLE_DELETE_BEHAVIOR.key)
        if text is not None:
            return text.upper()
        return "ALLOW" if merge_engine(self.info.descriptor.properties) is None else "IGNORE"

    def _configured_engine(self) -> MergeEngine:
        if self._merges == "first_row":
            return FirstRow()
        if self._merges == "versioned":
            column = self.info.property(t.TABLE_MERGE_ENGINE_VERSIONED_VER_COLUMN)
            return HighestVersion(column, before_images=self.before_images)
        return LastRow(before_images=self.before_images, ignore_deletes=self.deletes == "IGNORE")

    def _auto_increment_column(self) -> int | None:
        names = self.schema.auto_increment_column
        return self.schema.index_of(names[0]) if names else None

    def _count_fields(self) -> npt.NDArray[np.int32]:
        counts = np.zeros(self.info.schema_id + 1, np.int32)
        for schema_id, schema in self.schemas.items():
            if schema_id <= self.info.schema_id:
                counts[schema_id] = len(schema.columns)
        return counts

    @lru_cache(maxsize=64)  # noqa: B019  a table's sets of target columns are few, and go with it
    def _partial(self, targets: tuple[int, ...], mode: int) -> PartialUpdate:
        self._check_partial(targets)
        if self._merges is not None and mode != OVERWRITE:
            raise InvalidTargetColumnError(
                f"{self.info.path} has the merge engine {self._merges}, "
                "which takes whole rows only; send every column"
            )
        keys = {self.schema.index_of(name) for name in self.schema.primary_key}
        return PartialUpdate(
            self.schema,
            targets=frozenset(targets),
            keys=frozenset(keys),
            auto_increment=self.auto_increment,
            before_images=self.before_images,
            ignore_deletes=self.deletes == "IGNORE" and mode != OVERWRITE,
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def _aggregation(self, targets: tuple[int, ...], mode: int) -> Aggregation:
        columns = frozenset(targets or range(len(self.schema.columns)))
        if targets or self.auto_increment is not None:
            self._check_partial(targets)
            check_targets(self.schema, columns)
        return Aggregation(
            self.codec,
            operations(self.schema, MergeMode(mode), columns, self.auto_increment),
            schema_id=self.info.schema_id,
            partial=bool(targets),
            ignore_deletes=self.deletes == "IGNORE",
        )

    def _check_partial(self, targets: tuple[int, ...]) -> None:
        """Refuse target columns that a partial update cannot have."""
        path, schema = self.info.path, self.schema
        wrong = [i for i in targets if not 0 <= i < len(schema.columns)]
        if wrong:
            raise InvalidTargetColumnError(
                f"{path} has no columns {wrong}; its columns are 0 to {len(schema.columns) - 1}"
            )
        if self.auto_increment is not None:
            self._check_auto_increment(targets, self.auto_increment)
        missing = [k for k in schema.primary_key if schema.index_of(k) not in targets]
        if missing:
            raise InvalidTargetColumnError(
                f"a partial update of {path} must contain the whole primary key; "
                f"{', '.join(missing)} is missing"
            )
        needed = [
            c.name
            for c in schema.columns
            if not c.data_type.nullable and c.name not in schema.primary_key
        ]
        if needed:
            raise InvalidTargetColumnError(
                f"{path} takes no partial updates: its columns {', '.join(needed)} are NOT NULL, "
                "and a partial update may leave columns empty"
            )

    def _check_auto_increment(self, targets: tuple[int, ...], column: int) -> None:
        name = self.schema.columns[column].name
        if not targets:
            raise InvalidTargetColumnError(
                f"{self.info.path} fills column {name!r} itself; name the columns you write, "
                f"all but {name!r}"
            )
        if column in targets:
            raise InvalidTargetColumnError(
                f"{self.info.path} fills column {name!r} itself; leave it out of the target columns"
            )
