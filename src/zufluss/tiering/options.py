"""The options of the tiering service, in the groups and with the names that Fluss gives them.

| group | what |
|---|---|
| `--fluss.bootstrap.servers`, `--fluss.client.*` | the cluster, options of the client |
| `--datalake.format`, `--datalake.<format>.*` | the lake, overriding the cluster's properties |
| `--lake.tiering.*` | this service |
| `--zufluss.metrics.*` | the address of its metrics |
| `--spark.*` | settings of the Spark session, unchanged |

Each is given as `--key value` or `--key=value`. An unknown key is refused, with the nearest known
key in the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from zufluss.config.nearest import suggestion
from zufluss.config.option import (
    Option,
    duration_option,
    enum_option,
    int_option,
    string_option,
)
from zufluss.config.options import (
    OPTIONS,
    ZUFLUSS_METRICS_HOST,
    ZUFLUSS_METRICS_PORT,
    is_client_option,
)
from zufluss.config.values import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from zufluss.errors import ConfigError
from zufluss.lake_formats import LAKE_FORMATS

T = TypeVar("T")

CLUSTER = "fluss."
LAKE = "datalake."
SPARK = "spark."

BOOTSTRAP_SERVERS = string_option(
    "fluss.bootstrap.servers",
    "localhost:9123",
    "A server of the cluster as `host:port`; several separated by commas.",
)
DATALAKE_FORMAT = enum_option(
    "datalake.format",
    None,
    "Tier tables of this format only; a table of another one is refused.",
    allowed=tuple(LAKE_FORMATS),
    default_text="what each table says",
)
PARALLEL_TABLES = int_option(
    "lake.tiering.parallel-tables",
    4,
    "How many tables are tiered at the same time.",
    minimum=1,
    maximum=256,
)
POLL_INTERVAL = duration_option(
    "lake.tiering.poll-interval",
    200,
    "How often the coordinator is asked for a table while there is room for one.",
    minimum=10,
    maximum=MINUTE_MS,
)
HEARTBEAT_INTERVAL = duration_option(
    "lake.tiering.heartbeat-interval",
    2 * SECOND_MS,
    "How often the coordinator hears that the tables in work are still in work.",
    minimum=50,
    maximum=5 * MINUTE_MS,
)
HEARTBEAT_TIMEOUT = duration_option(
    "lake.tiering.heartbeat-timeout",
    10 * SECOND_MS,
    "After this long without a heartbeat the coordinator gives a table to another service. "
    "At least twice the heartbeat interval.",
    minimum=SECOND_MS,
    maximum=10 * MINUTE_MS,
)
TASKS_PER_CORE = int_option(
    "lake.tiering.tasks-per-core",
    2,
    "Into how many Spark tasks per core a round is packed at most.",
    minimum=1,
    maximum=16,
)
BUCKET_RECORDS_MAX = int_option(
    "lake.tiering.bucket-records-max",
    2_000_000,
    "The records of one bucket that one round takes at most; the rest comes in the next round, "
    "at once. Bounds the memory of a task that folds a primary-key table.",
    minimum=1,
    maximum=1_000_000_000,
)
ORPHAN_AGE = duration_option(
    "lake.tiering.orphan-age",
    DAY_MS,
    "Files of the lake table that no snapshot references are removed when they are older. "
    "Longer than the longest round.",
    minimum=SECOND_MS,
)
SWEEP_INTERVAL = duration_option(
    "lake.tiering.sweep-interval",
    HOUR_MS,
    "How often a table is swept for such files.",
    minimum=SECOND_MS,
)
SNAPSHOT_AGE = duration_option(
    "lake.tiering.snapshot-age",
    5 * DAY_MS,
    "Snapshots of tables with `table.datalake.auto-expire-snapshot` expire when they are older.",
    minimum=SECOND_MS,
)
STOP_TIMEOUT = duration_option(
    "lake.tiering.stop-timeout",
    30 * SECOND_MS,
    "How long running rounds may go on after SIGTERM before they are cancelled.",
)

METRICS_PORT = ZUFLUSS_METRICS_PORT
METRICS_HOST = ZUFLUSS_METRICS_HOST

TIERING_OPTIONS: Mapping[str, Option[Any]] = {
    option.key: option
    for name, option in list(globals().items())
    if isinstance(option, Option) and not name.startswith("ZUFLUSS_")
}
"""Every option of the service by key, in the order declared."""


@dataclass(frozen=True, slots=True)
class TieringOptions:
    """The checked options of a tiering service."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The parsed values that were given, by key; read them with `options[OPTION]`."""
    client: Mapping[str, str] = field(default_factory=dict)
    """The `client.*` options of the connection."""
    lake: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Catalog properties by format, without prefix."""
    spark: Mapping[str, str] = field(default_factory=dict)
    """`spark.*` settings of the session."""

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> TieringOptions:
        """The options of a command line; `ConfigError` names a wrong key and the nearest one."""
        return cls.of(split_arguments(arguments))

    @classmethod
    def of(cls, pairs: Mapping[str, str]) -> TieringOptions:
        """The options of `key: value` pairs.

        >>> TieringOptions.of({"lake.tiering.parallel-tables": "2"})[PARALLEL_TABLES]
        2
        """
        values: dict[str, Any] = {}
        client: dict[str, str] = {}
        lake: dict[str, dict[str, str]] = {}
        spark: dict[str, str] = {}
        for key, text in pairs.items():
            if key in TIERING_OPTIONS:
                values[key] = TIERING_OPTIONS[key].parse(text)
            elif _is_client(key):
                client[key.removeprefix(CLUSTER)] = _checked_client(key, text)
            elif (name := _lake_key(key)) is not None:
                lake.setdefault(name[0], {})[name[1]] = text
            elif key.startswith(SPARK):
                spark[key] = text
            else:
                raise ConfigError(f"option --{key} is not known{suggestion(key, _known())}")
        return cls(values, client, lake, spark)._checked()

    def __getitem__(self, option: Option[T]) -> T:
        return cast("T", self.values.get(option.key, option.default))

    def _checked(self) -> TieringOptions:
        beat, timeout = self[HEARTBEAT_INTERVAL], self[HEARTBEAT_TIMEOUT]
        if timeout < 2 * beat:
            raise ConfigError(
                f"{HEARTBEAT_TIMEOUT.key} = {HEARTBEAT_TIMEOUT.format(timeout)} is not allowed; "
                f"allowed: at least twice {HEARTBEAT_INTERVAL.key}, which is "
                f"{HEARTBEAT_INTERVAL.format(beat)}"
            )
        format = self[DATALAKE_FORMAT]
        foreign = sorted(name for name in self.lake if format is not None and name != format)
        if foreign:
            raise ConfigError(
                f"options --datalake.{foreign[0]}.* are of no use with --datalake.format {format}"
            )
        return self


def split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """`--key value` and `--key=value` as pairs; a key given twice has its last value."""
    pairs: dict[str, str] = {}
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ConfigError(f"{word!r} is not an option; give --key value or --key=value")
        if not equals:
            if not pending or pending[0].startswith("--"):
                raise ConfigError(f"option --{key} has no value; give --{key} value")
            value = pending.pop(0)
        pairs[key] = value
    return pairs


HELP = """\
Move tables into the lake, round by round, in a Spark session.

Prints one line on stdout when it is ready. SIGTERM or Ctrl-C ends it gracefully, a second one at
once.

Examples:

  zufluss tiering --fluss.bootstrap.servers localhost:9123

  zufluss tiering --lake.tiering.parallel-tables 8 --spark.master 'local[4]'

  spark-submit --master spark://host:7077 …/zufluss/tiering/main.py \\
      --fluss.bootstrap.servers host:9123

Options, with their defaults:
"""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for help."""
    return "--help" in arguments or "-h" in arguments


def help_text() -> str:
    """The text of `--help`: examples, and all options with default and meaning."""
    lines = [
        f"  --{option.key} ({option.default_shown})\n      {option.help}"
        for option in TIERING_OPTIONS.values()
    ]
    lines += [
        "  --fluss.client.*\n      Options of the client (docs/configuration.md).",
        "  --datalake.<format>.*\n      Properties of the lake's catalog, over the cluster's own.",
        "  --spark.*\n      Settings of the Spark session, such as spark.master.",
    ]
    return HELP + "\n".join(lines)


def _is_client(key: str) -> bool:
    inner = key.removeprefix(CLUSTER)
    return key.startswith(CLUSTER) and is_client_option(inner) and inner in OPTIONS


def _checked_client(key: str, text: str) -> str:
    OPTIONS[key.removeprefix(CLUSTER)].parse(text)
    return text


def _lake_key(key: str) -> tuple[str, str] | None:
    """Format and property of `datalake.<format>.<property>`."""
    name, _, inner = key.removeprefix(LAKE).partition(".")
    if key.startswith(LAKE) and name in LAKE_FORMATS and inner:
        return name, inner
    return None


def _known() -> list[str]:
    clients = [CLUSTER + key for key in OPTIONS if is_client_option(key)]
    return [*TIERING_OPTIONS, *clients, *(f"{LAKE}{name}.warehouse" for name in LAKE_FORMATS)]
