"""The tables of functions and of their parameters in docs/aggregation.md are what is declared."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.paths import DOCS
from zufluss.config.options import OPTIONS
from zufluss.config.table_options import TABLE_OPTIONS
from zufluss.model.aggregate import ANY, FUNCTIONS, NUMBERS, TEXTS, TIMES, FunctionTraits
from zufluss.model.types import Root

PAGE = DOCS / "aggregation.md"
WORDS = {
    "any": ANY,
    "numbers": NUMBERS,
    "texts": TEXTS,
    "times": TIMES,
    "INT": {Root.INTEGER},
    **{root.name: {root} for root in Root},
}


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
