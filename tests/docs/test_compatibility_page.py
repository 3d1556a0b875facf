"""The matrix of docs/compatibility.md: its versions are the pinned ones, its commands exist."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import clients, peers
from tests.paths import DOCS, ROOT

PAGE = (DOCS / "compatibility.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
FLINK_POMS = (peers.POM, ROOT / "examples" / "flink" / "pom.xml")


@dataclass(frozen=True)
class Row:
    """A line of the matrix."""

    name: str
    version: str
    works: str
    differs: str
    command: str


def matrix() -> list[Row]:
    """The lines of the first table of the page."""
    lines = PAGE.split("|---|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    return [Row(*(cell.strip() for cell in line.split("|")[1:-1])) for line in lines]


def row(name: str) -> Row:
    """The line whose first cell contains a text."""
    (result,) = [row for row in matrix() if name in row.name]
    return result


def pinned(pom: Path, name: str) -> str:
    """A version that a `pom.xml` pins, without the mark of Apache's incubator."""
    (version,) = re.findall(f"<{name}>(.*)</{name}>", pom.read_text())
    return str(version).removesuffix("-incubating")


def locked(lock: Path, package: str) -> str:
    """The version of a package in a `uv.lock` or `Cargo.lock`."""
    packages = tomllib.loads(lock.read_text())["package"]
    (version,) = [each["version"] for each in packages if each["name"] == package]
    return str(version)


def test_the_version_of_pyfluss_is_the_locked_one() -> None:
    assert row("pyfluss").version == locked(ROOT / "uv.lock", "pyfluss")


def test_the_version_of_the_java_client_is_the_one_that_is_fetched() -> None:
    assert row("fluss-client").version == pinned(clients.JAVA_CLIENT / "pom.xml", "fluss")


def test_the_version_of_the_rust_client_is_the_locked_one() -> None:
    assert row("fluss-rs").version == locked(clients.RUST_CLIENT / "Cargo.lock", "fluss-rs")


@pytest.mark.parametrize("pom", FLINK_POMS, ids=lambda pom: pom.parent.name)
def test_the_versions_of_flink_and_its_connector_are_those_that_are_fetched(pom: Path) -> None:
    versions = f"{pinned(pom, 'fluss')}, Flink {pinned(pom, 'flink')}"
    assert {row.version for row in matrix() if "Flink" in row.version} == {versions}


def test_the_number_of_flinks_test_classes_is_that_of_the_script() -> None:
    assert f"{len(peers.CASES)} classes" in row("tests of that connector").works


@pytest.mark.parametrize("row", matrix(), ids=lambda row: row.name)
def test_a_row_has_a_command_or_counts_as_untested(row: Row) -> None:
    assert (row.command == "") == (row.version == "untested")
    assert row.command == "" or exists(row.command.strip("`").split())


def exists(command: list[str]) -> bool:
    """Whether the target, module, directory or file of a command is there."""
    if command[0] == "make":
        return re.search(f"^{command[1]}:", MAKEFILE, re.M) is not None
    if command[0] == ".venv/bin/pytest":
        return (ROOT / command[1]).exists()
    assert command[:3] == [".venv/bin/python", "-m", "scripts.clients"]
    return command[3] in clients.CLIENTS


def test_make_test_peers_runs_what_the_page_says() -> None:
    recipe = MAKEFILE.split("\ntest-peers:")[1].split("\n\n")[0]
    for module in ("scripts.clients", "examples.flink.run", "scripts.peers"):
        assert f"-m {module}" in recipe
