"""A table for synchronous code, derived from `AsyncTable`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pyarrow as pa

from zufluss.client.keyed.lookup import KeyForm, Missing, Row, SingleKey
from zufluss.client.sync.facade import Facade, documented_by, makes, opens, plans, waits
from zufluss.client.sync.lease import KvSnapshotLease
from zufluss.client.sync.scan import KvSnapshotReader, LogScan, scan_facade
from zufluss.client.sync.write import AppendWriter, ExactlyOnceWriter, TaskWriter, UpsertWriter
from zufluss.client.table import AsyncTable
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo, TablePath


@documented_by(AsyncTable)
class Table(Facade[AsyncTable]):
    """A table as it was when it was opened; `connection.table(…)` opens it.

    Open it again to see later changes of its schema. Opened as `"db.table$lake"` it shows only the
    rows that the lake has, and can only be scanned.
    """

    @property
    def info(self) -> TableInfo:
        """Ids, schema, keys, bucket count and properties."""
        return self._twin.info

    @property
    def path(self) -> TablePath:
        return self._twin.path

    @property
    def schema(self) -> Schema:
        return self._twin.schema

    @property
    def lake_only(self) -> bool:
        """True if the table was opened with `$lake`."""
        return self._twin.lake_only

    def _repr_html_(self) -> str:
        return self._twin._repr_html_()

    append = makes(AsyncTable.append, AppendWriter)
    upsert = makes(AsyncTable.upsert, UpsertWriter)
    exactly_once_writer = opens(AsyncTable.exactly_once_writer, ExactlyOnceWriter)
    producer_writer = makes(AsyncTable.producer_writer, TaskWriter)
    append_producer = waits(AsyncTable.append_producer)
    scan = plans(AsyncTable.scan, scan_facade)
    changelog = plans(AsyncTable.changelog, LogScan)
    head = waits(AsyncTable.head)
    count = waits(AsyncTable.count)

    @overload
    def lookup(self, keys: SingleKey) -> Row | None: ...

    @overload
    def lookup(self, keys: Any, *, missing: Missing = "null") -> pa.Table: ...

    def lookup(self, keys: Any, *, missing: Missing = "null") -> Row | pa.Table | None:
        form = KeyForm.whole(self.info)
        key = form.single(keys)
        if key is not None:
            return self._thread.run(self._twin.lookup(key))
        batches = list(form.batches(keys))
        return self._thread.run(self._twin.lookup_batches(batches, missing=missing))

    def prefix_lookup(self, prefix: Any) -> pa.Table:
        form = KeyForm.prefix(self.info)
        key = form.single(prefix)
        batches = list(form.batches(prefix if key is None else [key]))
        return self._thread.run(self._twin.prefix_batches(batches))

    def kv_snapshot(
        self,
        bucket: TableBucket,
        snapshot_id: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        after: bytes | None = None,
        lease: KvSnapshotLease | None = None,
    ) -> KvSnapshotReader:
        twin = None if lease is None else lease.lease
        reader = self._twin.kv_snapshot(bucket, snapshot_id, columns, after=after, lease=twin)
        return KvSnapshotReader(self._thread, self._thread.run(reader))
