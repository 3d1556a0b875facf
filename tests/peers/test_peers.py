"""What `make test-peers` makes of a report and of its list; nothing here needs Maven."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import peers
from tests.paths import ROOT

REPORT = """<testsuite name="JUnit Jupiter">
<testcase name="testPasses()" classname="org.a.SinkITCase" time="1"><system-out/></testcase>
<testcase name="testFails(boolean)[1]" classname="org.a.SinkITCase" time="1"><failure/></testcase>
<testcase name="testBreaks()" classname="org.a.SinkITCase" time="1"><error/></testcase>
<testcase name="testLater()" classname="org.a.SinkITCase" time="0"><skipped/></testcase>
</testsuite>"""


def test_a_report_says_which_cases_passed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert peers.read_report(report) == {
        "SinkITCase#testPasses": True,
        "SinkITCase#testFails(boolean)[1]": False,
        "SinkITCase#testBreaks": False,
    }
    assert peers.read_report(tmp_path / "none.xml") == {}


def test_every_line_of_the_list_names_a_class_that_is_run_and_whose_fault_it_is() -> None:
    expected = peers.read_expected(peers.EXPECTED.read_text())
    assert {name.partition("#")[0] for name in expected} <= {case.short for case in peers.CASES}
    assert {reason.partition(":")[0] for reason in expected.values()} <= set(peers.ORIGINS)


def test_a_line_without_a_reason_is_refused() -> None:
    with pytest.raises(peers.PeersError, match="no case and reason"):
        peers.read_expected("# fine\nSinkITCase#testFails\n")


def test_a_failure_that_is_not_listed_and_a_listed_case_that_passes_are_told() -> None:
    outcome = {"A#fails": False, "A#known": False, "A#mended": True}
    expected = {
        "A#known": "theirs: …",
        "A#mended": "ours: …",
        "A#gone": "ours: …",
        "B#x": "ours: …",
    }
    assert peers.surprises("A", outcome, expected) == [
        "A#fails failed",
        "A#gone did not run, but is in expected.txt",
        "A#mended passed, but is in expected.txt",
    ]


def test_without_maven_nothing_is_run_and_the_script_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.peers"],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing was run: mvn, java, javac not found on the PATH\n"
