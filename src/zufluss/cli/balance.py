"""`zufluss cluster servers`, `tag …`, `rebalance …`: who is there, who leaves, who leads what."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

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
from zufluss.model.rebalance import RebalanceStatus, ServerTag

tag = typer.Typer(
    no_args_is_help=True,
    help="Tags of tablet servers that are about to leave, and get no more buckets: add, remove.",
)

rebalance = typer.Typer(
    no_args_is_help=True,
    help="Give each tablet server its share of the buckets: plan, start, status, cancel.",
)

if TYPE_CHECKING:
    from zufluss.client.rebalance import RebalanceMove, RebalanceProgress

    Tag: TypeAlias = StrEnum
else:
    Tag = StrEnum("Tag", [each.name for each in ServerTag])
    """The names of tags."""

TagArgument = Annotated[Tag, typer.Argument(help="The tag.", case_sensitive=False)]
ServersArgument = Annotated[
    list[int], typer.Argument(metavar="SERVER…", help="Ids of tablet servers.")
]


def servers(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the servers of the cluster, with the tags of those that are about to leave.

    Example:

      zufluss cluster servers
    """
    with connected(bootstrap, settings) as connection:
        nodes = connection.admin.server_nodes()
    rows = [
        (n.id, n.role, f"{n.host}:{n.port}", "" if n.tag is None else n.tag.name) for n in nodes
    ]
    print_rows(output, ["id", "role", "address", "tag"], rows)


@tag.command()
def add(
    tag: TagArgument,
    servers: ServersArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Tag tablet servers; all of them or none.

    They keep the buckets that they lead, and get no others: no new ones, and none of a server that
    is lost. The two tags have the same effect, and say what is planned.

    Example:

      zufluss cluster tag add PERMANENT_OFFLINE 3
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.add_server_tag(servers, ServerTag[tag.value.upper()])
    say(f"tagged {tag.value.upper()}: {', '.join(map(str, servers))}")


@tag.command()
def remove(
    tag: TagArgument,
    servers: ServersArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Take a tag from tablet servers; all of them or none. They may get buckets again.

    Example:

      zufluss cluster tag remove PERMANENT_OFFLINE 3
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.remove_server_tag(servers, ServerTag[tag.value.upper()])
    say(f"no longer {tag.value.upper()}: {', '.join(map(str, servers))}")


@rebalance.command()
def plan(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a rebalance would do now: the buckets of each server, and the moves. Nothing moves.

    After it the servers without tags lead equally many buckets but for one, of each table and of
    all; racks have their part of each table; servers with tags lead none. The text has the servers,
    JSON every move, too.

    Example:

      zufluss cluster rebalance plan
    """
    with connected(bootstrap, settings) as connection:
        planned = connection.admin.plan_rebalance()
    if output is Output.JSON:
        servers = [share._asdict() for share in planned.servers]
        print_document({"servers": servers, "moves": [_document(each) for each in planned.moves]})
        return
    print_rows(output, ["server", "buckets", "afterwards"], planned.servers)
    print(f"\n{len(planned.moves)} moves")


@rebalance.command()
def start(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Begin to move buckets, a few at a time, and print the id of the rebalance.

    It goes on without this command, also after a restart of the coordinator; `status` shows how far
    it is.

    Example:

      zufluss cluster rebalance start
    """
    with connected(bootstrap, settings) as connection:
        print(connection.admin.rebalance())


@rebalance.command()
def status(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how far the newest rebalance is, and why moves failed or were skipped.

    JSON has every move.

    Example:

      zufluss cluster rebalance status
    """
    with connected(bootstrap, settings) as connection:
        progress = connection.admin.rebalance_progress()
    if output is Output.JSON:
        print_document(None if progress is None else _progress_document(progress))
    elif progress is None:
        say("there was no rebalance yet")
    else:
        counts = {each: progress.count(each) for each in RebalanceStatus}
        print_fields(
            {
                "id": progress.id,
                "status": progress.status.name,
                "moves": f"{progress.ended} of {len(progress.moves)} ended",
                **{each.name: count for each, count in counts.items() if count},
            }
        )
        unmoved = [_cells(each) for each in progress.moves if each.reason]
        if unmoved:
            print()
            print_rows(output, [*_COLUMNS, "status", "reason"], unmoved)


@rebalance.command()
def cancel(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """Begin no more moves of the newest rebalance; those under way are finished.

    Example:

      zufluss cluster rebalance cancel
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.cancel_rebalance()
    say("no more moves begin")


_COLUMNS = ("table_id", "partition_id", "bucket", "source", "target")


def _cells(move: RebalanceMove) -> list[object]:
    return [*move.bucket, move.source, move.target, move.status.name, move.reason]


def _document(move: RebalanceMove) -> dict[str, object]:
    return dict(zip(_COLUMNS, _cells(move), strict=False))


def _progress_document(progress: RebalanceProgress) -> dict[str, object]:
    moves = [
        dict(zip((*_COLUMNS, "status", "reason"), _cells(each), strict=True))
        for each in progress.moves
    ]
    return {"id": progress.id, "status": progress.status.name, "moves": moves}
