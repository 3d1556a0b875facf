"""`zufluss lease …`: list, show and drop leases, which keep key-value snapshots for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zufluss.cli.output import Output, print_document, print_fields, print_rows
from zufluss.cli.session import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    OutputOption,
    Settings,
    connected,
    say,
)

if TYPE_CHECKING:
    from zufluss.client.lease.info import KvSnapshotLeaseInfo, KvSnapshotLeaseTable
    from zufluss.model.lease import LeasedSnapshot
    from zufluss.model.table import TableBucket

app = typer.Typer(
    no_args_is_help=True,
    help="Leases, which keep key-value snapshots for their readers: list, show, drop.",
)

LeaseArgument = Annotated[str, typer.Argument(metavar="ID", help="The lease's id.")]


@app.command("list")
def list_(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List leases with their snapshots, sizes and remaining times.

    Example:

      zufluss lease list
    """
    with connected(bootstrap, settings) as connection:
        leases = connection.admin.kv_snapshot_leases()
    if output is Output.JSON:
        print_document([_document(lease) for lease in leases])
        return
    columns = ["id", "owner", "tables", "snapshots", "bytes", "age", "remaining", "remarks"]
    print_rows(output, columns, [_row(lease) for lease in leases])


@app.command()
def show(
    lease_id: LeaseArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one lease with its snapshots.

    Example:

      zufluss lease show nightly-export
    """
    from zufluss.errors import KvSnapshotLeaseNotFoundError

    with connected(bootstrap, settings) as connection:
        leases = connection.admin.kv_snapshot_leases(lease_id)
    if not leases:
        raise KvSnapshotLeaseNotFoundError(f"there is no lease {lease_id!r}, or it has expired")
    lease = leases[0]
    if output is Output.JSON:
        print_document(_document(lease) | {"buckets": [_bucket(*each) for each in _buckets(lease)]})
        return
    print_fields(_fields(lease))
    print()
    rows = [(b.table_id, b.partition_id, b.bucket_id, *s) for b, s in _buckets(lease)]
    print_rows(output, ["table_id", "partition_id", "bucket", "snapshot", "log_offset"], rows)


@app.command()
def drop(
    lease_id: LeaseArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """End a lease at once. Its readers fail, and its snapshots may be deleted.

    Example:

      zufluss lease drop nightly-export
    """
    with connected(bootstrap, settings) as connection:
        connection.admin.drop_kv_snapshot_lease(lease_id)
    say(f"there is no lease {lease_id} any more")


def _row(lease: KvSnapshotLeaseInfo) -> tuple[Any, ...]:
    return (
        lease.lease_id,
        lease.owner or "",
        ", ".join(map(_name, lease.tables)),
        sum(table.snapshots for table in lease.tables),
        sum(table.bytes for table in lease.tables),
        _seconds(lease.age_ms),
        "" if lease.damage else _seconds(lease.remaining_ms),
        _remarks(lease),
    )


def _fields(lease: KvSnapshotLeaseInfo) -> dict[str, Any]:
    return {
        "id": lease.lease_id,
        "owner": lease.owner,
        "epoch": lease.epoch,
        "duration": _seconds(lease.duration_ms),
        "remaining": None if lease.damage else _seconds(lease.remaining_ms),
        "age": _seconds(lease.age_ms),
        "tables": [f"{_name(t)}: {t.snapshots} snapshots, {t.bytes} bytes" for t in lease.tables],
        "revoked": [each.what for each in lease.revoked],
        "damage": lease.damage,
    }


def _document(lease: KvSnapshotLeaseInfo) -> dict[str, Any]:
    return {
        "id": lease.lease_id,
        "owner": lease.owner,
        "epoch": lease.epoch,
        "duration_ms": lease.duration_ms,
        "remaining_ms": lease.remaining_ms,
        "age_ms": lease.age_ms,
        "tables": [
            {"id": t.table_id, "table": t.table, "snapshots": t.snapshots, "bytes": t.bytes}
            for t in lease.tables
        ],
        "revoked": [each.what for each in lease.revoked],
        "damage": lease.damage,
    }


def _buckets(lease: KvSnapshotLeaseInfo) -> list[tuple[TableBucket, LeasedSnapshot]]:
    """The leased snapshots by table, partition and bucket."""
    snapshots = lease.snapshots.items()
    return sorted(
        snapshots, key=lambda item: (item[0].table_id, item[0].partition_id or 0, item[0].bucket_id)
    )


def _bucket(bucket: TableBucket, snapshot: LeasedSnapshot) -> dict[str, Any]:
    return {
        "table_id": bucket.table_id,
        "partition_id": bucket.partition_id,
        "bucket": bucket.bucket_id,
        "snapshot_id": snapshot.snapshot_id,
        "log_offset": snapshot.log_offset,
    }


def _name(table: KvSnapshotLeaseTable) -> str:
    return table.table or f"dropped table {table.table_id}"


def _remarks(lease: KvSnapshotLeaseInfo) -> str:
    lost = [f"lost {each.what}" for each in lease.revoked]
    return "; ".join(["damaged, holds everything"] * bool(lease.damage) + lost)


def _seconds(value_ms: int) -> str:
    return f"{value_ms // 1000} s"
