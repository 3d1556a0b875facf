"""The configuration of a process: `server.yaml`, environment, `-D key=value`, in this order.

A later source wins. Every value is parsed when it is loaded; an invalid one stops the process with
the key, the value and the allowed values. An unknown key is a warning with the nearest known key,
because a `server.yaml` made for Fluss has keys we do not need. A key of Fluss that has no effect
here (`without_effect.py`) is kept as text, and the start says so. `zufluss config` shows where each
value came from.

The environment variable of a key is `env_name(key)`: `ZUFLUSS_` and the key in capitals with `_`
for `.` and `-`; our own keys do not repeat the prefix (`zufluss.log.flush` is `ZUFLUSS_LOG_FLUSH`).
In YAML, nested maps are the same as dotted keys. Keys of lake formats (`lake.py`) and object stores
(`stores.py`) are kept as text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zufluss.config.lake import is_lake_key, is_secret, lake_key_of_variable, lake_option
from zufluss.config.nearest import nearest
from zufluss.config.option import HIDDEN, Kind, Option
from zufluss.config.options import OPTIONS, is_client_option
from zufluss.config.stores import is_store_key, is_store_secret, store_key_of_variable
from zufluss.config.without_effect import OPTIONS_WITHOUT_EFFECT, checked
from zufluss.errors import ConfigError

T = TypeVar("T")

DEFAULT_ORIGIN = "default"
OVERRIDE_ORIGIN = "-D"
DYNAMIC_ORIGIN = "changed in the running cluster"
"""The origin of options that ALTER_CLUSTER_CONFIGS set."""

OTHER_VARIABLES = frozenset(
    {
        "ZUFLUSS_BOOTSTRAP",
        "ZUFLUSS_CONFIG",
        "ZUFLUSS_DEBUG",
        "ZUFLUSS_FAULT",
        "ZUFLUSS_S3_SERVER",
        "ZUFLUSS_SEED",
        "ZUFLUSS_TEST_MEMORY_LOCATIONS",
    }
)
"""Environment variables with our prefix that are not options; the CLI and the tests read them."""

_log = logging.getLogger("zufluss.config")
"""The standard library's logger: a client process decides where its output goes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One configured value."""

    value: Any
    """The parsed value."""
    origin: str
    """The source: a file name, an environment variable, `-D`, or a word of the caller."""


@dataclass(frozen=True, slots=True)
class EffectiveRow:
    """One line of `zufluss config`."""

    key: str
    """The option's key."""
    value: str
    """The effective value as text; secrets are hidden."""
    origin: str
    """The source of the value; `default` if it is not set."""


class Configuration:
    """An immutable set of option values with their origins."""

    __slots__ = ("_settings",)

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = dict(settings)

    @classmethod
    def load(
        cls,
        yaml_path: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, str] | Sequence[str] = (),
    ) -> Configuration:
        """Read all sources; without `environ`, the environment of this process is used."""
        settings: dict[str, Setting] = {}
        if yaml_path is not None:
            settings |= _settings(read_yaml(yaml_path), str(yaml_path))
        settings |= _from_environment(os.environ if environ is None else environ)
        settings |= _settings(split_overrides(overrides), OVERRIDE_ORIGIN)
        for key in filter(settings.__contains__, OPTIONS_WITHOUT_EFFECT):
            _log.warning(
                "configuration key %s from %s has no effect here: %s",
                key, settings[key].origin, OPTIONS_WITHOUT_EFFECT[key].help,
            )  # fmt: skip
        return cls(settings)

    @classmethod
    def of(cls, pairs: Mapping[str, Any], origin: str = "code") -> Configuration:
        """Returns a configuration of only these keys; values are text or YAML values."""
        return cls(_settings(_flatten(pairs), origin))

    def get(self, option: Option[T]) -> T:
        """The effective value."""
        setting = self._settings.get(option.key)
        return option.default if setting is None else setting.value

    def __getitem__(self, option: Option[T]) -> T:
        return self.get(option)

    def is_set(self, option: Option[Any]) -> bool:
        """Whether the option was set, even to its default."""
        return option.key in self._settings

    def origin(self, option: Option[Any]) -> str:
        """The source of the effective value."""
        setting = self._settings.get(option.key)
        return DEFAULT_ORIGIN if setting is None else setting.origin

    def with_overrides(
        self, overrides: Mapping[str, str] | Sequence[str], origin: str = OVERRIDE_ORIGIN
    ) -> Configuration:
        """A copy in which these keys are replaced."""
        return Configuration(self._settings | _settings(split_overrides(overrides), origin))

    def client_settings(self) -> dict[str, str]:
        """The client keys that are set, as text, for `zufluss.connect`."""
        return {
            key: OPTIONS[key].format(setting.value)
            for key, setting in self._settings.items()
            if is_client_option(key)
        }

    def lake_properties(self, format: str) -> dict[str, str]:
        """Returns the keys below `datalake.<format>.` without that prefix, secrets included."""
        prefix = f"datalake.{format}."
        return {
            key.removeprefix(prefix): setting.value
            for key, setting in self._settings.items()
            if key.startswith(prefix)
        }

    def store_settings(self) -> dict[str, str]:
        """The properties of object stores that are set, secrets included."""
        return {key: s.value for key, s in self._settings.items() if is_store_key(key)}

    def effective(self) -> list[EffectiveRow]:
        """All options in declared order, then other keys that are set; secrets hidden."""
        declared = [
            EffectiveRow(option.key, option.show(self.get(option)), self.origin(option))
            for option in OPTIONS.values()
        ]
        return declared + [
            EffectiveRow(key, _shown(key, setting.value), setting.origin)
            for key, setting in sorted(self._settings.items())
            if key not in OPTIONS
        ]

    def __repr__(self) -> str:
        shown = {key: _shown(key, s.value) for key, s in self._settings.items()}
        return f"Configuration({shown})"


class LiveConfiguration(Configuration):
    """The configuration in force in a running server.

    It is what the process was started with, and over it what was changed in the running cluster.
    Who reads an option from it gets the present value; who keeps a value keeps the old one.
    """

    __slots__ = ("started_with",)

    def __init__(self, started_with: Configuration) -> None:
        self.started_with = started_with
        """The configuration without the changes in the running cluster."""
        super().__init__(started_with._settings)

    def change(self, dynamic: Mapping[str, str]) -> None:
        """Put exactly these options over those of the start, from now on."""
        self._settings = with_dynamic(self.started_with, dynamic)._settings


def with_dynamic(conf: Configuration, dynamic: Mapping[str, str]) -> Configuration:
    """A configuration of a start with options over it that were changed in the running cluster."""
    return conf.with_overrides(dynamic, origin=DYNAMIC_ORIGIN)


def _shown(key: str, value: Any) -> str:
    """The text of a setting for people."""
    option = OPTIONS.get(key)
    if option is not None:
        return option.show(value)
    if key in OPTIONS_WITHOUT_EFFECT:
        return str(value)
    secret = is_store_secret(key) if is_store_key(key) else is_secret(key, value)
    return HIDDEN if secret else value


def option_of(key: str) -> Option[Any] | None:
    """The option of a server's key, also one without effect here or of a lake; None if unknown."""
    return OPTIONS.get(key) or OPTIONS_WITHOUT_EFFECT.get(key) or lake_option(key)


def env_name(key: str) -> str:
    """The environment variable of a key."""
    return "ZUFLUSS_" + key.removeprefix("zufluss.").upper().replace(".", "_").replace("-", "_")


def read_yaml(path: str | Path) -> dict[str, str]:
    """The flat `key: text` pairs of a YAML file."""
    import yaml  # here, because most commands read no file

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(
            f"cannot read the configuration file {path}: {problem.strerror}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not valid YAML: {problem}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}; allowed: a map of keys")
    return _flatten(document)


def split_overrides(overrides: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """The pairs of `key=value` items, or of a mapping."""
    if isinstance(overrides, Mapping):
        return _flatten(overrides)
    pairs: dict[str, str] = {}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{item!r} is not a setting; allowed: key=value")
        pairs[key.strip()] = value
    return pairs


def _flatten(document: Mapping[Any, Any]) -> dict[str, str]:
    return {key: text for key, value in document.items() for key, text in _leaves(str(key), value)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The dotted keys below `key`; nothing for an empty value, which means unset."""
    option = OPTIONS.get(key)
    if isinstance(value, Mapping) and not (option and option.kind is Kind.MAP):
        for name, child in value.items():
            yield from _leaves(f"{key}.{name}", child)
    elif value is not None:
        yield key, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def _settings(pairs: Mapping[str, str], origin: str) -> dict[str, Setting]:
    """Parse the known pairs; log a warning for each unknown one."""
    known: dict[str, Setting] = {}
    for key, text in pairs.items():
        option = OPTIONS.get(key)
        if option is not None:
            known[key] = Setting(_parsed(option, text, origin), origin)
        elif key in OPTIONS_WITHOUT_EFFECT:
            known[key] = Setting(_without_effect(key, text, origin), origin)
        elif is_lake_key(key) or is_store_key(key):
            known[key] = Setting(text.strip(), origin)
        else:
            _warn_unknown(key, origin, nearest(key, OPTIONS))
    return known


def _without_effect(key: str, text: str, origin: str) -> str:
    """The text of an option without effect, which is listed as it was given."""
    return _read(partial(checked, OPTIONS_WITHOUT_EFFECT[key]), text, origin)


def _parsed(option: Option[Any], text: str, origin: str) -> Any:
    return _read(option.parse, text, origin)


def _read(parse: Callable[[str], T], text: str, origin: str) -> T:
    try:
        return parse(text)
    except ConfigError as problem:
        raise ConfigError(f"{problem.message} (from {origin})") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    by_name = {env_name(key): option for key, option in OPTIONS.items()}
    idle = {env_name(key): key for key in OPTIONS_WITHOUT_EFFECT}
    settings: dict[str, Setting] = {}
    for name, text in environ.items():
        if not name.startswith("ZUFLUSS_") or name in OTHER_VARIABLES:
            continue
        option = by_name.get(name)
        other_key = lake_key_of_variable(name) or store_key_of_variable(name)
        if option is not None:
            settings[option.key] = Setting(_parsed(option, text, name), name)
        elif name in idle:
            settings[idle[name]] = Setting(_without_effect(idle[name], text, name), name)
        elif other_key is not None:
            settings[other_key] = Setting(text.strip(), name)
        else:
            _warn_unknown(name, "environment", nearest(name, by_name))
    return settings


def unknown_keys(
    yaml_path: str | Path | None, environ: Mapping[str, str], overrides: Sequence[str]
) -> list[tuple[str, str, str | None]]:
    """The unknown keys of all sources: key, origin, and the nearest known key."""
    unknown: list[tuple[str, str, str | None]] = []
    pairs = [] if yaml_path is None else [(key, str(yaml_path)) for key in read_yaml(yaml_path)]
    pairs += [(key, OVERRIDE_ORIGIN) for key in split_overrides(overrides)]
    for key, origin in pairs:
        known = key in OPTIONS or key in OPTIONS_WITHOUT_EFFECT
        if not known and not is_lake_key(key) and not is_store_key(key):
            unknown.append((key, origin, nearest(key, OPTIONS)))
    by_name = {env_name(key) for key in (*OPTIONS, *OPTIONS_WITHOUT_EFFECT)}
    for name in environ:
        known = name in by_name or name in OTHER_VARIABLES or not name.startswith("ZUFLUSS_")
        if not known and not lake_key_of_variable(name) and not store_key_of_variable(name):
            unknown.append((name, "environment", nearest(name, by_name)))
    return unknown


def _warn_unknown(key: str, origin: str, match: str | None) -> None:
    hint = f"; did you mean {match}?" if match else ""
    _log.warning("configuration key %s from %s is not known and has no effect%s", key, origin, hint)
