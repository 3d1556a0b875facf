"""The text forms of configuration values, both ways.

Configuration and table properties travel as text: in `server.yaml`, in the environment, on the
command line, in a table descriptor. The forms are those of Fluss, so that an existing file or
table keeps its meaning:

| kind     | forms                                                          | in Python       |
|----------|----------------------------------------------------------------|-----------------|
| duration | `100ms`, `3 min`, `7d`; units below; a bare number is ms        | int, ms         |
| memory   | `64mb`, `1 gb`; units below, powers of 1024; a bare number is bytes | int, bytes  |
| boolean  | `true`, `false`, any case                                      | bool            |
| list     | `a,b,c`                                                        | tuple of str    |
| map      | `k:v,k:v`                                                      | dict str to str |
| endpoint | `NAME://host:port`, IPv6 hosts in brackets                     | `Endpoint`      |

The `ValueError` of a parser says what is allowed; `Option.parse` adds the key and the value.
`format_*` returns the shortest text that parses back to the same value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

DURATION_ALLOWED = "a whole number with a unit: ms, s, min, h or d (a bare number is milliseconds)"
MEMORY_ALLOWED = "a whole number with a unit: b, kb, mb, gb or tb (a bare number is bytes)"
ENDPOINT_ALLOWED = "NAME://host:port, several separated by commas"

_NS_PER_MS = 1_000_000

# label -> nanoseconds
_DURATION_UNITS: dict[str, int] = {
    label: nanos
    for labels, nanos in (
        ("ns nano nanos nanosecond nanoseconds", 1),
        ("us µs μs micro micros microsecond microseconds", 1_000),
        ("ms milli millis millisecond milliseconds", _NS_PER_MS),
        ("s sec secs second seconds", SECOND_MS * _NS_PER_MS),
        ("m min minute minutes", MINUTE_MS * _NS_PER_MS),
        ("h hour hours", HOUR_MS * _NS_PER_MS),
        ("d day days", DAY_MS * _NS_PER_MS),
    )
    for label in labels.split()
}
_DURATION_UNITS[""] = _NS_PER_MS

# label -> bytes
_MEMORY_UNITS: dict[str, int] = {
    label: size
    for labels, size in (
        ("b bytes", 1),
        ("k kb kibibytes", KIB),
        ("m mb mebibytes", MIB),
        ("g gb gibibytes", GIB),
        ("t tb tebibytes", TIB),
    )
    for label in labels.split()
}
_MEMORY_UNITS[""] = 1

_NUMBER_AND_UNIT = re.compile(r"([0-9]+)\s*([^\W\d_]*)")
_ENDPOINT = re.compile(
    r"(?P<name>[A-Za-z0-9_-]+)://(?P<host>\[[^\]]+\]|[^:\[\]/\s]*):(?P<port>[0-9]+)"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a named listener."""

    listener: str
    """The listener's name, such as `FLUSS`, `CLIENT` or `INTERNAL`."""
    host: str
    """Host name or address, an IPv6 address without its brackets; empty binds every interface."""
    port: int
    """TCP port; 0 lets the system choose one."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.listener}://{host}:{self.port}"


def parse_duration_ms(text: str) -> int:
    """Milliseconds of a duration such as `3min`; fractions of a millisecond are refused."""
    nanos = _scaled(text, _DURATION_UNITS, DURATION_ALLOWED)
    millis, rest = divmod(nanos, _NS_PER_MS)
    if rest:
        raise ValueError(f"{DURATION_ALLOWED}; nothing finer than a millisecond")
    return _bounded(millis, DURATION_ALLOWED)


def format_duration(value_ms: int) -> str:
    """The duration in the largest unit that needs no fraction: 180000 is `3min`."""
    if value_ms:
        for label, unit in (("d", DAY_MS), ("h", HOUR_MS), ("min", MINUTE_MS), ("s", SECOND_MS)):
            if value_ms % unit == 0:
                return f"{value_ms // unit}{label}"
    return f"{value_ms}ms"


def parse_memory_bytes(text: str) -> int:
    """Bytes of a size such as `64mb`."""
    return _bounded(_scaled(text, _MEMORY_UNITS, MEMORY_ALLOWED), MEMORY_ALLOWED)


def format_memory(size: int) -> str:
    """The size in the largest unit that needs no fraction: 67108864 is `64mb`."""
    if size:
        for label, unit in (("tb", TIB), ("gb", GIB), ("mb", MIB), ("kb", KIB)):
            if size % unit == 0:
                return f"{size // unit}{label}"
    return f"{size}b"


def parse_bool(text: str) -> bool:
    """`true` or `false` in any case."""
    lowered = text.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError("true or false")
    return lowered == "true"


def format_bool(value: bool) -> str:
    """`true` or `false`."""
    return "true" if value else "false"


def parse_int(text: str) -> int:
    """A whole number in decimal digits."""
    stripped = text.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", stripped):
        raise ValueError("a whole number")
    return int(stripped)


def parse_list(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list, trimmed; empty text is an empty list."""
    if not text.strip():
        return ()
    items = tuple(part.strip() for part in text.split(","))
    if not all(items):
        raise ValueError("items separated by commas, none of them empty")
    return items


def parse_map(text: str) -> dict[str, str]:
    """The entries of `key:value,key:value`."""
    entries: dict[str, str] = {}
    for item in parse_list(text):
        key, colon, value = (part.strip() for part in item.partition(":"))
        if not key or not colon or not value:
            raise ValueError(f"key:value pairs separated by commas; {item!r} is none")
        if key in entries:
            raise ValueError(f"key:value pairs, each key once; {key!r} is there twice")
        entries[key] = value
    return entries


def format_map(entries: Mapping[str, str]) -> str:
    """`key:value,key:value`."""
    return ",".join(f"{key}:{value}" for key, value in entries.items())


def parse_endpoint(text: str) -> Endpoint:
    """The endpoint of `NAME://host:port`."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{ENDPOINT_ALLOWED}; {text.strip()!r} is none")
    port = int(match["port"])
    if port > 65535:
        raise ValueError(f"{ENDPOINT_ALLOWED}; the port is 0 to 65535")
    return Endpoint(match["name"], match["host"].strip("[]"), port)


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """The endpoints of a comma-separated list, each listener name once."""
    endpoints = tuple(parse_endpoint(item) for item in parse_list(text))
    names = [endpoint.listener for endpoint in endpoints]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{ENDPOINT_ALLOWED}, each name once; {', '.join(sorted(twice))} is twice")
    return endpoints


def _scaled(text: str, units: Mapping[str, int], allowed: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(allowed)
    if len(match[1]) > len(str(INT64_MAX)):
        raise ValueError(f"{allowed}, below 2^63")
    return int(match[1]) * units[match[2].lower()]


def _bounded(value: int, allowed: str) -> int:
    if value > INT64_MAX:
        raise ValueError(f"{allowed}, below 2^63")
    return value
