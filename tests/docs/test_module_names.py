"""Module names in ARCHITECTURE.md, CONTRIBUTING.md, docstrings and comments exist.

Checked are names in backticks: files (`log/files.py`, `tests/fault`), packages and modules
(`client/keyed`) and dotted names (`zufluss.client.keyed.scan`). A path counts from `src/zufluss`,
from the top of the checkout, or from one of the packages that the naming module stands in.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

SOURCE = ROOT / "src" / "zufluss"
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"(?:\w+/)*\w+\.py$")
FOLDER = re.compile(r"[a-z_]+(?:/[a-z_]+)+/?$")
NOT_FOLDERS = {"lake/warehouse"}
"""Folders of a data directory that begin like a package."""
DOTTED = re.compile(r"zufluss(?:\.\w+)+$")
KEY = re.compile(r'"(zufluss(?:\.[\w-]+)+)"')
"""An option, a property or a logger: a dotted name that the code has as a text."""


def exists(path: str, bases: list[Path]) -> bool:
    """Whether a path, with or without `.py`, is there below one of the bases."""
    return any((base / path).exists() or (base / f"{path}.py").exists() for base in bases)


def dotted_exists(name: str) -> bool:
    """Whether a dotted name is a module, or a name that its longest module prefix contains."""
    parts = name.split(".")[1:]
    at = SOURCE
    while parts and (at / parts[0]).is_dir():
        at = at / parts.pop(0)
    if parts and (at / f"{parts[0]}.py").is_file():
        at = at / f"{parts.pop(0)}.py"
    text = (at / "__init__.py" if at.is_dir() else at).read_text()
    return not parts or re.search(rf"\b{parts[0]}\b", text) is not None


@cache
def keys() -> set[str]:
    """The dotted names that are no modules."""
    return {key for path in SOURCE.rglob("*.py") for key in KEY.findall(path.read_text())}


def missing(text: str, bases: list[Path]) -> list[str]:
    """The names of modules in a text that do not exist."""
    packages = {path.name for base in bases for path in base.iterdir() if path.is_dir()}
    names = []
    for name in QUOTED.findall(text):
        if FILE.match(name):
            known = exists(name, bases)
        elif FOLDER.match(name) and name not in NOT_FOLDERS and name.split("/")[0] in packages:
            known = exists(name.rstrip("/"), bases)
        else:
            known = not DOTTED.match(name) or name in keys() or dotted_exists(name)
        if not known:
            names.append(name)
    return names


def prose(source: str) -> Iterator[str]:
    """The strings and comments of a module that quote something."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) and "`" in token.string:
            yield token.string


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_modules_that_exist(page: str) -> None:
    assert missing((ROOT / page).read_text(), [SOURCE, SOURCE.parent, ROOT]) == []


def test_docstrings_and_comments_name_modules_that_exist() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        packages = [folder for folder in path.parents if SOURCE in (folder, *folder.parents)]
        names = missing("\n".join(prose(path.read_text())), [*packages, SOURCE.parent, ROOT])
        wrong += [f"{path.relative_to(SOURCE)}: {name}" for name in names]
    assert wrong == []
