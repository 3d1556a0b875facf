"""`zufluss location files|verify|sweep`: what lies in a location, and whether it belongs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.location import FAILED, LocationArgument
from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    say,
)
from zufluss.cli.times import iso_time

if TYPE_CHECKING:
    from zufluss.client.locations import LocationFiles
    from zufluss.client.sync.connection import Connection

EveryLocation = Annotated[
    int | None, typer.Argument(metavar="[ID]", help="One location; all if omitted.")
]


def files(
    location: LocationArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the files in a location, by table and kind; it need not answer.

    Kinds are log (segments), kv (snapshots), lake (offsets of the lake) and dropped (of a dropped
    table, while leases hold its snapshots). Files that nothing refers to are not listed.

    Example:

      zufluss location files 2
    """
    with connected(bootstrap, settings) as connection:
        groups = connection.admin.location_files(location)
    totals: dict[tuple[str, str], list[int]] = {}
    for group in groups:
        total = totals.setdefault((str(group.table.path), group.kind), [0, 0, 0])
        total[0] += group.bucket_id is not None
        total[1] += group.files
        total[2] += group.bytes
    rows = [(*names, *total) for names, total in sorted(totals.items())]
    print_rows(output, ["table", "kind", "buckets", "files", "bytes"], rows)


def verify(
    location: EveryLocation = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="URI", help="Look at this address: a copy of the location."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check that every live file of a location is there with its size; exit code 1 if not.

    The files that are missing, cut or cannot be read are listed. `--at` checks a copy before
    `location move`. The content of files is not read.

    Example:

      zufluss location verify 2 --at s3://bucket-c/zufluss
    """
    if at is not None and location is None:
        raise typer.BadParameter("--at needs the id of the location that was copied")
    with connected(bootstrap, settings) as connection:
        ids = [location] if location is not None else _live_ids(connection)
        rows = [row for location_id in ids for row in _verified(connection, location_id, at)]
    if rows or output is Output.JSON:
        columns = ["location", "table", "partition", "bucket", "kind", "path", "problem"]
        print_rows(output, columns, rows)
    if rows:
        raise typer.Exit(FAILED)


def sweep(
    location: EveryLocation = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; list what would be deleted.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete files of dropped tables, failed uploads and crashes, which nothing refers to.

    Lists the files with reasons. The servers do the same every zufluss.remote.sweep.interval.
    Files younger than zufluss.remote.sweep.grace are left alone, as are files whose table's lists
    cannot be read: then the exit code is 1.

    Example:

      zufluss location sweep --dry-run
    """
    with connected(bootstrap, settings) as connection:
        result = connection.admin.sweep_locations(location, dry_run=dry_run)
    rows = [
        (f.location_id, f.path, f.size, iso_time(f.modified_ms), f.reason) for f in result.unused
    ]
    if rows or output is Output.JSON:
        print_rows(output, ["location", "path", "bytes", "changed", "reason"], rows)
    more = result.files - len(rows)
    say(
        f"{result.files} files with {result.bytes} bytes "
        f"{'would be' if dry_run else 'were'} deleted{f', {more} of them not listed' * bool(more)}"
    )
    for failure in result.failures:
        say(f"left alone: {failure}")
    if result.failures:
        raise typer.Exit(FAILED)


def _live_ids(connection: Connection) -> list[int]:
    locations = connection.admin.locations().locations
    return [x.location_id for x in locations if x.state.name != "RETIRED"]


def _verified(connection: Connection, location_id: int, at: str | None) -> list[tuple[Any, ...]]:
    """The problems of a location, a row each; says how far it is meanwhile."""

    def progress(done: int, total: int) -> None:
        if done < total:
            say(f"location {location_id}: {done} of {total} groups of files are checked")

    groups = connection.admin.verify_location(location_id, uri=at, progress=progress)
    problems = [row for group in groups for row in _problems(location_id, group)]
    count = sum(group.files for group in groups)
    where = f"location {location_id}" if at is None else f"location {location_id} at {at}"
    say(f"{where}: {count} files, {len(problems) or 'no'} problems")
    return problems


def _problems(location_id: int, group: LocationFiles) -> list[tuple[Any, ...]]:
    owner = group.table
    return [
        (
            location_id,
            str(owner.path),
            owner.partition,
            group.bucket_id,
            group.kind,
            problem.path,
            problem.reason,
        )
        for problem in group.problems
    ]
