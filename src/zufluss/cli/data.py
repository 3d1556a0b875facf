"""`zufluss append`, `zufluss offsets`: write rows to log tables, show the offsets of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.rows import (
    FormatOption,
    RowFile,
    Tally,
)
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    table_path,
)
from zufluss.cli.times import EARLIEST, LATEST, Position, parse_position

if TYPE_CHECKING:
    pass


def append(
    table: TableArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The rows; `-` is standard input.")
    ] = "-",
    form: FormatOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Append rows from a file or from standard input to a log table.

    Columns are matched by name; missing ones become NULL. When the command succeeds, every row
    is acknowledged. When it fails, rows before the bad one may have been written.

    Examples:

      zufluss append events day-1.parquet

      zufluss append shop.visits visits.csv -D client.writer.batch-size=8mb

      tail -f app.ndjson | zufluss append logs -
    """
    source = RowFile(file, form)
    name = table_path(table)
    tally = Tally()
    with connected(bootstrap, settings) as connection:
        target = connection.table(str(name))
        if target.info.has_primary_key:
            raise typer.BadParameter(
                f"table {name} has a primary key, rows are upserted: zufluss upsert {name}"
            )
        with target.append() as writer:
            rows = source.send(f"append {name}", target.schema.arrow, writer.write)
    tally.report(output, name, rows, "appended {} rows to")


def offsets(
    table: TableArgument,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="POSITION",
            help="earliest, latest or a time (ISO 8601 or epoch ms); default: earliest and latest.",
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="NAME", help="Only this partition; default: all."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the first and last offsets of the buckets of a table, or the offsets at a time.

    Examples:

      zufluss offsets events

      zufluss offsets shop.orders --at 2026-01-31T08:00:00Z --partition 2026-01-31

      zufluss offsets events --at latest --output json
    """
    positions: dict[str, Position] = {EARLIEST: EARLIEST, LATEST: LATEST}
    if at:
        positions = {"offset": parse_position(at)}
    name = str(table_path(table))
    rows: list[list[Any]] = []
    with connected(bootstrap, settings) as connection:
        admin = connection.admin
        partitioned = admin.table_info(name).is_partitioned
        for part in _partitions(admin, name, partition, partitioned):
            offsets_at = [
                admin.list_offsets(name, where, partition=part) for where in positions.values()
            ]
            rows += [
                [part, b, *(offset[b] for offset in offsets_at)] for b in sorted(offsets_at[0])
            ]
    headings = ["partition", "bucket", *positions]
    skip = 0 if partitioned else 1
    print_rows(output, headings[skip:], [row[skip:] for row in rows])


def _partitions(admin: Any, name: str, chosen: str | None, partitioned: bool) -> list[str | None]:
    if chosen is not None:
        return [chosen]
    return [item.name for item in admin.list_partitions(name)] if partitioned else [None]
