"""Tables and databases as nouns: paths, buckets, descriptors, infos.

A client sends a `TableDescriptor` to create a table; the server stores and returns it. Its JSON
form is

| key               | value                                                                   |
|-------------------|-------------------------------------------------------------------------|
| version           | 1                                                                       |
| schema            | see `schema.py`                                                         |
| comment           | text, absent if there is none                                           |
| partition_key     | [name], required                                                        |
| bucket_key        | [name], required when bucket_count is there                             |
| bucket_count      | may be absent in a request, always there in what the server returns     |
| properties        | {text: text}, `table.*` only, required                                  |
| custom_properties | {text: text}, free, required                                            |

Reading ignores unknown keys and turns scalar property values into text. Only the shape of a
descriptor is checked here; `validation.py` checks the rules. `TableInfo` is an existing table: a
descriptor with a path, ids and times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from zufluss.errors import InvalidDatabaseError, InvalidTableError
from zufluss.model.schema import Schema, dump_object, dump_with, name_list, parse_object

if TYPE_CHECKING:
    from zufluss.config.options import Option


class TablePath(NamedTuple):
    """The name of a table inside its database."""

    database: str
    """The database's name."""
    table: str
    """The table's name."""

    @classmethod
    def parse(cls, text: str, default_database: str | None = None) -> TablePath:
        """The path of `database.table`, or of `table` in the default database."""
        parts = text.split(".")
        if len(parts) == 1 and default_database is not None:
            parts = [default_database, text]
        if len(parts) != 2 or not all(parts):
            raise InvalidTableError(f"table path {text!r:.200} is not of the form 'database.table'")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.database}.{self.table}"


class PhysicalTablePath(NamedTuple):
    """A table without partitions, or one partition: the owner of buckets."""

    database: str
    """The database's name."""
    table: str
    """The table's name."""
    partition: str | None = None
    """The partition's name, None for a table without partitions."""

    @property
    def path(self) -> TablePath:
        """The table the partition belongs to."""
        return TablePath(self.database, self.table)

    def __str__(self) -> str:
        suffix = "" if self.partition is None else f"(p={self.partition})"
        return f"{self.database}.{self.table}{suffix}"


class TableBucket(NamedTuple):
    """One bucket of a table or partition; the key of everything a tablet server holds."""

    table_id: int
    """The table's id."""
    partition_id: int | None
    """The partition's id, None for a table without partitions."""
    bucket_id: int
    """The bucket's number, from 0."""

    def __str__(self) -> str:
        partition = "" if self.partition_id is None else f", partition {self.partition_id}"
        return f"table {self.table_id}{partition}, bucket {self.bucket_id}"

    def named(
        self, path: TablePath | PhysicalTablePath | None, partition: str | None = None
    ) -> str:
        """The bucket for messages: `fluss.orders, partition 2026, bucket 2`.

        `path` or `partition` is None where it is not known; the id stands in its place.
        """
        if isinstance(path, PhysicalTablePath):
            partition, path = path.partition, path.path
        table = unknown_table(self.table_id) if path is None else str(path)
        if self.partition_id is None:
            return f"{table}, bucket {self.bucket_id}"
        if partition is None:
            partition = f"id {self.partition_id}"
        return f"{table}, partition {partition}, bucket {self.bucket_id}"


def unknown_table(table_id: int) -> str:
    """A table for messages of a process that knows nothing but its id."""
    return f"table id {table_id} (unknown here)"


@dataclass(frozen=True, slots=True)
class TableDescriptor:
    """The definition of a table, as it is sent, stored and returned."""

    schema: Schema
    """Columns and primary key."""
    comment: str | None = None
    """A comment."""
    partition_keys: tuple[str, ...] = ()
    """Columns whose values make the partition, empty for none."""
    bucket_keys: tuple[str, ...] = ()
    """Columns whose hash picks the bucket; empty lets the client choose."""
    bucket_count: int | None = None
    """Buckets per table or partition; None asks for the server's default."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """`table.*` properties."""
    custom_properties: Mapping[str, str] = field(default_factory=dict)
    """Properties the server only keeps."""

    @classmethod
    def from_json(cls, source: bytes | str) -> Self:
        """Parse a descriptor; `InvalidTableError` says what is wrong."""
        obj = parse_object(source, "the table descriptor")
        if not isinstance(obj.get("schema"), Mapping):
            raise InvalidTableError("the table descriptor has no 'schema'; add one")
        for key in ("partition_key", "properties", "custom_properties"):
            if obj.get(key) is None:
                raise InvalidTableError(f"the table descriptor has no '{key}'; add it, even empty")
        bucket_count = obj.get("bucket_count")
        if bucket_count is not None and obj.get("bucket_key") is None:
            raise InvalidTableError("'bucket_count' needs 'bucket_key' beside it; add [] for none")
        if isinstance(bucket_count, bool) or not isinstance(bucket_count, int | None):
            raise InvalidTableError(f"bucket_count {bucket_count!r:.40} is not a number")
        comment = obj.get("comment")
        return cls(
            schema=Schema.from_json(obj["schema"]),
            comment=None if comment is None else str(comment),
            partition_keys=name_list(obj, "partition_key"),
            bucket_keys=name_list(obj, "bucket_key"),
            bucket_count=bucket_count,
            properties=_text_map(obj["properties"], "properties"),
            custom_properties=_text_map(obj["custom_properties"], "custom_properties"),
        )

    def to_json(self) -> bytes:
        """The JSON as it travels and is stored."""
        out: dict[str, Any] = {}
        if self.comment is not None:
            out["comment"] = self.comment
        out["partition_key"] = list(self.partition_keys)
        out["bucket_key"] = list(self.bucket_keys)
        if self.bucket_count is not None:
            out["bucket_count"] = self.bucket_count
        out["properties"] = dict(self.properties)
        out["custom_properties"] = dict(self.custom_properties)
        return dump_with({"version": 1}, "schema", self.schema.to_json_bytes(), out)

    @property
    def has_primary_key(self) -> bool:
        """Whether the table has a primary key."""
        return bool(self.schema.primary_key)

    @property
    def is_partitioned(self) -> bool:
        """Whether the table has partition keys."""
        return bool(self.partition_keys)

    @property
    def physical_primary_key(self) -> tuple[str, ...]:
        """The primary key without partition keys: what is encoded as the key of a row."""
        return tuple(k for k in self.schema.primary_key if k not in self.partition_keys)

    @property
    def has_default_bucket_key(self) -> bool:
        """The bucket key is the physical primary key (of a log table: empty)."""
        return self.bucket_keys == self.physical_primary_key


def _text_map(obj: object, what: str) -> dict[str, str]:
    if not isinstance(obj, Mapping):
        raise InvalidTableError(f"'{what}' must be an object of texts, not {obj!r:.80}")
    out: dict[str, str] = {}
    for key, value in obj.items():
        if isinstance(value, bool):
            value = str(value).lower()
        if value is None or isinstance(value, (dict, list)):
            raise InvalidTableError(f"'{what}' has {key!r}: {value!r:.80}; the value must be text")
        out[key] = str(value)
    return out


@dataclass(frozen=True, slots=True)
class DatabaseDescriptor:
    """The definition of a database: a comment and free properties."""

    comment: str | None = None
    """A comment."""
    custom_properties: Mapping[str, str] = field(default_factory=dict)
    """Properties the server only keeps."""

    @classmethod
    def from_json(cls, source: bytes | str) -> Self:
        """The descriptor of its JSON; empty bytes stand for an empty descriptor."""
        if not source:
            return cls()
        try:
            obj = parse_object(source, "the database descriptor")
            properties = _text_map(obj.get("custom_properties") or {}, "custom_properties")
        except InvalidTableError as e:
            raise InvalidDatabaseError(e.message) from None
        comment = obj.get("comment")
        return cls(None if comment is None else str(comment), properties)

    def to_json(self) -> bytes:
        """The JSON as it travels and is stored."""
        out: dict[str, Any] = {"version": 1}
        if self.comment is not None:
            out["comment"] = self.comment
        out["custom_properties"] = dict(self.custom_properties)
        return dump_object(out)


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table that exists."""

    path: TablePath
    """Its name."""
    table_id: int
    """Its id, never used again after a drop."""
    schema_id: int
    """The id of its current schema, from 1."""
    descriptor: TableDescriptor
    """The descriptor, with every default filled in."""
    created_time: int
    """When it was created, epoch milliseconds."""
    modified_time: int
    """When it was last altered, epoch milliseconds."""

    @property
    def schema(self) -> Schema:
        """The current schema."""
        return self.descriptor.schema

    @property
    def is_partitioned(self) -> bool:
        """Whether the table has partition keys."""
        return self.descriptor.is_partitioned

    @property
    def has_primary_key(self) -> bool:
        """Whether the table has a primary key."""
        return self.descriptor.has_primary_key

    @property
    def partition_keys(self) -> tuple[str, ...]:
        """Columns whose values make the partition."""
        return self.descriptor.partition_keys

    @property
    def bucket_keys(self) -> tuple[str, ...]:
        """Columns whose hash picks the bucket."""
        return self.descriptor.bucket_keys

    @property
    def bucket_count(self) -> int:
        """Buckets per table or partition."""
        if self.descriptor.bucket_count is None:
            raise InvalidTableError(f"table {self.path} was stored without a bucket_count")
        return self.descriptor.bucket_count

    @property
    def log_format(self) -> str:
        """The format of log batches: ARROW, INDEXED or COMPACTED."""
        return self.descriptor.properties.get("table.log.format", "ARROW").upper()

    def property(self, option: Option[Any]) -> Any:
        """The value of a table property, parsed, or its default."""
        from zufluss.config.table_options import parse_table_property

        text = self.descriptor.properties.get(option.key)
        return option.default if text is None else parse_table_property(option.key, text)
