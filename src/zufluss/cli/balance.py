"""`zufluss cluster servers` and `cluster tag …`: who is there, and who is about to leave."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    say,
)
from zufluss.model.rebalance import ServerTag

tag = typer.Typer(
    no_args_is_help=True,
    help="Tags of tablet servers that are about to leave, and get no more buckets: add, remove.",
)

if TYPE_CHECKING:
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
