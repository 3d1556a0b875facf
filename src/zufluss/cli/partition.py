"""`zufluss partition …`: the partitions of a table."""

from __future__ import annotations

from typing import Annotated

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    IfExists,
    IfNotExists,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    pairs,
    say,
    table_path,
)

app = typer.Typer(no_args_is_help=True, help="Partitions of a table: list, create, drop.")

SpecArgument = Annotated[
    list[str], typer.Argument(metavar="KEY=VALUE…", help="The value of each partition key.")
]


@app.command("list")
def list_(
    table: TableArgument,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="KEY=VALUE", help="Only partitions with this value."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the partitions of a table.

    Example:

      zufluss partition list shop.orders --where region=EMEA
    """
    partial = pairs(where, "--where") or None
    with connected(bootstrap, settings) as connection:
        partitions = connection.admin.list_partitions(str(table_path(table)), partial)
    print_rows(output, ["id", "partition"], [(item.partition_id, item.name) for item in partitions])


@app.command()
def create(
    table: TableArgument,
    spec: SpecArgument,
    if_not_exists: IfNotExists = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Create a partition.

    Example:

      zufluss partition create shop.orders day=2026-01-31 region=EMEA
    """
    values = pairs(spec, "partition value")
    with connected(bootstrap, settings) as connection:
        connection.admin.create_partition(
            str(table_path(table)), values, ignore_if_exists=if_not_exists
        )
    say(f"partition {'$'.join(values.values())} of {table_path(table)} is there")


@app.command()
def drop(
    table: TableArgument,
    spec: SpecArgument,
    if_exists: IfExists = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Drop a partition with its data.

    Example:

      zufluss partition drop shop.orders day=2026-01-31 region=EMEA
    """
    values = pairs(spec, "partition value")
    with connected(bootstrap, settings) as connection:
        connection.admin.drop_partition(
            str(table_path(table)), values, ignore_if_not_exists=if_exists
        )
    say(f"partition {'$'.join(values.values())} of {table_path(table)} is gone")
