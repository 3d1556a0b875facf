"""docs/aggregation.md does what it says: its blocks run in order on one server.

Python blocks print what stands behind their `print(…)`. The tables of functions and of their
parameters are compared with what is declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.test_readme import ROOT, run_python
from tests.servers import WarmServer
from zufluss.config.options import OPTIONS
from zufluss.config.table_options import TABLE_OPTIONS
from zufluss.model.aggregate import ANY, FUNCTIONS, NUMBERS, TEXTS, TIMES, FunctionTraits
from zufluss.model.types import Root

PAGE = ROOT / "docs" / "aggregation.md"
WORDS = {
    "any": ANY,
    "numbers": NUMBERS,
    "texts": TEXTS,
    "times": TIMES,
    "INT": {Root.INTEGER},
    **{root.name: {root} for root in Root},
}


def test_the_blocks_of_the_page_do_what_they_say(tmp_path: Path) -> None:
    code_blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(code_blocks) >= 2
    with WarmServer(tmp_path) as server:
        for code in code_blocks:
            expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)
            assert run_python(code, server).splitlines() == expected


def listed() -> Iterator[tuple[str, FunctionTraits]]:
    """The functions of the page, each with what its line says."""
    table = PAGE.read_text().split("## Functions")[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        names, column, parameters, _, retract = (cell.strip() for cell in line.split("|")[1:-1])
        for name in re.findall(r"`(\w+)`", names):
            declared = FUNCTIONS[name]
            keys = re.findall(r"`(\w+)`", parameters)
            assert keys == list(declared.parameters), name
            assert bool(retract) == declared.retracts, name
            yield name, declared
            roots = set().union(*(WORDS[word] for word in column.split(", ")))
            assert roots == declared.roots, name


def test_the_functions_of_the_page_are_those_there_are() -> None:
    assert [name for name, _ in listed()] == list(FUNCTIONS)


def test_the_options_of_the_page_exist() -> None:
    named = set(
        re.findall(r"`((?:table|zufluss(?!\.model)|super)\.[a-z.-]+[a-z])`", PAGE.read_text())
    )
    assert len(named) >= 6
    assert not named - set(OPTIONS) - set(TABLE_OPTIONS)
