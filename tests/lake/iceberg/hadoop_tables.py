"""Tables of a catalog of type hadoop: events in the middle of a commit, and what came of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.table import Table

from tests.lake.iceberg.hadoop_writer import TABLE
from tests.paths import ROOT
from zufluss.lake.iceberg.commit import commit_snapshot
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.lake.iceberg.private import SnapshotChange

SCHEMA = pa.schema([("a", pa.int64())])


def opened(warehouse: str, **properties: str) -> HadoopCatalog:
    """A catalog that shares nothing with the one of `load`."""
    return HadoopCatalog("zufluss", warehouse=warehouse, **properties)


def values(table: Table) -> list[int]:
    return sorted(table.scan().to_arrow()["a"].to_pylist())


def versions(metadata: Path) -> list[str]:
    return sorted(path.name for path in metadata.iterdir() if path.name.startswith("v"))


def started(location: str, name: str, count: int, **settings: str) -> subprocess.Popen[bytes]:
    module = "tests.lake.iceberg.hadoop_writer"
    given = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", module, location, name, str(count), *given]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def interfere(
    catalog: HadoopCatalog,
    monkeypatch: pytest.MonkeyPatch,
    event: Callable[[], object],
    *,
    after: bool = False,
) -> None:
    """Let something happen just before, or just after, the catalog creates its next version."""
    files = catalog._files
    create = files.create

    def eventful(path: str, data: bytes) -> None:
        monkeypatch.setattr(files, "create", create)
        if not after:
            event()
        create(path, data)
        if after:
            event()

    monkeypatch.setattr(files, "create", eventful)


def set_property(table: Table) -> None:
    """One attempt of a commit."""
    with table.transaction() as transaction:
        transaction.set_properties({"ours": "set"})


def add_snapshot(table: Table) -> int:
    """Commit a snapshot as rounds do, in as many attempts as it takes."""
    return commit_snapshot(table, SnapshotChange("append"), lambda _: None).snapshot_id


def history(catalog: HadoopCatalog) -> list[int]:
    return [snapshot.snapshot_id for snapshot in catalog.load_table(TABLE).snapshots()]
