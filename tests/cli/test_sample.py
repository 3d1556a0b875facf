"""`zufluss sample` writes files that the other commands can read, the same ones every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Result

Run = Callable[..., Result]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_files_of_a_second_run_are_those_of_the_first(tmp_path: Path, run: Run) -> None:
    assert run("sample", str(tmp_path / "new" / "one")).code == 0
    assert run("sample", str(tmp_path / "two")).code == 0
    (tmp_path / "two" / "stock.csv").write_text("spoiled")
    assert run("sample", str(tmp_path / "two")).code == 0
    assert contents(tmp_path / "new" / "one") == contents(tmp_path / "two")


def test_every_file_fits_a_table_of_the_columns_that_are_printed(
    tmp_path: Path, zufluss: Run, run: Run
) -> None:
    printed = run("sample", str(tmp_path), "--output", "json").out
    files = json.loads(printed)
    assert len(files) == len(list(tmp_path.iterdir())) == 4
    for each in files:
        table = "sample_" + Path(each["file"]).name.replace(".", "_")
        zufluss("table", "create", table, each["columns"])
        appended = zufluss("append", table, each["file"], "--output", "json")
        assert json.loads(appended.out)["rows"] == each["rows"]


@pytest.mark.parametrize("name", ["", "/below"], ids=["a file", "below a file"])
def test_a_place_that_cannot_be_a_directory_is_a_usage_error(
    tmp_path: Path, run: Run, name: str
) -> None:
    (tmp_path / "file").write_text("")
    result = run("sample", f"{tmp_path / 'file'}{name}")
    assert result.code == 2
    assert "Traceback" not in result.err
