"""Where values come from, which source wins, and what happens to keys and values that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from zufluss.config import Configuration, Endpoint
from zufluss.config.client_options import CLIENT_WRITER_ENABLE_IDEMPOTENCE
from zufluss.config.load import env_name
from zufluss.config.options import (
    BIND_LISTENERS,
    DATA_DIR,
    LOG_SEGMENT_FILE_SIZE,
    MAX_PARTITION_NUM,
    SECURITY_PROTOCOL_MAP,
    SECURITY_SASL_PLAIN_JAAS_CONFIG,
    ZUFLUSS_LOG_FLUSH,
)
from zufluss.errors import ConfigError


@pytest.fixture
def server_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(
        "data.dir: /from/yaml\n"
        "log.segment.file-size: 64mb\n"
        "max.partition.num: 12\n"
        "bind.listeners: CLIENT://localhost:1, INTERNAL://localhost:2\n"
        "security.protocol.map: {CLIENT: sasl}\n"
        "client:\n  writer:\n    enable-idempotence: false\n"
        "remote.data.dir:\n"
    )
    return path


def test_without_sources_every_value_is_the_default() -> None:
    conf = Configuration.load(environ={})
    assert conf[ZUFLUSS_LOG_FLUSH] == "ack"
    assert conf.origin(ZUFLUSS_LOG_FLUSH) == "default"
    assert not conf.is_set(ZUFLUSS_LOG_FLUSH)


def test_yaml_gives_flat_nested_and_map_values(server_yaml: Path) -> None:
    conf = Configuration.load(server_yaml, environ={})
    assert conf[LOG_SEGMENT_FILE_SIZE] == 64 << 20
    assert conf[MAX_PARTITION_NUM] == 12
    assert conf[SECURITY_PROTOCOL_MAP] == {"CLIENT": "sasl"}
    assert conf[CLIENT_WRITER_ENABLE_IDEMPOTENCE] is False
    assert conf[BIND_LISTENERS] == (
        Endpoint("CLIENT", "localhost", 1),
        Endpoint("INTERNAL", "localhost", 2),
    )


def test_environment_wins_over_yaml_and_the_command_line_over_both(server_yaml: Path) -> None:
    environ = {"ZUFLUSS_DATA_DIR": "/from/env", "ZUFLUSS_LOG_FLUSH": "os", "HOME": "/"}
    conf = Configuration.load(server_yaml, environ, ["data.dir=/from/line"])
    assert conf[DATA_DIR] == "/from/line"
    assert conf.origin(DATA_DIR) == "-D"
    assert conf[ZUFLUSS_LOG_FLUSH] == "os"
    assert conf.origin(ZUFLUSS_LOG_FLUSH) == "ZUFLUSS_LOG_FLUSH"
    assert conf.origin(LOG_SEGMENT_FILE_SIZE) == str(server_yaml)


def test_an_environment_variable_is_the_key_in_capitals_with_our_prefix_once() -> None:
    assert env_name("log.segment.file-size") == "ZUFLUSS_LOG_SEGMENT_FILE_SIZE"
    assert env_name("zufluss.net.max-connections") == "ZUFLUSS_NET_MAX_CONNECTIONS"


def test_an_unknown_key_warns_with_the_nearest_one_and_changes_nothing(caplog) -> None:
    conf = Configuration.load(environ={}, overrides=["log.segment.file-sise=1mb"])
    assert conf[LOG_SEGMENT_FILE_SIZE] == 1 << 30
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "WARNING",
            "configuration key log.segment.file-sise from -D is not known and has no effect; "
            "did you mean log.segment.file-size?",
        )
    ]


def test_an_unknown_environment_variable_warns_and_those_of_the_tools_do_not(caplog) -> None:
    Configuration.load(environ={"ZUFLUSS_DATA_DIRR": "x", "ZUFLUSS_BOOTSTRAP": "y"})
    assert len(caplog.records) == 1
    assert "did you mean ZUFLUSS_DATA_DIR?" in caplog.records[0].getMessage()


def test_a_bad_value_stops_the_start_and_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("max.partition.num: many\n")
    with pytest.raises(ConfigError, match=r"max\.partition\.num = 'many'.*a whole number.*server"):
        Configuration.load(path, environ={})


@pytest.mark.parametrize(
    ("content", "problem"),
    [("- a\n- b\n", "holds a list"), ("a: [", "not valid YAML"), (None, "cannot read")],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "server.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{problem}|server\.yaml {problem}"):
        Configuration.load(path, environ={})


def test_an_empty_file_is_an_empty_configuration(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("# nothing\n")
    assert Configuration.load(path, environ={})[DATA_DIR] == "zufluss-data"


def test_an_override_without_equals_sign_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'data\.dir' is not a setting; allowed: key=value"):
        Configuration.load(environ={}, overrides=["data.dir"])


def test_a_value_may_contain_equals_signs() -> None:
    conf = Configuration.load(
        environ={}, overrides=['security.sasl.plain.jaas.config=m required user_a="b";']
    )
    assert conf[SECURITY_SASL_PLAIN_JAAS_CONFIG] == 'm required user_a="b";'


def test_effective_lists_every_option_and_hides_secrets() -> None:
    conf = Configuration.of({"security.sasl.plain.jaas.config": 'user_a="geheim"'})
    rows = {row.key: row for row in conf.effective()}
    assert rows["security.sasl.plain.jaas.config"].value == "******"
    assert rows["log.segment.file-size"].value == "1gb"
    assert "geheim" not in repr(rows) + repr(conf)


def test_overrides_give_a_new_configuration_and_leave_the_old_one() -> None:
    old = Configuration.of({"data.dir": "a", "max.partition.num": 3})
    new = old.with_overrides({"data.dir": "b"})
    assert (old[DATA_DIR], new[DATA_DIR], new[MAX_PARTITION_NUM]) == ("a", "b", 3)
