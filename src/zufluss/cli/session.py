"""What the commands share: their common options, the connection, and refusals.

A mistake of the user (an option, a file, a column list) is a `typer.BadParameter`: exit code 2
with the usage. Errors of the server and of the network pass through to `main`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zufluss.cli.output import Output

if TYPE_CHECKING:
    from zufluss.client.sync.connection import Connection
    from zufluss.config import Configuration
    from zufluss.model.table import TablePath

DEFAULT_BOOTSTRAP = "localhost:9123"
DEFAULT_DATABASE = "fluss"

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "-b",
        metavar="HOST:PORT",
        envvar="ZUFLUSS_BOOTSTRAP",
        help="A server of the cluster; several separated by commas.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "-D",
        metavar="KEY=VALUE",
        help="A configuration key, as often as needed (docs/configuration.md).",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="Text for people or JSON for programs.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", envvar="ZUFLUSS_CONFIG", help="A server.yaml."),
]
TableArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="`database.table`, or a table of `fluss`.")
]


@contextmanager
def usage(about: str = "") -> Iterator[None]:
    """Turn what the user's own input causes into a usage error (exit code 2)."""
    from zufluss.errors import ZuflussError

    prefix = f"{about}: " if about else ""
    try:
        yield
    except ZuflussError as problem:
        raise typer.BadParameter(prefix + problem.message) from problem
    except OSError as problem:
        raise typer.BadParameter(prefix + (problem.strerror or str(problem))) from problem
    except ValueError as problem:
        raise typer.BadParameter(prefix + str(problem)) from problem


def configuration(
    config_file: Path | None = None, settings: Sequence[str] | None = None
) -> Configuration:
    """The configuration of this process, from all sources."""
    from zufluss.config import Configuration

    with usage():
        return Configuration.load(config_file, os.environ, settings or ())


def log_warnings() -> None:
    """Let client commands say warnings on stderr and nothing else."""
    from zufluss.obs.logging import configure

    configure(level="warning")


@contextmanager
def connected(bootstrap: str, settings: Sequence[str] | None) -> Iterator[Connection]:
    """A connection to the cluster, closed at the end."""
    import zufluss
    from zufluss.errors import ConfigError

    log_warnings()
    options = configuration(None, settings).client_settings()
    try:
        connection = zufluss.connect(bootstrap, **options)
    except ConfigError as problem:
        raise typer.BadParameter(problem.message) from problem
    with connection:
        yield connection


def table_path(text: str) -> TablePath:
    """The path of a table as the user wrote it."""
    from zufluss.model.table import TablePath

    with usage():
        return TablePath.parse(text, DEFAULT_DATABASE)


def names(text: str | None) -> tuple[str, ...]:
    """The names of a comma-separated list."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def pairs(items: Sequence[str] | None, what: str) -> dict[str, str]:
    """The `key=value` items of a repeated option."""
    found: dict[str, str] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{what} {item!r} is not of the form key=value")
        found[key.strip()] = value.strip()
    return found


def say(message: str) -> None:
    """Tell what was done, on stderr so that stdout stays the result."""
    typer.echo(message, err=True)
