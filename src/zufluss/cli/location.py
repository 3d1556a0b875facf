"""`zufluss location …`: administer the locations of remote files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_document, print_fields, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    say,
)

if TYPE_CHECKING:
    from zufluss.client.locations import (
        LocationFiles,
        LocationReport,
        RemoteLocation,
        RemoteLocations,
    )

app = typer.Typer(
    no_args_is_help=True,
    help="Places for remote files: list, show, files, verify, sweep, add, drain, activate, retire, "
    "set-weight, move, probe.",
)

FAILED = 1
"""Exit code of `probe` if a location does not work."""

LocationArgument = Annotated[int, typer.Argument(metavar="ID", help="The location's id.")]
UriArgument = Annotated[str, typer.Argument(metavar="URI", help="A path or a URI.")]
WeightArgument = Annotated[
    int,
    typer.Argument(metavar="WEIGHT", min=0, help="Its share of new files, from 0 (none) on."),
]
LOSS_COLUMNS = ["table", "partition", "bucket", "kind", "files", "bytes", "offsets", "snapshots"]
"""The list of what a destroyed location had."""
NEGATIVE_NUMBERS = {"ignore_unknown_options": True}
"""Makes -5 a value that is refused with the reason, instead of an unknown option."""
VersionOption = Annotated[
    int | None,
    typer.Option(
        "--if-version", metavar="N", help="Change only if the registry has this version (see list)."
    ),
]


@app.command("list")
def list_(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List locations with their files, and whether servers can use them.

    Example:

      zufluss location list
    """
    with connected(bootstrap, settings) as connection:
        registry = connection.admin.locations()
    if output is Output.JSON:
        print_document(_document(registry))
        return
    columns = ["id", "uri", "weight", "state", "health", "files", "bytes", "errors", "last error"]
    print_rows(output, columns, [_row(location) for location in registry.locations])
    say(f"version {registry.version} of the registry")
    for location in registry.locations:
        _say_pinned(location)


@app.command()
def show(
    location: LocationArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one location: its files, the tables that are pinned to it, and each server's report.

    Example:

      zufluss location show 2
    """
    with connected(bootstrap, settings) as connection:
        shown = connection.admin.locations().get(location)
    document = _location_document(shown)
    if output is Output.JSON:
        print_document(document)
        return
    servers = document.pop("servers")
    print_fields(document)
    if servers:
        print()
        print_rows(output, list(servers[0]), [list(report.values()) for report in servers])


@app.command()
def add(
    uri: UriArgument,
    weight: Annotated[int, typer.Option(min=0, help="Its share of new files.")] = 1,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Add a location; new files go there at once. Refused unless it can be written and read.

    Example:

      zufluss location add s3://bucket-b/zufluss --weight 2
    """
    _alter("add", None, if_version, bootstrap, settings, uri=uri, weight=weight)


@app.command()
def drain(
    location: LocationArgument,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Send no new files to a location, and move its files to other locations.

    The files stay readable all the time. When `location list` shows 0 files, retire the location.
    Files of tables that are pinned to this location alone stay: the command names these tables.

    Example:

      zufluss location drain 2
    """
    _alter("drain", location, if_version, bootstrap, settings)


@app.command()
def activate(
    location: LocationArgument,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Let a drained or retired location take files again, if it can be written and read.

    Example:

      zufluss location activate 2
    """
    _alter("activate", location, if_version, bootstrap, settings)


@app.command()
def retire(
    location: LocationArgument,
    force: Annotated[
        bool,
        typer.Option("--force", help="Give up a location that was destroyed, and what it had."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --force: only list what is lost.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask.")] = False,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop using a location that was drained and has no files left.

    --force is for a location that was destroyed. It lists what only this location had, and asks.
    Then lost segments leave the logs, leases of lost snapshots are revoked, and new snapshots are
    taken. Records that servers still have on their disks are copied again. The lake is not touched.
    The command waits for the end; if it is interrupted, the servers go on, and the same command
    waits again. A location that still works is refused: drain it.

    Examples:

      zufluss location retire 2

      zufluss location retire 2 --force --dry-run
    """
    if not force:
        if dry_run or yes:
            raise typer.BadParameter("--dry-run and --yes belong to --force")
        _alter("retire", location, if_version, bootstrap, settings)
        return
    if if_version is not None:
        raise typer.BadParameter("--if-version cannot be used with --force")
    with connected(bootstrap, settings) as connection:
        known = connection.admin.locations().get(location)
        if known.state.name != "LOST":
            groups = connection.admin.location_files(location, documents=True)
            print_rows(output, LOSS_COLUMNS, [_loss(group) for group in groups])
        if dry_run:
            return
        if not yes:
            typer.confirm(
                f"Give up location {location} ({known.uri}) and everything above?",
                abort=True,
                err=True,
            )
        said: set[int] = set()

        def progress(left: RemoteLocation) -> None:
            if left.live_files not in said:
                said.add(left.live_files)
                say(f"{left.live_files} files are still referred to")

        connection.admin.retire_lost_location(location, progress=progress)
    say(f"location {location} at {known.uri} is retired; nothing refers to its files any more")


@app.command("set-weight", context_settings=NEGATIVE_NUMBERS)
def set_weight(
    location: LocationArgument,
    weight: WeightArgument,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Change a location's share of new files; its present files stay where they are.

    Example:

      zufluss location set-weight 2 5
    """
    _alter("set-weight", location, if_version, bootstrap, settings, weight=weight)


@app.command()
def move(
    location: LocationArgument,
    uri: UriArgument,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Change the address of a location after its files were copied.

    Set its weight to 0, copy all files, move it, and restore its weight: files that are written
    during the copy would be missing. Refused, with their names, if live files are not at the new
    address with their sizes; `location verify --at` checks this without moving.

    Example:

      zufluss location move 2 s3://bucket-c/zufluss
    """
    _alter("move", location, if_version, bootstrap, settings, uri=uri)


@app.command()
def probe(
    location: Annotated[
        int | None, typer.Argument(metavar="[ID]", help="One location; all if omitted.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write, read and delete a small object from the coordinator; exit code 1 on a failure.

    Example:

      zufluss location probe
    """
    with connected(bootstrap, settings) as connection:
        probes = connection.admin.probe_locations(location)
    rows = [(p.location_id, p.error is None, _rounded(p.latency_ms), p.error) for p in probes]
    print_rows(output, ["id", "works", "latency_ms", "error"], rows)
    if any(p.error is not None for p in probes):
        raise typer.Exit(FAILED)


def _loss(group: LocationFiles) -> tuple[Any, ...]:
    """A row of the list of what a destroyed location had."""
    offsets = ", ".join(f"{start} to {end - 1}" for start, end in group.offsets)
    return (
        str(group.table.path),
        group.table.partition,
        group.bucket_id,
        group.kind,
        group.files,
        group.bytes,
        f"at most {offsets}" if group.problems and offsets else offsets,
        ", ".join(map(str, group.snapshot_ids)),
    )


def _alter(
    operation: str,
    location_id: int | None,
    expected_version: int | None,
    bootstrap: str,
    settings: list[str] | None,
    *,
    uri: str | None = None,
    weight: int | None = None,
) -> None:
    with connected(bootstrap, settings) as connection:
        now = connection.admin.alter_location(
            operation, location_id, uri=uri, weight=weight, expected_version=expected_version
        )
    say(
        f"location {now.location_id} at {now.uri} is {now.state.name.lower()} with weight "
        f"{now.weight}"
    )
    _say_pinned(now)


def _say_pinned(location: RemoteLocation) -> None:
    """Name the tables whose files keep a location from draining."""
    if location.pinned_count and location.state.name in ("DRAINING", "LOST"):
        more = location.pinned_count - len(location.pinned_tables)
        also = f" and {more} more" if more else ""
        say(
            f"location {location.location_id} keeps the files of these tables, which are pinned "
            f"to it: {', '.join(location.pinned_tables)}{also}. Let them go elsewhere: zufluss "
            "table alter TABLE --set table.zufluss.remote.placement=cluster"
        )


def _row(location: RemoteLocation) -> tuple[Any, ...]:
    errors = sum(report.errors for report in location.servers)
    last = next((report.last_error for report in location.servers if report.last_error), "")
    return (
        location.location_id,
        location.uri,
        location.weight,
        location.state.name.lower(),
        location.health.name.lower(),
        location.live_files,
        location.live_bytes,
        errors,
        last,
    )


def _document(registry: RemoteLocations) -> dict[str, Any]:
    return {
        "version": registry.version,
        "locations": [_location_document(location) for location in registry.locations],
    }


def _location_document(location: RemoteLocation) -> dict[str, Any]:
    return {
        "id": location.location_id,
        "uri": location.uri,
        "weight": location.weight,
        "state": location.state.name.lower(),
        "health": location.health.name.lower(),
        "files": location.live_files,
        "bytes": location.live_bytes,
        "pinned_tables": list(location.pinned_tables),
        "pinned_count": location.pinned_count,
        "servers": [_report(report) for report in location.servers],
    }


def _report(report: LocationReport) -> dict[str, Any]:
    return {
        "server_id": report.server_id,
        "health": report.health.name.lower(),
        "placed_files": report.placed_files,
        "placed_bytes": report.placed_bytes,
        "errors": report.errors,
        "latency_ms": _rounded(report.latency_ms),
        "effective_weight": report.effective_weight,
        "last_error": report.last_error,
    }


def _rounded(latency_ms: float | None) -> float | None:
    return None if latency_ms is None else round(latency_ms, 3)
