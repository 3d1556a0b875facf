"""`zufluss append`, `zufluss scan`, `zufluss offsets`: write rows, read rows, show offsets."""

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
    from zufluss.client.sync.table import Table
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


class ScanSource(StrEnum):
    """The source of the rows of a scan."""

    LIVE = "live"
    SNAPSHOT = "snapshot"
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
        ScanSource | None,
        typer.Option(
            "--source",
            help="log, lake, or union for both together. For a primary-key table also live (its "
            "rows now, the default) and snapshot (its newest key-value snapshots).",
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the rows of a table; --follow waits for new rows of a log table.

    The rows of a primary-key table are those at the beginning of the scan, by bucket in the order
    of their keys; `zufluss lookup` finds rows by key, `zufluss changelog` prints changes. --source
    union reads tiered rows from the lake and the others from the log.

    JSON output is one object per line, which `zufluss append` and `upsert` can read. If the output
    goes to a file or a pipe, stderr shows the progress of a scan of a primary-key table.

    Examples:

      zufluss scan events --limit 10

      zufluss scan shop.visits --columns id,page --from 2026-01-31T08:00:00Z --output json

      zufluss scan logs --from latest --follow

      zufluss scan shop.orders --output json > orders.ndjson

      zufluss scan shop.orders --source union
    """
    name = table_path(table)
    with connected(bootstrap, settings) as connection:
        source = connection.table(str(name))
        keyed = source.info.has_primary_key
        where = origin or _usual(source)
        if _is_state(where, keyed):
            _check_state(name, where, start, follow, keyed)
            _print_state(source, columns, limit, where, output)
            return
        _check_union(name, where, start, follow, keyed)
        batches = source.scan(
            columns=list(names(columns)) or None,
            start=start_of(start, source.info.bucket_count),
            stop=None if follow else LATEST,
            limit=limit,
            source=where.value,
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


def _usual(table: Table) -> ScanSource:
    """The default source of a table."""
    if table.lake_only:
        return ScanSource.LAKE
    return ScanSource.LIVE if table.info.has_primary_key else ScanSource.LOG


def _is_state(origin: ScanSource, keyed: bool) -> bool:
    """Whether a scan reads the rows of a primary-key table."""
    return origin in (ScanSource.LIVE, ScanSource.SNAPSHOT) or (keyed and origin is ScanSource.LOG)


def _check_state(
    name: TablePath, origin: ScanSource, start: str, follow: bool, keyed: bool
) -> None:
    if not keyed:
        raise typer.BadParameter(
            f"table {name} has no primary key, so --source {origin} has no rows; use --source log"
        )
    if origin is ScanSource.LOG or follow or start != EARLIEST:
        raise typer.BadParameter(
            f"table {name} has a primary key, so its log has changes and not rows: zufluss "
            f"changelog {name} prints the changes, also with --from and --follow; zufluss scan "
            f"{name} prints its rows, zufluss lookup {name} KEY finds rows by key"
        )


def _check_union(
    name: TablePath, origin: ScanSource, start: str, follow: bool, keyed: bool
) -> None:
    if origin is ScanSource.LOG:
        return
    if start != EARLIEST:
        raise typer.BadParameter(f"--from {start} is for --source log; {origin} reads everything")
    if follow and keyed:
        raise typer.BadParameter(
            f"table {name} has a primary key; its changes are followed by zufluss changelog "
            f"{name} --follow"
        )
    if follow and origin is ScanSource.LAKE:
        raise typer.BadParameter(
            "a lake cannot be followed; --source union prints what is in it, then follows the log"
        )


def _print_state(
    source: Table, columns: str | None, limit: int | None, origin: ScanSource, output: Output
) -> None:
    """Print rows of a primary-key table; from a server without scans some rows, in no order."""
    from zufluss.errors import UnsupportedVersionError

    chosen = chosen_columns(source, columns)
    scan = source.scan(chosen, limit=limit, source=origin.value)
    try:
        print_scan(scan, output, f"scan {source.path}")
    except UnsupportedVersionError:
        if limit is None or origin is not ScanSource.LIVE:
            raise
        show = row_printer(output, chosen)
        for batch in source.head(limit).select(chosen).to_batches():
            show(batch)
