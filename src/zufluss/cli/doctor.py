"""`zufluss doctor`: what is wrong with this machine and with the servers of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_document, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    ConfigFile,
    OutputOption,
    Settings,
    connected,
)

if TYPE_CHECKING:
    from pathlib import Path

    from zufluss.client.sync.admin import Admin

PROBLEMS = 5
"""Exit code if something does not work."""
OK, WARNING, PROBLEM = "ok", "warning", "problem"
SEVERITIES = (OK, WARNING, PROBLEM)
HERE = "this machine"
"""The server of findings that no server told."""

Row = tuple[str, str, str, str]
"""Server, state, subject, finding."""


def doctor(
    confirm_clock: Annotated[
        bool,
        typer.Option(
            "--confirm-clock", help="The time of the servers is right: let data expire again."
        ),
    ] = False,
    config_file: ConfigFile = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check this machine and every server: what is wrong, and what to do; exits 5 for problems.

    On this machine: Python and packages, kernels, limits, memory, clock, Spark and Java; and for
    the configuration in --config, the environment and -D: unknown keys and dangerous values, data
    directory, ports, locations, the catalog of the lake. Of the servers: buckets that do not work,
    shortages, locations (a small file is written to each). A server that does not answer, or that
    the coordinator misses, is a problem. Without a server only this machine is checked.

    Examples:

      zufluss doctor

      zufluss doctor --config server.yaml

      zufluss doctor -o json --bootstrap stream.example.com:9123
    """
    rows = [(HERE, *finding) for finding in _local(config_file, settings)]
    rows += _remote(bootstrap, settings, confirm_clock)
    columns = ["server", "state", "subject", "finding"]
    if output is Output.JSON:
        print_document([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_rows(output, columns, rows)
    if any(state == PROBLEM for _, state, _, _ in rows):
        raise typer.Exit(PROBLEMS)


def _local(config_file: Path | None, settings: list[str] | None) -> Any:
    """The findings about this machine; a wrong configuration is one of them."""
    import os

    from zufluss.cli.local_checks import machine_findings, server_findings, unknown_findings
    from zufluss.config.load import Configuration
    from zufluss.errors import ConfigError

    yield from machine_findings()
    try:
        yield from unknown_findings(config_file, settings or [])
        conf = Configuration.load(config_file, os.environ, settings or ())
    except ConfigError as problem:
        yield PROBLEM, "configuration", problem.message
    else:
        yield from server_findings(conf)


def _remote(bootstrap: str, settings: list[str] | None, confirm_clock: bool) -> list[Row]:
    """The findings of all servers. That none answers is a problem if the user named one."""
    from zufluss.errors import NetworkError, RequestTimeoutError

    try:
        with connected(bootstrap, settings) as connection:
            admin = connection.admin
            findings = admin.examine_servers(confirm_clock=confirm_clock)
            rows = [(f.server, SEVERITIES[f.severity], f.subject, f.text) for f in findings]
            return rows + _probes(admin)
    except (NetworkError, RequestTimeoutError) as problem:
        state = WARNING if bootstrap == DEFAULT_BOOTSTRAP and not confirm_clock else PROBLEM
        text = f"no server answers ({problem.message}); only this machine was checked. Start one: "
        return [(bootstrap, state, "server", f"{text}zufluss dev")]


def _probes(admin: Admin) -> list[Row]:
    """Whether each remote location can be written and read."""
    rows: list[Row] = []
    uris = {each.location_id: each.uri for each in admin.locations().locations}
    for probe in admin.probe_locations():
        subject, uri = f"location {probe.location_id}", uris.get(probe.location_id)
        if probe.error is None:
            rows.append(("coordinator", OK, subject, f"{uri} can be written and read"))
        else:
            text = f"{uri} does not work: {probe.error}; check its address and credentials"
            rows.append(("coordinator", PROBLEM, subject, text))
    return rows
