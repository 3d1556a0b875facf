"""What docs/tiering.md says of options, catalogs and formats is so.

Commands that need a cluster are parsed by what would read them. The table of options is the one
that `zufluss.tiering.options` declares.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import yaml

from scripts.pages import blocks, fenced
from tests.counts import only_full
from tests.paths import DOCS
from zufluss.config.option import Option
from zufluss.lake.base import ENTRY_POINTS
from zufluss.lake.iceberg.catalog import TYPES, normalized
from zufluss.lake_formats import LAKE_FORMATS
from zufluss.tiering.options import TIERING_OPTIONS, TieringOptions

PAGE = DOCS / "tiering.md"
SUITE = "LakeConformance"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_commands_for_clusters_have_options_that_exist() -> None:
    (code,) = (each.code for each in blocks(PAGE) if each.not_run == "needs clusters")
    starts = [shlex.split(line) for line in code.splitlines()]
    services = [words[2:] for words in starts if words[:2] == ["zufluss", "tiering"]]
    submitted = [words[4:] for words in starts if words[:2] == ["spark-submit", "--master"]]
    assert (len(services), len(submitted), len(starts)) == (2, 1, 3)
    for arguments in services + submitted:
        assert TieringOptions.parse(arguments)


def test_the_script_for_spark_submit_is_where_the_page_finds_it() -> None:
    lines = "".join(fenced(PAGE, "sh")).splitlines()
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
    prefix = "datalake.iceberg."
    types = []
    for block in fenced(PAGE, "yaml"):
        keys = yaml.safe_load(block).items()
        given = {k.removeprefix(prefix): v for k, v in keys if k.startswith(prefix)}
        types.append(normalized(given)["type"])
    assert types == ["rest", "hadoop"]
    table = PAGE.read_text().partition("| `type` | needs |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) < set(TYPES)


def test_the_entry_point_on_the_page_is_the_one_that_is_looked_up() -> None:
    (block,) = fenced(PAGE, "toml")
    points = tomllib.loads(block)["project"]["entry-points"][ENTRY_POINTS]
    assert set(points) <= set(LAKE_FORMATS)
    assert [point.name for point in entry_points(group=ENTRY_POINTS)] == ["iceberg"]
    allowed = ", ".join(f"`{name}`" for name in LAKE_FORMATS)
    assert allowed in PAGE.read_text()


@only_full
def test_the_conformance_suite_runs_as_the_page_shows_it(tmp_path: Path) -> None:
    (block,) = (code for code in fenced(PAGE, "python") if SUITE in code)
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
