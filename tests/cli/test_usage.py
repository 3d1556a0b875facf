"""The command without a server: help, versions, usage errors, exit codes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from typer.main import get_command

from zufluss.cli.failures import exit_code
from zufluss.cli.main import app
from zufluss.errors import NetworkError, RequestTimeoutError, TableNotExistError

from .conftest import Result

Run = Callable[..., Result]


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(group, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        else:
            yield path if command.hidden else (*path, name)


ALL_COMMANDS = list(commands(get_command(app)))


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_of_itself(path: tuple[str, ...], run: Run) -> None:
    result = run(*path, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"zufluss {' '.join(path)}" in result.out.split("Example", 1)[1]


def test_help_loads_nothing_heavy() -> None:
    # Help and completion that take seconds make people think the tool is broken.
    script = (
        "import sys\nfrom zufluss.cli.main import app\n"
        "heavy = {'pyarrow', 'numba', 'numpy', 'google.protobuf'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_module_is_the_command_and_prints_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zufluss", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("zufluss 0.")


def test_config_shows_values_with_origin_and_hides_secrets(run: Run) -> None:
    result = run(
        *("config", "--output", "json"),
        *("-D", "zufluss.log.flush=os", "-D", "client.security.sasl.password=geheim"),
    )
    rows = {row["key"]: row for row in json.loads(result.out)}
    assert rows["zufluss.log.flush"] == {
        "key": "zufluss.log.flush",
        "value": "os",
        "origin": "-D",
    }
    assert rows["client.security.sasl.password"]["value"] == "******"
    assert "geheim" not in result.out + result.err


def test_an_unknown_key_is_warned_of_on_stderr(run: Run) -> None:
    result = run("config", "-D", "dta.dir=x", "--output", "json")
    assert result.code == 0
    assert "did you mean data.dir?" in result.err
    json.loads(result.out)


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "-D", "zufluss.log.flush=never"),
        ("config", "-D", "data.dir"),
        ("config", "--config", "no-such-file.yaml"),
        ("dev", "--port", "70000"),
        ("server",),
        ("table", "create", "t"),
        ("table", "create", "t", "id NOTYPE"),
        ("table", "create", "t", "--schema", "no-such-file.json"),
        ("table", "create", "a.b.c", "id INT"),
        ("table", "create", "t", "id INT", "--property", "novalue"),
        ("table", "alter", "t"),
        ("db", "alter", "d"),
        ("append", "t", "no-such-file.csv"),
        ("append", "t", "no-such-file.xlsx"),
        ("upsert", "t", "no-such-file.csv"),
        ("delete", "t"),
        ("delete", "t", "-", "--key", "1"),
        ("lookup", "t"),
        ("lookup", "t", "1", "--file", "-"),
        ("offsets", "t", "--at", "yesterday"),
        ("db", "list", "--bootstrap", "nonsense"),
        ("db", "list", "-D", "client.security.protocol=sasl"),
        ("nonsense",),
    ],
    ids=" ".join,
)
def test_a_usage_error_ends_with_two_and_no_traceback(arguments: tuple[str, ...], run: Run) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert result.err.startswith("error: ") or "\nerror: " in result.err
    assert result.err.rstrip().endswith("--help)")
    assert "Traceback" not in result.err


def test_a_server_that_is_not_there_ends_with_three(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        result = run(
            *("db", "list", "--bootstrap", f"127.0.0.1:{port}"),
            *("-D", "client.connect-timeout=1s", "-D", "client.request-timeout=1s"),
        )
    assert result.code == 3
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err


def test_errors_map_to_the_documented_exit_codes() -> None:
    assert exit_code(TableNotExistError("x")) == 1
    assert exit_code(NetworkError("x")) == 3
    assert exit_code(RequestTimeoutError("x")) == 3
