"""Paths of files that tests read: the pages, and bytes captured from Fluss."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIXTURES = ROOT / "tests" / "fixtures"
