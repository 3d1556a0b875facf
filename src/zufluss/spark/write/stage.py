"""Stages the rows of a task: the first row is sent only after all rows were checked.

So a task with a row that does not fit, or whose source fails, has written nothing. Up to
`MEMORY_BYTES` of rows stay in memory; the rest goes to a file without a name, which the operating
system removes when the process ends.

If the last row of a key counts and the keys fit into memory, only the last row of each key is sent:
then two runs of a task write the same row for each key, and a run that Spark gave up but that still
goes on cannot put an older row over a newer one.
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
"""The most bytes of rows that stay in memory."""

Change = tuple[bool, pa.RecordBatch]
"""Rows to be deleted (True) or upserted (False)."""


class _StoredRows(NamedTuple):
    """The place of a batch in the file."""

    schema: pa.Schema
    start: int
    size: int


class Stage:
    """The staged rows of a task, in their order; iterate to read them."""

    def __init__(self, info: TableInfo, *, last_wins: bool, memory: int = MEMORY_BYTES) -> None:
        self._runs: list[tuple[bool, pa.RecordBatch | _StoredRows]] = []
        self._memory = memory
        self._file: IO[bytes] | None = None
        self._open = ExitStack()
        self._last = LastOfKeys(info) if last_wins else None

    @classmethod
    def of(cls, changes: Iterable[Change], info: TableInfo, *, last_wins: bool) -> Self:
        """Stage all rows of a task; errors of the rows are raised here."""
        stage = cls(info, last_wins=last_wins)
        try:
            for delete, rows in changes:
                stage.add(delete, rows)
        except BaseException:
            stage.close()
            raise
        return stage

    def add(self, delete: bool, rows: pa.RecordBatch) -> None:
        """Add rows."""
        if self._last is not None:
            self._last.add(rows)
        self._memory -= rows.nbytes
        self._runs.append((delete, rows if self._memory >= 0 else self._stored(rows)))

    def _stored(self, rows: pa.RecordBatch) -> _StoredRows:
        if self._file is None:
            file = tempfile.TemporaryFile(prefix="zufluss-sink-")  # noqa: SIM115 - in the stack
            self._file = self._open.enter_context(file)
        start = self._file.tell()
        self._file.write(rows.serialize())
        return _StoredRows(rows.schema, start, self._file.tell() - start)

    def __iter__(self) -> Iterator[Change]:
        mask = None if self._last is None else self._last.mask()
        at = 0
        for delete, run in self._runs:
            rows = self._read(run) if isinstance(run, _StoredRows) else run
            end = at + rows.num_rows
            if mask is not None:
                rows = rows.filter(pa.array(mask[at:end]))
            at = end
            if rows.num_rows:
                yield delete, rows

    def _read(self, run: _StoredRows) -> pa.RecordBatch:
        assert self._file is not None
        self._file.seek(run.start)
        return pa.ipc.read_record_batch(pa.py_buffer(self._file.read(run.size)), run.schema)

    def close(self) -> None:
        """Close the file."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
