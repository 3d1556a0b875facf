"""Options of Fluss without effect: their values are checked as Fluss checks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zufluss.config.load import Configuration, unknown_keys
from zufluss.config.options import OPTIONS
from zufluss.config.without_effect import (
    OPTIONS_WITHOUT_EFFECT,
    RATIO_KEYS,
    checked,
)
from zufluss.errors import ConfigError

RATE = "kv.rocksdb.shared-rate-limiter.bytes-per-sec"


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


def test_an_option_without_effect_at_the_start_is_kept_and_said_once_to_have_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = tmp_path / "server.yaml"
    yaml.write_text("log.replica.min-in-sync-replicas-number: 2\n")
    environ = {"ZUFLUSS_KV_LEADER__REPLICA_MEMORY__RESERVED": "1"}
    assert unknown_keys(yaml, environ, [f"{RATE}=1mb"])[0][0] == next(iter(environ))
    environ = {"ZUFLUSS_KV_LEADER_REPLICA_MEMORY_RESERVED": "10mb"}
    assert unknown_keys(yaml, environ, [f"{RATE}=1mb"]) == []
    conf = Configuration.load(yaml, environ, [f"{RATE}= 100 mb"])
    rows = {row.key: (row.value, row.origin) for row in conf.effective()}
    assert rows[RATE] == ("100 mb", "-D")
    assert rows["log.replica.min-in-sync-replicas-number"] == ("2", str(yaml))
    assert rows["kv.leader-replica.memory-reserved"] == ("10mb", next(iter(environ)))
    assert all("has no effect here: " in line for line in caplog.messages)
    assert len(caplog.messages) == 3
    conf.with_overrides({RATE: "200 mb"})
    assert len(caplog.messages) == 3


def test_a_value_that_fluss_would_refuse_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"Could not parse value 'much' .* \(from -D\)"):
        Configuration.load(None, {}, [f"{RATE}=much"])
