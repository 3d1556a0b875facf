"""`zufluss db …`: list, create, describe, alter and drop databases."""

from __future__ import annotations

from typing import Annotated

import typer

from zufluss.cli.output import Output, print_document, print_fields, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    CustomProperties,
    IfExists,
    IfNotExists,
    OutputOption,
    Settings,
    connected,
    names,
    pairs,
    say,
)
from zufluss.cli.times import iso_time

app = typer.Typer(no_args_is_help=True, help="Databases: list, create, describe, alter, drop.")

DatabaseArgument = Annotated[str, typer.Argument(metavar="DATABASE", help="The database's name.")]


@app.command("list")
def list_(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the databases.

    Example:

      zufluss db list --output json
    """
    with connected(bootstrap, settings) as connection:
        databases = connection.admin.list_databases()
    print_rows(output, ["database"], [(name,) for name in databases])


@app.command()
def create(
    database: DatabaseArgument,
    comment: Annotated[str | None, typer.Option(help="A comment.")] = None,
    custom: CustomProperties = None,
    if_not_exists: IfNotExists = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Create a database.

    Example:

      zufluss db create shop --comment "orders and stock" --custom-property team=retail
    """
    properties = pairs(custom, "--custom-property")
    with connected(bootstrap, settings) as connection:
        connection.admin.create_database(
            database,
            comment=comment,
            custom_properties=properties,
            ignore_if_exists=if_not_exists,
        )
    say(f"database {database} is there")


@app.command()
def describe(
    database: DatabaseArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show comment, properties and times of a database.

    Example:

      zufluss db describe shop
    """
    with connected(bootstrap, settings) as connection:
        info = connection.admin.database_info(database)
    fields = {
        "database": database,
        "comment": info.descriptor.comment,
        "custom_properties": dict(info.descriptor.custom_properties),
        "created": iso_time(info.created_time),
        "modified": iso_time(info.modified_time),
    }
    if output is Output.JSON:
        print_document(fields)
    else:
        print_fields(fields)


@app.command()
def alter(
    database: DatabaseArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a custom property."),
    ] = None,
    reset: Annotated[
        str | None, typer.Option(metavar="KEY,…", help="Remove custom properties.")
    ] = None,
    comment: Annotated[str | None, typer.Option(help="A new comment.")] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Change custom properties and the comment of a database.

    Example:

      zufluss db alter shop --set team=sales --reset owner --comment "orders"
    """
    changes = pairs(set_, "--set")
    if not changes and not reset and comment is None:
        raise typer.BadParameter("nothing to alter; give --set, --reset or --comment")
    with connected(bootstrap, settings) as connection:
        connection.admin.alter_database(database, set=changes, reset=names(reset), comment=comment)
    say(f"database {database} is altered")


@app.command()
def drop(
    database: DatabaseArgument,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Drop the tables of the database, too.")
    ] = False,
    if_exists: IfExists = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Drop a database; one with tables needs --cascade.

    Example:

      zufluss db drop shop --cascade
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.drop_database(database, cascade=cascade, ignore_if_not_exists=if_exists)
    say(f"database {database} is gone")
