"""The rules of options that change while the cluster runs (ALTER_CLUSTER_CONFIGS).

An option says itself whether it changes at run time (`Option.dynamic`). A change is checked here
and becomes durable in `remote/locations.py`, together with the registry of locations that follows
from it. Then the configurations of the coordinator and of all tablet servers have the new values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from zufluss.config import without_effect
from zufluss.config.load import Configuration, option_of, with_dynamic
from zufluss.config.option import Kind, Option
from zufluss.config.options import DATALAKE_ENABLED, DATALAKE_FORMAT, OPTIONS
from zufluss.errors import ConfigError
from zufluss.model.alter import ConfigOp
from zufluss.model.partition import plain


class ConfigChange(NamedTuple):
    """One option to change."""

    key: str
    value: str | None
    op: int


def changed_configs(
    dynamic: Mapping[str, str], changes: Iterable[ConfigChange], static: Configuration
) -> dict[str, str]:
    """The options after some changes; `ConfigError` if one is not allowed."""
    after = dict(dynamic)
    for change in changes:
        if change.op == ConfigOp.SET and change.value is None:
            raise ConfigError(f"{change.key} needs a value; to take one back, delete it (op 1)")
        option = _dynamic_option(change.key)
        if change.op == ConfigOp.DELETE:
            after.pop(change.key, None)
        elif change.op != ConfigOp.SET:
            after[change.key] = _listed(option, after.get(change.key), change, static)
        elif change.key in without_effect.OPTIONS_WITHOUT_EFFECT:
            after[change.key] = without_effect.checked(option, change.value or "")
        else:
            after[change.key] = (change.value or "").strip()
            option.parse(after[change.key])
    if any(after.get(o.key) != dynamic.get(o.key) for o in (DATALAKE_ENABLED, DATALAKE_FORMAT)):
        _check_lake(with_dynamic(static, after))
    return after


def _check_lake(conf: Configuration) -> None:
    """Raise `ConfigError` for a lake that tables may join and that has no format."""
    if conf.get(DATALAKE_ENABLED) and conf.get(DATALAKE_FORMAT) is None:
        raise ConfigError(
            f"'{DATALAKE_FORMAT.key}' must be configured when '{DATALAKE_ENABLED.key}' is "
            "explicitly set to true."
        )


def _listed(
    option: Option[Any], known: str | None, change: ConfigChange, static: Configuration
) -> str:
    """The text of a list option after APPEND or SUBTRACT."""
    if option.kind is not Kind.LIST or change.op not in (ConfigOp.APPEND, ConfigOp.SUBTRACT):
        raise ConfigError(
            f"operation {change.op} on {option.key} is not possible; allowed: SET (0), DELETE (1), "
            f"and for lists APPEND (2) and SUBTRACT (3)"
        )
    items = option.parse(known) if known is not None else static.get(option)
    operands = option.parse(change.value or "")
    if change.op == ConfigOp.APPEND:
        return option.format((*items, *operands))
    return option.format(tuple(item for item in items if item not in operands))


def _dynamic_option(key: str) -> Option[Any]:
    """The option of a key that changes at run time; `ConfigError` for any other key."""
    option = option_of(key)
    if option is not None and option.dynamic:
        return option
    allowed = [known.key for known in OPTIONS.values() if known.dynamic]
    why = "is unknown" if option is None else "takes effect at a start of the servers only"
    raise ConfigError(
        f"The config key {plain(key)} is not allowed to be changed dynamically. It {why}; "
        f"changeable at run time: {', '.join(allowed)}, datalake.<format>.*"
    )
