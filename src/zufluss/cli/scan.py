"""`zufluss scan`: print the rows of a table; `scan list` and `scan kill`: the scans of all clients.

`zufluss scan TABLE` reads, so `scan` is a command and a group of commands at once. A table that is
named like one of the commands is written with its database: `fluss.list`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from zufluss.cli.output import Output, print_document, print_rows
from zufluss.cli.rows import (
    ColumnsOption,
    FollowOption,
    FromOption,
    LimitOption,
    PartitionsOption,
    WhereOption,
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
    say,
    table_path,
    usage,
)
from zufluss.cli.times import EARLIEST, LATEST, parse_position

if TYPE_CHECKING:
    from zufluss.client.keyed.scan_info import KvScanInfo
    from zufluss.client.sync.connection import Connection
    from zufluss.client.sync.table import Table

ROWS: Final = "rows"
"""The command that `zufluss scan` runs if none is named."""
NOT_FOUND: Final = 1
"""Exit code of `kill` if a scan does not exist."""


class ScanGroup(TyperGroup):
    """A group that reads a table, unless the first word is one of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front, if no command is named."""
        if not args or args[0] not in self.commands:
            args = [ROWS, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=ScanGroup, help="Print the rows of a table; list or end scans.")


class ScanSource(StrEnum):
    """The source of the rows of a scan."""

    LIVE = "live"
    SNAPSHOT = "snapshot"
    LOG = "log"
    UNION = "union"
    LAKE = "lake"


SourceOption = Annotated[
    ScanSource | None,
    typer.Option(
        "--source",
        help="log, lake, or union for both together. For a primary-key table also live (its "
        "rows now, the default) and snapshot (its newest key-value snapshots).",
    ),
]
BucketsOption = Annotated[
    list[int] | None,
    typer.Option("--bucket", metavar="N", help="Only this bucket; may be repeated."),
]
AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="POSITION",
        help="The rows of a primary-key table as they were then: a time (ISO 8601 or epoch "
        "ms), `offset:N` for every bucket, or `offset:BUCKET=N,BUCKET=N`.",
    ),
]


@app.command(ROWS, hidden=True)
def scan(
    table: TableArgument,
    columns: ColumnsOption = None,
    start: FromOption = EARLIEST,
    limit: LimitOption = None,
    follow: FollowOption = False,
    origin: SourceOption = None,
    where: WhereOption = None,
    partitions: PartitionsOption = None,
    buckets: BucketsOption = None,
    at: AtOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the rows of a table; --follow waits for new rows of a log table.

    `zufluss scan list` shows the scans of all clients, `zufluss scan kill` ends some.

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

      zufluss scan shop.orders --where "day >= '2026-01-30' AND cents > 100" --partition 2026-01-31

      zufluss scan shop.orders --at 2026-01-31T08:00:00Z --bucket 0
    """
    with connected(bootstrap, settings) as connection:
        source = connection.table(str(table_path(table)))
        rows_of = origin or _usual(source)
        chosen: dict[str, Any] = {
            "filter": where,
            "limit": limit,
            "partitions": partitions or None,
            "buckets": buckets or None,
            "source": rows_of.value,
        }
        if _is_state(rows_of, source.info.has_primary_key):
            _check_state(source, rows_of, start, follow)
            chosen["at"] = None if at is None else _offsets_at(connection, source, at, partitions)
            _print_state(source, chosen_columns(source, columns), chosen, output)
        else:
            _check_log(source, rows_of, start, follow, at)
            _print_log(source, columns, start, follow, chosen, output)


@app.command("list")
def list_(
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="Only scans of this table.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the running scans of primary-key tables: who reads which bucket, and how far it came.

    Examples:

      zufluss scan list

      zufluss scan list shop.orders --output json
    """
    name = None if table is None else str(table_path(table))
    with connected(bootstrap, settings) as connection:
        scans = connection.admin.list_kv_scans(name)
    if output is Output.JSON:
        print_document([_document(scan) for scan in scans])
        return
    columns = ["id", "table", "partition", "bucket", "client", "owner", "age", "idle", "rows"]
    print_rows(output, columns, [_row(scan) for scan in scans])


@app.command()
def kill(
    scan_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids that `scan list` shows.")
    ] = None,
    table: Annotated[
        str | None, typer.Option("--table", metavar="TABLE", help="All scans of this table.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """End scans of primary-key tables; their clients get an error.

    The exit code is 1 if a scan does not exist, or has ended by itself.

    Examples:

      zufluss scan kill 0-17 0-18

      zufluss scan kill --table shop.orders
    """
    if (table is None) == (not scan_ids):
        raise typer.BadParameter("give either ids of scans or --table TABLE")
    ids = list(dict.fromkeys(scan_ids or ()))
    with connected(bootstrap, settings) as connection:
        if table is not None:
            name = str(table_path(table))
            ids = [scan.scan_id for scan in connection.admin.list_kv_scans(name)]
        with usage():
            _check_ids(ids)
        ended = connection.admin.end_kv_scans(ids)
    say(f"ended {len(ended)} scans")
    missing = [scan_id for scan_id in ids if scan_id not in ended]
    if missing and table is None:
        say(f"no scan {', '.join(missing)}; `zufluss scan list` shows the running ones")
        raise typer.Exit(NOT_FOUND)


def _usual(table: Table) -> ScanSource:
    """The default source of a table."""
    if table.lake_only:
        return ScanSource.LAKE
    return ScanSource.LIVE if table.info.has_primary_key else ScanSource.LOG


def _is_state(origin: ScanSource, keyed: bool) -> bool:
    """Whether a scan reads the rows of a primary-key table."""
    return origin in (ScanSource.LIVE, ScanSource.SNAPSHOT) or (keyed and origin is ScanSource.LOG)


def _check_state(table: Table, origin: ScanSource, start: str, follow: bool) -> None:
    name = table.path
    if not table.info.has_primary_key:
        raise typer.BadParameter(
            f"table {name} has no primary key, so --source {origin} has no rows; use --source log"
        )
    if origin is ScanSource.LOG or follow or start != EARLIEST:
        raise typer.BadParameter(
            f"table {name} has a primary key, so its log has changes and not rows: zufluss "
            f"changelog {name} prints the changes, also with --from and --follow; zufluss scan "
            f"{name} prints its rows, zufluss lookup {name} KEY finds rows by key"
        )


def _check_log(table: Table, origin: ScanSource, start: str, follow: bool, at: str | None) -> None:
    if at is not None:
        raise typer.BadParameter(
            f"--at is for the rows of a primary-key table, not for --source {origin}"
        )
    if origin is ScanSource.LOG:
        return
    if start != EARLIEST:
        raise typer.BadParameter(f"--from {start} is for --source log; {origin} reads everything")
    if follow and table.info.has_primary_key:
        raise typer.BadParameter(
            f"table {table.path} has a primary key; its changes are followed by zufluss changelog "
            f"{table.path} --follow"
        )
    if follow and origin is ScanSource.LAKE:
        raise typer.BadParameter(
            "a lake cannot be followed; --source union prints what is in it, then follows the log"
        )


def _offsets_at(
    connection: Connection, table: Table, at: str, partitions: list[str] | None
) -> dict[Any, int]:
    """The offsets of `--at`, by bucket number, or by bucket for the time of a partition."""
    position = start_of(at, table.info.bucket_count)
    if isinstance(position, dict):
        return dict(position)
    admin, name = connection.admin, str(table.path)
    if not table.info.is_partitioned:
        return dict(admin.list_offsets(name, parse_position(at)))
    if not partitions:
        partitions = [partition.name for partition in admin.list_partitions(name)]
    ids = {partition.name: partition.partition_id for partition in admin.list_partitions(name)}
    from zufluss.model.table import TableBucket

    return {
        TableBucket(table.info.table_id, ids.get(part), bucket): offset
        for part in partitions
        for bucket, offset in admin.list_offsets(name, parse_position(at), partition=part).items()
    }


def _print_state(
    source: Table, columns: list[str], options: dict[str, Any], output: Output
) -> None:
    """Print rows of a primary-key table; from a server without scans some rows, in no order."""
    from zufluss.errors import UnsupportedVersionError

    with usage():
        scan = source.scan(columns, **options)
    try:
        print_scan(scan, output, f"scan {source.path}")
    except UnsupportedVersionError:
        limit = options["limit"]
        plain = {name for name, value in options.items() if value is not None}
        if limit is None or plain != {"limit", "source"} or options["source"] != ScanSource.LIVE:
            raise
        show = row_printer(output, columns)
        for batch in source.head(limit).select(columns).to_batches():
            show(batch)


def _print_log(
    source: Table,
    columns: str | None,
    start: str,
    follow: bool,
    options: dict[str, Any],
    output: Output,
) -> None:
    """Print rows of a log, of the lake, or of both."""
    with usage():
        scan = source.scan(
            columns=list(names(columns)) or None,
            start=start_of(start, source.info.bucket_count),
            stop=None if follow else LATEST,
            **options,
        )
    print_scan(scan, output)


def _row(scan: KvScanInfo) -> tuple[Any, ...]:
    return (
        scan.scan_id,
        scan.table,
        scan.partition or "",
        scan.bucket,
        scan.client if scan.connected else f"{scan.client} (gone)",
        scan.owner or "",
        _seconds(scan.age_ms),
        _seconds(scan.idle_ms),
        scan.rows,
    )


def _document(scan: KvScanInfo) -> dict[str, Any]:
    return {name: getattr(scan, name) for name in scan.__slots__}


def _seconds(value_ms: int) -> str:
    return f"{value_ms // 1000} s"


def _check_ids(ids: list[str]) -> None:
    """Refuse texts that are no ids before any scan is ended."""
    from zufluss.client.keyed.scan_info import check_scan_id

    for scan_id in ids:
        check_scan_id(scan_id)
