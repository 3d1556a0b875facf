"""`zufluss wal ls|check`: what lies in the shared log of a location, without a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import OutputOption, Settings, configuration, say, usage

if TYPE_CHECKING:
    from zufluss.log.shared.inspection import StoredSession
    from zufluss.remote.objects import Objects

FAILED = 1
"""Exit code of a check that found something."""

app = typer.Typer(
    no_args_is_help=True,
    help="The shared log in a location, read without a server: ls, check.",
)

LocationUriArgument = Annotated[
    str,
    typer.Argument(
        metavar="URI", help="A location of the cluster, as in remote.data.dirs; -D gives its keys."
    ),
]
SessionOption = Annotated[
    int | None,
    typer.Option("--session", metavar="EPOCH", help="One session; all if omitted."),
]


@app.command("ls")
def ls(
    location: LocationUriArgument,
    session: SessionOption = None,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the sessions of tablet servers, or the objects of one session.

    A session is one registration of a server. It is sealed by the coordinator, or closed by its
    server; one that is neither is live, or its server was lost a moment ago.

    Example:

      zufluss wal ls s3://bucket/zufluss -D s3.region=eu-central-1
    """
    asyncio.run(_list(_objects(location, settings), session, output))


@app.command()
def check(
    location: LocationUriArgument,
    session: SessionOption = None,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read sessions whole and list what is damaged or missing; exit code 1 if anything is.

    A place without a shared log is an error (exit code 2), in case it is not the one you meant.

    Not every problem costs rows: they may be in segments by now, or written again in a later
    object. A number that is missing among the first of a session may have been trimmed; the
    coordinator knows the floor, below which nothing is needed. Buckets have the ids of their table
    and partition, as in `zufluss table describe`.

    Example:

      zufluss wal check /mnt/zufluss --session 12
    """
    asyncio.run(_check(_objects(location, settings), session, output))


def _objects(location: str, settings: list[str] | None) -> Objects:
    from zufluss.remote.objects import Objects
    from zufluss.remote.uri import parse_location

    with usage():
        uri = parse_location(location, "URI")
        return Objects(uri, configuration(None, settings).store_settings())


async def _sessions(store: Objects, server_epoch: int | None) -> list[StoredSession]:
    from zufluss.log.shared.inspection import sessions

    found = await sessions(store)
    chosen = [each for each in found if server_epoch in (None, each.server_epoch)]
    if server_epoch is not None and not chosen:
        epochs = ", ".join(str(each.server_epoch) for each in found) or "none"
        raise typer.BadParameter(
            f"{store.uri} has no session {server_epoch}; it has {epochs}", param_hint="--session"
        )
    return chosen


async def _list(store: Objects, server_epoch: int | None, output: Output) -> None:
    if server_epoch is not None:
        await _sessions(store, server_epoch)
        await _list_objects(store, server_epoch, output)
        return
    columns = ["session", "server", "state", "first", "end", "objects", "bytes", "cluster"]
    rows = [
        (
            each.server_epoch,
            each.session and each.session.server_id,
            _state(each),
            each.first_number,
            each.end,
            each.objects,
            each.bytes,
            each.session and each.session.cluster_id,
        )
        for each in await _sessions(store, None)
    ]
    if not rows:
        say(f"{store.uri} has no shared log")
    if rows or output is Output.JSON:
        print_rows(output, columns, rows)


def _state(session: StoredSession) -> str:
    from zufluss.remote.wal import WalKind

    return {None: "open", WalKind.SEAL: "sealed", WalKind.CLOSE: "closed"}[session.ended_by]


async def _list_objects(store: Objects, server_epoch: int, output: Output) -> None:
    from zufluss.log.shared.inspection import objects
    from zufluss.remote.wal import WalKind

    rows: list[tuple[Any, ...]] = []
    for each in await objects(store, server_epoch):
        header = each.header
        if header is None:
            rows.append((each.number, "damaged", each.bytes, None, None, each.problem))
        else:
            durable = None if header.kind is WalKind.SEAL else header.said
            kind = header.kind.name.lower()
            rows.append((each.number, kind, each.bytes, header.entries, durable, None))
    columns = ["number", "kind", "bytes", "entries", "durable_below", "problem"]
    print_rows(output, columns, rows)


async def _check(store: Objects, server_epoch: int | None, output: Output) -> None:
    from zufluss.log.shared.inspection import problems

    chosen = await _sessions(store, server_epoch)
    if not chosen:
        raise typer.BadParameter(
            f"{store.uri} has no shared log, so nothing was checked", param_hint="URI"
        )
    rows = [
        (each.server_epoch, found.number, *(found.bucket or (None, None, None)), found.text)
        for each in chosen
        for found in await problems(store, each)
    ]
    if rows or output is Output.JSON:
        columns = ["session", "number", "table_id", "partition_id", "bucket", "problem"]
        print_rows(output, columns, rows)
    objects = sum(each.objects for each in chosen)
    size = sum(each.bytes for each in chosen)
    say(f"{len(chosen)} sessions, {objects} objects, {size} bytes read: {len(rows)} problems")
    if rows:
        raise typer.Exit(FAILED)
