"""`zufluss dev`, `zufluss server`, `zufluss config`: commands that need no running server."""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import ConfigFile, OutputOption, Settings, configuration, say, usage
from zufluss.lake_formats import LAKE_FORMATS

if TYPE_CHECKING:
    from zufluss.config import Configuration


CONFIGURABLE_ERRORS = frozenset(
    {errno.EADDRINUSE, errno.EADDRNOTAVAIL}
    | {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}
)
"""Errors of a wrong address, port or directory, which are usage errors."""
USAGE: Final = 2
"""Exit code of a wrong option."""


class Role(StrEnum):
    """The role of a server process."""

    COORDINATOR = "coordinator"
    TABLET = "tablet"


if TYPE_CHECKING:
    Lake: TypeAlias = StrEnum
else:
    Lake = StrEnum("Lake", [name for name, traits in LAKE_FORMATS.items() if traits.embedded])
    """Formats of lakes that a server in one process brings along; only known at run time."""


def dev(
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="The data directory.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="TCP port; default 9123, 0 for a free one."),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; default localhost.")
    ] = None,
    lake: Annotated[
        Lake | None,
        typer.Option("--lake", help="Lake format of new tables; Iceberg's is kept in the data."),
    ] = None,
    tablet_servers: Annotated[
        str | None,
        typer.Option(
            "--tablet-servers",
            metavar="N",
            help="Run a coordinator and N tablet servers as processes of their own, to use more "
            "than one core; `auto` is one per usable core.",
        ),
    ] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run a whole cluster in one process: both roles, one port, one data directory.

    Prints one line when it is ready. SIGTERM or Ctrl-C stops it cleanly; the data stays. With
    --tablet-servers it is still one command, one line and one stop; the address is that of the
    coordinator, and clients find the others (docs/cluster.md).

    Examples:

      zufluss dev

      zufluss dev --data-dir /var/lib/zufluss --port 9200

      zufluss dev --lake iceberg

      zufluss dev --tablet-servers auto

      zufluss dev -D zufluss.log.flush=os -D log.segment.file-size=256mb
    """
    _check_system()
    conf = _dev_configuration(configuration(config_file, settings), data_dir, host, port, lake)
    if tablet_servers is not None:
        _run(partial(_run_cluster, conf, tablet_servers))
    _prepare(conf, "--port PORT (0 for any free one)")
    from zufluss.server import run_dev

    _run(lambda: run_dev(conf))


def _run_cluster(conf: Configuration, tablet_servers: str) -> int:
    """Run a supervisor, which imports no server before it knows whether that may be forked."""
    from zufluss.config.options import DATA_DIR
    from zufluss.local_cluster import run_cluster, server_count

    _check_ports(conf, "--port PORT (0 for any free one)")
    _log_to_stderr(conf, "supervisor")
    return run_cluster(conf, server_count(tablet_servers, Path(conf[DATA_DIR])))


def server(
    role: Annotated[Role, typer.Option("--role", help="The role of this process.")],
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one role of a cluster.

    Examples:

      zufluss server --role coordinator --config server.yaml

      zufluss server --role tablet --config server.yaml -D tablet-server.id=3
    """
    _check_system()
    conf = configuration(config_file, settings)
    _prepare(conf, "-D bind.listeners=NAME://HOST:PORT")
    from zufluss.server import run_role

    _run(lambda: run_role(role.value, conf))


def config(
    config_file: ConfigFile = None, settings: Settings = None, output: OutputOption = Output.TABLE
) -> None:
    """Print the effective configuration and the origin of each value; secrets are hidden.

    Examples:

      zufluss config --config server.yaml

      ZUFLUSS_LOG_FLUSH=os zufluss config -D data.dir=/data --output json
    """
    from zufluss.cli.session import log_warnings

    log_warnings()
    rows = configuration(config_file, settings).effective()
    print_rows(output, ["key", "value", "origin"], [(r.key, r.value, r.origin) for r in rows])


def _dev_configuration(
    conf: Configuration,
    data_dir: Path | None,
    host: str | None,
    port: int | None,
    lake: Lake | None,
) -> Configuration:
    """Apply the options of `dev` to the configuration."""
    from zufluss.config.options import BIND_LISTENERS, DATA_DIR, DATALAKE_FORMAT

    overrides: dict[str, str] = {}
    if lake is not None:
        overrides[DATALAKE_FORMAT.key] = lake.value
    if data_dir is not None:
        overrides[DATA_DIR.key] = str(data_dir)
    if host is not None or port is not None:
        first = conf[BIND_LISTENERS][0]
        address = host if host is not None else first.host
        address = f"[{address}]" if ":" in address else address
        number = port if port is not None else first.port
        overrides[BIND_LISTENERS.key] = f"{first.listener}://{address}:{number}"
    with usage():
        return conf.with_overrides(overrides, origin="command line")


def _prepare(conf: Configuration, option: str) -> None:
    """Do what comes before a server is imported: say that a port is taken, compile kernels.

    Importing the server loads libraries for a second, and without a compiled library it would
    compile kernels one after the other. `option` is what the user sets for another port.
    """
    from zufluss.record import kernels

    _check_ports(conf, option)
    _log_to_stderr(conf)
    kernels.warm()


def _check_ports(conf: Configuration, option: str) -> None:
    """Say that a port is taken, and what to do."""
    from zufluss.config.options import BIND_LISTENERS
    from zufluss.net.listeners import taken_endpoint

    listeners = conf[BIND_LISTENERS]
    taken = taken_endpoint(listeners)
    if taken is not None:
        say(
            f"error: {taken.host}:{taken.port} is taken by another process; stop that process, or "
            f"choose another port with {option}"
        )
        raise typer.Exit(USAGE)


def _check_system() -> None:
    from zufluss.system import SERVERS_RUN

    if not SERVERS_RUN:
        raise typer.BadParameter(
            "servers run on Linux and macOS; on this system zufluss is a client. Start the server "
            "in WSL, in a container or on another machine, and connect to it"
        )


def _run(serve: Callable[[], int]) -> None:
    """Serve until stopped; a wrong configuration is a usage error."""
    from zufluss.errors import ConfigError
    from zufluss.threads import ThreadShortageError

    try:
        code = serve()
    except ThreadShortageError as problem:
        raise typer.BadParameter(f"cannot serve: {problem.message}") from problem
    except ConfigError as problem:
        raise typer.BadParameter(problem.message) from problem
    except OSError as problem:
        if problem.errno not in CONFIGURABLE_ERRORS:
            raise
        raise typer.BadParameter(f"cannot serve: {problem}") from problem
    raise typer.Exit(code)


def _log_to_stderr(conf: Configuration, server: str | None = None) -> None:
    from zufluss.config.options import ZUFLUSS_LOGGING_FORMAT, ZUFLUSS_LOGGING_LEVEL
    from zufluss.obs.logging import configure

    configure(conf[ZUFLUSS_LOGGING_LEVEL], conf[ZUFLUSS_LOGGING_FORMAT], server=server)
