"""Readers of key-value snapshots for synchronous code, derived from `AsyncKvSnapshotReader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import pyarrow as pa

from zufluss.client.keyed.snapshot_reader import AsyncKvSnapshotReader
from zufluss.client.sync.facade import Facade, documented_by, waits


@documented_by(AsyncKvSnapshotReader)
class KvSnapshotReader(Facade[AsyncKvSnapshotReader]):
    """The rows of a key-value snapshot; `table.kv_snapshot(…)` opens it. Iterate it, then close it.

    >>> with table.kv_snapshot(bucket, 7) as reader:  # doctest: +SKIP
    ...     for batch in reader:
    ...         print(batch.num_rows)
    """

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self._twin.schema

    @property
    def log_offset(self) -> int:
        return self._twin.log_offset

    @property
    def last_key(self) -> bytes | None:
        """The encoded key of the last row handed out: an `after` to continue from."""
        return self._twin.last_key

    close = waits(AsyncKvSnapshotReader.close)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._thread.run(self._twin.next_batch())
        if batch is None:
            raise StopIteration
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
