"""`zufluss append`, `zufluss scan`, `zufluss offsets`: rows in, rows out, where a log stands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.formats import Format, format_of
from zufluss.cli.output import Output, TablePrinter, cell, json_line, print_document, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    names,
    say,
    table_path,
    usage,
)
from zufluss.cli.times import EARLIEST, LATEST, Position, parse_position

if TYPE_CHECKING:
    import pyarrow as pa

PRINT_ROWS = 1000
"""Rows that are turned into text at once."""


def append(
    table: TableArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The rows; `-` is standard input.")
    ] = "-",
    form: Annotated[
        Format | None,
        typer.Option("--format", help="By default the file's suffix says; ndjson on stdin."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Append rows of a file or of standard input to a table.

    Columns are matched by name; missing ones become NULL. When the command succeeds, every row
    is acknowledged. When it fails, rows before the bad one may have been written.

    Examples:

      zufluss append events day-1.parquet

      zufluss append shop.orders orders.csv -D client.writer.batch-size=8mb

      tail -f app.ndjson | zufluss append logs -
    """
    from zufluss.cli.files import read_batches

    path = None if file == "-" else Path(file)
    with usage(file):
        chosen = form or format_of(path)
        if path is not None and not path.is_file():
            raise ValueError("no such file")
    name = table_path(table)
    started = time.monotonic()
    rows = 0
    with connected(bootstrap, settings) as connection:
        target = connection.table(str(name))
        batches = _local_errors(read_batches(path, chosen, target.schema.arrow), file)
        with _progress(f"append {name}") as advance, target.append() as writer:
            for batch, fraction in batches:
                with _fitting(file):
                    writer.write(batch)
                rows += batch.num_rows
                advance(rows, fraction)
    seconds = time.monotonic() - started
    if output is Output.JSON:
        print_document({"table": str(name), "rows": rows, "seconds": round(seconds, 3)})
    else:
        say(f"appended {rows} rows to {name} in {seconds:.2f} s ({rows / seconds:,.0f} rows/s)")


def scan(
    table: TableArgument,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="A,B", help="Only these columns.")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="POSITION",
            help="earliest, latest, a time (ISO 8601 or epoch ms), `offset:N` for every bucket, "
            "or `offset:BUCKET=N,BUCKET=N`.",
        ),
    ] = EARLIEST,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Stop after this many rows.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new rows until Ctrl-C.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the rows of a log table; with --follow also those still to come.

    JSON output is one object per line, the form that `zufluss append` reads.

    Examples:

      zufluss scan events --limit 10

      zufluss scan shop.orders --columns id,total --from 2026-01-31T08:00:00Z --output json

      zufluss scan logs --from latest --follow
    """
    name = table_path(table)
    with connected(bootstrap, settings) as connection:
        source = connection.table(str(name))
        batches = source.scan(
            columns=list(names(columns)) or None,
            start=_start(start, source.info.bucket_count),
            stop=None if follow else LATEST,
            limit=limit,
        )
        show = _print_json if output is Output.JSON else _table_printer(batches.schema.names)
        with batches, _until_told_to_stop():
            for batch in batches:
                show(batch)


def offsets(
    table: TableArgument,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="POSITION",
            help="earliest, latest or a time (ISO 8601 or epoch ms); default: earliest and latest.",
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="NAME", help="Only this partition; default: all."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where the buckets of a table begin and end, or which offset belongs to a time.

    Examples:

      zufluss offsets events

      zufluss offsets shop.orders --at 2026-01-31T08:00:00Z --partition 2026-01-31

      zufluss offsets events --at latest --output json
    """
    positions: dict[str, Position] = {EARLIEST: EARLIEST, LATEST: LATEST}
    if at:
        positions = {"offset": parse_position(at)}
    name = str(table_path(table))
    rows: list[list[Any]] = []
    with connected(bootstrap, settings) as connection:
        admin = connection.admin
        partitioned = admin.table_info(name).is_partitioned
        for part in _partitions(admin, name, partition, partitioned):
            found = [
                admin.list_offsets(name, where, partition=part) for where in positions.values()
            ]
            rows += [[part, b, *(offset[b] for offset in found)] for b in sorted(found[0])]
    headings = ["partition", "bucket", *positions]
    skip = 0 if partitioned else 1
    print_rows(output, headings[skip:], [row[skip:] for row in rows])


def _partitions(admin: Any, name: str, chosen: str | None, partitioned: bool) -> list[str | None]:
    if chosen is not None:
        return [chosen]
    return [item.name for item in admin.list_partitions(name)] if partitioned else [None]


def _start(text: str, bucket_count: int) -> Position | dict[int, int]:
    """What `--from` says, in the client's terms."""
    if not text.startswith("offset:"):
        return parse_position(text)
    given = text.removeprefix("offset:")
    if given.isdecimal():
        return dict.fromkeys(range(bucket_count), int(given))
    try:
        return {int(bucket): int(at) for bucket, at in (p.split("=") for p in given.split(","))}
    except ValueError:
        raise typer.BadParameter(
            f"--from {text!r} is no offset; allowed: offset:N or offset:BUCKET=N,BUCKET=N"
        ) from None


def _table_printer(columns: Sequence[str]) -> Callable[[pa.RecordBatch], None]:
    printer = TablePrinter(columns)

    def show(batch: pa.RecordBatch) -> None:
        for piece in _printable(batch):
            rows = zip(*(column.to_pylist() for column in piece.columns), strict=True)
            printer.print([[cell(value) for value in row] for row in rows])

    return show


def _print_json(batch: pa.RecordBatch) -> None:
    for piece in _printable(batch):
        sys.stdout.write("".join(json_line(row) + "\n" for row in piece.to_pylist()))
    sys.stdout.flush()


def _printable(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    from zufluss.cli.printable import printable

    for at in range(0, batch.num_rows, PRINT_ROWS):
        yield printable(batch.slice(at, PRINT_ROWS))


def _local_errors(batches: Iterator[Any], file: str) -> Iterator[Any]:
    """The batches; a row that cannot be read is the user's to mend, not the server's."""
    while True:
        with usage(file):
            item = next(batches, None)
        if item is None:
            return
        yield item


@contextmanager
def _fitting(file: str) -> Iterator[None]:
    """Rows that do not fit the table's columns are the user's to mend as well."""
    from zufluss.client.convert import ColumnMismatchError

    try:
        yield
    except ColumnMismatchError as problem:
        raise typer.BadParameter(f"{file}: {problem.message}") from problem


@contextmanager
def _until_told_to_stop() -> Iterator[None]:
    """Ctrl-C, and a reader such as `head` that has seen enough, are ways out and no errors."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has nowhere to go; without this, Python fails as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, float | None], None]]:
    """A progress line on the terminal; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda rows, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
    )
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, rows=0)

        def advance(rows: int, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            progress.update(task, rows=rows, completed=fraction or 0, total=total)

        yield advance
