"""Files that the pages name, and headings that they link to, exist.

`test_module_names.py` checks the names in ARCHITECTURE.md, CONTRIBUTING.md and in the source. Here
a file name counts from the repository, from `src/zufluss`, or from the directory of the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import DOCS, ROOT

SOURCE = ROOT / "src" / "zufluss"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
ELSEWHERE = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages that `test_module_names.py` checks, and the one that may name files of the past."""

MODULE = re.compile(r"(?:`|<i>|, )([A-Za-z_][\w./-]*\.py)(?=`|</i>|, )")
"""A file name in backquotes, or in the italics of a diagram."""
LINK = re.compile(r"\]\(([^)\s#]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


def exists(name: str, *places: Path) -> bool:
    """Whether a file of this name is in one of the places."""
    return any((place / name).exists() for place in places)


def named_files(page: Path) -> list[str]:
    """The files that a page names; a bare `test_x.py` belongs to the directory named before it."""
    names: list[str] = []
    directory = ""
    for name in MODULE.findall(page.read_text()):
        if "/" in name:
            directory = name.rpartition("/")[0]
        elif name.startswith("test_"):
            name = f"{directory}/{name}"
        names.append(name)
    return names


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [name for name in named_files(page) if not exists(name, ROOT, SOURCE, page.parent)]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_a_page_links_to_exist(page: Path) -> None:
    missing = [
        f"{target}#{anchor}"
        for target, anchor in LINK.findall(page.read_text())
        if "://" not in target and anchor not in anchors((page.parent / target) if target else page)
    ]
    assert not missing
