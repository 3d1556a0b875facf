"""Files and headings that the pages and docstrings mention exist.

A refactoring that renames a module leaves its old name in prose, where no import fails. A name is
looked for relative to the repository, to `src/zufluss`, and, in docstrings, to the own package.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.paths import DOCS, ROOT

SOURCE = ROOT / "src" / "zufluss"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
HISTORY = "CHANGELOG.md"
"""The page that may name files as they were called at the time."""

MODULE = re.compile(r"`([A-Za-z_][\w./-]*\.py)`")
LINK = re.compile(r"\]\(([^)\s#]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


def exists(name: str, *places: Path) -> bool:
    """Whether a file of this name is in one of the places."""
    return any((place / name).exists() for place in places)


def named_files(page: Path) -> list[str]:
    """The files in backquotes; a bare `test_x.py` belongs to the directory named before it."""
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
    "page", [page for page in PAGES if page.name != HISTORY], ids=lambda page: page.name
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [name for name in named_files(page) if not exists(name, ROOT, SOURCE, page.parent)]
    assert not missing


def docstrings(module: Path) -> str:
    """All texts that stand by themselves in a module: docstrings of everything in it."""
    tree = ast.parse(module.read_text())
    return "\n".join(
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_modules_that_docstrings_name_exist() -> None:
    missing = [
        f"{module.relative_to(ROOT)}: {name}"
        for module in sorted(SOURCE.rglob("*.py"))
        if "proto" not in module.parts
        for name in MODULE.findall(docstrings(module))
        if not exists(name, ROOT, SOURCE, module.parent, module.parent.parent)
    ]
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
