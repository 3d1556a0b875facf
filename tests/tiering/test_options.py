"""The command line of the tiering service."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from zufluss.cli.main import app
from zufluss.errors import ConfigError
from zufluss.tiering import options as o
from zufluss.tiering.main import main
from zufluss.tiering.options import TieringOptions, help_text, split_arguments


def test_without_arguments_everything_is_at_its_default() -> None:
    options = TieringOptions.parse([])
    assert options[o.BOOTSTRAP_SERVERS] == "localhost:9123"
    assert options[o.PARALLEL_TABLES] == 4
    assert options[o.HEARTBEAT_TIMEOUT] == 10_000
    assert options[o.DATALAKE_FORMAT] is None
    assert (options.client, options.lake, options.spark) == ({}, {}, {})


def test_both_forms_of_an_option_mean_the_same() -> None:
    spaced = split_arguments(["--a.b", "1", "--c", "-2"])
    joined = split_arguments(["--a.b=1", "--c=-2"])
    assert spaced == joined == {"a.b": "1", "c": "-2"}


def test_a_value_may_have_an_equals_sign_or_be_empty() -> None:
    assert split_arguments(["--k=a=b", "--e="]) == {"k": "a=b", "e": ""}


def test_each_group_goes_where_it_belongs() -> None:
    options = TieringOptions.parse(
        [
            "--fluss.bootstrap.servers=a:1,b:2",
            "--fluss.client.request-timeout=5s",
            "--datalake.format=iceberg",
            "--datalake.iceberg.warehouse=file:///w",
            "--lake.tiering.poll-interval=1s",
            "--spark.master=local[2,4]",
        ]
    )
    assert options[o.BOOTSTRAP_SERVERS] == "a:1,b:2"
    assert options.client == {"client.request-timeout": "5s"}
    assert options[o.DATALAKE_FORMAT] == "iceberg"
    assert options.lake == {"iceberg": {"warehouse": "file:///w"}}
    assert options[o.POLL_INTERVAL] == 1000
    assert options.spark == {"spark.master": "local[2,4]"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lake.tiering.parallel-table=1"], "did you mean lake.tiering.parallel-tables?"),
        (["--fluss.client.request-timout=1s"], "did you mean fluss.client.request-timeout?"),
        (["--datalake.icebrg.warehouse=x"], "did you mean datalake.iceberg.warehouse?"),
        (["--lake.tiering.parallel-tables=0"], "allowed: 1 to 256"),
        (["--lake.tiering.poll-interval=soon"], "lake.tiering.poll-interval = 'soon'"),
        (["--fluss.client.request-timeout=soon"], "client.request-timeout = 'soon'"),
        (["--datalake.format=orc"], "datalake.format = 'orc'"),
        (["--lake.tiering.heartbeat-timeout=3s"], "at least twice"),
        (["--datalake.format=lance", "--datalake.iceberg.x=y"], "of no use"),
        (["--lake.tiering.poll-interval"], "has no value"),
        (["--a", "--b"], "option --a has no value"),
        (["poll-interval=1"], "is not an option"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TieringOptions.parse(words)
    assert message in caught.value.message


def test_help_has_every_option() -> None:
    text = help_text()
    assert all(f"--{key} " in text for key in o.TIERING_OPTIONS)


def test_wrong_usage_ends_with_code_2_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--lake.tiering.parallel=1"]) == 2
    assert "option --lake.tiering.parallel is not known" in capsys.readouterr().err


def test_the_command_hands_its_options_on_as_they_are() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["tiering", "--help"])
    assert shown.exit_code == 0
    assert "--lake.tiering.parallel-tables (4)" in shown.output
    refused = runner.invoke(app, ["tiering", "--lake.tiering.parallel-tables", "many"])
    assert refused.exit_code == 2
    assert "lake.tiering.parallel-tables = 'many'" in refused.output
    nobody = runner.invoke(app, ["tiering", "--fluss.bootstrap.servers=localhost:1"])
    assert nobody.exit_code == 3
