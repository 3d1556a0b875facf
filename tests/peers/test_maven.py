"""Jars are fetched once per pom.xml; a Maven that is not there or fails says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import maven

FETCHES = """#!/bin/sh
for option in "$@"; do case "$option" in -DoutputDirectory=*) folder="${option#*=}";; esac; done
mkdir "$folder" && : >"$folder/a.jar"
"""
FAILS = """#!/bin/sh
echo "[ERROR] Could not transfer artifact a:b:jar:1: Connection refused -> [Help 1]"
echo "[ERROR] To see the full stack trace of the errors, re-run Maven with the -e switch."
exit 1
"""


@pytest.fixture
def pom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pom.xml, and an empty cache."""
    monkeypatch.setattr(maven, "CACHE", tmp_path / "cache")
    pom = tmp_path / "pom.xml"
    pom.write_text("<project/>")
    return pom


def path_with(folder: Path, script: str) -> dict[str, str]:
    """An environment whose PATH begins with an `mvn` that does what the script says."""
    command = folder / "mvn"
    command.write_text(script)
    command.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_jars_are_fetched_once_and_again_when_the_pom_changes(pom: Path, tmp_path: Path) -> None:
    jars = maven.fetched_jars(pom, path_with(tmp_path, FETCHES))
    assert [jar.name for jar in jars.iterdir()] == ["a.jar"]
    assert maven.fetched_jars(pom, {"PATH": ""}) == jars
    pom.write_text("<project><!-- another version --></project>")
    assert maven.fetched_jars(pom, path_with(tmp_path, FETCHES)) != jars


def test_a_fetch_that_fails_says_why_and_leaves_nothing(pom: Path, tmp_path: Path) -> None:
    reason = "Could not transfer artifact a:b:jar:1: Connection refused"
    with pytest.raises(maven.MavenError, match=f"could not fetch the jars of .*: {reason}$"):
        maven.fetched_jars(pom, path_with(tmp_path, FAILS))
    assert not list(maven.CACHE.iterdir())


def test_without_maven_the_error_names_it(pom: Path) -> None:
    with pytest.raises(maven.MavenError, match=r"^Maven \(mvn\), .* is not on the PATH$"):
        maven.fetched_jars(pom, {"PATH": ""})
