"""Every `table.*` property, declared once, with the same `Option` as the configuration.

The table descriptor stores properties as given; `parse_table_property` reads them. Enum values
match in any case; the parsed value is the canonical spelling. ALTER TABLE may change `alterable`
properties. `model/validation.py` has the rules that need more than one property or the schema (a
merge engine needs a primary key, …).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from zufluss.config.nearest import nearest
from zufluss.config.option import (
    Option,
    bool_option,
    duration_option,
    enum_option,
    int_option,
    string_option,
)
from zufluss.config.values import DAY_MS, INT32_MAX, INT64_MAX, MINUTE_MS
from zufluss.errors import ConfigError
from zufluss.lake_formats import LAKE_FORMATS

PREFIX: Final = "table."

TABLE_REPLICATION_FACTOR = int_option(
    "table.replication.factor",
    None,
    "The number of replicas of each bucket: its leader, and standbys that follow it on other "
    "servers so that a take-over is short. Acknowledgements never wait for standbys. More than 1 "
    "needs zufluss.log.durability = remote and as many tablet servers.",
    minimum=1,
    maximum=INT32_MAX,
    default_text="`default.replication.factor`",
)
TABLE_LOG_FORMAT = enum_option(
    "table.log.format",
    "ARROW",
    "The format of log records. pyfluss reads and writes ARROW only.",
    allowed=("ARROW", "INDEXED", "COMPACTED"),
)
TABLE_LOG_ARROW_COMPRESSION_TYPE = enum_option(
    "table.log.arrow.compression.type",
    "ZSTD",
    "How clients compress ARROW log records. pyfluss wants it in capitals.",
    allowed=("NONE", "LZ4_FRAME", "ZSTD"),
)
TABLE_LOG_ARROW_COMPRESSION_ZSTD_LEVEL = int_option(
    "table.log.arrow.compression.zstd.level",
    3,
    "The level of ZSTD compression, 1 to 22. pyfluss accepts 3 only.",
)
TABLE_LOG_TTL = duration_option(
    "table.log.ttl",
    7 * DAY_MS,
    "How long log records are kept; a segment is removed when its newest record is older. 0 keeps "
    "all.",
    alterable=True,
)
TABLE_LOG_LOCAL_TTL = duration_option(
    "table.log.local-ttl",
    None,
    "How long a segment that is also in remote storage stays on the server; at most "
    "`table.log.ttl`.",
    alterable=True,
    default_text="`table.log.ttl`",
)
TABLE_LOG_TIERED_LOCAL_SEGMENTS = int_option(
    "table.log.tiered.local-segments",
    2,
    "The number of segments that stay on the server when older ones are in remote storage.",
    alterable=True,
    minimum=1,
    maximum=INT32_MAX,
)
TABLE_KV_FORMAT = enum_option(
    "table.kv.format",
    "COMPACTED",
    "The row format of a primary-key table. pyfluss writes COMPACTED only.",
    allowed=("COMPACTED", "INDEXED"),
)
TABLE_KV_FORMAT_VERSION = int_option(
    "table.kv.format-version",
    None,
    "The version of the key encoding. The server sets 2 when a primary-key table is created; "
    "a table without it is version 1.",
    minimum=1,
    maximum=2,
    default_text="set by the server",
)
TABLE_KV_STANDBY_REPLICA_ENABLED = bool_option(
    "table.kv.standby-replica.enabled",
    None,
    "Keep a standby replica of a primary-key table warm for a quick change of leader. "
    "The server sets true when the table is created.",
    alterable=True,
    default_text="set by the server",
)
TABLE_AUTO_PARTITION_ENABLED = bool_option(
    "table.auto-partition.enabled",
    False,
    "Create partitions by time ahead and drop old ones.",
    alterable=True,
)
TABLE_AUTO_PARTITION_KEY = string_option(
    "table.auto-partition.key",
    None,
    "The partition key that holds the time; needed when there is more than one.",
    default_text="the only partition key",
)
TABLE_AUTO_PARTITION_TIME_UNIT = enum_option(
    "table.auto-partition.time-unit",
    "DAY",
    "The time one partition covers.",
    allowed=("HOUR", "DAY", "MONTH", "QUARTER", "YEAR"),
)
TABLE_AUTO_PARTITION_TIME_FORMAT = string_option(
    "table.auto-partition.time-format",
    None,
    "The pattern of the partition value, largest unit first and of fixed width, such as "
    "`yyyy-MM-dd`.",
    default_text="by unit: yyyyMMddHH, yyyyMMdd, yyyyMM, yyyyQ, yyyy",
)
TABLE_AUTO_PARTITION_TIME_ZONE = string_option(
    "table.auto-partition.time-zone",
    None,
    "The time zone in which partitions begin, such as `Europe/Berlin`.",
    default_text="the server's time zone",
)
TABLE_AUTO_PARTITION_NUM_PRECREATE = int_option(
    "table.auto-partition.num-precreate",
    2,
    "The number of partitions that exist from the current one on; 0 with several partition keys.",
    alterable=True,
    maximum=INT32_MAX,
)
TABLE_AUTO_PARTITION_NUM_RETENTION = int_option(
    "table.auto-partition.num-retention",
    7,
    "The number of partitions kept before the current one; less than 0 keeps all.",
    alterable=True,
    maximum=INT32_MAX,
)
TABLE_DATALAKE_ENABLED = bool_option(
    "table.datalake.enabled", False, "Move the table's data to the lake.", alterable=True
)
TABLE_DATALAKE_FORMAT = enum_option(
    "table.datalake.format",
    None,
    "The lake format. It also decides how keys are encoded and hashed to buckets.",
    allowed=tuple(LAKE_FORMATS),
    default_text="`datalake.format`",
)
TABLE_DATALAKE_FRESHNESS = duration_option(
    "table.datalake.freshness",
    3 * MINUTE_MS,
    "How far the lake may lag behind the table.",
    alterable=True,
)
TABLE_DATALAKE_AUTO_COMPACTION = bool_option(
    "table.datalake.auto-compaction",
    False,
    "Compact the lake table while tiering writes to it.",
    alterable=True,
)
TABLE_DATALAKE_AUTO_EXPIRE_SNAPSHOT = bool_option(
    "table.datalake.auto-expire-snapshot",
    False,
    "Expire old snapshots of the lake table when tiering commits.",
)
TABLE_DATALAKE_HISTORICAL_PARTITION_ENABLED = bool_option(
    "table.datalake.historical-partition.enabled",
    False,
    "Answer lookups of partitions that have expired from the lake.",
    alterable=True,
)
TABLE_MERGE_ENGINE = enum_option(
    "table.merge-engine",
    None,
    "How rows of the same primary key are merged: the first row stays, the higher version wins, or "
    "columns are aggregated. Without it the last row wins.",
    allowed=("first_row", "versioned", "aggregation"),
)
TABLE_MERGE_ENGINE_VERSIONED_VER_COLUMN = string_option(
    "table.merge-engine.versioned.ver-column",
    None,
    "The version column of the `versioned` engine: INT, BIGINT, TIMESTAMP or TIMESTAMP_LTZ.",
)
TABLE_MERGE_ENGINE_AGGREGATION_DEFAULT_FUNCTION = string_option(
    "table.merge-engine.aggregation.default-function",
    None,
    "The function of columns of the `aggregation` engine that name none. Without it every column "
    "outside the primary key must name one.",
)
TABLE_COLUMN_LOCK_ENABLED = bool_option(
    "table.column-lock.enabled",
    None,
    "Whether a producer owns the columns it writes, so that nobody else writes them meanwhile. "
    "`false` lets several producers add to the same columns, if the functions can be undone one by "
    "one.",
    default_text="true with the `aggregation` engine, else false",
)
TABLE_DELETE_BEHAVIOR = enum_option(
    "table.delete.behavior",
    "ALLOW",
    "The effect of a delete on a primary-key table: it deletes, is ignored, or is refused.",
    allowed=("ALLOW", "IGNORE", "DISABLE"),
    default_text="ALLOW; IGNORE with a merge engine",
)
TABLE_CHANGELOG_IMAGE = enum_option(
    "table.changelog.image",
    "FULL",
    "Whether the changelog of a primary-key table carries the row before an update (FULL) or "
    "only the row after it (WAL).",
    allowed=("FULL", "WAL"),
)
TABLE_AUTO_INCREMENT_CACHE_SIZE = int_option(
    "table.auto-increment.cache-size",
    100_000,
    "The number of ids of an auto-increment column that a server reserves at once.",
    minimum=1,
    maximum=INT64_MAX,
)
TABLE_STATISTICS_COLUMNS = string_option(
    "table.statistics.columns",
    None,
    "The columns whose minimum, maximum and null count writers put into each batch of a log "
    "table, so that filters skip batches: `*`, or names separated by commas.",
    alterable=True,
)
TABLE_ZUFLUSS_REMOTE_PLACEMENT = string_option(
    "table.zufluss.remote.placement",
    "cluster",
    "The locations of the table's remote files: `cluster` spreads them over all, `partition` keeps "
    "the files of a partition (or table) in one, `pinned:1,3` uses the locations with these ids.",
    alterable=True,
)

TABLE_OPTIONS: Mapping[str, Option[Any]] = {
    value.key: value for value in list(globals().values()) if isinstance(value, Option)
}
"""Every table property by key, in the order declared."""


def table_option(key: str) -> Option[Any]:
    """The property of that key; an unknown key is refused with the nearest one."""
    option = TABLE_OPTIONS.get(key)
    if option is not None:
        return option
    if key.startswith(PREFIX):
        text = (
            "is not a recognized Fluss table property in the current cluster version. You may be "
            "using an older Fluss cluster that does not support this property."
        )
    else:
        text = (
            "is not a Fluss table property. Please use '.customProperty(..)' to set custom "
            "properties."
        )
    raise ConfigError(f"{key!r:.200} {text}{_near(key)}")


def _is_below_1(value: str) -> bool:
    return re.fullmatch(r"\s*(-\d+|0+)\s*", value) is not None


def _near(key: str) -> str:
    """A question that names the nearest property; empty when none is near."""
    names = [known.removeprefix(PREFIX) for known in TABLE_OPTIONS]
    match = nearest(key.removeprefix(PREFIX), names)
    return f" Did you mean {PREFIX}{match}?" if match else ""


def parse_table_property(key: str, value: str) -> Any:
    """The parsed value of a table property; `ConfigError` for an unknown key or a bad value."""
    option = table_option(key)
    try:
        return option.parse(value)
    except ConfigError as problem:
        if option.minimum == 1 and option.maximum == INT32_MAX and _is_below_1(value):
            raise ConfigError(f"'{key}' must be greater than 0.") from None
        raise ConfigError(
            f"Invalid value for config '{key}'. Reason: Could not parse value {value!r:.200} for "
            f"key '{key}'. {problem.message}"
        ) from None
