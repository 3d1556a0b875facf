"""`zufluss doctor`: shortages, doubts and failures of all servers of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from zufluss.cli.output import Output, print_document, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
)

PROBLEMS = 5
"""Exit code if something does not work."""
SEVERITIES = ("ok", "warning", "problem")


def doctor(
    confirm_clock: Annotated[
        bool,
        typer.Option(
            "--confirm-clock", help="The time of the servers is right: let data expire again."
        ),
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask every server for buckets that do not work, shortages and doubts; exits 5 for problems.

    A server that does not answer, or that the coordinator misses, is a problem, too.

    Examples:

      zufluss doctor

      zufluss doctor -o json
    """
    with connected(bootstrap, settings) as connection:
        findings = connection.admin.examine_servers(confirm_clock=confirm_clock)
    rows = [(f.server, SEVERITIES[f.severity], f.subject, f.text) for f in findings]
    columns = ["server", "state", "subject", "finding"]
    if output is Output.JSON:
        print_document([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_rows(output, columns, rows)
    if any(state == "problem" for _, state, _, _ in rows):
        raise typer.Exit(PROBLEMS)
