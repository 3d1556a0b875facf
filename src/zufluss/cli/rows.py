"""Reading, writing and printing rows, for all commands that move rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from zufluss.cli.failures import abandon_output
from zufluss.cli.formats import Format, format_of
from zufluss.cli.output import Output, TablePrinter, cell, json_line, print_document
from zufluss.cli.session import names, say, usage
from zufluss.cli.times import Position, parse_position

if TYPE_CHECKING:
    import pyarrow as pa

    from zufluss.client.sync.scan import LogScan, LogScanner
    from zufluss.client.sync.table import Table
    from zufluss.model.table import TablePath

PRINT_ROWS: Final = 1000
"""Rows that are converted to text at once."""

POLL_MS: Final = 500
"""How long a scan waits for rows before it checks for Ctrl-C."""
RATE_ROWS: Final = 1000
"""No rate is printed for fewer rows, because it would say nothing."""

FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="Default: by the file's suffix; ndjson on stdin."),
]
ColumnsOption = Annotated[
    str | None, typer.Option("--columns", metavar="A,B", help="Only these columns.")
]
FromOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="POSITION",
        help="earliest, latest, unbroken (behind the last records that a lost disk took), a time "
        "(ISO 8601 or epoch ms), `offset:N` for every bucket, or `offset:BUCKET=N,BUCKET=N`.",
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Stop after this many rows.")
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Wait for new rows until Ctrl-C.")
]

WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="FILTER",
        help='Only rows that match, such as "id > 5". Filters have comparisons, IN, BETWEEN, IS '
        "NULL, LIKE with % at an end, AND, OR, NOT and parentheses. Texts, dates and times are in "
        "single quotes.",
    ),
]
PartitionsOption = Annotated[
    list[str] | None,
    typer.Option("--partition", metavar="NAME", help="Only this partition; may be repeated."),
]


class RowFile:
    """An existing file of rows in a known format, or standard input (`-`)."""

    def __init__(self, name: str, form: Format | None) -> None:
        self.name = name
        """The file's name as the user wrote it."""
        self._path = None if name == "-" else Path(name)
        with usage(name):
            self._form = form or format_of(self._path)
            if self._path is not None and not self._path.is_file():
                raise ValueError("no such file")

    def batches(self, schema: pa.Schema) -> Iterator[tuple[pa.RecordBatch, float | None]]:
        """Yield batches with the share read so far; an unreadable batch is a usage error."""
        from zufluss.cli.files import read_batches

        batches = read_batches(self._path, self._form, schema)
        while True:
            with usage(self.name):
                item = next(batches, None)
            if item is None:
                return
            yield item

    def send(self, title: str, schema: pa.Schema, write: Callable[[pa.RecordBatch], None]) -> int:
        """Pass all batches to `write`, with a progress line; returns the number of rows."""
        rows = 0
        with _progress(title) as advance:
            for batch, fraction in self.batches(schema):
                with fitting(self.name):
                    write(batch)
                rows += batch.num_rows
                advance(rows, fraction)
        return rows


class Tally:
    """Reports how many rows a command wrote, and how fast."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def report(
        self, output: Output, name: TablePath, rows: int, what: str, **more: int | None
    ) -> None:
        """Print the summary; `what` has the form `appended {} rows to`, JSON has `more`, too."""
        seconds = time.monotonic() - self._started
        if output is Output.JSON:
            counts = {"table": str(name), "rows": rows, **more}
            print_document({**counts, "seconds": round(seconds, 3)})
            return
        rate = f" ({rows / seconds:,.0f} rows/s)" if rows >= RATE_ROWS else ""
        say(f"{what.format(rows)} {name} in {seconds:.2f} s{rate}")


def chosen_columns(table: Table, columns: str | None) -> list[str]:
    """The columns in `--columns`, or all."""
    chosen = list(names(columns)) or list(table.schema.names)
    unknown = [name for name in chosen if name not in table.schema]
    if unknown:
        raise typer.BadParameter(
            f"table {table.path} has no column {', '.join(unknown)}; its columns are "
            f"{', '.join(table.schema.names)}"
        )
    return chosen


def print_scan(batches: LogScan, output: Output, title: str = "") -> None:
    """Print the rows of a scan as they arrive; a title adds a progress line beside a file."""
    show = row_printer(output, batches.schema.names)
    beside = bool(title) and not sys.stdout.isatty()
    with until_told_to_stop(), batches.open() as scanner, _progress(title, beside) as advance:
        rows = 0
        for batch in _polled(scanner):
            show(batch)
            rows += batch.num_rows
            advance(rows, scanner.progress)


def _polled(scanner: LogScanner) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a scanner in short waits.

    A Ctrl-C that arrives just before a thread waits is noticed only when the thread wakes up.
    """
    while True:
        batch = scanner.poll(POLL_MS)
        if batch is not None:
            yield batch
        elif scanner.finished:
            yield from scanner  # raises an error, or yields rows, that came meanwhile
            return


def row_printer(output: Output, columns: Sequence[str]) -> Callable[[pa.RecordBatch], None]:
    """A printer of batches with these columns: a growing table, or a JSON object per line."""
    return _print_json if output is Output.JSON else _table_printer(columns)


def start_of(text: str, bucket_count: int) -> Position | dict[int, int]:
    """Parse `--from` to a start of the client's scans."""
    if not text.startswith("offset:"):
        return parse_position(text)
    offsets = text.removeprefix("offset:")
    if offsets.isdecimal():
        return dict.fromkeys(range(bucket_count), int(offsets))
    try:
        return {int(bucket): int(at) for bucket, at in (p.split("=") for p in offsets.split(","))}
    except ValueError:
        raise typer.BadParameter(
            f"--from {text!r} is not an offset; allowed: offset:N or offset:BUCKET=N,BUCKET=N"
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


@contextmanager
def fitting(file: str) -> Iterator[None]:
    """Turn rows that do not fit the table's columns into a usage error."""
    from zufluss.client.core.convert import ColumnMismatchError

    try:
        yield
    except ColumnMismatchError as problem:
        raise typer.BadParameter(f"{file}: {problem.message}") from problem


@contextmanager
def until_told_to_stop() -> Iterator[None]:
    """End quietly on Ctrl-C, and when the reader of a pipe such as `head` has ended."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_output()


@contextmanager
def _progress(title: str, enabled: bool = True) -> Iterator[Callable[[int, float | None], None]]:
    """A progress line on stderr, if that is a terminal."""
    if not enabled or not sys.stderr.isatty():
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
    terminal = Console(stderr=True)
    with Progress(*shown, console=terminal, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(title, total=None, rows=0)

        def advance(rows: int, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            progress.update(task, rows=rows, completed=fraction or 0, total=total)

        yield advance
