"""`zufluss append`, `zufluss scan`, `zufluss offsets`: rows in, rows out, where a log stands."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.rows import (
    ColumnsOption,
    FollowOption,
    FormatOption,
    FromOption,
    LimitOption,
    RowFile,
    Tally,
    chosen_columns,
    print_scan,
    row_printer,
    start_of,
)
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    names,
    table_path,
)
from zufluss.cli.times import EARLIEST, LATEST, Position, parse_position

if TYPE_CHECKING:
    from zufluss.client.sync import Table
    from zufluss.model.table import TablePath


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
    """Append rows of a file or of standard input to a log table.

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


class Source(StrEnum):
    """Where a scan takes rows from."""

    LOG = "log"
    UNION = "union"
    LAKE = "lake"


def scan(
    table: TableArgument,
    columns: ColumnsOption = None,
    start: FromOption = EARLIEST,
    limit: LimitOption = None,
    follow: FollowOption = False,
    origin: Annotated[
        Source | None,
        typer.Option("--source", help="log, lake, or union: both together, every row there is."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the rows of a log table; with --follow also those still to come.

    With --source union it reads what was tiered from the lake and the rest from the log, also of a
    primary-key table. Without, of a primary-key table it prints some rows with --limit: `zufluss
    lookup` finds its rows by key, `zufluss changelog` prints its changes.

    JSON output is one object per line, the form that `zufluss append` reads.

    Examples:

      zufluss scan events --limit 10

      zufluss scan shop.visits --columns id,page --from 2026-01-31T08:00:00Z --output json

      zufluss scan logs --from latest --follow

      zufluss scan shop.orders --source union
    """
    name = table_path(table)
    with connected(bootstrap, settings) as connection:
        source = connection.table(str(name))
        from_log = origin is Source.LOG or (origin is None and not source.lake_only)
        keyed = source.info.has_primary_key
        if keyed and from_log:
            _check_head(name, limit, start, follow)
            _print_head(source, columns, limit, output)
            return
        if not from_log:
            _check_union(name, origin or Source.LAKE, start, follow, keyed)
        batches = source.scan(
            columns=list(names(columns)) or None,
            start=start_of(start, source.info.bucket_count),
            stop=None if follow else LATEST,
            limit=limit,
            source=None if origin is None else origin.value,
        )
        print_scan(batches, output)


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
    """Show where the buckets of a table begin and end, or which offset belongs to a time.

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
            found = [
                admin.list_offsets(name, where, partition=part) for where in positions.values()
            ]
            rows += [[part, b, *(offset[b] for offset in found)] for b in sorted(found[0])]
    headings = ["partition", "bucket", *positions]
    skip = 0 if partitioned else 1
    print_rows(output, headings[skip:], [row[skip:] for row in rows])


def _partitions(admin: Any, name: str, chosen: str | None, partitioned: bool) -> list[str | None]:
    if chosen is not None:
        return [chosen]
    return [item.name for item in admin.list_partitions(name)] if partitioned else [None]


def _check_head(name: TablePath, limit: int | None, start: str, follow: bool) -> None:
    if limit is None or follow or start != EARLIEST:
        raise typer.BadParameter(
            f"table {name} has a primary key, so its log has changes and not rows: zufluss "
            f"changelog {name} prints these, zufluss lookup {name} KEY finds rows, zufluss scan "
            f"{name} --limit 10 shows some (without --from and --follow), zufluss scan {name} "
            "--source union all"
        )


def _check_union(name: TablePath, origin: Source, start: str, follow: bool, keyed: bool) -> None:
    if start != EARLIEST:
        raise typer.BadParameter(f"--from {start} is for --source log; {origin} reads everything")
    if follow and keyed:
        raise typer.BadParameter(
            f"table {name} has a primary key; its changes are followed by zufluss changelog "
            f"{name} --follow"
        )
    if follow and origin is Source.LAKE:
        raise typer.BadParameter(
            "a lake cannot be followed; --source union prints what is in it, then follows the log"
        )


def _print_head(source: Table, columns: str | None, limit: int | None, output: Output) -> None:
    """Some rows of a primary-key table; which ones is the server's choice."""
    assert limit is not None
    chosen = chosen_columns(source, columns)
    show = row_printer(output, chosen)
    for batch in source.head(limit).select(chosen).to_batches():
        show(batch)
