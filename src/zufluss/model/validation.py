"""Validation of tables: the server's defaults and every rule that a descriptor must keep.

CREATE TABLE calls `check_table_path`, parses the `TableDescriptor`, then calls `complete`, which
fills in the defaults, and `check_table`. ALTER TABLE (`alter.py`) ends with `check_table`, too. All
functions are pure; of the cluster they need its configuration and the number of live servers.

| broken rule                                                            | error code       |
|------------------------------------------------------------------------|------------------|
| name of a database / of a table                                        | 16 / 15          |
| keys, buckets, columns, partition keys, time format                    | 15               |
| property: unknown, bad value, does not fit the table                   | 39               |
| more replicas than live tablet servers                                 | 17               |
| more than `max.bucket.num` buckets                                     | 49               |

A message says what was wrong, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from zufluss.config import Configuration
from zufluss.config import options as server
from zufluss.config import table_options as o
from zufluss.config.lake import handed_out, table_prefix
from zufluss.config.option import Option
from zufluss.errors import (
    BucketMaxNumError,
    ConfigError,
    InvalidDatabaseError,
    InvalidReplicationFactorError,
    InvalidTableError,
)
from zufluss.lake_formats import LAKE_FORMATS, is_place, opens_files
from zufluss.model.agg_columns import (
    AGGREGATION,
    declare,
    merge_field_options,
    take_field_options,
)
from zufluss.model.auto_partition import AutoPartition, time_format, time_zone
from zufluss.model.merge import check_merge_engine, merge_engine
from zufluss.model.partition import PARTITION_KEY_ROOTS, name_problem, plain
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TablePath
from zufluss.model.types import NESTED, Root, check_unique, fluss_text

REPLICAS_MAX = 1
"""Most replicas of a bucket whose log is durable on the disk of its leader: nothing copies it."""
KV_FORMAT_VERSION = "2"
"""The newest version of the key encoding, given to new primary-key tables."""
RESERVED_COLUMNS = (
    "__offset",
    "__timestamp",
    "__bucket",
    "_change_type",
    "_log_offset",
    "_commit_timestamp",
)
"""Names the system uses beside the columns of a table."""
_FLUSS_ORDER = (
    *(Root.CHAR, Root.STRING, Root.BOOLEAN, Root.BINARY, Root.BYTES),
    *(Root.TINYINT, Root.SMALLINT, Root.INTEGER, Root.DATE, Root.TIME, Root.BIGINT),
    *(Root.FLOAT, Root.DOUBLE, Root.TIMESTAMP, Root.TIMESTAMP_LTZ),
    *(Root.ARRAY, Root.MAP, Root.ROW),
)
"""How Fluss orders the types that may, or may not, be keys; its clients compare the whole text."""
ZSTD_LEVELS = 1, 22
"""The lowest and the highest level of ZSTD compression."""
STATISTICS_ROOTS = frozenset(Root) - NESTED - {Root.BYTES, Root.BINARY}
"""Types a column with statistics may have."""


def check_database_name(name: str) -> None:
    """Raise 16 for a database name that is not allowed."""
    problem = name_problem(name)
    if problem is not None:
        raise InvalidDatabaseError(f"Database name {plain(name)} is invalid: {problem}")


def check_table_name(name: str) -> None:
    """Raise 15 for a table name that is not allowed."""
    problem = name_problem(name)
    if problem is not None:
        raise InvalidTableError(f"Table name {plain(name)} is invalid: {problem}")


def check_table_path(path: TablePath) -> None:
    """Raise 16 or 15 for a path with a name that is not allowed."""
    check_database_name(path.database)
    check_table_name(path.table)


def complete(descriptor: TableDescriptor, conf: Configuration) -> TableDescriptor:
    """The descriptor with every default of the server filled in, as it is stored."""
    check_keys(descriptor)
    descriptor = with_functions(_with_default_function(descriptor, conf))
    properties = without_cluster_lake(descriptor.properties, conf)
    factor = conf.get(server.DEFAULT_REPLICATION_FACTOR)
    properties.setdefault(o.TABLE_REPLICATION_FACTOR.key, str(factor))
    if len(descriptor.partition_keys) > 1 and _is_true(properties, o.TABLE_AUTO_PARTITION_ENABLED):
        properties.setdefault(o.TABLE_AUTO_PARTITION_NUM_PRECREATE.key, "0")
    lake_format = conf.get(server.DATALAKE_FORMAT)
    if lake_format is not None:
        properties.setdefault(o.TABLE_DATALAKE_FORMAT.key, lake_format)
    if descriptor.has_primary_key:
        if merge_engine(properties) is not None:
            properties.setdefault(o.TABLE_DELETE_BEHAVIOR.key, "IGNORE")
        properties.setdefault(o.TABLE_KV_FORMAT_VERSION.key, KV_FORMAT_VERSION)
        properties.setdefault(o.TABLE_KV_STANDBY_REPLICA_ENABLED.key, "true")
    count = descriptor.bucket_count
    return replace(
        descriptor,
        bucket_count=conf.get(server.DEFAULT_BUCKET_NUMBER) if count is None else count,
        bucket_keys=descriptor.bucket_keys or descriptor.physical_primary_key,
        properties=properties,
    )


def _with_default_function(descriptor: TableDescriptor, conf: Configuration) -> TableDescriptor:
    """The descriptor with the cluster's default function, unless it names its own."""
    default = conf.get(server.ZUFLUSS_AGGREGATION_DEFAULT_FUNCTION)
    if default is None or merge_engine(descriptor.properties) != AGGREGATION:
        return descriptor
    named = {o.TABLE_MERGE_ENGINE_AGGREGATION_DEFAULT_FUNCTION.key: default}
    return replace(descriptor, properties={**named, **descriptor.properties})


def with_functions(descriptor: TableDescriptor) -> TableDescriptor:
    """The descriptor whose schema has all aggregation functions, wherever they are named."""
    engine = merge_engine(descriptor.properties)
    properties, one = take_field_options(descriptor.properties, descriptor.schema, engine)
    custom, other = take_field_options(descriptor.custom_properties, descriptor.schema, engine)
    default = properties.get(o.TABLE_MERGE_ENGINE_AGGREGATION_DEFAULT_FUNCTION.key)
    schema = declare(descriptor.schema, merge_field_options(one, other), default, engine)
    return replace(descriptor, schema=schema, properties=properties, custom_properties=custom)


def without_cluster_lake(properties: Mapping[str, str], conf: Configuration) -> dict[str, str]:
    """The properties without the lake properties of the cluster, which are not stored.

    Descriptors that clients got from the server contain them. Other values are refused: a table
    cannot choose another lake.
    """
    remaining = dict(properties)
    for format in LAKE_FORMATS:
        lake_keys = [key for key in properties if key.startswith(table_prefix(format))]
        known = handed_out(format, conf.lake_properties(format)) if lake_keys else {}
        for key in lake_keys:
            if properties[key] != known.get(key):
                raise ConfigError(
                    f"{key} is not the table's to set: the lake is the cluster's; leave it out, "
                    f"or configure {key.removeprefix('table.')} on the servers"
                )
            del remaining[key]
    return remaining


def check_table(descriptor: TableDescriptor, conf: Configuration, live_servers: int | None) -> None:
    """Raise unless a completed descriptor keeps every rule.

    `live_servers` bounds the replication factor; None, for an existing table, skips this rule.
    """
    for key, text in descriptor.properties.items():
        o.parse_table_property(key, text)
    check_keys(descriptor)
    _check_buckets(descriptor, conf)
    check_columns(descriptor.schema)
    for check in _PROPERTY_CHECKS:
        check(descriptor)
    _check_partitions(descriptor, conf)
    _check_lake(descriptor, conf, is_new=live_servers is not None)
    _check_replication(descriptor, conf, live_servers)


def check_columns(schema: Schema) -> None:
    """Raise 15 for a schema without columns or with a name the system uses."""
    if not schema.columns:
        raise InvalidTableError("the table has no columns; give it at least one")
    taken = [name for name in schema.names if name in RESERVED_COLUMNS]
    if taken:
        raise InvalidTableError(
            f"{', '.join(taken)} cannot be used as column names, because they are reserved system "
            "columns in Fluss. Please use other names for these columns. The reserved system "
            f"columns are: {', '.join(RESERVED_COLUMNS)}"
        )


def check_keys(descriptor: TableDescriptor) -> None:
    """Raise 15 unless partition and bucket keys fit the columns and the primary key."""
    schema, partition_keys = descriptor.schema, descriptor.partition_keys
    check_unique(partition_keys, "partition key")
    check_unique(descriptor.bucket_keys, "bucket key")
    for name in (*partition_keys, *descriptor.bucket_keys):
        schema.index_of(name)
    both = [key for key in descriptor.bucket_keys if key in partition_keys]
    if both:
        raise InvalidTableError(
            f"bucket key {', '.join(both)} is a partition key too; leave it out of the bucket key"
        )
    if schema.primary_key:
        _check_primary_key(descriptor)
    for what, names in (
        ("primary key", schema.primary_key),
        ("bucket key", descriptor.bucket_keys),
    ):
        for name in names:
            data_type = schema.column(name).data_type
            if data_type.root in NESTED:
                raise InvalidTableError(
                    f"{what.capitalize()} column '{name}' has unsupported data type "
                    f"{fluss_text(data_type)}. Currently, {what} column does not support types: "
                    f"{_shown(NESTED)}."
                )
    for name in partition_keys:
        data_type = schema.column(name).data_type
        if data_type.root not in PARTITION_KEY_ROOTS:
            raise InvalidTableError(
                "Currently, partitioned table supported partition key type are "
                f"{_shown(PARTITION_KEY_ROOTS)}, but got partition key '{name}' with data type "
                f"{fluss_text(data_type)}."
            )


def _shown(roots: Collection[Root]) -> str:
    """Types as Fluss lists them: in the order of their declaration there."""
    return f"[{', '.join(sorted(roots, key=_FLUSS_ORDER.index))}]"


def _check_primary_key(descriptor: TableDescriptor) -> None:
    key = descriptor.schema.primary_key
    outside = [name for name in descriptor.partition_keys if name not in key]
    if outside:
        raise InvalidTableError(
            f"partition key {', '.join(outside)} is not in the primary key ({', '.join(key)}); "
            "add it to the primary key"
        )
    if not descriptor.physical_primary_key:
        raise InvalidTableError(
            f"the primary key ({', '.join(key)}) consists of partition keys only; "
            "add a column that tells rows of a partition apart"
        )
    outside = [name for name in descriptor.bucket_keys if name not in key]
    if outside:
        raise InvalidTableError(
            f"bucket key {', '.join(outside)} is not in the primary key ({', '.join(key)}); "
            f"the bucket key may have {', '.join(descriptor.physical_primary_key)}"
        )


def _check_buckets(descriptor: TableDescriptor, conf: Configuration) -> None:
    count, limit = descriptor.bucket_count, conf.get(server.MAX_BUCKET_NUM)
    if count is None or count < 1:
        raise InvalidTableError(f"bucket_count {count} is not allowed; give 1 to {limit}")
    if count > limit:
        raise BucketMaxNumError(
            f"Bucket count {count} exceeds the maximum limit {limit} for a non-partitioned table "
            f"or partition. Take fewer buckets, or raise {server.MAX_BUCKET_NUM.key}"
        )


def table_property(properties: Mapping[str, str], option: Option[Any]) -> Any:
    """The parsed value of a property, its default if it is not set."""
    text = properties.get(option.key)
    return option.default if text is None else option.parse(text)


def _is_true(properties: Mapping[str, str], option: Option[Any]) -> bool:
    """Whether a flag is set; for properties that are not checked yet."""
    return properties.get(option.key, "").strip().lower() == "true"


def _check_formats(descriptor: TableDescriptor) -> None:
    """Refuse INDEXED changelogs of primary-key tables, which fail at the first write."""
    log = table_property(descriptor.properties, o.TABLE_LOG_FORMAT)
    if descriptor.has_primary_key and log == "INDEXED":
        raise ConfigError(
            "Currently, Primary Key Table supports ARROW or COMPACTED log format when kv format is "
            f"COMPACTED. {o.TABLE_LOG_FORMAT.key} = {log} goes with no kv format; allowed: ARROW, "
            "COMPACTED"
        )


def _check_compression(descriptor: TableDescriptor) -> None:
    low, high = ZSTD_LEVELS
    level = table_property(descriptor.properties, o.TABLE_LOG_ARROW_COMPRESSION_ZSTD_LEVEL)
    if not low <= level <= high:
        raise ConfigError(
            f"Invalid ZSTD compression level: {level}. Expected a value between {low} and {high}."
        )


def _check_log_ttl(descriptor: TableDescriptor) -> None:
    local = table_property(descriptor.properties, o.TABLE_LOG_LOCAL_TTL)
    total = table_property(descriptor.properties, o.TABLE_LOG_TTL)
    if local is not None and 0 < total < local:
        raise ConfigError(
            f"{o.TABLE_LOG_LOCAL_TTL.key} = {local} ms is longer than {o.TABLE_LOG_TTL.key} = "
            f"{total} ms; a segment cannot stay on the server longer than it exists"
        )


def _check_statistics(descriptor: TableDescriptor) -> None:
    key = o.TABLE_STATISTICS_COLUMNS.key
    text = descriptor.properties.get(key)
    if text is None:
        return
    if descriptor.has_primary_key:
        raise ConfigError(f"{key} is for log tables; remove it from this primary-key table")
    if text.strip() == "*":
        return
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{key} = {text!r} names no column; allowed: *, or names with commas")
    for name in names:
        if name not in descriptor.schema:
            raise ConfigError(
                f"{key} names {name!r:.80}, which is not a column; "
                f"the columns are {', '.join(descriptor.schema.names)}"
            )
        data_type = descriptor.schema.column(name).data_type
        if data_type.root not in STATISTICS_ROOTS:
            raise ConfigError(
                f"{key} names {name!r} of type {data_type}; there are no statistics of BYTES, "
                "BINARY, ARRAY, MAP and ROW, leave it out"
            )


_PROPERTY_CHECKS: tuple[Callable[[TableDescriptor], None], ...] = (
    _check_formats,
    _check_compression,
    check_merge_engine,
    _check_log_ttl,
    _check_statistics,
)


def _check_partitions(descriptor: TableDescriptor, conf: Configuration) -> None:
    enabled = table_property(descriptor.properties, o.TABLE_AUTO_PARTITION_ENABLED)
    if not descriptor.is_partitioned:
        time_zone(table_property(descriptor.properties, o.TABLE_AUTO_PARTITION_TIME_ZONE))
        if enabled:
            raise ConfigError(
                "Currently, auto partition is only supported for partitioned table, please set "
                f"table property '{o.TABLE_AUTO_PARTITION_ENABLED.key}' to false."
            )
        return
    auto = AutoPartition.of(descriptor)
    if not enabled:
        return
    key = table_property(descriptor.properties, o.TABLE_AUTO_PARTITION_KEY)
    keys = descriptor.partition_keys
    if auto.key not in keys or (key is None and len(keys) > 1):
        if key is None:
            raise InvalidTableError(
                "Currently, auto partitioned table must set one auto partition key when it has "
                "multiple partition keys. Please set table property "
                f"'{o.TABLE_AUTO_PARTITION_KEY.key}'."
            )
        raise InvalidTableError(
            "The specified key for auto partitioned table is not a partition key. Your key "
            f"'{auto.key}' is not in key list [{', '.join(keys)}]"
        )
    most = 0 if len(keys) > 1 else conf.get(server.MAX_PARTITION_NUM)
    if auto.precreate > most:
        if len(keys) > 1:
            raise InvalidTableError(
                "For a partitioned table with multiple partition keys, auto pre-create is "
                f"unsupported and this value must be set to 0, but is {auto.precreate}"
            )
        raise InvalidTableError(
            f"{o.TABLE_AUTO_PARTITION_NUM_PRECREATE.key} = {auto.precreate} is more than {most}"
        )
    if descriptor.schema.column(auto.key).data_type.root is Root.DATE:
        _check_date_key(auto)


def _check_date_key(auto: AutoPartition) -> None:
    if auto.unit != "DAY" or auto.format != time_format("yyyy-MM-dd", "DAY"):
        raise InvalidTableError(
            f"auto-partition key {auto.key!r} is a DATE; set "
            f"{o.TABLE_AUTO_PARTITION_TIME_UNIT.key} = DAY and "
            f"{o.TABLE_AUTO_PARTITION_TIME_FORMAT.key} = yyyy-MM-dd"
        )


def closed_lake(conf: Configuration) -> str | None:
    """What to set on the servers so that tables may join the lake; None if they may."""
    if conf.get(server.DATALAKE_FORMAT) is None:
        return server.DATALAKE_FORMAT.key
    if conf.get(server.DATALAKE_ENABLED) is False:
        return f"{server.DATALAKE_ENABLED.key} = true"
    return None


def _check_lake(descriptor: TableDescriptor, conf: Configuration, is_new: bool) -> None:
    properties = descriptor.properties
    cluster = conf.get(server.DATALAKE_FORMAT)
    lake = table_property(properties, o.TABLE_DATALAKE_FORMAT)
    if table_property(properties, o.TABLE_DATALAKE_ENABLED):
        closed = closed_lake(conf)
        if closed is not None and (is_new or cluster is None):
            raise InvalidTableError(
                f"'{o.TABLE_DATALAKE_ENABLED.key}' is enabled for the table, but the Fluss cluster "
                f"doesn't enable datalake tables. Set {closed} on the servers"
            )
        if lake is not None and lake != cluster:
            raise ConfigError(
                f"{o.TABLE_DATALAKE_FORMAT.key} = {lake} is not the lake of the cluster; "
                f"allowed: {cluster}"
            )
    for key in filter(opens_files, descriptor.custom_properties):
        raise ConfigError(
            f"{key!r:.80} is not allowed: how the files of the lake are opened is for the cluster "
            f"to say (datalake.{key[:80]}); leave the property out"
        )
    for key in filter(is_place, descriptor.custom_properties):
        raise ConfigError(
            f"{key!r:.80} is not allowed: the lake's catalog decides where files of a table lie, "
            f"each table in a directory of its own; leave the property out"
        )
    _check_historical(descriptor, lake)
    _check_lake_keys(descriptor, lake)


def _check_historical(descriptor: TableDescriptor, lake: str | None) -> None:
    option = o.TABLE_DATALAKE_HISTORICAL_PARTITION_ENABLED
    properties = descriptor.properties
    if not table_property(properties, option):
        return
    able = [name for name, traits in LAKE_FORMATS.items() if traits.historical_partitions]
    conditions = {
        f"{o.TABLE_AUTO_PARTITION_ENABLED.key} = true": table_property(
            properties, o.TABLE_AUTO_PARTITION_ENABLED
        ),
        f"{o.TABLE_DATALAKE_ENABLED.key} = true": table_property(
            properties, o.TABLE_DATALAKE_ENABLED
        ),
        f"{o.TABLE_DATALAKE_FORMAT.key} = {' or '.join(able)}": lake in able,
        "a primary key": descriptor.has_primary_key,
        "exactly one partition key": len(descriptor.partition_keys) == 1,
    }
    missing = [what for what, there in conditions.items() if not there]
    if missing:
        raise ConfigError(f"{option.key} = true needs {', '.join(missing)}")


def _check_lake_keys(descriptor: TableDescriptor, lake: str | None) -> None:
    """Refuse keys that the lake's encoder cannot write."""
    if lake is None:
        return
    traits = LAKE_FORMATS[lake]
    keys = [descriptor.bucket_keys]
    if table_property(descriptor.properties, o.TABLE_KV_FORMAT_VERSION) in (None, 1):
        keys.append(descriptor.physical_primary_key)
    for names in keys:
        most = traits.key_columns_max
        if most is not None and len(names) > most:
            raise InvalidTableError(
                f"key ({', '.join(names)}) has {len(names)} columns; with "
                f"{o.TABLE_DATALAKE_FORMAT.key} = {lake} the bucket key has at most {most}"
            )
        for name in names:
            data_type = descriptor.schema.column(name).data_type
            if data_type.root.name in traits.key_types_refused:
                refused = ", ".join(sorted(traits.key_types_refused))
                raise InvalidTableError(
                    f"key column {name!r} is {data_type}; with {o.TABLE_DATALAKE_FORMAT.key} = "
                    f"{lake} keys cannot be {refused}, take another column or lake"
                )


def _check_replication(
    descriptor: TableDescriptor, conf: Configuration, live_servers: int | None
) -> None:
    key = o.TABLE_REPLICATION_FACTOR.key
    factor = table_property(descriptor.properties, o.TABLE_REPLICATION_FACTOR)
    if factor is None:
        raise ConfigError(f"{key} is missing; set it to 1 or more")
    if live_servers is None:
        return
    durability = conf.get(server.ZUFLUSS_LOG_DURABILITY)
    most = max(live_servers, 1) if durability == "remote" else REPLICAS_MAX
    if factor > live_servers:
        raise InvalidReplicationFactorError(
            f"Replication factor: {factor} larger than available tablet servers: {live_servers}. "
            f"Set {key} to {most}"
        )
    if factor > most:
        raise InvalidReplicationFactorError(
            f"Replication factor: {factor} larger than {most}: with "
            f"{server.ZUFLUSS_LOG_DURABILITY.key} = {durability} nothing would copy a bucket to a "
            f"second server. Set {key}, or {server.DEFAULT_REPLICATION_FACTOR.key} of the "
            f"coordinator, to {most}, or begin the cluster with "
            f"{server.ZUFLUSS_LOG_DURABILITY.key} = remote; remote.data.dirs keeps copies of log "
            "segments and snapshots in remote storage"
        )
