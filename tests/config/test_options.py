"""Options as declared: defaults, limits, table properties, the generated page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zufluss.config import docs
from zufluss.config.client_options import CLIENT_WRITER_BUCKET_NO_KEY_ASSIGNER
from zufluss.config.load import env_name
from zufluss.config.option import Kind, Option
from zufluss.config.options import (
    LOG_SEGMENT_FILE_SIZE,
    OPTIONS,
    SECURITY_PROTOCOL_MAP,
    SECURITY_SASL_PLAIN_JAAS_CONFIG,
    ZUFLUSS_LOG_FLUSH,
)
from zufluss.config.stores import SECRET_KEYS, STORE_KEYS
from zufluss.config.table_options import (
    TABLE_LOG_ARROW_COMPRESSION_TYPE,
    TABLE_OPTIONS,
    parse_table_property,
)
from zufluss.errors import ConfigError, ErrorCode

EVERY_OPTION = [*OPTIONS.values(), *TABLE_OPTIONS.values()]


@pytest.mark.parametrize("option", EVERY_OPTION, ids=lambda option: option.key)
def test_every_default_is_a_value_its_own_option_accepts(option: Option[Any]) -> None:
    # A default outside the limits would make `-D key=<documented default>` fail.
    if option.default is not None:
        assert option.parse(option.format(option.default)) == option.default


@pytest.mark.parametrize("option", EVERY_OPTION, ids=lambda option: option.key)
def test_every_option_says_what_it_does_in_sentences(option: Option[Any]) -> None:
    assert option.help
    assert option.help[-1] in ".`"
    assert option.key == option.key.lower()


def test_no_two_options_share_an_environment_variable() -> None:
    names = [env_name(key) for key in OPTIONS]
    assert len(set(names)) == len(names)


def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        ZUFLUSS_LOG_FLUSH.parse("sometimes")
    assert caught.value.message == (
        "zufluss.log.flush = 'sometimes' is not allowed; allowed: ack, interval, os"
    )
    assert caught.value.code is ErrorCode.INVALID_CONFIG_EXCEPTION


def test_a_value_outside_its_limits_names_the_limits_in_its_own_unit() -> None:
    with pytest.raises(ConfigError, match=r"allowed: 1kb to 2147483647b"):
        LOG_SEGMENT_FILE_SIZE.parse("3gb")


def test_the_values_of_a_map_are_checked_and_canonical() -> None:
    assert SECURITY_PROTOCOL_MAP.parse("CLIENT:SASL") == {"CLIENT": "sasl"}
    with pytest.raises(ConfigError, match="allowed: plaintext, sasl"):
        SECURITY_PROTOCOL_MAP.parse("CLIENT:kerberos")


def test_enum_values_match_in_any_case() -> None:
    assert CLIENT_WRITER_BUCKET_NO_KEY_ASSIGNER.parse("ROUND_ROBIN") == "round_robin"
    assert TABLE_LOG_ARROW_COMPRESSION_TYPE.parse("zstd") == "ZSTD"


def test_a_secret_is_hidden_when_shown_and_in_errors() -> None:
    assert SECURITY_SASL_PLAIN_JAAS_CONFIG.show('user_a="b"') == "******"
    assert SECURITY_SASL_PLAIN_JAAS_CONFIG.show(None) == ""
    secret = Option("a.secret", Kind.INT, 0, "x.", secret=True)
    with pytest.raises(ConfigError) as caught:
        secret.parse("hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_table_property_is_parsed_by_its_option() -> None:
    assert parse_table_property("table.log.ttl", "7 d") == 604_800_000
    assert parse_table_property("table.merge-engine", "FIRST_ROW") == "first_row"


def test_an_unknown_table_property_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"property\. Did you mean table\.log\.ttl\?$"):
        parse_table_property("table.log.tll", "7d")


def test_an_unknown_table_property_that_is_like_no_other_is_refused_in_fluss_s_words() -> None:
    """Its tests compare them as a whole; two keys are not alike because both begin with `table.`"""
    with pytest.raises(ConfigError) as caught:
        parse_table_property("table.unknown.option", "v")
    assert caught.value.message == (
        "'table.unknown.option' is not a recognized Fluss table property in the current cluster "
        "version. You may be using an older Fluss cluster that does not support this property."
    )


def test_the_alterable_table_properties_are_those_of_fluss_and_one_of_ours() -> None:
    # A property too many lets ALTER TABLE change what tables are built on.
    assert {key for key, option in TABLE_OPTIONS.items() if option.alterable} == {
        "table.datalake.enabled",
        "table.datalake.historical-partition.enabled",
        "table.datalake.freshness",
        "table.datalake.auto-compaction",
        "table.log.ttl",
        "table.log.tiered.local-segments",
        "table.log.local-ttl",
        "table.auto-partition.enabled",
        "table.auto-partition.num-retention",
        "table.auto-partition.num-precreate",
        "table.statistics.columns",
        "table.kv.standby-replica.enabled",
        "table.zufluss.remote.placement",
    }


def test_the_page_lists_every_option_and_no_secret(tmp_path: Path) -> None:
    page = docs.render()
    for option in EVERY_OPTION:
        assert f"| `{option.key}` |" in page


def test_the_page_lists_every_key_of_object_stores_and_says_which_are_secret() -> None:
    page = docs.render()
    for key, text in STORE_KEYS.items():
        assert f"| `{key}` | {text}{' Secret.' if key in SECRET_KEYS else ''} |" in page


def test_check_passes_on_a_fresh_page_and_fails_with_a_hint_on_a_stale_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "configuration.md"
    assert docs.main(["--check", str(page)]) == 1
    assert docs.main([str(page)]) == 0
    assert docs.main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "edited by hand\n")
    assert docs.main(["--check", str(page)]) == 1
    assert "make docs" in capsys.readouterr().err
