"""Partitions by time: which to create ahead, which have expired. Pure; the clock is an argument.

With `table.auto-partition.enabled` one partition key, the time key, holds the start of a period as
text. From the current period on, `num-precreate` partitions exist; partitions more than
`num-retention` periods old are dropped (a negative number keeps all). The texts sort like time, so
ages are compared as text.

| unit    | default format | next period                                      |
|---------|----------------|--------------------------------------------------|
| HOUR    | yyyyMMddHH     | an hour later on the clock of the world          |
| DAY     | yyyyMMdd       | the next calendar day in the time zone           |
| MONTH   | yyyyMM         | the next calendar month                          |
| QUARTER | yyyyQ          | three months later                               |
| YEAR    | yyyy           | the next calendar year                           |

A user's format has the same fields in the same order (`yyyy-MM-dd`) and literals of characters
that names may have; letters are quoted. With several partition keys nothing is created ahead, and
retention looks at the time key alone. Only partitions whose value has the format are dropped, so
partitions that were made by hand before auto-partitioning was switched on stay.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from zufluss.config import table_options as o
from zufluss.config.option import Option
from zufluss.errors import ConfigError, InvalidPartitionError, InvalidTableError
from zufluss.model.partition import PartitionSpec, check_spec, name_problem, spec_of
from zufluss.model.table import TableDescriptor, TableInfo

HOUR_MS = 3_600_000
_FORMATS = {
    "HOUR": "yyyyMMddHH",
    "DAY": "yyyyMMdd",
    "MONTH": "yyyyMM",
    "QUARTER": "yyyyQ",
    "YEAR": "yyyy",
}
_WIDTHS = {"y": 4, "Q": 1, "M": 2, "d": 2, "H": 2}
_SAME = {"u": "y", "q": "Q", "L": "M"}
_TOKEN = re.compile(r"''|'(?:[^']|'')*'|([A-Za-z])\1*|[^A-Za-z']")
_OFFSET = re.compile(r"(?:GMT|UTC)?([+-])(\d{1,2})(?::?([0-5]\d))?")


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """A compiled time format: renders a moment as text, and checks such a text."""

    pattern: str
    """The format as written."""
    parts: tuple[tuple[str, str], ...]
    """(field letter, "") for a field, ("", text) for a literal."""

    def render(self, moment: dt.datetime) -> str:
        """The text of a moment."""
        fields = {
            "y": f"{moment.year:04}",
            "Q": str((moment.month + 2) // 3),
            "M": f"{moment.month:02}",
            "d": f"{moment.day:02}",
            "H": f"{moment.hour:02}",
        }
        return "".join(fields[letter] if letter else text for letter, text in self.parts)

    def accepts(self, text: str) -> bool:
        """Whether a text is the rendering of some moment."""
        fields: dict[str, int] = {}
        at = 0
        for letter, literal in self.parts:
            width = _WIDTHS[letter] if letter else len(literal)
            piece = text[at : at + width]
            if letter:
                if len(piece) < width or not (piece.isascii() and piece.isdigit()):
                    return False
                fields[letter] = int(piece)
            elif piece != literal:
                return False
            at += width
        return at == len(text) and _is_moment(fields)


def _is_moment(fields: Mapping[str, int]) -> bool:
    try:
        dt.datetime(fields["y"], fields.get("M", 1), fields.get("d", 1), fields.get("H", 0))
    except ValueError:
        return False
    return 1 <= fields.get("Q", 1) <= 4


@lru_cache(maxsize=256)
def time_format(pattern: str | None, unit: str) -> TimeFormat:
    """Compile a format, by default that of the unit; raises 15 if it is invalid."""
    default = _FORMATS[unit]
    pattern = default if pattern is None else pattern
    parts: list[tuple[str, str]] = []
    at = 0
    for token in _TOKEN.finditer(pattern):
        if token.start() != at:
            break
        at = token.end()
        parts.append(_part(token.group(), pattern, default))
    fields = "".join(letter * _WIDTHS[letter] for letter, _ in parts if letter)
    if at != len(pattern) or fields != default:
        raise _bad_format(pattern, default, f"its fields must be {default} in this order")
    compiled = TimeFormat(pattern, tuple(parts))
    problem = name_problem(compiled.render(dt.datetime(2024, 11, 11, 11)))
    if problem is not None:
        raise _bad_format(pattern, default, f"it gives no partition value: {problem}")
    return compiled


def _part(token: str, pattern: str, default: str) -> tuple[str, str]:
    if token == "''":
        return "", "'"
    if token[0] == "'":
        return "", token[1:-1].replace("''", "'")
    if not (token[0].isascii() and token[0].isalpha()):
        return "", token
    letter = _SAME.get(token[0], token[0])
    if _WIDTHS.get(letter) != len(token):
        raise _bad_format(pattern, default, f"{token!r} is not a field of fixed width")
    return letter, ""


def _bad_format(pattern: str, default: str, why: str) -> InvalidTableError:
    return InvalidTableError(
        f"{o.TABLE_AUTO_PARTITION_TIME_FORMAT.key} = {pattern!r:.80} is not allowed: {why}; "
        f"remove it to get {default}"
    )


def time_zone(name: str | None) -> dt.tzinfo | None:
    """The time zone of a name or offset (`Europe/Berlin`, `GMT+8`), None for the system's."""
    if name is None:
        return None
    if name.upper() in ("UTC", "GMT", "Z"):
        return dt.UTC
    offset = _OFFSET.fullmatch(name)
    try:
        if offset is None:
            return ZoneInfo(name)
        span = dt.timedelta(hours=int(offset[2]), minutes=int(offset[3] or 0))
        return dt.timezone(span if offset[1] == "+" else -span)
    except (KeyError, ValueError, OSError):
        raise ConfigError(
            f"{o.TABLE_AUTO_PARTITION_TIME_ZONE.key} = {name!r:.80} is not a time zone; allowed: "
            "a name such as Europe/Berlin, or an offset such as GMT+8"
        ) from None


@dataclass(frozen=True, slots=True)
class AutoPartition:
    """The auto-partition properties of a table, parsed."""

    enabled: bool
    """Partitions are created and dropped by time."""
    key: str
    """The partition key that holds the time."""
    unit: str
    """HOUR, DAY, MONTH, QUARTER or YEAR."""
    format: TimeFormat
    """The text form of a period."""
    zone: dt.tzinfo | None
    """Where days begin; None for the system's time zone."""
    precreate: int
    """Partitions that exist from the current one on."""
    retention: int
    """Periods kept before the current one; negative keeps all."""
    checked: bool
    """Values of the time key must have the format: when enabled, or when a format is given."""

    @classmethod
    def of(cls, descriptor: TableDescriptor) -> AutoPartition:
        """The properties of a partitioned table; raises 39 or 15 if they are invalid."""

        def get(option: Option[Any]) -> Any:
            text = descriptor.properties.get(option.key)
            return option.default if text is None else option.parse(text)

        unit = get(o.TABLE_AUTO_PARTITION_TIME_UNIT)
        pattern = get(o.TABLE_AUTO_PARTITION_TIME_FORMAT)
        enabled = get(o.TABLE_AUTO_PARTITION_ENABLED)
        return cls(
            enabled=enabled,
            key=get(o.TABLE_AUTO_PARTITION_KEY) or descriptor.partition_keys[0],
            unit=unit,
            format=time_format(pattern, unit),
            zone=time_zone(get(o.TABLE_AUTO_PARTITION_TIME_ZONE)),
            precreate=get(o.TABLE_AUTO_PARTITION_NUM_PRECREATE),
            retention=get(o.TABLE_AUTO_PARTITION_NUM_RETENTION),
            checked=enabled or pattern is not None,
        )

    def period(self, now_ms: int, offset: int) -> str | None:
        """The text of the period `offset` units from now; None outside the years 1 to 9999."""
        try:
            if self.unit == "HOUR":
                return self.format.render(self._moment(now_ms + offset * HOUR_MS))
            now = self._moment(now_ms)
            if self.unit == "DAY":
                return self.format.render(now.replace(tzinfo=None) + dt.timedelta(days=offset))
            months = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}[self.unit] * offset
            year, month = divmod(now.year * 12 + now.month - 1 + months, 12)
            return self.format.render(dt.datetime(year, month + 1, 1))
        except (ValueError, OverflowError, OSError):
            return None

    def _moment(self, ms: int) -> dt.datetime:
        return dt.datetime.fromtimestamp(ms // 1000, self.zone)

    def oldest(self, now_ms: int) -> str | None:
        """The text of the oldest period that is kept, None if all are."""
        return None if self.retention < 0 else self.period(now_ms, -self.retention)


def auto_partitions(info: TableInfo, now_ms: int) -> list[str]:
    """The names of the partitions that must exist now, current first."""
    if not info.is_partitioned:
        return []
    auto = AutoPartition.of(info.descriptor)
    if not auto.enabled or len(info.partition_keys) > 1:
        return []
    periods = (auto.period(now_ms, offset) for offset in range(auto.precreate))
    return list(dict.fromkeys(period for period in periods if period is not None))


def expired_partitions(info: TableInfo, names: Iterable[str], now_ms: int) -> list[str]:
    """The partitions that are older than the table keeps."""
    if not info.is_partitioned:
        return []
    auto = AutoPartition.of(info.descriptor)
    oldest = auto.oldest(now_ms) if auto.enabled else None
    if oldest is None:
        return []
    values = ((name, spec_of(info.partition_keys, name)[auto.key]) for name in names)
    return [name for name, value in values if auto.format.accepts(value) and value < oldest]


def check_create_partition(info: TableInfo, spec: PartitionSpec, now_ms: int) -> str:
    """The name of a partition to create; raises 37, or 43 for an invalid or expired value."""
    name = check_spec(info, spec, create=True)
    auto = AutoPartition.of(info.descriptor)
    if not auto.checked:
        return name
    value = spec[auto.key]
    if not auto.format.accepts(value):
        raise InvalidPartitionError(
            f"Partition value '{value}' of partition key {auto.key!r} does not match the expected "
            f"format '{auto.format.pattern}' for auto-partition time unit '{auto.unit}'"
        )
    oldest = auto.oldest(now_ms) if auto.enabled else None
    if oldest is not None and value < oldest:
        raise InvalidPartitionError(
            f"Partition value '{value}' is out-of-date. The earliest retained partition is "
            f"'{oldest}': table {info.path} keeps {auto.retention} past periods; raise "
            f"{_RETENTION} to keep more"
        )
    return name


_RETENTION = o.TABLE_AUTO_PARTITION_NUM_RETENTION.key
