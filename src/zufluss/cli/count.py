"""`zufluss count`: the number of rows of a table."""

from __future__ import annotations

from zufluss.cli.output import Output, print_document
from zufluss.cli.rows import PartitionsOption, WhereOption
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    table_path,
    usage,
)


def count(
    table: TableArgument,
    where: WhereOption = None,
    partitions: PartitionsOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the exact number of rows of a table, or of those that match a filter.

    Without --where the servers know the number and no rows are read.

    Examples:

      zufluss count events

      zufluss count shop.orders --where "cents > 100" --partition 2026-01-31
    """
    path = table_path(table)
    with connected(bootstrap, settings) as connection:
        source = connection.table(str(path))
        with usage():
            source.scan(filter=where)  # a wrong filter is a usage error; nothing is read
        rows = source.count(where, partitions=partitions or None)
    if output is Output.JSON:
        print_document({"table": str(path), "rows": rows})
    else:
        print(rows)
