"""`zufluss location …`: the places where remote files lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_document, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    say,
)

if TYPE_CHECKING:
    from zufluss.client.locations import LocationReport, RemoteLocation, RemoteLocations

app = typer.Typer(
    no_args_is_help=True,
    help="Places for remote files: list, add, drain, activate, retire, set-weight, move, probe.",
)

FAILED = 1
"""The exit code of `probe` when a location does not work."""

LocationArgument = Annotated[int, typer.Argument(metavar="ID", help="The location's id.")]
UriArgument = Annotated[str, typer.Argument(metavar="URI", help="A path or a URI.")]
WeightArgument = Annotated[int, typer.Argument(metavar="WEIGHT", min=0, help="0 takes no files.")]
VersionOption = Annotated[
    int | None,
    typer.Option(
        "--if-version", metavar="N", help="Only if the registry has this version (see list)."
    ),
]


@app.command("list")
def list_(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the locations, what lies there, and whether servers can use them.

    Example:

      zufluss location list
    """
    with connected(bootstrap, settings) as connection:
        found = connection.admin.locations()
    if output is Output.JSON:
        print_document(_document(found))
        return
    columns = ["id", "uri", "weight", "state", "health", "files", "bytes", "errors", "last error"]
    print_rows(output, columns, [_row(location) for location in found.locations])
    say(f"version {found.version} of the registry")


@app.command()
def add(
    uri: UriArgument,
    weight: Annotated[int, typer.Option(min=0, help="Its share of new files.")] = 1,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Add a location; new files go there at once.

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
    """Send no new files to a location; those it has are read until they are replaced or expire.

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
    """Let a drained or retired location take files again.

    Example:

      zufluss location activate 2
    """
    _alter("activate", location, if_version, bootstrap, settings)


@app.command()
def retire(
    location: LocationArgument,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Give up a location that was drained and has no files any more.

    Example:

      zufluss location retire 2
    """
    _alter("retire", location, if_version, bootstrap, settings)


@app.command("set-weight")
def set_weight(
    location: LocationArgument,
    weight: WeightArgument,
    if_version: VersionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Change a location's share of new files.

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
    """Change the address of a location to one where its files were copied.

    Give it weight 0, copy everything, move it, and give its weight back: files written meanwhile
    would be missing.

    Example:

      zufluss location move 2 s3://bucket-c/zufluss
    """
    _alter("move", location, if_version, bootstrap, settings, uri=uri)


@app.command()
def probe(
    location: Annotated[
        int | None, typer.Argument(metavar="[ID]", help="One location; without it, all.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the coordinator write, read and delete a small object; exit code 1 if one fails.

    Example:

      zufluss location probe
    """
    with connected(bootstrap, settings) as connection:
        found = connection.admin.probe_locations(location)
    rows = [(p.location_id, p.error is None, _rounded(p.latency_ms), p.error) for p in found]
    print_rows(output, ["id", "works", "latency_ms", "error"], rows)
    if any(p.error is not None for p in found):
        raise typer.Exit(FAILED)


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


def _row(location: RemoteLocation) -> tuple[Any, ...]:
    errors = sum(seen.errors for seen in location.servers)
    last = next((seen.last_error for seen in location.servers if seen.last_error), "")
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


def _document(found: RemoteLocations) -> dict[str, Any]:
    return {
        "version": found.version,
        "locations": [
            {
                "id": location.location_id,
                "uri": location.uri,
                "weight": location.weight,
                "state": location.state.name.lower(),
                "health": location.health.name.lower(),
                "files": location.live_files,
                "bytes": location.live_bytes,
                "servers": [_seen(seen) for seen in location.servers],
            }
            for location in found.locations
        ],
    }


def _seen(seen: LocationReport) -> dict[str, Any]:
    return {
        "server_id": seen.server_id,
        "health": seen.health.name.lower(),
        "placed_files": seen.placed_files,
        "placed_bytes": seen.placed_bytes,
        "errors": seen.errors,
        "latency_ms": _rounded(seen.latency_ms),
        "effective_weight": seen.effective_weight,
        "last_error": seen.last_error,
    }


def _rounded(latency_ms: float | None) -> float | None:
    return None if latency_ms is None else round(latency_ms, 3)
