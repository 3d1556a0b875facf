"""`zufluss snapshot …`: key-value snapshots of primary-key tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    TableArgument,
    connected,
    table_path,
)
from zufluss.clock import wall_ms

if TYPE_CHECKING:
    from zufluss.client.keyed.snapshots import KvSnapshotInfo
    from zufluss.client.sync.connection import Connection

    Snapshots = Callable[[str, str | None], Iterable[KvSnapshotInfo]]

app = typer.Typer(
    no_args_is_help=True, help="Key-value snapshots of a table in remote storage: list, now."
)

PartitionOption = Annotated[
    str | None,
    typer.Option("--partition", metavar="NAME", help="One partition; all if omitted."),
]


@app.command("list")
def list_(
    table: TableArgument,
    partition: PartitionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the snapshots that are kept, with their offsets, sizes and ages.

    Example:

      zufluss snapshot list shop.orders
    """
    with connected(bootstrap, settings) as connection:
        rows = _rows(connection, table, partition, connection.admin.list_kv_snapshots)
    _print(output, rows)


@app.command()
def now(
    table: TableArgument,
    partition: PartitionOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Take snapshots at once, wait for them, and list the newest of each bucket.

    A bucket that did not change since its last snapshot gets no new one.

    Example:

      zufluss snapshot now shop.orders
    """
    with connected(bootstrap, settings) as connection:
        rows = _rows(connection, table, partition, connection.admin.take_kv_snapshots)
    _print(output, rows)


def _rows(
    connection: Connection, table: str, partition: str | None, snapshots: Snapshots
) -> list[tuple[Any, ...]]:
    """A row per snapshot of a table, of one of its partitions, or of all."""
    path = str(table_path(table))
    partitions: list[str | None] = [partition]
    if partition is None and connection.admin.table_info(path).is_partitioned:
        partitions = [each.name for each in connection.admin.list_partitions(path)]
    now_ms = wall_ms()
    return [
        (
            name,
            each.bucket.bucket_id,
            each.snapshot_id,
            each.log_offset,
            each.size,
            None if each.committed_ms is None else max(0, now_ms - each.committed_ms) // 1000,
        )
        for name in partitions
        for each in snapshots(path, name)
    ]


def _print(output: Output, rows: list[tuple[Any, ...]]) -> None:
    print_rows(output, ["partition", "bucket", "id", "offset", "bytes", "age_seconds"], rows)
