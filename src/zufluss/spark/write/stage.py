"""The rows of a task, kept until all of them are known to be right; only then the first is sent.

A task that comes upon a row that does not fit, or whose source fails, has written nothing then, so
there is nothing half-written to tell apart later. Up to `MEMORY_BYTES` rows stay in memory, others
go to a file that has no name and ends with the process, however that ends.

Of several rows of one key only the last is sent, where it is the last that counts and keys fit into
memory: then two runs of a task write the same row for each key, and a run that Spark gave up and
that still goes on cannot put an older row over a newer one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO, Final, NamedTuple, Self

import pyarrow as pa

from zufluss.model.table import TableInfo
from zufluss.spark.write.rows import LastOfKeys

MEMORY_BYTES: Final = 128 << 20
"""Rows of a task that stay in memory."""

Change = tuple[bool, pa.RecordBatch]
"""Rows to be deleted (True), or not."""


class _StoredRows(NamedTuple):
    """Rows in the file."""

    schema: pa.Schema
    start: int
    size: int


class Stage:
    """Rows that are read once more, in their order, when all are there."""

    def __init__(self, info: TableInfo, *, last_wins: bool, memory: int = MEMORY_BYTES) -> None:
        self._runs: list[tuple[bool, pa.RecordBatch | _StoredRows]] = []
        self._memory = memory
        self._file: IO[bytes] | None = None
        self._open = ExitStack()
        self._last = LastOfKeys(info) if last_wins else None

    @classmethod
    def of(cls, changes: Iterable[Change], info: TableInfo, *, last_wins: bool) -> Self:
        """Everything that a task has; whatever is wrong with it is raised here."""
        stage = cls(info, last_wins=last_wins)
        try:
            for delete, rows in changes:
                stage.add(delete, rows)
        except BaseException:
            stage.close()
            raise
        return stage

    def add(self, delete: bool, rows: pa.RecordBatch) -> None:
        """Keep rows."""
        if self._last is not None:
            self._last.add(rows)
        self._memory -= rows.nbytes
        self._runs.append((delete, rows if self._memory >= 0 else self._stored(rows)))

    def _stored(self, rows: pa.RecordBatch) -> _StoredRows:
        if self._file is None:
            made = tempfile.TemporaryFile(prefix="zufluss-sink-")  # noqa: SIM115 - in the stack
            self._file = self._open.enter_context(made)
        start = self._file.tell()
        self._file.write(rows.serialize())
        return _StoredRows(rows.schema, start, self._file.tell() - start)

    def __iter__(self) -> Iterator[Change]:
        kept = None if self._last is None else self._last.found()
        at = 0
        for delete, run in self._runs:
            rows = self._read(run) if isinstance(run, _StoredRows) else run
            end = at + rows.num_rows
            if kept is not None:
                rows = rows.filter(pa.array(kept[at:end]))
            at = end
            if rows.num_rows:
                yield delete, rows

    def _read(self, run: _StoredRows) -> pa.RecordBatch:
        assert self._file is not None
        self._file.seek(run.start)
        return pa.ipc.read_record_batch(pa.py_buffer(self._file.read(run.size)), run.schema)

    def close(self) -> None:
        """Let go of the file."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
