"""docs/cli.md is what the help of the commands says."""

from __future__ import annotations

from tests.paths import DOCS
from zufluss.cli import docs


def test_the_page_has_every_command_as_its_help_describes_it() -> None:
    page = (DOCS / "cli.md").read_text()
    assert page == docs.render(), "make docs"
    for path, _ in docs.commands(docs.get_command(docs.command_line.app)):
        section = page.split(f"\n## zufluss {' '.join(path)}\n", 1)[1].split("\n## ", 1)[0]
        assert f"zufluss {' '.join(path)}" in section.split("```sh", 1)[1], path
