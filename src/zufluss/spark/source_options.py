"""The options of `format("fluss")`, declared once, and their parsing.

Keys are matched in any case, since Spark passes them in lower case. Each option is in one group:

| group | batch reads | streaming reads | writes |
|---|---|---|---|
| `COMMON`, and every `client.*` | yes | yes | yes |
| `READ` | yes | yes | refused |
| `BATCH` | yes | refused | refused |
| `VIEW` | yes | refused | not looked at |
| `STREAM` | refused | yes | refused |
| `WRITE` | not looked at | refused | yes |

A view has one set of options for reading and for `INSERT INTO`: so a batch read ignores options of
writes, and a write ignores options of views. Refused and unknown options raise `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from zufluss.config.nearest import suggestion
from zufluss.config.option import (
    Option,
    bool_option,
    enum_option,
    int_option,
    list_option,
    memory_option,
    string_option,
)
from zufluss.config.options import OPTIONS, is_client_option
from zufluss.errors import ConfigError
from zufluss.model.table import TablePath

T = TypeVar("T")

DEFAULT_DATABASE: Final = "fluss"
"""The database of tables that are named without one, as in the client."""

# -- common ------------------------------------------------------------------------------------

BOOTSTRAP = string_option(
    "bootstrap.servers",
    None,
    "The address of the cluster, `host:port[,host:port…]`. Required unless it was given to "
    "`zufluss.spark.register`.",
    default_text="that of `register`",
)
TABLE = string_option(
    "table",
    None,
    "The table, `database.table`; for reading also `database.table$lake` (what its lake has) and "
    '`database.table$changelog` (its changes). `.load("database.table")` means the same.',
    default_text="needed",
)

# -- reads -------------------------------------------------------------------------------------

COLUMNS: Option[tuple[str, ...] | None] = list_option(
    "columns", None, "Only these columns, in this order; others are not read.", default_text="all"
)
FILTER = string_option(
    "filter",
    None,
    "Only rows that match, such as `cents > 500 AND customer IN ('ann', 'bob')`; pushed to server "
    "and lake.",
    default_text="none",
)
PARTITIONS: Option[tuple[str, ...] | None] = list_option(
    "partitions", None, "Only these partitions, by name.", default_text="all"
)
LIMIT = int_option(
    "limit",
    None,
    "At most this many rows, in no particular order; one task reads them.",
    minimum=0,
    default_text="none",
)
READ_OPTIMIZED = bool_option(
    "read.optimized",
    False,
    "Read only the lake and not the log, as `$lake` does. Faster, and as old as the last tiering "
    "round.",
)
READ_FRESH = bool_option(
    "read.fresh",
    False,
    "Spark plans a DataFrame or view of a source once, and each query of it has the rows of that "
    "moment. With this option every task reads its buckets as they are when it begins, so each "
    "query has the current rows; there is one task per bucket, and buckets are read at slightly "
    "different moments. `register_views` sets it.",
)
MAX_RECORDS_PER_PARTITION = int_option(
    "scan.maxRecordsPerPartition",
    None,
    "One task per this many records of a bucket's log. Tasks run in parallel, so the changes of a "
    "key in the log of a primary-key table may come out of order.",
    minimum=1,
    default_text="one task per bucket",
)
INCREMENTAL_START = string_option(
    "scan.incremental.start.timestamp",
    None,
    "Only rows written at this time or later: epoch milliseconds, or `2026-01-31T12:00:00` (UTC "
    "where it names no zone). Of log tables and of `$changelog`.",
    default_text="from the beginning",
)
INCREMENTAL_END = string_option(
    "scan.incremental.end.timestamp",
    None,
    "Only rows written before this time, as `scan.incremental.start.timestamp`. It must be in the "
    "past of the servers, preferably by some seconds.",
    default_text="up to now",
)

# -- streaming reads ---------------------------------------------------------------------------

STARTUP_MODE = enum_option(
    "scan.startup.mode",
    "full",
    "Where a new query begins: `full` with all rows of the table, followed by later writes; "
    "`earliest` at the beginning of the log; `latest` with later writes only; `timestamp` at a "
    "time. A query with a checkpoint continues from there.",
    allowed=("full", "earliest", "latest", "timestamp"),
)
STARTUP_TIMESTAMP = string_option(
    "scan.startup.timestamp",
    None,
    "The time of mode `timestamp`: epoch milliseconds, or `2026-01-31T12:00:00` (UTC where it "
    "names no zone).",
    default_text="none",
)
MAX_ROWS_PER_TRIGGER = int_option(
    "maxRowsPerTrigger",
    None,
    "At most about this many records in one micro-batch. From Spark 4.2 on.",
    minimum=1,
    default_text="no limit",
)
MAX_BYTES_PER_TRIGGER = memory_option(
    "maxBytesPerTrigger",
    None,
    "At most about this many bytes of the log in one micro-batch. From Spark 4.2 on.",
    minimum=1,
    default_text="no limit",
)

# -- writes ------------------------------------------------------------------------------------

TXN_ID = string_option(
    "txn.id",
    None,
    "The name under which a batch job that may be run again, or a streaming query whose checkpoint "
    "Python cannot read, writes exactly once. It must be unique among jobs and queries.",
    default_text="that of the query's checkpoint",
)
WRITE_COLUMNS: Option[tuple[str, ...] | None] = list_option(
    "write.columns",
    None,
    "For a primary-key table: write these columns and leave the others as they are. They must "
    "contain the key.",
    default_text="all",
)
CHANGE_TYPE_COLUMN = string_option(
    "write.change-type-column",
    None,
    "A column of the rows, not of the table, with the change type of each row: `insert` and "
    "`update_after` upsert, `delete` deletes, `update_before` is skipped.",
    default_text="none: every row is an upsert",
)
WRITE_ORDER = enum_option(
    "write.order",
    "arrival",
    "How the rows of a log table stay exactly once when a task runs again: the task has the same "
    "rows in the same order (`arrival`, true unless they come from an unordered shuffle), or only "
    "the same rows, which are then sorted by their content (`canonical`).",
    allowed=("arrival", "canonical"),
)

COMMON: Final = (BOOTSTRAP, TABLE)
READ: Final = (COLUMNS, FILTER, PARTITIONS, MAX_RECORDS_PER_PARTITION)
BATCH: Final = (LIMIT, READ_OPTIMIZED, INCREMENTAL_START, INCREMENTAL_END)
VIEW: Final = (READ_FRESH,)
STREAM: Final = (STARTUP_MODE, STARTUP_TIMESTAMP, MAX_ROWS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER)
WRITE: Final = (TXN_ID, WRITE_COLUMNS, CHANGE_TYPE_COLUMN, WRITE_ORDER)

_ALL: Final[Mapping[str, Option[Any]]] = {
    option.key.lower(): option for option in (*COMMON, *READ, *BATCH, *VIEW, *STREAM, *WRITE)
}
_OF_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname"})
"""Options that Spark adds to ours."""


class Use(Enum):
    """The operation that the options are for."""

    BATCH = "a batch read"
    STREAM = "a streaming read"
    WRITE = "a write"


_REFUSED: Final[Mapping[Use, tuple[Option[Any], ...]]] = {
    Use.BATCH: STREAM,
    Use.STREAM: (*BATCH, *VIEW, *WRITE),
    Use.WRITE: (*READ, *BATCH, *STREAM),
}


class TableView(Enum):
    """The part of a table that is meant, by the suffix of its name."""

    ROWS = ""
    LAKE = "$lake"
    CHANGELOG = "$changelog"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one relation. Pickles."""

    bootstrap: str
    """The address of the cluster."""
    path: TablePath
    """The table."""
    view: TableView
    """Its rows, its lake or its changelog."""
    client: Mapping[str, str]
    """Options of the client."""
    spark: Mapping[str, str]
    """Options that Spark added, by key in lower case: `path`, `checkpointlocation`."""
    values: Mapping[str, Any]
    """Parsed values of the options that were given, by key."""

    def get(self, option: Option[T]) -> T:
        """The value of an option, or its default."""
        value: T = self.values.get(option.key, option.default)
        return value

    def check_for(self, use: Use) -> None:
        """Raise `ConfigError` if an option has no meaning for this use."""
        for option in _REFUSED[use]:
            if option.key in self.values:
                raise ConfigError(
                    f"table {self.path}: option {option.key} has no meaning for {use.value}; "
                    "leave it out"
                )
        if use is Use.BATCH and self.view is TableView.CHANGELOG and self.get(READ_OPTIMIZED):
            raise ConfigError(
                f"{self.path}{self.view.value} is not in the lake: {READ_OPTIMIZED.key} has no "
                f"meaning for it; leave it out, or read {self.path}"
            )
        if use is Use.WRITE and self.view is not TableView.ROWS:
            raise ConfigError(
                f"{self.path}{self.view.value} can only be read; write to table {self.path}"
            )


def parse_options(options: Mapping[str, str], bootstrap: str | None = None) -> SourceOptions:
    """Parse the options that Spark passes; `bootstrap` is the address if they name none.

    >>> parse_options({"table": "shop.orders$lake", "bootstrap.servers": "localhost:9123"}).view
    <View.LAKE: '$lake'>
    """
    lower = {key.lower(): str(value) for key, value in options.items()}
    client = {key: text for key, text in lower.items() if key.startswith("client.")}
    spark = {key: text for key, text in lower.items() if key in _OF_SPARK}
    values: dict[str, Any] = {}
    for key in lower.keys() - client.keys() - spark.keys():
        if key not in _ALL:
            raise _unknown(key, _ALL)
        option = _ALL[key]
        values[option.key] = option.parse(lower[key])
        if values[option.key] == ():
            raise ConfigError(f"option {option.key} is empty; name something, or leave it out")
    for key in client:
        if not is_client_option(key) or key not in OPTIONS:
            raise _unknown(key, [known for known in OPTIONS if is_client_option(known)])
    path, view = _table(values.get(TABLE.key), spark.get("path"))
    servers = values.get(BOOTSTRAP.key) or bootstrap
    if servers is None:
        raise ConfigError(
            f"table {path}: where is the cluster? Give the option {BOOTSTRAP.key}, host:port, or "
            "zufluss.spark.register(spark, bootstrap)"
        )
    return SourceOptions(servers, path, view, client, spark, values)


def _unknown(key: str, known: Any) -> ConfigError:
    names = [_ALL[name].key if name in _ALL else name for name in known]
    return ConfigError(
        f"{key} is not an option of format fluss{suggestion(key, names)}; docs/spark.md lists them"
    )


def _table(name: str | None, path: str | None) -> tuple[TablePath, TableView]:
    """The table by its name, or by the path; a path with a slash may be Spark's own."""
    text = name or (path.rsplit("/", 1)[-1] if path else None)
    if not text:
        raise ConfigError(f"which table? Give the option {TABLE.key}, database.table")
    named = _named(text)
    if path and "/" not in path and _named(path) != named:
        raise ConfigError(
            f"which table? The option {TABLE.key} says {text!r:.100}, the path {path!r:.100}; give "
            "one of them"
        )
    return named


def _named(text: str) -> tuple[TablePath, TableView]:
    for view in (TableView.LAKE, TableView.CHANGELOG):
        if text.endswith(view.value):
            return TablePath.parse(text.removesuffix(view.value), DEFAULT_DATABASE), view
    return TablePath.parse(text, DEFAULT_DATABASE), TableView.ROWS
