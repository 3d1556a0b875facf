"""The `zufluss` command: its sub-commands and its exit codes.

| code | meaning                                                                    |
|------|----------------------------------------------------------------------------|
| 0    | done; also if the reader of rows (`scan`, `changelog`, `sql`) has enough   |
| 1    | the server refused: its message is on stderr; or you answered no           |
| 2    | usage: an option, a configuration value, a file or a directory is wrong    |
| 3    | no server: cannot connect, or no answer in time                            |
| 4    | `lookup`: some key has no row                                              |
| 5    | `doctor`, `status`: something does not work                                |
| 70   | a defect of zufluss, please report it                                      |
| 130  | Ctrl-C                                                                     |
| 141  | the reader of the output, such as `head`, ended before the command         |

An error is one line on stderr that begins with `error: ` (`failures.py`); `--debug` or the
environment variable ZUFLUSS_DEBUG shows where it comes from.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from zufluss import __version__
from zufluss.cli import (
    cluster,
    count,
    data,
    database,
    doctor,
    failures,
    keyed,
    lease,
    location,
    location_files,
    metadata,
    partition,
    producer,
    sample,
    scan,
    servers,
    snapshot,
    sql,
    status,
    table,
    tiering,
    top,
    wal,
)
from zufluss.no_pandas import do_without_pandas

app = typer.Typer(
    name="zufluss",
    help="Streaming storage for lakehouses: run a server, manage tables, move rows.",
    epilog="Begin with: zufluss dev · zufluss sample · zufluss table create trips --schema "
    "sample/trips.parquet · zufluss append trips sample/trips.parquet · zufluss count trips. "
    "Exit codes: 0 done, 1 the server refused, 2 usage, 3 no server, 4 no row for a key, "
    "5 something does not work, 70 a defect, 130 Ctrl-C, 141 nobody reads the output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_RUN = "Run"
_CATALOG = "Catalog"
_DATA = "Data"

app.command(rich_help_panel=_RUN)(servers.dev)
app.command(rich_help_panel=_RUN)(servers.server)
app.command(rich_help_panel=_RUN, context_settings=tiering.PASS_ON)(tiering.tiering)
app.command(rich_help_panel=_RUN)(servers.config)
app.command(rich_help_panel=_RUN)(status.status)
app.command(rich_help_panel=_RUN)(top.top)
app.command(rich_help_panel=_RUN)(doctor.doctor)
app.add_typer(database.app, name="db", rich_help_panel=_CATALOG)
app.add_typer(table.app, name="table", rich_help_panel=_CATALOG)
app.add_typer(partition.app, name="partition", rich_help_panel=_CATALOG)
for command in (location_files.files, location_files.verify, location_files.sweep):
    location.app.command()(command)
app.add_typer(location.app, name="location", rich_help_panel=_CATALOG)
app.add_typer(snapshot.app, name="snapshot", rich_help_panel=_CATALOG)
app.add_typer(cluster.app, name="cluster", rich_help_panel=_CATALOG)
app.add_typer(wal.app, name="wal", rich_help_panel=_CATALOG)
app.add_typer(metadata.app, name="metadata", rich_help_panel=_CATALOG)
app.add_typer(lease.app, name="lease", rich_help_panel=_CATALOG)
app.add_typer(producer.app, name="producer", rich_help_panel=_CATALOG)
app.command(rich_help_panel=_DATA)(data.append)
app.add_typer(scan.app, name="scan", rich_help_panel=_DATA)
app.command(rich_help_panel=_DATA)(count.count)
app.command(rich_help_panel=_DATA)(sql.sql)
app.command(rich_help_panel=_DATA)(keyed.upsert)
app.command(rich_help_panel=_DATA)(keyed.delete)
app.command(rich_help_panel=_DATA)(keyed.lookup)
app.command(rich_help_panel=_DATA)(keyed.changelog)
app.command(rich_help_panel=_DATA)(data.offsets)
app.command(rich_help_panel=_DATA)(sample.sample)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"zufluss {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error; so does the environment variable ZUFLUSS_DEBUG.",
        ),
    ] = False,
) -> None:
    """Options before the command; `--version` ends the process before this runs."""
    if debug:
        os.environ[failures.DEBUG] = "1"


def main() -> None:
    """Run the command line; exits with one of the codes above."""
    try:
        result = app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer makes it exit code 1
            failures.end_without_reader()
        sys.exit(end.code)
    except BrokenPipeError:
        failures.end_without_reader()
    except Exception as problem:
        failures.report(problem)
        sys.exit(failures.exit_code(problem))
    sys.exit(result if isinstance(result, int) else 0)


def process_main() -> None:
    """Run the command line in a process of its own, which does without pandas."""
    if sys.argv[1:2] != ["tiering"]:  # Spark may want pandas
        do_without_pandas()
    main()


if __name__ == "__main__":
    process_main()
