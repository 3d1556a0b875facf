"""Every shell and Python block of README and docs runs as written, in one order, on one server.

README comes first and once more at the end, with some other pages: whoever repeats their lines gets
the same results. Where a page starts a server or a service, the test's own stands in for it, and
the options are parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import zufluss
from scripts.pages import Block, PageError, Terminal, blocks
from tests.docs.aws import ENDPOINT
from tests.docs.session import PythonSession
from tests.paths import DOCS, ROOT
from tests.servers import WarmServer
from tests.spark.cluster import QUICK as QUICK_SPARK
from zufluss.cli.main import app
from zufluss.testing.s3 import S3Server
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess
from zufluss.tiering.options import TieringOptions

README = ROOT / "README.md"
REFERENCE = DOCS / "cli.md"
"""Has the examples of the commands' help, with the reader's own tables; tests/cli runs commands."""
PAGES = [README, *sorted(page for page in DOCS.glob("*.md") if page != REFERENCE)]
AGAIN = [README, DOCS / "aggregation.md", DOCS / "leases.md", DOCS / "python-client.md"]
QUICK = {
    "remote.log.task-interval-duration": "100ms",
    "kv.snapshot.interval": "500ms",
    "log.segment.file-size": "4kb",
}
NOT_RUN = {
    "README.md": 6,
    "cluster.md": 5,
    "performance.md": 2,
    "server.md": 1,
    "spark.md": 1,
    "tiering.md": 2,
}
"""How many blocks of each page are not run; the page says why."""


class Reader:
    """Does what the pages say, on one server."""

    def __init__(self, server: DevServer, directory: Path, environ: dict[str, str]) -> None:
        self._server = server
        self._directory = directory
        self._environ = environ
        self.service: TieringProcess | None = None
        """The tiering service, from the page on tiering on. Before, it would keep files in the
        locations that the page on remote storage drains."""

    def read(self, page: Path) -> None:
        """Run the blocks of a page in a directory that has what README's first lines make."""
        directory = self._directory / page.stem
        directory.mkdir(exist_ok=True)
        for name, target in {".venv": Path(sys.prefix), "data": self._server.data_dir}.items():
            (directory / name).unlink(missing_ok=True)
            (directory / name).symlink_to(target)
        python = PythonSession(directory, self._environ)
        with Terminal(directory, self._environ) as terminal:
            try:
                for block in blocks(page):
                    if block.not_run is None:
                        self._run(page, block, terminal, python)
            finally:
                code = python.close()
        # pyfluss 1.0.0 aborts about one interpreter in ten at its end, when a scan's threads run.
        harmless = (0, -signal.SIGABRT) if "import asyncio, fluss" in page.read_text() else (0,)
        assert code in harmless

    def _run(self, page: Path, block: Block, terminal: Terminal, python: PythonSession) -> None:
        code = block.code.replace("localhost:9123", self._server.bootstrap)
        if block.language == "python":
            block.check_printed(python.run(block, code))
        elif not block.until_stopped:
            terminal.run(block.place, code)
        elif code.startswith("zufluss dev "):
            commands: Any = get_command(app)
            commands.commands["dev"].make_context("dev", shlex.split(code)[2:])
        elif code.startswith("zufluss tiering "):
            self._tier(page, shlex.split(code)[2:])
        else:
            terminal.start(block.place, code)

    def _tier(self, page: Path, arguments: list[str]) -> None:
        assert TieringOptions.parse(arguments)
        if page.name == "tiering.md" and self.service is None:
            options = {"spark.master": "local[2]", **QUICK_SPARK}
            self.service = TieringProcess(self._server.bootstrap, options).start()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with a server that has a lake and the locations of the page on remote storage."""
    directory = tmp_path_factory.mktemp("pages")
    page = (DOCS / "remote-storage.md").read_text().split("## Many places")[1]
    settings = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    places = {key: value for key, value in settings.items() if key.startswith("remote.")}
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server())
        for bucket in ("fast", "large", "new", "archive"):
            s3.bucket(bucket)
        properties = {**QUICK, **places, **s3.properties, "datalake.format": "iceberg"}
        server = stack.enter_context(WarmServer(tmp_path_factory.mktemp("data"), properties))
        environ = {
            **os.environ,
            "PATH": f"{commands(directory)}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
            "ZUFLUSS_BOOTSTRAP": server.bootstrap,
            ENDPOINT: s3.endpoint,
        }
        reader = Reader(server, directory, environ)
        yield reader
        if reader.service is not None:
            reader.service.kill()


def commands(directory: Path) -> Path:
    """A directory with the command `aws`, which not every machine has."""
    place = directory / "bin"
    place.mkdir()
    aws = place / "aws"
    aws.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.docs.aws "$@"\n')
    aws.chmod(0o755)
    return place


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_blocks_of_all_pages_run_in_order_and_those_of_the_readme_twice(
    reader: Reader,
) -> None:
    for page in PAGES + AGAIN:
        reader.read(page)
        if page.name == "remote-storage.md":
            check_locations(reader._server)


def check_locations(server: DevServer) -> None:
    """The page on remote storage retired the first place, moved the second and added a third."""
    with zufluss.connect(server.bootstrap) as connection:
        locations = {x.location_id: x for x in connection.admin.locations().locations}
        assert [x.state.name for x in locations.values()] == ["RETIRED", "ACTIVE", "ACTIVE"]
        assert locations[2].uri == "s3://archive/zufluss"
        assert (locations[2].weight, locations[3].weight) == (3, 5)
        trips = connection.table("depot.trips").scan(stop="latest").to_arrow()
        assert trips.num_rows == 10_000


def test_blocks_that_are_not_run_say_why_and_are_known() -> None:
    reasons = {
        page.name: [block.not_run for block in blocks(page) if block.not_run is not None]
        for page in PAGES
    }
    print(*(f"{name}: {reason}" for name in reasons for reason in reasons[name]), sep="\n")
    assert all(reason for each in reasons.values() for reason in each)
    assert {name: len(each) for name, each in reasons.items() if each} == NOT_RUN


def test_no_block_is_fenced_in_a_way_that_hides_it() -> None:
    for page in PAGES:
        for language in ("bash", "shell", "console", "py", "pycon"):
            assert f"```{language}\n" not in page.read_text(), page


def block(code: str) -> Block:
    return Block("page.md:1", "python", code, until_stopped=False, not_run=None)


def test_a_block_that_prints_something_else_is_found() -> None:
    every = block("print(1)  # 1\nprint(2)  # [2…]\n")
    every.check_printed("1\n[2, 3]\n")
    some = block("print(1)\nprint(2)  # 2\n")
    some.check_printed("1\n2\n")
    for wrong, printed in ((every, "1\n"), (every, "1\n[2]\n3\n"), (some, "1\n"), (some, "12\n")):
        with pytest.raises(PageError, match="should print"):
            wrong.check_printed(printed)


def test_each_page_has_databases_of_its_own() -> None:
    owners: dict[str, set[str]] = {}
    for page in PAGES:
        for each in blocks(page):
            if each.not_run is None:
                created = re.findall(r'(?:create_database\("|zufluss db create )(\w+)', each.code)
                for database in created:
                    owners.setdefault(database, set()).add(page.name)
                assert page == README or not re.search(
                    r"[\"' ]fluss\.(?!bootstrap|spark)\w", each.code
                ), each
    assert all(len(pages) == 1 for pages in owners.values()), owners
