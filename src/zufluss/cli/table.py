"""`zufluss table …`: list, create, describe, alter and drop tables, show their lake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.amounts import UNKNOWN, bytes_text, count_text, rate_text
from zufluss.cli.output import Output, print_document, print_fields, print_table
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    DEFAULT_DATABASE,
    Bootstrap,
    CustomProperties,
    IfExists,
    IfNotExists,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    names,
    pairs,
    say,
    table_path,
    usage,
)
from zufluss.cli.times import iso_time

if TYPE_CHECKING:
    from zufluss.cli.numbers import TableNumbers
    from zufluss.model.table import TableDescriptor, TableInfo

SchemaFile = Annotated[
    Path | None,
    typer.Option(
        "--schema",
        metavar="FILE",
        help="A .json, .yaml, .parquet or .arrow file with the columns.",
    ),
]

app = typer.Typer(no_args_is_help=True, help="Tables: list, create, describe, alter, drop, lake.")


@app.command("list")
def list_(
    database: Annotated[
        str, typer.Argument(metavar="DATABASE", help="The database.")
    ] = DEFAULT_DATABASE,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the tables of a database with their rows, their size, and the rows of the last minute.

    `rows` are the records of a log table or the keys of a primary-key table, `?` if they are not
    counted; `log bytes` is the size of the logs on the servers; `written` is the average of the
    last minute. `zufluss count` counts exactly.

    Examples:

      zufluss table list

      zufluss table list shop --output json
    """
    from zufluss.cli.numbers import table_numbers

    with connected(bootstrap, settings) as connection:
        tables = connection.admin.list_tables(database)
        numbers = table_numbers(connection.admin.describe_servers())
    rows = [(name, numbers.get(f"{database}.{name}")) for name in tables]
    if output is Output.JSON:
        print_document([{"table": name} | _numbers(of_table) for name, of_table in rows])
        return
    print_table(
        ["table", "buckets", "rows", "log bytes", "written"],
        [(name, *_number_cells(of_table)) for name, of_table in rows],
    )


@app.command()
def create(
    table: TableArgument,
    columns: Annotated[
        str | None,
        typer.Argument(metavar="COLUMNS", help="A column list as in SQL; --schema replaces it."),
    ] = None,
    schema: SchemaFile = None,
    primary_key: Annotated[str | None, typer.Option(metavar="A,B", help="The primary key.")] = None,
    partition_by: Annotated[
        str | None, typer.Option(metavar="A,B", help="The partition keys.")
    ] = None,
    buckets: Annotated[int | None, typer.Option(min=1, help="The number of buckets.")] = None,
    bucket_key: Annotated[str | None, typer.Option(metavar="A,B", help="The bucket key.")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="KEY=VALUE", help="A `table.…` property."),
    ] = None,
    custom: CustomProperties = None,
    comment: Annotated[str | None, typer.Option(help="A comment.")] = None,
    if_not_exists: IfNotExists = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Create a table from a column list or a schema file.

    Options override the values of a schema file.

    Examples:

      zufluss table create events "id BIGINT, name STRING, at TIMESTAMP(3)"

      zufluss table create shop.users "id INT, name STRING, PRIMARY KEY (id)" --buckets 4

      zufluss table create logs "day STRING, line STRING" --partition-by day

      zufluss table create views "page STRING, pv BIGINT SUM, PRIMARY KEY (page)" --property
      table.merge-engine=aggregation

      zufluss table create trips --schema trips.parquet --property table.log.ttl=1d
    """
    changes: dict[str, Any] = {
        "primary_key": names(primary_key),
        "partition_keys": names(partition_by),
        "bucket_keys": names(bucket_key),
        "bucket_count": buckets,
        "comment": comment,
        "properties": pairs(properties, "--property"),
        "custom_properties": pairs(custom, "--custom-property"),
    }
    with usage(str(schema) if schema else ""):
        descriptor = _with_options(_descriptor(columns, schema), changes)
    path = table_path(table)
    with connected(bootstrap, settings) as connection:
        missing = connection.admin.create_table(
            str(path), descriptor, ignore_if_exists=if_not_exists
        )
    say(f"table {path} is there")
    _say_missing(missing)


@app.command()
def describe(
    table: TableArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show columns, keys, buckets and properties of a table.

    The JSON output is a schema file: `zufluss table create copy --schema FILE` reads it.

    Examples:

      zufluss table describe shop.users

      zufluss table describe shop.users --output json > users.json
    """
    from zufluss.cli.numbers import table_numbers

    path = table_path(table)
    with connected(bootstrap, settings) as connection:
        info: TableInfo = connection.admin.table_info(str(path))
        numbers = table_numbers(connection.admin.describe_servers()).get(str(path))
    if output is Output.JSON:
        descriptor_json = json.loads(info.descriptor.to_json())
        print_document(_facts(info) | _numbers(numbers) | {"descriptor": descriptor_json})
        return
    _print_description(info, numbers)


@app.command()
def lake(
    table: TableArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how far a table is tiered: its lake snapshot, and the lag of each bucket.

    Examples:

      zufluss table lake shop.orders

      zufluss table lake shop.orders --output json
    """
    with connected(bootstrap, settings) as connection:
        path = table_path(table)
        plan = connection.plan_union(path)
        reason = None if plan.lake is not None else connection.admin.no_lake_snapshot(str(path))
    rows = [(p.partition, p.bucket.bucket_id, p.start, p.stop, p.stop - p.start) for p in plan.tail]
    facts = {
        "table": str(plan.info.path),
        "format": plan.info.descriptor.properties.get("table.datalake.format"),
        "snapshot": None if plan.lake is None else plan.lake.snapshot_id,
        "lag": sum(row[-1] for row in rows),
    }
    headings = ["partition", "bucket", "tiered", "end", "lag"]
    if output is Output.JSON:
        print_document(facts | {"buckets": [dict(zip(headings, r, strict=True)) for r in rows]})
        return
    skip = 0 if plan.info.is_partitioned else 1
    print_fields(facts | {"snapshot": facts["snapshot"] or f"none yet: {reason}"})
    print()
    print_table(headings[skip:], [[str(value) for value in row[skip:]] for row in rows])


@app.command()
def alter(
    table: TableArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a property, `table.…` or your own."),
    ] = None,
    reset: Annotated[
        str | None, typer.Option(metavar="KEY,…", help="Reset properties to their defaults.")
    ] = None,
    add_column: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME TYPE'", help="Append a column; it must be nullable."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Change properties of a table, or append columns; not both in one call.

    Examples:

      zufluss table alter events --set table.log.ttl=3d --reset table.statistics.columns

      zufluss table alter events --add-column "country STRING COMMENT 'ISO code'"
    """
    changes = pairs(set_, "--set")
    if not changes and not reset and not add_column:
        raise typer.BadParameter("nothing to alter; give --set, --reset or --add-column")
    from zufluss.model.schema import Schema

    with usage():
        added = [column for text in add_column or () for column in Schema.of(text).columns]
    path = table_path(table)
    with connected(bootstrap, settings) as connection:
        missing = connection.admin.alter_table(
            str(path), set=changes, reset=names(reset), add_columns=added
        )
    say(f"table {path} is altered")
    _say_missing(missing)


@app.command()
def drop(
    table: TableArgument,
    if_exists: IfExists = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Drop a table with its data.

    Example:

      zufluss table drop shop.users --if-exists
    """
    path = table_path(table)
    with connected(bootstrap, settings) as connection:
        connection.admin.drop_table(str(path), ignore_if_not_exists=if_exists)
    say(f"table {path} is gone")


def _say_missing(reason: str | None) -> None:
    if reason is not None:
        say(
            f"its lake table is not as it should be: {reason}\nthe next round of `zufluss tiering` "
            "or `zufluss table alter` tries again"
        )


def _descriptor(columns: str | None, schema: Path | None) -> TableDescriptor:
    from zufluss.cli.schema_file import descriptor_of_file, descriptor_of_text

    if columns is not None and schema is None:
        return descriptor_of_text(columns)
    if columns is None and schema is not None:
        return descriptor_of_file(schema)
    raise ValueError("give either a column list or --schema FILE")


def _with_options(descriptor: TableDescriptor, changes: dict[str, Any]) -> TableDescriptor:
    """Apply options to a descriptor; properties are merged key by key."""
    options = {name: value for name, value in changes.items() if value}
    primary_key = options.pop("primary_key", None)
    if primary_key:
        options["schema"] = replace(descriptor.schema, primary_key=primary_key)
    for name in ("properties", "custom_properties"):
        options[name] = {**getattr(descriptor, name), **changes[name]}
    return replace(descriptor, **options)


def _print_description(info: TableInfo, numbers: TableNumbers | None) -> None:
    """Print facts, numbers, columns and properties, each in a block of its own."""
    descriptor = info.descriptor
    _, rows, log_bytes, rate = _number_cells(numbers)
    print_fields(
        _facts(info)
        | {
            "comment": descriptor.comment,
            "rows": rows,
            "log bytes": log_bytes,
            "written": rate,
            "primary key": descriptor.schema.primary_key,
            "partition by": descriptor.partition_keys,
            "bucket key": descriptor.bucket_keys,
            "buckets": descriptor.bucket_count,
        }
    )
    print()
    _print_columns(descriptor)
    for title in ("properties", "custom_properties"):
        values = dict(sorted(getattr(descriptor, title).items()))
        if values:
            print(f"\n{title.replace('_', ' ')}")
            print_fields(values)


def _print_columns(descriptor: TableDescriptor) -> None:
    """Print the columns; with their aggregate functions if one has a function."""
    columns = descriptor.schema.columns
    shown = {
        "column": [c.name for c in columns],
        "type": [str(c.data_type) for c in columns],
        "key": ["primary key" if c.name in descriptor.schema.primary_key else "" for c in columns],
        "function": [str(c.agg_function or "") for c in columns],
        "comment": [c.comment or "" for c in columns],
    }
    for optional in ("key", "function", "comment"):
        if not any(shown[optional]):
            del shown[optional]
    print_table([*shown], [*zip(*shown.values(), strict=True)])


def _numbers(table: TableNumbers | None) -> dict[str, Any]:
    """The numbers of a table; those of a table without a server are not known."""
    return {
        "buckets": None if table is None else table.buckets,
        "rows": None if table is None else table.rows,
        "log_bytes": None if table is None else table.log_bytes,
        "rows_per_second": None if table is None else round(table.rate, 1),
    }


def _number_cells(table: TableNumbers | None) -> tuple[str, ...]:
    if table is None:
        return (UNKNOWN,) * 4
    rate = rate_text(table.rate)
    return count_text(table.buckets), count_text(table.rows), bytes_text(table.log_bytes), rate


def _facts(info: TableInfo) -> dict[str, Any]:
    return {
        "table": str(info.path),
        "kind": "primary-key table" if info.has_primary_key else "log table",
        "id": info.table_id,
        "schema": info.schema_id,
        "created": iso_time(info.created_time),
        "modified": iso_time(info.modified_time),
    }
