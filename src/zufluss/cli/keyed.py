"""`zufluss upsert`, `delete`, `lookup`, `changelog`: rows and changes of primary-key tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zufluss.cli.output import Output
from zufluss.cli.rows import (
    ColumnsOption,
    FollowOption,
    FormatOption,
    FromOption,
    LimitOption,
    RowFile,
    Tally,
    chosen_columns,
    fitting,
    print_scan,
    row_printer,
    start_of,
    until_told_to_stop,
)
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
from zufluss.cli.times import EARLIEST, LATEST

if TYPE_CHECKING:
    import pyarrow as pa

    from zufluss.client.sync.connection import Connection
    from zufluss.client.sync.table import Table
    from zufluss.model.table import TablePath

MISSING: Final = 4
"""Exit code if a key has no row."""
MISSING_SHOWN: Final = 10
"""Keys without a row that the message names."""


def upsert(
    table: TableArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The rows; `-` is standard input.")
    ] = "-",
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="A,B",
            help="Change only these columns, including the primary key; keep the others.",
        ),
    ] = None,
    form: FormatOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Insert rows into a primary-key table, or replace the rows with the same keys.

    Columns are matched by name. Rows are whole rows: a column that the file lacks becomes NULL,
    even if the key has a row already. --columns names the columns to change and keeps the others.
    When the command succeeds, every row is acknowledged. When it fails, rows before the bad one
    may have been written.

    Examples:

      zufluss upsert shop.orders orders.parquet

      zufluss upsert shop.orders status.csv --columns id,status

      echo '{"id": 7, "status": "paid"}' | zufluss upsert shop.orders
    """
    source = RowFile(file, form)
    name = table_path(table)
    tally = Tally()
    with connected(bootstrap, settings) as connection:
        target = _keyed(connection, name, f"zufluss append {name}")
        partial = list(names(columns)) or None
        with usage("--columns" if partial else ""):
            writer = target.upsert(partial)
        with writer:
            rows = source.send(
                f"upsert {name}", target.schema.arrow, _requiring(partial, file, writer.write)
            )
    tally.report(output, name, rows, "upserted {} rows into")


def delete(
    table: TableArgument,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Whole rows, or only keys; `-` is standard input."),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="A key instead of a file; may be repeated."),
    ] = None,
    form: FormatOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete rows of a primary-key table by their keys.

    A key without a row is no error; the command says how many keys had one. Keys are written as
    for `zufluss lookup`.

    Examples:

      zufluss delete shop.orders --key 7 --key 8

      zufluss delete shop.items --key order=7,line=2

      zufluss delete shop.orders cancelled.csv
    """
    if (file is None) == (not keys):
        raise typer.BadParameter("give either a FILE (`-` is standard input) or --key KEY")
    source = None if file is None else RowFile(file, form)
    name = table_path(table)
    tally = Tally()
    with connected(bootstrap, settings) as connection:
        target = _keyed(connection, name, "a log table keeps every row until table.log.ttl")
        with target.upsert() as writer:
            if source is None:
                batch = _keys_of(target.schema.primary_key, keys or [], target)
                writer.delete(batch)
                rows = batch.num_rows
            else:
                rows = source.send(f"delete {name}", target.schema.arrow, writer.delete)
        ignored = _ignores_deletes(target)
    if ignored:
        say(f"table {name} ignores deletes (table.delete.behavior); nothing was deleted")
    deleted = writer.deleted_rows
    known = not ignored and deleted is not None
    what = f"deleted {deleted} of {{}} keys from" if known else "sent {} deletes to"
    tally.report(output, name, rows, what, deleted=deleted)


def lookup(
    table: TableArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY", help="`7` or `id=7`; for several columns `4711,1` or `a=1,b=x`."
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="FILE", help="A file of keys; `-` is stdin."),
    ] = None,
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix",
            help="Keys are bucket keys: find all rows whose primary key begins with one.",
        ),
    ] = False,
    columns: ColumnsOption = None,
    form: FormatOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the rows of a primary-key table with the given keys, in the order of the keys.

    The exit code is 0 if every key has a row (with --prefix: at least one), and 4 if some have
    none. Keys without a row are named on stderr; the rows of the others are printed.

    Values are written as in JSON output: dates and times in ISO 8601, binary in base64. In a key
    of several columns, put a value with a comma in double quotes. Put `--` before a negative
    number, which looks like an option otherwise.

    Examples:

      zufluss lookup shop.orders 7 8 9

      zufluss lookup shop.items order=7,line=2 --output json

      zufluss lookup shop.items --prefix 7

      zufluss lookup shop.orders --file wanted.csv --columns id,status
    """
    if (file is None) == (not keys):
        raise typer.BadParameter("give either keys or --file FILE")
    source = None if file is None else RowFile(file, form)
    name = table_path(table)
    missing = _Missing()
    with connected(bootstrap, settings) as connection:
        target = _keyed(connection, name, f"zufluss scan {name}")
        key_columns = _prefix_columns(target) if prefix else target.schema.primary_key
        chosen = chosen_columns(target, columns)
        find = _rows_by_prefix if prefix else _rows_by_key
        batches = _key_batches(key_columns, keys or [], source, target)
        _print_rows(batches, lambda batch: find(target, batch, missing), chosen, file, output)
    if missing.count:
        say(missing.text(name))
        raise typer.Exit(MISSING)


def changelog(
    table: TableArgument,
    columns: ColumnsOption = None,
    start: FromOption = EARLIEST,
    limit: LimitOption = None,
    follow: FollowOption = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the changes of a primary-key table; --follow waits for new ones.

    `_change_type` is +I for a new row, -U and +U for a row before and after its change, -D for a
    deleted row. Changes of one bucket are printed in order.

    Examples:

      zufluss changelog shop.orders --limit 20

      zufluss changelog shop.orders --columns id,status --from latest --follow

      zufluss changelog shop.orders --from 2026-01-31T08:00:00Z --output json
    """
    name = table_path(table)
    with connected(bootstrap, settings) as connection:
        source = _keyed(connection, name, f"zufluss scan {name}")
        changes = source.changelog(
            columns=list(names(columns)) or None,
            start=start_of(start, source.info.bucket_count),
            stop=None if follow else LATEST,
            limit=limit,
        )
        print_scan(changes, output)


def _print_rows(
    keys: Iterator[pa.RecordBatch],
    find: Callable[[pa.RecordBatch], pa.Table],
    columns: list[str],
    file: str | None,
    output: Output,
) -> None:
    """Print the rows that `find` returns for each batch of keys."""
    show = row_printer(output, columns)
    with until_told_to_stop():
        for batch in keys:
            with fitting(file or "key"):
                rows = find(batch)
            for part in rows.select(columns).to_batches():
                show(part)


class _Missing:
    """Counts the keys without a row, and remembers the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, keys: list[dict[str, Any]]) -> None:
        from zufluss.cli.keys import key_text

        self.count += len(keys)
        self._first += [key_text(key) for key in keys[: MISSING_SHOWN - len(self._first)]]

    def text(self, name: TablePath) -> str:
        more = self.count - len(self._first)
        behind = f" and {more} more" if more else ""
        return f"no row in {name} for {'; '.join(self._first)}{behind}"


def _keyed(connection: Connection, name: TablePath, instead: str) -> Table:
    """Open a table; a table without primary key is a usage error."""
    table = connection.table(str(name))
    if not table.info.has_primary_key:
        raise typer.BadParameter(f"table {name} has no primary key; {instead}")
    return table


def _requiring(
    columns: list[str] | None, file: str, write: Callable[[pa.RecordBatch], None]
) -> Callable[[pa.RecordBatch], None]:
    """Wrap `write`: a batch that lacks a column of a partial update is a usage error."""

    def checked(batch: pa.RecordBatch) -> None:
        lacking = [name for name in columns or () if name not in batch.schema.names]
        if lacking:
            raise typer.BadParameter(
                f"{file} has no column {', '.join(lacking)}, which --columns names; it would "
                "become NULL in every row"
            )
        write(batch)

    return checked


def _ignores_deletes(table: Table) -> bool:
    from zufluss.config import table_options as t
    from zufluss.model.merge import merge_engine

    properties = table.info.descriptor.properties
    behaviour = properties.get(t.TABLE_DELETE_BEHAVIOR.key)
    if behaviour is None:
        return merge_engine(properties) is not None
    return behaviour.upper() == "IGNORE"


def _prefix_columns(table: Table) -> tuple[str, ...]:
    from zufluss.client.core.keys import prefix_columns

    with usage():
        return prefix_columns(table.info)


def _keys_of(columns: tuple[str, ...], texts: list[str], table: Table) -> pa.RecordBatch:
    """Parse keys from the command line."""
    import pyarrow as pa

    from zufluss.cli.keys import keys_batch

    schema = table.schema.arrow
    with usage():
        return keys_batch(texts, pa.schema([schema.field(name) for name in columns]))


def _key_batches(
    columns: tuple[str, ...], texts: list[str], source: RowFile | None, table: Table
) -> Iterator[pa.RecordBatch]:
    """Yield the keys of the command line or of a file, with only the key columns."""
    if source is None:
        yield _keys_of(columns, texts, table)
        return
    for batch, _ in source.batches(table.schema.arrow):
        lacking = [name for name in columns if name not in batch.schema.names]
        if lacking:
            raise typer.BadParameter(
                f"{source.name} has no column {', '.join(lacking)}; a key has {', '.join(columns)}"
            )
        yield batch.select(list(columns))


def _rows_by_key(table: Table, keys: pa.RecordBatch, missing: _Missing) -> pa.Table:
    """The rows of whole keys; notes the keys without a row."""
    import pyarrow.compute as pc

    rows = table.lookup(keys)
    absent = pc.is_null(rows.column(table.schema.primary_key[0]))
    missing.add(keys.filter(absent.combine_chunks()).to_pylist())
    return rows.filter(pc.invert(absent))


def _rows_by_prefix(table: Table, keys: pa.RecordBatch, missing: _Missing) -> pa.Table:
    """The rows with these prefixes; notes the prefixes without a row."""
    rows = table.prefix_lookup(keys)
    there = {tuple(row.values()) for row in rows.select(keys.schema.names).to_pylist()}
    missing.add([key for key in keys.to_pylist() if tuple(key.values()) not in there])
    return rows
