"""`zufluss tiering`: runs the tiering service, with the options of Fluss's own service."""

from __future__ import annotations

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""The service parses its options itself, because their names have dots and are open-ended."""


def tiering(context: typer.Context) -> None:
    """Move tables into the lake, round by round, in a Spark session.

    `zufluss tiering --help` lists its options; docs/tiering.md explains them.

    Examples:

      zufluss tiering --fluss.bootstrap.servers localhost:9123

      zufluss tiering --fluss.bootstrap.servers localhost:9123 --zufluss.metrics.port 9465
    """
    from zufluss.tiering.options import asks_for_help, help_text

    if asks_for_help(context.args):
        typer.echo(help_text())
        return
    from zufluss.tiering.main import main

    raise typer.Exit(main(context.args))
