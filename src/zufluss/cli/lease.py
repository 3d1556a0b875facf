"""`zufluss lease …`: leases, which keep key-value snapshots for readers, and what they cost."""

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
    from zufluss.client.lease.info import (
        KvSnapshotLeaseInfo,
        KvSnapshotLeaseTable,
        KvSnapshotLeaseUsage,
        KvSnapshotLeaseUsages,
    )
    from zufluss.model.lease import LeasedSnapshot
    from zufluss.model.table import TableBucket

app = typer.Typer(
    no_args_is_help=True,
    help="Leases, which keep key-value snapshots for their readers: list, show, usage, drop.",
)

FAILED = 1
"""Exit code of `drop` if a lease does not exist or could not be ended."""

LeaseArgument = Annotated[str, typer.Argument(metavar="ID", help="The lease's id.")]


@app.command("list")
def list_(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List leases with their snapshots, sizes and remaining times.

    `held` are the bytes of files that a lease keeps and that no retained snapshot has; `frees` are
    those of them that no other lease keeps.

    Example:

      zufluss lease list
    """
    with connected(bootstrap, settings) as connection:
        leases = connection.admin.kv_snapshot_leases()
        usage = connection.admin.kv_snapshot_lease_usage()
    if output is Output.JSON:
        print_document([_document(lease, usage) for lease in leases])
        return
    columns = ["id", "owner", "tables", "snapshots", "bytes", "held", "frees", "age", "remaining"]
    print_rows(output, [*columns, "remarks"], [_row(lease, usage) for lease in leases])
    _say_uncounted(usage)


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
        usage = connection.admin.kv_snapshot_lease_usage()
    if not leases:
        raise KvSnapshotLeaseNotFoundError(_no_lease(lease_id))
    lease = leases[0]
    if output is Output.JSON:
        buckets = [_bucket(*each) for each in _buckets(lease)]
        print_document(_document(lease, usage) | {"buckets": buckets})
        return
    print_fields(_fields(lease, usage))
    print()
    rows = [(b.table_id, b.partition_id, b.bucket_id, *s) for b, s in _buckets(lease)]
    print_rows(output, ["table_id", "partition_id", "bucket", "snapshot", "log_offset"], rows)


@app.command()
def usage(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Count the bytes of files that only leases keep, by table and owner.

    Files of retained snapshots are not counted, and shared files once. The row of a table without
    an owner is the sum over all owners; `frees` are the bytes that are freed when all leases of the
    row are dropped.

    Example:

      zufluss lease usage
    """
    with connected(bootstrap, settings) as connection:
        found = connection.admin.kv_snapshot_lease_usage()
    if output is Output.JSON:
        print_document(
            {
                "tables": [_usage_document(row, "table") for row in found.tables],
                "owners": [_usage_document(row, "owner") for row in found.owners],
                "leases": [_usage_document(row, "lease") for row in found.leases],
            }
        )
        return
    rows = [
        (_name(row), who, row.held_bytes, row.freed_bytes)
        for table in found.tables
        for row, who in [
            (table, "(all)"),
            *((row, row.owner or "") for row in found.owners if row.table_id == table.table_id),
        ]
    ]
    print_rows(output, ["table", "owner", "held", "frees"], rows)
    _say_uncounted(found)


@app.command()
def drop(
    lease_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids that `lease list` shows.")
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner", metavar="NAME", help="All leases of this user; '' for those without one."
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
) -> None:
    """End leases at once. Their readers fail, and their snapshots may be deleted.

    Each lease that was ended, and each that could not be, is named. The exit code is 1 if a lease
    does not exist or could not be ended; the others are ended nevertheless.

    Examples:

      zufluss lease drop nightly-export hourly-export

      zufluss lease drop --owner anna
    """
    from zufluss.errors import KvSnapshotLeaseNotFoundError, ZuflussError

    if (owner is None) == (not lease_ids):
        raise typer.BadParameter("give either ids of leases or --owner NAME")
    with connected(bootstrap, settings) as connection:
        known = {lease.lease_id: lease for lease in connection.admin.kv_snapshot_leases()}
        ids = list(dict.fromkeys(lease_ids or ()))
        if owner is not None:
            ids = [i for i, lease in known.items() if (lease.owner or "") == owner]
            if not ids:
                none = f"{owner} has no lease" if owner else "there is no lease without an owner"
                raise KvSnapshotLeaseNotFoundError(f"{none}; `zufluss lease list` shows all")
        failures = 0
        for lease_id in ids:
            try:
                if lease_id not in known and not connection.admin.kv_snapshot_leases(lease_id):
                    raise KvSnapshotLeaseNotFoundError(_no_lease(lease_id))
                connection.admin.drop_kv_snapshot_lease(lease_id)
                say(f"ended lease {lease_id}{_extent(known.get(lease_id))}")
            except ZuflussError as problem:
                say(f"error: lease {lease_id}: {problem}")
                failures += 1
    if failures:
        raise typer.Exit(FAILED)


def _no_lease(lease_id: str) -> str:
    return f"there is no lease {lease_id!r}, or it has expired; `zufluss lease list` shows all"


def _extent(lease: KvSnapshotLeaseInfo | None) -> str:
    """The owner and the snapshots of a lease; empty for a lease that is younger than the list."""
    if lease is None:
        return ""
    owner = f" of {lease.owner}" if lease.owner else ""
    tables = ", ".join(f"{each.snapshots} snapshots of {_name(each)}" for each in lease.tables)
    return f"{owner}: {tables}" if tables else owner


def _say_uncounted(usage: KvSnapshotLeaseUsages) -> None:
    missing = sum(row.uncounted_snapshots for row in usage.tables)
    if missing:
        say(
            f"the files of {missing} snapshots are not counted, because their lists could not be "
            "read: see `zufluss location list`"
        )


def _usage_document(row: KvSnapshotLeaseUsage, kind: str) -> dict[str, Any]:
    document: dict[str, Any] = {"table_id": row.table_id, "table": row.table}
    if kind != "table":
        document["owner"] = row.owner
    if kind == "lease":
        document["lease_id"] = row.lease_id
    return document | {
        "held_bytes": row.held_bytes,
        "freed_bytes": row.freed_bytes,
        "uncounted_snapshots": row.uncounted_snapshots,
    }


def _row(lease: KvSnapshotLeaseInfo, usage: KvSnapshotLeaseUsages) -> tuple[Any, ...]:
    return (
        lease.lease_id,
        lease.owner or "",
        ", ".join(map(_name, lease.tables)),
        sum(table.snapshots for table in lease.tables),
        sum(table.bytes for table in lease.tables),
        *usage.of_lease(lease.lease_id),
        _seconds(lease.age_ms),
        "" if lease.damage else _seconds(lease.remaining_ms),
        _remarks(lease),
    )


def _fields(lease: KvSnapshotLeaseInfo, usage: KvSnapshotLeaseUsages) -> dict[str, Any]:
    held, freed = usage.of_lease(lease.lease_id)
    return {
        "id": lease.lease_id,
        "owner": lease.owner,
        "epoch": lease.epoch,
        "duration": _seconds(lease.duration_ms),
        "remaining": None if lease.damage else _seconds(lease.remaining_ms),
        "age": _seconds(lease.age_ms),
        "tables": [f"{_name(t)}: {t.snapshots} snapshots, {t.bytes} bytes" for t in lease.tables],
        "held": f"{held} bytes that no retained snapshot has",
        "frees": f"{freed} bytes, if it is dropped",
        "revoked": [each.what for each in lease.revoked],
        "damage": lease.damage,
    }


def _document(lease: KvSnapshotLeaseInfo, usage: KvSnapshotLeaseUsages) -> dict[str, Any]:
    held, freed = usage.of_lease(lease.lease_id)
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
        "held_bytes": held,
        "freed_bytes": freed,
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


def _name(table: KvSnapshotLeaseTable | KvSnapshotLeaseUsage) -> str:
    return table.table or f"dropped table {table.table_id}"


def _remarks(lease: KvSnapshotLeaseInfo) -> str:
    lost = [f"lost {each.what}" for each in lease.revoked]
    return "; ".join(["damaged, holds everything"] * bool(lease.damage) + lost)


def _seconds(value_ms: int) -> str:
    return f"{value_ms // 1000} s"
