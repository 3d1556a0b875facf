"""One configuration option: key, kind, default, help, and how its text becomes a value.

An option is declared once, in `options.py` (server and client) or `table_options.py` (table
properties). Parsing, limits, error messages, `docs/configuration.md` and the output of `zufluss
config` are derived from the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack

from zufluss.config import values
from zufluss.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")
V = TypeVar("V", covariant=True)

HIDDEN = "******"
"""Text shown in place of a secret."""


class Kind(Enum):
    """The type of an option's value."""

    STRING = "string"
    INT = "int"
    BOOL = "boolean"
    DURATION = "duration"
    MEMORY = "memory size"
    ENUM = "enum"
    LIST = "list"
    MAP = "map"
    ENDPOINTS = "endpoints"


_PARSERS: Mapping[Kind, Callable[[str], Any]] = {
    Kind.STRING: str.strip,
    Kind.INT: values.parse_int,
    Kind.BOOL: values.parse_bool,
    Kind.DURATION: values.parse_duration_ms,
    Kind.MEMORY: values.parse_memory_bytes,
    Kind.ENUM: str.strip,
    Kind.LIST: values.parse_list,
    Kind.MAP: values.parse_map,
    Kind.ENDPOINTS: values.parse_endpoints,
}

_FORMATTERS: Mapping[Kind, Callable[[Any], str]] = {
    Kind.STRING: str,
    Kind.INT: str,
    Kind.BOOL: values.format_bool,
    Kind.DURATION: values.format_duration,
    Kind.MEMORY: values.format_memory,
    Kind.ENUM: str,
    Kind.LIST: ",".join,
    Kind.MAP: values.format_map,
    Kind.ENDPOINTS: lambda endpoints: ",".join(map(str, endpoints)),
}


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """A key with its type, default, limits and description."""

    key: str
    """The public name; Fluss's own where Fluss has one, else under `zufluss.`."""
    kind: Kind
    """How the text is read. Durations are int milliseconds, memory sizes int bytes."""
    default: T
    """The value when nothing is configured; None where absence has a meaning of its own."""
    help: str
    """The effect of the option and how to choose a value."""
    dynamic: bool = False
    """A server option that takes effect without a restart when the cluster is reconfigured."""
    alterable: bool = False
    """A table property that ALTER TABLE may change."""
    secret: bool = False
    """Never printed or logged."""
    allowed: tuple[str, ...] = ()
    """The values of an enum, or of the entries of a list or map; matched in any case."""
    minimum: int | None = None
    """The smallest value, of numbers, durations (ms) and sizes (bytes)."""
    maximum: int | None = None
    """The largest value, as `minimum`."""
    default_text: str = ""
    """How the documentation words a default that depends on the machine or on another key."""

    def parse(self, text: str) -> T:
        """Parse `text`; `ConfigError` names the key, the value and the allowed values."""
        try:
            value = self._checked(_PARSERS[self.kind](text))
        except ValueError as problem:
            shown = HIDDEN if self.secret else repr(text)
            raise ConfigError(f"{self.key} = {shown} is not allowed; allowed: {problem}") from None
        return value  # type: ignore[no-any-return]

    def format(self, value: T) -> str:
        """The text of a value; empty for None."""
        return "" if value is None else _FORMATTERS[self.kind](value)

    def show(self, value: T) -> str:
        """The text of a value for people: a secret that is set is hidden."""
        text = self.format(value)
        return HIDDEN if self.secret and text else text

    @property
    def default_shown(self) -> str:
        """The default as the documentation shows it."""
        return self.default_text or self.show(self.default)

    @property
    def limits(self) -> str:
        """The allowed values in words; empty if the kind is the only limit."""
        if self.allowed:
            return " | ".join(self.allowed)
        low = None if self.minimum is None else _FORMATTERS[self.kind](self.minimum)
        high = None if self.maximum is None else _FORMATTERS[self.kind](self.maximum)
        if low is not None and high is not None:
            return f"{low} to {high}"
        return f"at least {low}" if low is not None else f"at most {high}" if high else ""

    def _checked(self, value: Any) -> Any:
        if self.kind in (Kind.INT, Kind.DURATION, Kind.MEMORY):
            return self._within_limits(value)
        if not self.allowed:
            return value
        if self.kind is Kind.LIST:
            return tuple(self._one_of(item) for item in value)
        if self.kind is Kind.MAP:
            return {key: self._one_of(item) for key, item in value.items()}
        return self._one_of(value)

    def _within_limits(self, value: int) -> int:
        low = value if self.minimum is None else self.minimum
        high = value if self.maximum is None else self.maximum
        if not low <= value <= high:
            raise ValueError(self.limits)
        return value

    def _one_of(self, text: str) -> str:
        for candidate in self.allowed:
            if candidate.lower() == text.lower():
                return candidate
        raise ValueError(", ".join(self.allowed))


class Traits(TypedDict, total=False):
    """The fields of an option that most declarations leave out."""

    dynamic: bool
    alterable: bool
    secret: bool
    allowed: tuple[str, ...]
    minimum: int | None
    maximum: int | None
    default_text: str


class _Declare(Protocol[V]):
    """Declares an option of one kind; a default of None makes the value optional."""

    def __call__(
        self, key: str, default: D, help: str, **traits: Unpack[Traits]
    ) -> Option[V | D]: ...


def _declares(kind: Kind) -> Any:
    return lambda key, default, help, **traits: Option(key, kind, default, help, **traits)


string_option: _Declare[str] = _declares(Kind.STRING)
int_option: _Declare[int] = _declares(Kind.INT)
bool_option: _Declare[bool] = _declares(Kind.BOOL)
duration_option: _Declare[int] = _declares(Kind.DURATION)
memory_option: _Declare[int] = _declares(Kind.MEMORY)
enum_option: _Declare[str] = _declares(Kind.ENUM)
list_option: _Declare[tuple[str, ...]] = _declares(Kind.LIST)
map_option: _Declare[dict[str, str]] = _declares(Kind.MAP)
endpoints_option: _Declare[tuple[values.Endpoint, ...]] = _declares(Kind.ENDPOINTS)
