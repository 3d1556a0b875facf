"""What the commands share: common options, the connection, usage errors.

A mistake of the user (an option, a file, a column list) is a `typer.BadParameter`: exit code 2 with
the usage. Errors of the server and of the network pass through to `main`.
"""

from __future__ import annotations

import logging
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
        help="A server of the cluster, or several separated by commas.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "-D",
        metavar="KEY=VALUE",
        help="A configuration option; may be repeated (docs/configuration.md).",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="Text for people or JSON for programs.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="ZUFLUSS_CONFIG",
        help="A configuration file such as server.yaml.",
    ),
]
CustomProperties = Annotated[
    list[str] | None,
    typer.Option("--custom-property", metavar="KEY=VALUE", help="A property of your own."),
]
IfNotExists = Annotated[bool, typer.Option("--if-not-exists", help="Succeed if it exists.")]
IfExists = Annotated[bool, typer.Option("--if-exists", help="Succeed if it does not exist.")]
TableArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="`database.table`, or `table` in database `fluss`.")
]


@contextmanager
def usage(about: str = "") -> Iterator[None]:
    """Turn errors that the user's input causes into usage errors (exit code 2)."""
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
    """Load the configuration from file, environment and `-D` options."""
    from zufluss.config import Configuration

    with usage():
        return Configuration.load(config_file, os.environ, settings or ())


def log_warnings() -> None:
    """Log only warnings and errors, to stderr.

    Clients log through the standard library. structlog, which servers use, would take a fifth of
    the time of a short command.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )


@contextmanager
def connected(bootstrap: str, settings: Sequence[str] | None) -> Iterator[Connection]:
    """Connect to the cluster for the time of a block."""
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
    """Parse the path of a table."""
    from zufluss.model.table import TablePath

    with usage():
        return TablePath.parse(text, DEFAULT_DATABASE)


def names(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def pairs(items: Sequence[str] | None, option: str) -> dict[str, str]:
    """Parse the `key=value` items of a repeated option."""
    values: dict[str, str] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{option} {item!r} is not of the form key=value")
        values[key.strip()] = value.strip()
    return values


def say(message: str) -> None:
    """Print a message to stderr, because stdout is for results."""
    typer.echo(message, err=True)
