"""The demo that README promises does what it says, and links between pages lead somewhere.

The blocks of the pages are run by `test_pages.py`, README's also from a wheel, by
`scripts/newcomer.py`.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.paths import DOCS, ROOT


@pytest.mark.slow
def test_the_demo_does_what_it_says():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "1,000,000 rows scanned back, every id once" in done.stdout
    assert "the changelog, folded, is the table: 360,000 orders, all equal" in done.stdout
    assert done.stdout.count("= live table") == 10  # four times two union reads, two lakes
    assert "4, all equal" in done.stdout
    assert "tiering service and server stopped cleanly" in done.stdout


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))],
    ids=lambda p: p.name,
)
def test_links_between_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
