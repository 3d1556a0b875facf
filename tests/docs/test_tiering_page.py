"""docs/tiering.md does what it says, with one server and one tiering service.

Blocks are taken in the order of the page. Python blocks print what stands behind their `print(…)`;
commands on tables are run; what starts a server or a service is parsed by what would read it. The
table of options is the one that `zufluss.tiering.options` declares.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from tests.counts import only_full
from tests.docs.test_readme import DATA_COMMAND, ROOT, blocks, run_python
from tests.servers import WarmServer
from tests.spark.cluster import QUICK
from zufluss.config.option import Option
from zufluss.lake.base import ENTRY_POINTS
from zufluss.lake.iceberg.catalog import TYPES, normalized
from zufluss.lake_formats import LAKE_FORMATS
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess
from zufluss.tiering.options import TIERING_OPTIONS, TieringOptions

PAGE = ROOT / "docs" / "tiering.md"
SUITE = "LakeConformance"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with WarmServer(tmp_path_factory.mktemp("data"), {"datalake.format": "iceberg"}) as server:
        yield server


@pytest.fixture(scope="module")
def service(server: DevServer) -> Iterator[TieringProcess]:
    with TieringProcess(server.bootstrap, {"spark.master": "local[2]", **QUICK}) as service:
        yield service


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_blocks_of_the_tiering_page_do_what_they_say(
    server: DevServer, service: TieringProcess
) -> None:
    code_blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    scripts = 0
    for language, code in code_blocks:
        if language == "sh":
            for line in filter(DATA_COMMAND.search, code.splitlines()):
                run_shell(line, server)
        elif SUITE not in code:
            scripts += 1
            expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)
            code = code.replace("/path/to/data", str(server.data_dir))
            assert run_python(code, server).splitlines() == expected
    assert scripts == 3


def run_shell(line: str, server: DevServer) -> None:
    environment = os.environ | {"PATH": PATH, "ZUFLUSS_BOOTSTRAP": server.bootstrap}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, (line, done.stderr)


def test_commands_that_start_something_have_options_that_exist() -> None:
    starts = [
        shlex.split(line)
        for block in blocks(PAGE, "sh")
        for line in block.splitlines()
        if not DATA_COMMAND.search(line)
    ]
    services = [words[2:] for words in starts if words[:2] == ["zufluss", "tiering"]]
    submitted = [words[4:] for words in starts if words[:2] == ["spark-submit", "--master"]]
    assert (len(services), len(submitted), len(starts)) == (3, 1, 6)
    for arguments in services + submitted:
        assert TieringOptions.parse(arguments)


def test_the_script_for_spark_submit_is_where_the_page_finds_it() -> None:
    lines = "".join(blocks(PAGE, "sh")).splitlines()
    (line,) = (line for line in lines if line.startswith("spark-submit"))
    find = line.replace("spark-submit --master yarn", "printf %s").partition(" --fluss")[0]
    done = subprocess.run(
        ["bash", "-c", find], capture_output=True, text=True, env=os.environ | {"PATH": PATH}
    )
    assert done.stdout.endswith("zufluss/tiering/main.py"), done.stderr


def test_the_page_lists_the_options_as_they_are_declared() -> None:
    declared = "\n".join(row(option) for option in TIERING_OPTIONS.values())
    assert declared in PAGE.read_text(), f"the table of options has to be\n{declared}"


def row(option: Option[object]) -> str:
    plain = bool(option.default_text) or not option.default_shown
    default = option.default_shown if plain else f"`{option.default_shown}`"
    return f"| `{option.key}` | {default} | {option.help} |"


def test_the_catalogs_of_the_page_are_understood() -> None:
    (block,) = blocks(PAGE, "yaml")
    settings = yaml.safe_load(block)
    prefix = "datalake.iceberg."
    given = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    assert normalized(given)["type"] == "rest"
    table = PAGE.read_text().partition("| `type` | needs |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) < set(TYPES)


def test_the_entry_point_on_the_page_is_the_one_that_is_looked_up() -> None:
    (block,) = blocks(PAGE, "toml")
    points = tomllib.loads(block)["project"]["entry-points"][ENTRY_POINTS]
    assert set(points) <= set(LAKE_FORMATS)
    assert [point.name for point in entry_points(group=ENTRY_POINTS)] == ["iceberg"]
    allowed = ", ".join(f"`{name}`" for name in LAKE_FORMATS)
    assert allowed in PAGE.read_text()


@only_full
def test_the_conformance_suite_runs_as_the_page_shows_it(tmp_path: Path) -> None:
    (block,) = (code for code in blocks(PAGE, "python") if SUITE in code)
    module = tmp_path / "test_format.py"
    module.write_text(block)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    ]
    done = subprocess.run(
        [*command, module, "-k", "commit"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
