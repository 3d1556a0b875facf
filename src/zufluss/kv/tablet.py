"""One bucket of a primary-key table: what a put does, from its bytes to its changelog batch.

    records → parse, checksum → rows to field positions, keys and rows agree → idempotence
            → old rows of all keys at once → the merge engine decides → new state → changelog batch

`prepare` does all of this but the last in the key-value worker thread, a batch at a time and in the
order the batches came. The changelog batch is encoded in a second thread, since compressing it
takes as long as everything else; the event loop then appends it to the log, which is the
write-ahead log, and acknowledges it when it is durable. State is written under the log offset of
its batch and becomes visible with the high watermark, so nobody reads what might still be lost.

A tablet is one step ahead of its log: it knows the offsets and the writers' sequences of batches
that the loop has yet to append. That is sound because nobody else appends to this log, and because
an append that fails ends the bucket until the next start, which begins from the log alone:

    state = what was flushed to RocksDB + replay of the changelog from there

What was flushed may also be a snapshot from remote storage, and the changelog may begin there.

A refused batch changes nothing: everything that can refuse it comes before the first change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import structlog

from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    ProducerStateError,
    RecordTooLargeError,
    ZuflussError,
)
from zufluss.kv.change import Change, Groups
from zufluss.kv.changelog import Changes
from zufluss.kv.cold.checkpoint import Checkpoint, remove_left_overs
from zufluss.kv.cold.state import KvState
from zufluss.kv.hot.memtable import group_keys, hash_keys
from zufluss.kv.merge.base import DELETE, INSERT, UPDATE_BEFORE
from zufluss.kv.merge.gather import SCHEMA_ID_BYTES, NewValues, longest, prefixed
from zufluss.kv.merge.partial import Ids
from zufluss.kv.producer.fence import OPEN, Fence
from zufluss.kv.producer.undo import STORED_BYTES_MAX, Step, StepTooLargeError, undone
from zufluss.kv.replay import Earlier, Piece, changelog_start, pieces
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.kv.settled import Settled, Written
from zufluss.kv.store import KvStore
from zufluss.kv.table import KvTable
from zufluss.log.log import Log
from zufluss.log.writer_state import WriterState
from zufluss.model.producer import UNDO_TASK, ProducerWriter, is_producer
from zufluss.record.batch.check import CheckedBatch
from zufluss.record.batch.kv import KvBatch, parse_kv_batches
from zufluss.record.header import NO_SEQUENCE, NO_WRITER_ID
from zufluss.record.slices import ABSENT, Bytes, Positions, Slices

log = structlog.get_logger(__name__)

STEP_KEYS: Final = 256
"""Keys of a step of an undo whose rows are read at a time, to see how large they are."""


class Prepared(NamedTuple):
    """What a put batch does; the state has it already."""

    changes: Changes | None
    """To be encoded and appended; None for a batch that was appended before."""
    end_offset: int
    """Where the log ends after it; the put is acknowledged when that is durable."""
    now_ms: int
    """The time it was prepared at, which the log is to use as well."""

    @property
    def keys(self) -> int:
        """How many keys it changes, of a batch that has each key once."""
        if self.changes is None:
            return 0
        return int(np.count_nonzero(self.changes.kinds != UPDATE_BEFORE))


class KvTablet:
    """The key-value state of one bucket. Belongs to the worker thread where not said otherwise."""

    def __init__(self, table: KvTable, store: KvStore, value_bytes_max: int) -> None:
        self.table = table
        """Replaced from the event loop when the table is altered."""
        self.store = store
        self.fence: Fence = OPEN
        """Who may write; replaced from the event loop when the table's producers change."""
        self.undoing: Mapping[int, int] = {}
        """Producers whose changes are being undone, with their epochs; replaced likewise."""
        self.ids = Ids()
        """Numbers for the auto-increment column, filled from the event loop."""
        self._rows = store.row_count
        self._value_bytes_max = value_bytes_max
        self._next_offset = 0
        self._last_timestamp = 0
        self._writers = WriterState(0)
        self._settled = Settled(store.row_count)
        self.unflushed_bytes = 0
        """Bytes of changelog since the last flush began; whoever appends it adds to this."""
        self.on_flushed: Callable[[], None] = _nothing
        """Called in some thread when a flush has ended."""
        self._readable_by_all = False
        store.flush_wanted = self.flush
        self.failure: ZuflussError | None = None
        """Why nothing more can be written: the state is not what the log says."""

    @property
    def row_count(self) -> int | None:
        """Rows after the last prepared batch.

        None where the changelog has no before images: it does not tell whether a key is new, so
        the count could not be kept up over a restart.
        """
        return self._rows if self.table.before_images else None

    # ------------------------------------------------------------------------------------ writes

    def prepare(self, records: Bytes, targets: tuple[int, ...], mode: int, now_ms: int) -> Prepared:
        """Work out one put batch and apply it; raises what is wrong with it, and has done nothing.

        `targets` are the positions of the columns it writes, empty for all.
        """
        if self.failure is not None:
            raise self.failure
        table = self.table
        batch = _only_batch(records)
        table.schema_of(batch.schema_id)
        engine = table.engine(targets, mode)
        if self.fence is not OPEN or is_producer(batch.writer_id):
            self.fence.check(table, batch.writer_id, targets, self.undoing)
        now_ms = max(now_ms, self._last_timestamp)
        copy = self._writers.check((self._as_checked(batch),), now_ms)
        if copy is not None:
            return Prepared(None, copy[1], now_ms)
        if table.indexed:
            batch = batch._replace(rows=table.to_compacted(batch.rows, batch.schema_id))
        self._check_sizes(batch)
        hashes = hash_keys(batch.keys)
        groups = Groups(*group_keys(batch.keys, hashes))
        keys, hashes = batch.keys.take(groups.first), hashes[groups.first]
        old = self.store.get(keys, hashes)
        change = Change(table, batch, groups, old, engine, self.ids)
        changes = Changes(
            table.changelog, change.rows, change.kinds, batch.writer_id,
            batch.batch_sequence,
        )  # fmt: skip
        if change.merged is not None:
            self._check_size(longest(keys) + longest(change.merged))
        self._apply(keys, hashes, change.new_values(), changes, now_ms)
        return Prepared(changes, self._next_offset, now_ms)

    def _apply(
        self,
        keys: Slices,
        hashes: Positions,
        new: NewValues,
        changes: Changes,
        now_ms: int,
    ) -> None:
        """Take over the outcome. A failure from here on is the end of the bucket."""
        base = self._next_offset
        groups, values, more_rows = new
        try:
            self.store.put(keys.take(groups), hashes[groups], values, base)
        except BaseException as e:
            self.failure = ZuflussError(
                f"{self.table.info.path}: a write may be half applied ({e}); the bucket takes no "
                "more until the server is restarted",
                code=ErrorCode.KV_STORAGE_EXCEPTION,
            )
            raise self.failure from e
        self._next_offset = base + changes.offsets
        self._last_timestamp = now_ms
        written = None
        if changes.writer_id >= 0:
            end = self._next_offset
            written = Written(changes.writer_id, changes.sequence, base, end, now_ms)
            self._writers.record(*written)
        self._count(more_rows, written)

    def _count(self, more_rows: int, written: Written | None = None) -> None:
        self._rows += more_rows
        self._settled.add(self._next_offset, self._rows, written, self.store.horizon)

    def _as_checked(self, batch: KvBatch) -> CheckedBatch:
        return CheckedBatch(
            0, 0, 0, batch.schema_id, batch.count, 0, batch.writer_id, batch.batch_sequence
        )

    def _check_sizes(self, batch: KvBatch) -> None:
        self._check_size(longest(batch.keys) + longest(batch.rows) + SCHEMA_ID_BYTES)

    def _check_size(self, size: int) -> None:
        if size > self._value_bytes_max:
            raise RecordTooLargeError(
                f"a key with its row takes {size} bytes; at most {self._value_bytes_max} "
                "are allowed, see zufluss.kv.value.max-size"
            )

    # -------------------------------------------------------------------------------------- undo

    def begin_undo(self, writer: ProducerWriter, now_ms: int) -> Prepared:
        """Where the changelog ends, below which everything is that a producer may have to undo.

        Earlier epochs of it are fenced by now, and its present one while it is in `undoing`, so
        nothing of it is added any more. `ProducerStateError` if the present one has written here.
        """
        if self.failure is not None:
            raise self.failure
        self.fence.present(self.table, writer.writer_id, task=UNDO_TASK)
        for other in self._writers.producer_writers():
            if other.task != UNDO_TASK and other[:2] == writer[:2]:
                raise ProducerStateError(
                    f"{self.table.info.path}: epoch {writer.epoch} of producer {writer.number} has "
                    "written to this bucket; what earlier ones wrote is undone before that, or "
                    "never. Begin a new epoch"
                )
        return Prepared(None, self._next_offset, max(now_ms, self._last_timestamp))

    def undo(self, writer: ProducerWriter, step: Step, now_ms: int) -> Prepared:
        """Work out one step of an undo, as a put of the leader's own, and apply it.

        A step that finds everything as it should be takes no offset. `StepTooLargeError` if it
        has to be done in parts, because the rows of its keys have grown since.
        """
        if self.failure is not None:
            raise self.failure
        table, writer_id = self.table, writer.writer_id
        owner = self.fence.present(table, writer_id, task=UNDO_TASK)
        now_ms = max(now_ms, self._last_timestamp)
        keys = Slices.contiguous(*table.key.encode(step.rows))
        hashes = hash_keys(keys)
        self._check_step(keys, hashes)
        own = frozenset(c.id for c in table.schema.columns if owner.owns(c.id))
        work = undone(table, step, self.store.get(keys, hashes), own)
        if not len(work.kinds):
            return Prepared(None, self._next_offset, now_ms)
        sequence = self._writers.next_sequence(writer_id)
        changes = Changes(table.changelog, work.rows, work.kinds, writer_id, sequence)
        self._apply(keys, hashes, work.values, changes, now_ms)
        return Prepared(changes, self._next_offset, now_ms)

    def _check_step(self, keys: Slices, hashes: Positions) -> None:
        """Refuse a step of many keys before all their rows are in memory."""
        if keys.count == 1:
            return
        size = 0
        for begin in range(0, keys.count, STEP_KEYS):
            some = np.arange(begin, min(begin + STEP_KEYS, keys.count))
            stored = self.store.get(keys.take(some), hashes[some])
            size += int((stored.ends - stored.starts)[stored.starts != ABSENT].sum())
            if size > STORED_BYTES_MAX:
                raise StepTooLargeError(f"the rows of {keys.count} keys have {size} bytes and more")

    # ---------------------------------------------------------------------------------- recovery

    def recover(self, changelog: Log, earlier: Earlier | None = None) -> None:
        """Bring the state to the end of the log; nobody writes to it meanwhile.

        `earlier` is what there is of the changelog before the log. `CorruptRecordError` if the
        changelog begins after what was flushed: rows would be missing.
        """
        offset, start = self.store.flushed_offset, changelog_start(changelog, earlier)
        if offset < start or offset > changelog.log_end_offset:
            raise CorruptRecordError(
                f"the state of {self.table.info.path} ends at offset {offset}, its changelog has "
                f"{start} to {changelog.log_end_offset}; the rows between "
                "are lost. Restore the files from a backup, or drop the table"
            )
        self.replay(pieces(self.table, changelog, offset, earlier))
        self._next_offset = changelog.log_end_offset
        self._last_timestamp = changelog.last_timestamp
        self._writers = changelog.writers.copy()
        self.store.horizon = changelog.high_watermark
        self._settled.until(self.store.horizon)
        self._settled.recovered(self._writers, self._next_offset, self.store.flushed_offset)

    def replay(self, changes: Iterable[Piece]) -> None:
        """Apply changes that follow what the state has."""
        for piece in changes:
            self._next_offset = piece.end_offset
            self._replay(piece)
            self.store.horizon = piece.end_offset

    def _replay(self, piece: Piece) -> None:
        table = self.table
        keys = Slices.contiguous(*table.key.encode(piece.rows))
        hashes = hash_keys(keys)
        group, first = group_keys(keys, hashes)
        last = np.empty(len(first), np.int64)
        last[group] = np.arange(len(group))
        keys, hashes = keys.take(last), hashes[last]
        rows = table.codec_of(piece.schema_id).encode(piece.rows).take(last)
        rows.starts[piece.kinds[last] == DELETE] = ABSENT
        values = prefixed(rows, piece.schema_id, SCHEMA_ID_BYTES)
        self.store.put(keys, hashes, values, piece.base_offset)
        inserted = np.count_nonzero(piece.kinds == INSERT)
        self._count(int(inserted) - int(np.count_nonzero(piece.kinds == DELETE)))
        self.unflushed_bytes += piece.size

    # ------------------------------------------------------------------------------------- flush

    def flush_due(self, changelog_bytes: int) -> bool:
        """So much changelog has come since the last flush that recovery would take long."""
        return self.unflushed_bytes >= changelog_bytes and not self.store.flushing

    def flush(self, rests: Rests = NO_PUTS) -> None:
        """Begin to write what is durable to RocksDB, unless that is under way."""
        if not self.store.flushing:
            self.unflushed_bytes = 0
            horizon = self.store.horizon
            rows = self._settled.flush(horizon, self.store.flushed_offset)
            self.store.flush_begin(horizon, rows, done=self.on_flushed, rests=rests)

    def checkpoint(self, target: Path, wanted: int) -> Checkpoint | Future[KvState]:
        """Copy what is flushed up to `wanted`, at least, as hard links to a directory.

        If that cannot be yet, what has to end before this is tried again: a flush, or table files
        of an earlier version being written again.
        """
        store = self.store
        remove_left_overs(store.files, store.directory)
        if (waiting := self._flush_to(wanted)) is not None:
            return waiting
        state = store.checkpoint(target)
        counted = state.row_count if self.table.before_images else None
        writers = self._settled.writers_at(state.flushed_offset)
        made = Checkpoint(target, state, counted, self.ids.ranges, writers)
        if self._readable_by_all or made.readable_by_all():
            self._readable_by_all = True  # and so is what comes after
            return made
        log.info("kv_tables_rewritten", tablet=repr(store))
        self._readable_by_all = True
        return store.rewrite_begin()

    def pin(self, target: Path, wanted: int, rests: Rests = NO_PUTS) -> KvState | Future[KvState]:
        """As `checkpoint`, for readers on this server, who read table files of every version.

        Nothing is made if there are no rows. A flush that is needed for it rests as told.
        """
        if (waiting := self._flush_to(wanted, rests)) is not None:
            return waiting
        return self.store.pin(target)

    def _flush_to(self, wanted: int, rests: Rests = NO_PUTS) -> Future[KvState] | None:
        """The flush that has to end before everything below `wanted` is flushed, and no more is."""
        store = self.store
        store.flush_end()
        if not store.flushing and store.flushed_offset < wanted:
            self.flush(rests)
        return store.flush_under_way

    def close(self) -> None:
        """Flush, so that the next start has nothing to replay, and let go of everything."""
        horizon = self.store.horizon
        self.store.close(horizon, self._settled.until(horizon))

    def forget_expired_writers(self, now_ms: int) -> None:
        """Drop writers that have not written for long."""
        self._writers.forget_expired(now_ms)
        self._settled.forget_expired(now_ms)


def _only_batch(records: Bytes) -> KvBatch:
    batches = parse_kv_batches(records, 0, len(records))
    if len(batches) != 1:
        raise CorruptRecordError(
            f"a bucket entry has {len(batches)} batches; a put takes one, send several entries"
        )
    batch = batches[0]
    named, numbered = batch.writer_id >= 0, batch.batch_sequence >= 0
    if named != numbered or batch.writer_id < NO_WRITER_ID or batch.batch_sequence < NO_SEQUENCE:
        raise CorruptRecordError(
            f"writer id {batch.writer_id} with batch sequence {batch.batch_sequence}: both are 0 "
            "or more, or both are -1"
        )
    return batch


def _nothing() -> None:
    return
