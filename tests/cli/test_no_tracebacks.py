"""Whatever a user does wrong ends in one line and a documented exit code, never in a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from tests.waiting import WAIT_SECONDS
from zufluss.cli import failures
from zufluss.cli.docs import commands
from zufluss.cli.main import app

from .conftest import COMMAND, Result, environment

Run = Callable[..., Result]
ALL = dict(commands(get_command(app)))
CODES = {0, 1, 2, 3, 4, 5}
SERVING = {("dev",), ("server",), ("tiering",)}
"""Commands that run until they are stopped."""
LOCAL = {("config",), ("doctor",), ("sample",)}
"""Commands that need no server."""


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def is_one_line(result: Result) -> bool:
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    return len(errors) == 1 and "Traceback" not in result.err + result.out


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_an_unknown_option_is_a_usage_error(path: tuple[str, ...], run: Run) -> None:
    if path == ("tiering",):
        pytest.skip("its options are open-ended; tests/tiering has its usage errors")
    result = run(*path, "--no-such-option")
    assert result.code == 2
    assert is_one_line(result)


@pytest.mark.parametrize("path", [path for path in ALL if path not in SERVING], ids=" ".join)
def test_nonsense_for_every_argument_is_no_traceback(
    path: tuple[str, ...], run: Run, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every required argument is nonsense, and no server answers."""
    monkeypatch.chdir(tmp_path)
    arguments = [
        "no.such..thing" if each.param_type_name == "argument" else each.opts[0]
        for each in ALL[path].params
        if each.required or each.param_type_name == "argument"
    ]
    fast = ("-D", "client.connect-timeout=1s", "-D", "client.request-timeout=1s")
    names = [name for each in ALL[path].params for name in each.opts]
    where = ("--bootstrap", nobody) if "--bootstrap" in names else ()
    options = fast if "-D" in names else ()
    result = run(*path, *arguments, *where, *options)
    assert result.code in CODES, result
    assert "Traceback" not in result.err + result.out
    assert result.code in (0, 5) or is_one_line(result), result


def test_a_server_that_is_not_there_is_named(run: Run, nobody: str) -> None:
    fast = ("-D", "client.connect-timeout=1s", "-D", "client.request-timeout=1s")
    for words in (["status"], ["top"], ["count", "t"], ["sql", "SELECT 1 FROM t"], ["db", "list"]):
        result = run(*words, "--bootstrap", nobody, *fast)
        assert result.code == 3, (words, result)
        assert is_one_line(result)
        assert nobody.rsplit(":", 1)[1] in result.err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("bad.yaml", "a: [1", "not valid YAML"),
        ("list.yaml", "- 1\n- 2\n", "allowed: a map"),
        ("binary.yaml", "\x00\x01", "not valid YAML"),
    ],
)
def test_a_bad_configuration_file_is_named(
    run: Run, tmp_path: Path, name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    for words in (["config"], ["dev"], ["server", "--role", "tablet"]):
        result = run(*words, "--config", str(path))
        assert result.code == 2
        assert is_one_line(result)
        assert str(path) in result.err
        assert says in result.err


def test_a_directory_that_cannot_be_made_is_named(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for words in (["dev", "--port", "0", "--data-dir"], ["sample"]):
        result = run(*words, str(file / "below"))
        assert result.code == 2, result
        assert is_one_line(result)
        assert "file" in result.err


def test_rows_of_the_wrong_type_are_named(zufluss: Callable[..., Result], tmp_path: Path) -> None:
    zufluss("table", "create", "typed", "id INT")
    for text in ('{"id": "x"}\n', '{"nix": 1}\n', "[1]\n", "no json\n"):
        result = zufluss("append", "typed", "-", stdin=text, code=2)
        assert is_one_line(result), result
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    assert is_one_line(zufluss("append", "typed", str(broken), code=2))
    assert is_one_line(zufluss("append", "typed", str(tmp_path), code=2))
    assert zufluss("count", "typed").out == "0\n"


def without_reader(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *words],
            stdout=closed,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=WAIT_SECONDS,
            check=False,
        )
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    return done


def test_a_reader_of_rows_may_end_first(
    zufluss: Callable[..., Result], server_address: str
) -> None:
    zufluss("table", "create", "unread", "id INT")
    zufluss("append", "unread", "-", stdin='{"id": 1}\n')
    done = without_reader("scan", "unread", "--bootstrap", server_address)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_reader_is_no_success_of_a_server_or_of_other_commands(tmp_path: Path) -> None:
    """A server without its ready line, or files without their list, would pass for done."""
    server = ["dev", "--port", "0", "--data-dir", str(tmp_path / "data")]
    for words in (["config"], ["sample", str(tmp_path / "sample")], server):
        done = without_reader(*words)
        assert done.returncode == 141, (words, done)
        assert b"error: the reader of the output ended before the command" in done.stderr


def test_no_or_no_answer_aborts_and_is_no_defect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*args: object) -> None:
        typer.confirm("Really?", abort=True, err=True)

    monkeypatch.setattr("zufluss.cli.servers.print_rows", ask)
    for answer in ("n\n", ""):
        result = run("config", stdin=answer)
        assert result.code == 1
        assert result.err.endswith("aborted\n")
        assert "error" not in result.err


def test_the_end_of_a_file_elsewhere_is_no_answer_to_a_question(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise EOFError("no more bytes")

    monkeypatch.setattr("zufluss.cli.servers.print_rows", fail)
    assert run("config").code == 70


def test_ctrl_c_ends_with_130_and_no_traceback(server_address: str) -> None:
    """Standard input stays open, so the command waits for rows."""
    setup = [*COMMAND, "table", "create", "ctrl_c", "id INT", "--if-not-exists"]
    subprocess.run([*setup, "--bootstrap", server_address], env=environment(), check=True)
    command = [*COMMAND, "--debug", "append", "ctrl_c", "-", "--bootstrap", server_address, "-o"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "json"], stdin=pipe, stdout=pipe, stderr=pipe, env=environment()
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"id": 1}\n')
        process.stdin.flush()
        count = [*COMMAND, "count", "ctrl_c", "--bootstrap", server_address]
        while not subprocess.run(
            count, env=environment(), check=True, capture_output=True
        ).stdout.startswith(b"1"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_a_defect_says_so_and_debug_shows_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a surprise")

    monkeypatch.setattr("zufluss.cli.servers.print_rows", fail)
    result = run("config")
    assert result.code == 70
    assert is_one_line(result)
    assert "defect of zufluss" in result.err
    monkeypatch.delenv(failures.DEBUG, raising=False)
    shown = run("--debug", "config")
    monkeypatch.delenv(failures.DEBUG, raising=False)
    assert shown.code == 70
    assert "Traceback" in shown.err
    assert "RuntimeError: a surprise" in shown.err
