"""Options of Fluss without effect: their values are checked as Fluss checks them."""

from __future__ import annotations

import pytest

from zufluss.config.options import OPTIONS
from zufluss.config.without_effect import (
    OPTIONS_WITHOUT_EFFECT,
    RATIO_KEYS,
    StoredOption,
    checked,
    stored,
    with_effect,
)
from zufluss.errors import ConfigError


def test_no_option_has_an_effect_and_none() -> None:
    assert not OPTIONS_WITHOUT_EFFECT.keys() & OPTIONS.keys()
    assert OPTIONS_WITHOUT_EFFECT.keys() >= RATIO_KEYS


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("kv.rocksdb.shared-rate-limiter.bytes-per-sec", "100 mb", "much"),
        ("log.replica.min-in-sync-replicas-number", "2", "0"),
        ("server.data-disk.write-limit-ratio", "0.85", "nan"),
        ("server.historical-partition.lookuper-cache.expire-after-access", "3 h", "soon"),
    ],
)
def test_a_value_is_checked_and_kept_as_it_was_given(key: str, good: str, bad: str) -> None:
    option = OPTIONS_WITHOUT_EFFECT[key]
    assert checked(option, f" {good} ") == good
    with pytest.raises(ConfigError, match=f"Could not parse value '{bad}' for key '{key}'"):
        checked(option, bad)


def test_values_without_effect_are_told_from_those_that_act() -> None:
    dynamic = {"remote.data.dirs": "/a", "kv.leader-replica.memory-reserved": "1mb"}
    assert stored(dynamic) == [StoredOption("kv.leader-replica.memory-reserved", "1mb")]
    assert with_effect(dynamic) == {"remote.data.dirs": "/a"}
