"""The table of lake formats says what is true of the formats that are installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from zufluss.config.lake import embedded_lake
from zufluss.lake.base import ENTRY_POINTS
from zufluss.lake_formats import LAKE_FORMATS
from zufluss.model.types import Root

FORMATS = list(LAKE_FORMATS)


def test_every_installed_format_is_in_the_table() -> None:
    assert {point.name for point in entry_points(group=ENTRY_POINTS)} <= set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_modules_and_types_that_a_format_names_exist(name: str, tmp_path: Path) -> None:
    traits = LAKE_FORMATS[name]
    assert all(find_spec(m) for m in (traits.task_module, traits.driver_module) if m)
    assert traits.key_types_refused <= {root.name for root in Root}
    assert all(key.startswith(f"datalake.{name}.") for key in embedded_lake(name, tmp_path))
