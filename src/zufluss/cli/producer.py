"""`zufluss producer …`: list and drop the producers of exactly-once writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_document, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    say,
)

if TYPE_CHECKING:
    from zufluss.client.producer.info import ProducerInfo

app = typer.Typer(
    no_args_is_help=True,
    help="Producers, which write tables exactly once and own columns of them: list, drop.",
)

TableOption = Annotated[
    str | None, typer.Argument(metavar="[TABLE]", help="Only producers of this table.")
]


@app.command("list")
def list_(
    table: TableOption = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List producers, the columns they own, and the time since they last reported.

    Examples:

      zufluss producer list

      zufluss producer list shop.page_views -o json
    """
    with connected(bootstrap, settings) as connection:
        producers = connection.admin.list_producers(table)
    if output is Output.JSON:
        print_document([_document(producer) for producer in producers])
        return
    columns = ["table", "id", "owner", "columns", "lock", "epoch", "idle", "ttl", "remarks"]
    print_rows(output, columns, [_row(producer) for producer in producers])


@app.command()
def drop(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table of the producer.")],
    producer_id: Annotated[str, typer.Argument(metavar="ID", help="The producer's id.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """End a producer: its columns are free, and its writes are never undone.

    A writer of this producer that still runs fails with an error.

    Example:

      zufluss producer drop shop.page_views nightly-job
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.drop_producer(table, producer_id)
    say(f"table {table} has no producer {producer_id} any more")


def _row(producer: ProducerInfo) -> tuple[Any, ...]:
    return (
        producer.table or f"dropped table {producer.table_id}",
        producer.producer_id,
        producer.owner or "",
        ", ".join(producer.columns),
        "exclusive" if producer.exclusive else "shared",
        producer.epoch,
        f"{producer.idle_ms // 1000} s",
        f"{producer.ttl_ms // 1000} s",
        "lost its columns to another; drop it" if producer.lost else "",
    )


def _document(producer: ProducerInfo) -> dict[str, Any]:
    return {
        "id": producer.producer_id,
        "table_id": producer.table_id,
        "table": producer.table,
        "number": producer.number,
        "epoch": producer.epoch,
        "owner": producer.owner,
        "columns": list(producer.columns),
        "exclusive": producer.exclusive,
        "ttl_ms": producer.ttl_ms,
        "idle_ms": producer.idle_ms,
        "lost": producer.lost,
        "checkpointed": producer.checkpointed,
        "checkpoint_id": producer.checkpoint_id,
        "baseline": [
            {
                "partition_id": bucket.partition_id,
                "bucket": bucket.bucket_id,
                "log_offset": offset,
            }
            for bucket, offset in producer.baseline.items()
        ],
    }
