"""`zufluss sql`: a query of DuckDB over tables of the cluster.

Each table that the query names is a dataset to DuckDB, which asks it for the columns that the query
needs and passes on filters of single columns. Columns, and filters that are simple, are applied by
the servers; the rest is applied here. Tables with a lake are read as a union of lake and log.
"""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zufluss.cli.output import Output
from zufluss.cli.rows import row_printer, until_told_to_stop
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    DEFAULT_DATABASE,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from zufluss.client.sync.connection import Connection
    from zufluss.client.sync.table import Table

ROWS_AT_ONCE: Final = 10_000
"""Rows of a result that are fetched at once."""
INSTALL: Final = "zufluss sql needs DuckDB: pip install duckdb"
COMPARISONS: Final = {
    ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "=", ast.NotEq: "<>",
}  # fmt: skip


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One SELECT statement.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a SELECT of DuckDB over tables: joins, aggregates, window functions. It only reads.

    Tables are `table` in database `fluss`, or `database.table`. The servers send only the columns
    that the query needs, and only rows that match its simple filters. Files can be joined, too:
    FROM 'prices.parquet'. Needs the package duckdb.

    Examples:

      zufluss sql "SELECT city, count(*), avg(km) FROM trips GROUP BY city ORDER BY 2 DESC"

      zufluss sql "SELECT * FROM shop.orders o JOIN shop.users u ON u.id = o.user_id LIMIT 10"
      --output json
    """
    duckdb = _duckdb()
    with connected(bootstrap, settings) as connection:
        database = duckdb.connect(":memory:")
        try:
            database.execute("SET python_enable_replacements = false")
            _check(duckdb, database, query)
            _attach(database, connection, query)
            _print(_reader(database.sql(query)), output)
        except duckdb.Error as problem:
            raise typer.BadParameter(_explained(problem, connection)) from problem
        finally:
            database.close()


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise typer.BadParameter(INSTALL) from None
    return duckdb


def _check(duckdb: Any, database: Any, query: str) -> None:
    """Refuse everything but one SELECT: of others DuckDB does not tell which tables they name."""
    kinds = [statement.type for statement in database.extract_statements(query)]
    if kinds != [duckdb.StatementType.SELECT]:
        names = ", ".join(str(kind).rsplit(".", 1)[-1] for kind in kinds) or "nothing"
        raise typer.BadParameter(f"the query is {names}; allowed: one SELECT statement")


def _attach(database: Any, connection: Connection, query: str) -> None:
    """Give DuckDB the tables that the query names; others may be files, or an error later."""
    for number, (schema, name) in enumerate(sorted(_names(database, query))):
        path = f"{schema or DEFAULT_DATABASE}.{name}"
        if not _exists(connection, path):
            continue
        database.register(f"zufluss_{number}", _dataset(connection.table(path)))
        if schema:
            database.execute(f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)}")
        view = f"{_quoted(schema)}.{_quoted(name)}" if schema else _quoted(name)
        database.execute(f"CREATE VIEW {view} AS SELECT * FROM zufluss_{number}")


def _names(database: Any, query: str) -> set[tuple[str, str]]:
    """Schema and name of everything that the query reads, as DuckDB parsed it."""
    parsed = database.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    names: set[tuple[str, str]] = set()
    waiting: list[Any] = [json.loads(parsed)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE":
                names.add((node["schema_name"], node["table_name"]))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return names


def _exists(connection: Connection, path: str) -> bool:
    from zufluss.errors import ZuflussError

    try:
        return connection.admin.table_exists(path)
    except ZuflussError:  # not a name of ours, such as the path of a file
        return False


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _dataset(table: Table) -> Any:
    """The table as a dataset, of which DuckDB reads some columns with a filter."""
    import pyarrow.dataset

    class TableDataset(pyarrow.dataset.Dataset):  # type: ignore[misc]
        """A dataset whose scanner is a scan of the table."""

        def __init__(self) -> None:
            """Not that of the base class, which refuses to be called."""

        @property
        def schema(self) -> pa.Schema:
            """The columns of the table."""
            return table.schema.arrow

        def scanner(
            self, columns: list[str] | None = None, filter: Any = None, **options: Any
        ) -> Any:
            """A scan of these columns; the filter is applied exactly, and pushed down in part."""
            return _scanner(table, columns, filter)

    return TableDataset()


def _scanner(table: Table, columns: list[str] | None, filter: Any) -> Any:
    import pyarrow as pa
    import pyarrow.dataset

    from zufluss.errors import ZuflussError

    names = list(table.schema.names)
    needed = names if columns is None else [*columns]
    if filter is not None:
        needed += [name for name in names if name not in needed and _mentions(filter, name)]
    wanted, source = needed or names[:1], _source(table)
    try:
        scan = table.scan(wanted, simple_filter(str(filter)) or None, source=source)
    except ZuflussError:  # it is not simple enough for the servers
        scan = table.scan(wanted, source=source)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from scan

    reader = pa.RecordBatchReader.from_batches(scan.schema, batches())
    chosen = None if columns is None else [*columns]
    return pyarrow.dataset.Scanner.from_batches(reader, columns=chosen, filter=filter)


def _mentions(filter: Any, name: str) -> bool:
    """Whether the filter may need a column; a wrong yes only reads too much."""
    return name in str(filter)


def _source(table: Table) -> Any:
    """The source that has all rows."""
    if table.lake_only:
        return "lake"
    if table.info.has_primary_key:
        return "live"
    from zufluss.config.table_options import TABLE_DATALAKE_ENABLED

    return "union" if table.info.property(TABLE_DATALAKE_ENABLED) else "log"


def simple_filter(text: str) -> str:
    """The part of a filter of Arrow, as Arrow prints it, that servers can apply; often all of it.

    Comparisons of a column with a whole number or a plain text, joined by `and`, are passed on.
    What is left out is only applied here.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return ""
    return " AND ".join(part for part in map(_comparison, _conjuncts(tree)) if part)


def _conjuncts(tree: ast.expr) -> Iterator[ast.expr]:
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        for part in tree.values:
            yield from _conjuncts(part)
    else:
        yield tree


def _comparison(tree: ast.expr) -> str | None:
    match tree:
        case ast.Compare(ast.Name(name), [operator], [ast.Constant(value)]):
            symbol = COMPARISONS.get(type(operator))
            if symbol is None or keyword.iskeyword(name) or isinstance(value, bool):
                return None
            if isinstance(value, int):
                return f"{name} {symbol} {value}"
            if isinstance(value, str) and value.isprintable() and not {*"'\\"} & {*value}:
                return f"{name} {symbol} '{value}'"
    return None


def _reader(relation: Any) -> pa.RecordBatchReader:
    """The result in batches; the method had another name before DuckDB 1.4."""
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
    return read(ROWS_AT_ONCE)


def _print(result: pa.RecordBatchReader, output: Output) -> None:
    show = row_printer(output, result.schema.names)
    with until_told_to_stop():
        for batch in result:
            show(batch)


def _explained(problem: Exception, connection: Connection) -> str:
    """The first lines of DuckDB's message, and the tables that exist if one was not found."""
    text = str(problem).split("\n\n", 1)[0].strip()
    if "does not exist" in text:
        tables = ", ".join(connection.admin.list_tables(DEFAULT_DATABASE)) or "none"
        text += f" The tables of database {DEFAULT_DATABASE} are: {tables}"
    return text
