"""Catalogs of the lake tests: a process opens each once, and there is one for nearly every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zufluss.lake.iceberg import catalog


@pytest.fixture(scope="module", autouse=True)
def closed_catalogs() -> Iterator[None]:
    """Close the catalogs of a module: a process of tests had 800 descriptors open at its end."""
    yield
    for each in catalog._catalogs.values():
        each.close()
    catalog._catalogs.clear()
