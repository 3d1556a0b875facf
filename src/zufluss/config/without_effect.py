"""Options that Apache Fluss changes at run time and that mean nothing here.

They belong to parts that this server does not have. Configurations, scripts and procedures that set
them keep working: a value is checked, kept and listed like that of any other option, and has no
effect, which the log says. The documentation lists them with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from zufluss.config.option import (
    Option,
    duration_option,
    int_option,
    memory_option,
    string_option,
)
from zufluss.errors import ConfigError

RATIO_KEYS: Final = frozenset(
    {
        "server.data-disk.write-limit-ratio",
        "server.data-disk.write-recover-ratio",
        "server.historical-partition.lookup-cache.max-disk-ratio",
    }
)
"""Options whose value is a number from 0 to 1."""

_NO_ROCKSDB: Final = "rows are in memory, and RocksDB is written by one process that flushes them."
_NO_REPLICAS: Final = "a bucket has one replica."
_NO_WATERMARK: Final = "writes are refused when the disk is full, not from a ratio on."
_NO_HISTORY: Final = "lookups in historical partitions have no such cache."

_DECLARED: Final[tuple[Option[Any], ...]] = (
    memory_option("kv.rocksdb.shared-rate-limiter.bytes-per-sec", None, _NO_ROCKSDB),
    memory_option("kv.leader-replica.memory-reserved", None, _NO_ROCKSDB),
    int_option("log.replica.min-in-sync-replicas-number", None, _NO_REPLICAS, minimum=1),
    string_option("server.data-disk.write-limit-ratio", None, _NO_WATERMARK),
    string_option("server.data-disk.write-recover-ratio", None, _NO_WATERMARK),
    string_option("server.historical-partition.lookup-cache.max-disk-ratio", None, _NO_HISTORY),
    duration_option(
        "server.historical-partition.lookuper-cache.expire-after-access", None, _NO_HISTORY
    ),
)

OPTIONS_WITHOUT_EFFECT: Mapping[str, Option[Any]] = MappingProxyType(
    {option.key: replace(option, dynamic=True) for option in _DECLARED}
)
"""These options by key; `help` is the reason."""


def checked(option: Option[Any], text: str) -> str:
    """The value as it is stored and listed; `ConfigError` for one that Fluss would refuse."""
    value = text.strip()
    try:
        if option.key in RATIO_KEYS:
            if not 0 <= float(value) <= 1:
                raise ValueError
        else:
            option.parse(value)
    except (ConfigError, ValueError) as problem:
        allowed = f"{problem}" or "a number from 0 to 1"
        raise ConfigError(
            f"Could not parse value {value!r:.100} for key '{option.key}'. Allowed: {allowed}"
        ) from None
    return value
