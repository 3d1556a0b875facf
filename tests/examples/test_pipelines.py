"""The pipelines of examples/pipelines do what they say and end by themselves; so does the tour."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from scripts.spark_classes import options as quick_java
from tests.counts import only_full
from tests.examples.notebook import text_of
from tests.paths import ROOT
from zufluss.errors import TableNotExistError

PIPELINES = ROOT / "examples" / "pipelines"
TOUR = ROOT / "examples" / "tour.ipynb"

pytest.importorskip("pyspark.sql.streaming.datasource", reason="needs Spark 4.2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*arguments: object) -> str:
    """Run Python; what it prints. Every Java starts quickly, also that of `spark-pipelines`."""
    command = [sys.executable, *map(str, arguments)]
    environ = os.environ | {"JAVA_TOOL_OPTIONS": quick_java()}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_all_pipelines_end_with_what_they_promise():
    output = run(PIPELINES)
    assert "a server of our own runs on" in output
    assert "all 10,000 clicks are on the dashboard, each once" in output  # clickstream.py
    assert "that is right, and the audit log has 7 changes" in output  # cdc.py
    assert "order 102: Ada Lovelace pays 4.00" in output  # enrich.py
    assert "1,000 rows exported, every id once" in output  # export.py
    assert "Bern took 13.40 in 2 sales" in output  # declarative.py


def test_a_pipeline_that_does_not_get_what_it_should_ends_with_1_and_says_why(capsys, monkeypatch):
    monkeypatch.syspath_prepend(PIPELINES)
    monkeypatch.setattr(sys, "argv", ["pipeline", "--bootstrap", "nowhere:1"])
    running = importlib.import_module("running")

    def wrong(bootstrap: str) -> None:
        running.check(False, f"there is nothing at {bootstrap}")

    def absent(bootstrap: str) -> None:
        raise TableNotExistError("table example.t does not exist")

    assert (running.run(wrong), running.run(absent)) == (1, 1)
    output = capsys.readouterr().out
    assert "there is nothing at nowhere:1" in output
    assert "table example.t does not exist" in output


@only_full
def test_the_notebook_gives_what_stands_in_it(tmp_path):
    again = tmp_path / TOUR.name
    again.write_text(TOUR.read_text())
    run("-m", "tests.examples.notebook", again)
    assert json.loads(again.read_text()) == json.loads(TOUR.read_text())


def test_the_notebook_is_written_as_the_runner_writes_it_and_names_no_place_of_a_machine():
    text = TOUR.read_text()
    assert text == text_of(json.loads(text))
    assert not any(place in text for place in ("/tmp", "/home", "/root", "127.0.0.1"))
