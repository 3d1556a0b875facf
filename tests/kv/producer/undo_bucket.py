"""A bucket with a real log and store that producers write to, and that can crash at any time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.end_to_end.kv import Codec, kv_batch, records_of
from tests.kv.kv_samples import open_store
from tests.log.support import open_log
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.memory import KvMemory
from zufluss.kv.producer.fence import Fence, Owner
from zufluss.kv.producer.own_changes import Progress, Source, exclusive_steps, shared_steps
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet, PreparedPut
from zufluss.model.producer import UNDO_TASK, ProducerWriter
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath

NUMBER = 5
Record = tuple[Any, ...] | int
"""A row, or the key of a delete."""


def table_of(schema: Schema, **properties: str) -> KvTable:
    """A table with one bucket; `_` in the names of properties stands for `.`."""
    named = {key.replace("__", "-").replace("_", "."): v for key, v in properties.items()}
    descriptor = TableDescriptor(schema, None, (), schema.primary_key, 1, named, {})
    return KvTable(TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0), {1: schema})


class Bucket:
    """One bucket; its first column is the key."""

    def __init__(
        self,
        directory: Path,
        memory: KvMemory,
        table: KvTable,
        columns: Sequence[int],
        *,
        exclusive: bool = True,
    ) -> None:
        self.table = table
        self.codec = Codec(table.schema)
        self._directory = directory
        self._memory = memory
        self._columns = frozenset(table.schema.columns[i].id for i in columns)
        self._exclusive = exclusive
        self._sequences: dict[int, int] = {}
        self._now = 1_000
        self.epoch = 1
        self._open()

    def _open(self) -> None:
        self.log = open_log(self._directory)
        store = open_store(self._directory / "kv-0", self._memory)
        self.tablet = KvTablet(self.table, store, 1 << 20)
        self.tablet.recover(self.log)
        self.begin(self.epoch)

    def crash(self) -> None:
        """Lose everything that is not in the log."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close the files and free the memory."""
        self.tablet.store.abandon()
        self.log.close(clean=False)

    def begin(self, epoch: int) -> None:
        """The producer is in this epoch."""
        self.epoch = epoch
        owner = Owner("p", NUMBER, epoch, self._columns, self._exclusive, False)
        self.tablet.fence = Fence([owner])

    @property
    def end(self) -> int:
        """Where the log ends."""
        return self.log.log_end_offset

    def put(
        self,
        records: Sequence[Record],
        targets: tuple[int, ...] = (),
        *,
        task: int | None = None,
        mode: int = 0,
    ) -> None:
        """Put rows and deletes, as a task of the producer or as nobody."""
        writer: dict[str, int] = {}
        if task is not None:
            writer_id = ProducerWriter(NUMBER, self.epoch, task).writer_id
            sequence = self._sequences.get(writer_id, 0)
            self._sequences[writer_id] = sequence + 1
            writer = {"writer_id": writer_id, "sequence": sequence}
        batch = kv_batch([self._record(record) for record in records], **writer)
        data = np.frombuffer(batch, np.uint8)
        self._append(self.tablet.prepare(data, targets, mode, self._time()))

    def _record(self, record: Record) -> bytes:
        if isinstance(record, int):
            return self.codec.delete((record,))
        return self.codec.put(record)

    def _time(self) -> int:
        self._now += 1
        return self._now

    def _append(self, prepared: PreparedPut) -> None:
        if prepared.changes is not None:
            batch = prepared.changes.encode()
            self.log.append(batch.view, (batch.checked,), prepared.now_ms)
        assert self.log.log_end_offset == prepared.end_offset
        self.log.advance_high_watermark(self.log.log_end_offset)
        self.tablet.store.horizon = self.log.high_watermark

    # -- undo ---------------------------------------------------------------------------------

    def undo(self, start: int, *, keys_max: int = 1000, steps_max: int = 1 << 30) -> int | None:
        """Undo from an offset on; the number of keys that changed, None if it did not end."""
        writer = ProducerWriter(NUMBER, self.epoch, UNDO_TASK)
        end = self.tablet.begin_undo(writer, self._time()).end_offset
        keys = 0
        for count, (step, _) in enumerate(self.steps(start, end, keys_max)):
            if count == steps_max:
                return None
            if step is not None:
                prepared = self.tablet.undo(writer, step, self._time())
                self._append(prepared)
                keys += prepared.keys
        return keys

    def steps(self, start: int, end: int, keys_max: int) -> Iterator[Progress]:
        """The steps of an undo."""
        source = Source(self.table, partial(self._batches, start), start, end, NUMBER)
        if self._exclusive:
            return exclusive_steps(source, keys_max)
        return shared_steps(source, self._columns, keys_max)

    def _batches(self, offset: int) -> Generator[memoryview, None, None]:
        while offset < self.log.high_watermark:
            read = self.log.read(offset, 4096, at_least_one=True, nowait=False)
            yield read.records
            offset = read.end_offset

    # -- what is there ------------------------------------------------------------------------

    def rows(self) -> dict[int, tuple[Any, ...]]:
        """Every row by its key."""
        _, values = self.tablet.store.scan(None, 1 << 20, 1 << 30, NEWEST)
        found = [self.codec.value(value) for value in values.tolist() if value is not None]
        return {row[0]: row[1:] for row in found if row is not None}

    def folded(self) -> dict[int, tuple[Any, ...]]:
        """The rows that the changelog leads to; asserts that it never contradicts itself."""
        rows: dict[int, tuple[Any, ...]] = {}
        for records in self._batches(0):
            for _, kind, row in records_of(bytes(records), self.table.schema):
                key, values = row[0], row[1:]
                if kind in ("-U", "-D"):
                    assert rows.pop(key) == values
                else:
                    assert key not in rows
                    rows[key] = values
        return rows
