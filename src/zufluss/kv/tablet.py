"""One bucket of a primary-key table: a put, from its bytes to its changelog batch; undo; recovery.

    records → parse, checksum → fence, idempotence → stored rows of all keys at once
            → the merge engine decides; rows are validated → new state → changelog batch

`prepare` does all of this but the last step in the key-value worker thread, one batch at a time in
the order of arrival. A second thread encodes the changelog batch, since compressing it takes as
long as everything else. The event loop then appends the batch to the log, which is the write-ahead
log, and acknowledges the put when the log is durable. State is written under the log offset of its
batch and becomes visible with the high watermark, so no reader sees a row that a crash could take
back.

A tablet is one step ahead of its log: it knows the offsets and the writers' sequences of batches
that the loop has yet to append. That is sound because nobody else appends to this log, and because
after a failed append the bucket is opened again, from the log alone:

    state = flushed state in RocksDB + replay of the changelog from its offset

The flushed state may also be a snapshot from remote storage, and the changelog may begin there.

A refused batch changes nothing: every check comes before the first change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    StorageBackpressureError,
    ZuflussError,
)
from zufluss.kv.change import Groups, PutChange
from zufluss.kv.changelog import Changes
from zufluss.kv.cold.checkpoint import Checkpoint, remove_left_overs
from zufluss.kv.cold.state import KvState
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.hot.memtable import group_keys, hash_keys
from zufluss.kv.merge.base import DELETE, INSERT, UPDATE_BEFORE
from zufluss.kv.merge.gather import SCHEMA_ID_BYTES, NewValues, longest, prefixed
from zufluss.kv.merge.partial import Ids
from zufluss.kv.producer.fence import OPEN, Fence
from zufluss.kv.producer.undo import StepTooLargeError, UndoStep, undo_change
from zufluss.kv.replay import ChangelogPiece, EarlierChangelog, changelog_start, pieces
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.kv.settled import SettledBatch, SettledState
from zufluss.kv.store import KvStore, RowsTooLargeError
from zufluss.kv.table import KvTable
from zufluss.log.log import Log
from zufluss.log.writer_state import WriterState
from zufluss.model.producer import UNDO_TASK, ProducerWriter, is_producer
from zufluss.record.batch.check import CheckedBatch
from zufluss.record.batch.kv import KvBatch, parse_kv_batches
from zufluss.record.header import NO_SEQUENCE, NO_WRITER_ID
from zufluss.record.rows.codec import LocatedRows
from zufluss.record.slices import ABSENT, Bytes, Positions, Slices

log = structlog.get_logger(__name__)

STORED_BYTES_MAX: Final = 64 << 20
"""Bytes of the stored rows of a put, or of a step of an undo, at most."""

STORED_ROWS_MIN: Final = 4
"""Rows of the largest size that a put may read in any case."""


class PreparedPut(NamedTuple):
    """A put batch that the state contains already, and the log not yet."""

    changes: Changes | None
    """The changes to be encoded and appended; None if there is nothing to append."""
    end_offset: int
    """End of the log after the put, which is acknowledged when the log is durable up to there."""
    now_ms: int
    """Time of the put, which the log uses too."""
    deleted_rows: int | None = None
    """Number of rows that the put's deletes removed; None without deletes, or for a duplicate."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the changed rows, as they are stored."""
        if self.changes is None:
            return 0
        rows = self.changes.rows
        if isinstance(rows, LocatedRows):
            return int((rows.rows.ends - rows.rows.starts).sum())
        return int(rows.nbytes)

    @property
    def keys(self) -> int:
        """Number of changed keys, of a batch that has each key once."""
        if self.changes is None:
            return 0
        return int(np.count_nonzero(self.changes.kinds != UPDATE_BEFORE))


class KvTablet:
    """The key-value state of one bucket. Belongs to the worker thread unless noted otherwise."""

    def __init__(self, table: KvTable, store: KvStore, value_bytes_max: int) -> None:
        self.table = table
        """Replaced by the event loop when the table is altered."""
        self.store = store
        self.fence: Fence = OPEN
        """Decides who may write; replaced by the event loop when the table's producers change."""
        self.undoing: Mapping[int, int] = {}
        """Epochs of the producers whose changes are being undone; replaced by the event loop."""
        self.ids = Ids()
        """Numbers for the auto-increment column, added by the event loop."""
        self._rows = store.row_count
        self._value_bytes_max = value_bytes_max
        self._next_offset = store.flushed_offset
        self._last_timestamp = 0
        self._writers = WriterState(0)
        self._settled = SettledState(store.row_count)
        self.unflushed_bytes = 0
        """Bytes of changelog since the last flush began; the event loop adds what it appends."""
        self.on_flushed: Callable[[], None] = _nothing
        """Called in the flush thread when a flush has ended."""
        self._readable_by_all = False
        store.flush_wanted = self.flush
        self.failure: ZuflussError | None = None
        """Why the bucket takes no more writes: state and log may differ. None while they agree."""

    @property
    def row_count(self) -> int | None:
        """Rows after the last prepared batch.

        None if the changelog has no before images: such a changelog does not tell whether a key is
        new, so a restart would lose the count.
        """
        return self._rows if self.table.before_images else None

    # ------------------------------------------------------------------------------------ writes

    def prepare(
        self,
        records: Bytes,
        targets: tuple[int, ...],
        mode: int,
        now_ms: int,
        expiry_ms: int | None = None,
    ) -> PreparedPut:
        """Work out one put batch and apply it. A batch that is refused raises and changes nothing.

        `targets` are the positions of the columns that the batch writes, empty for all.
        `expiry_ms` is the time by which writers have expired, by default `now_ms`.
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
        expiry_ms = now_ms if expiry_ms is None else expiry_ms
        earlier = self._writers.check((self._as_checked(batch),), expiry_ms)
        if earlier is not None:
            return PreparedPut(None, earlier[1], now_ms)
        if table.indexed:
            batch = batch._replace(rows=table.to_compacted(batch.rows, batch.schema_id))
        self._check_sizes(batch)
        hashes = hash_keys(batch.keys)
        groups = Groups(*group_keys(batch.keys, hashes))
        keys, hashes = batch.keys.take(groups.first), hashes[groups.first]
        old = self._stored(keys, hashes)
        change = PutChange(table, batch, groups, old, engine, mode, self.ids)
        changes = Changes(
            table.changelog, change.rows, change.kinds, batch.writer_id,
            batch.batch_sequence,
        )  # fmt: skip
        if change.merged is not None:
            self._check_size(longest(keys) + longest(change.merged))
        return self._apply(
            keys, hashes, change.new_values(), changes, now_ms, change.ids_used, change.deleted_rows
        )

    def _stored(self, keys: Slices, hashes: Positions) -> Slices:
        """Return the stored rows of keys: a put reads them all, and may log them all.

        Raises `RecordTooLargeError` if they are too large together; one row never is.
        """
        one = keys.count == 1
        bytes_max = max(STORED_BYTES_MAX, STORED_ROWS_MIN * self._value_bytes_max)
        try:
            return self.store.get(keys, hashes, NEWEST if one else bytes_max)
        except RowsTooLargeError:
            pass  # as the cause of another error it would keep the rows in its frames
        raise RecordTooLargeError(
            f"{self.table.info.path}: the stored rows of the {keys.count} keys of a batch take "
            f"more than {bytes_max} bytes; send fewer keys in a batch"
        )

    def _apply(
        self,
        keys: Slices,
        hashes: Positions,
        new: NewValues,
        changes: Changes,
        now_ms: int,
        ids_used: int = 0,
        deleted_rows: int | None = None,
    ) -> PreparedPut:
        """Write the new state. A refusal for lack of memory changes nothing.

        Any other failure from here on fails the bucket: `failure` is set.
        """
        base = self._next_offset
        groups, values, more_rows = new
        try:
            self.store.put(keys.take(groups), hashes[groups], values, base)
            self._next_offset = base + changes.offsets
            self._last_timestamp = now_ms
            batch = None
            if changes.writer_id >= 0:
                end = self._next_offset
                batch = SettledBatch(changes.writer_id, changes.sequence, base, end, now_ms)
                self._writers.record(*batch)
            self._count(more_rows, batch)
            self.ids.use(ids_used)
            return PreparedPut(changes, self._next_offset, now_ms, deleted_rows)
        except (StorageBackpressureError, RecordTooLargeError):
            raise  # the store has changed nothing
        except BaseException as e:
            self.failure = ZuflussError(
                f"{self.table.info.path}: a write may be half applied ({e!r}); the server opens "
                "the bucket again from its log, try again later",
                code=ErrorCode.KV_STORAGE_EXCEPTION,
            )
            raise self.failure from e

    def _count(self, more_rows: int, batch: SettledBatch | None = None) -> None:
        self._rows += more_rows
        self._settled.add(self._next_offset, self._rows, batch, self.store.horizon)

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

    def begin_undo(self, writer: ProducerWriter, now_ms: int) -> PreparedPut:
        """Return the end of the changelog: an undo of a producer's changes reads up to there.

        Earlier epochs of the producer are fenced, and its present one while it is in `undoing`, so
        the producer adds no more changes. Raises `ProducerStateError` if its present epoch has
        written to this bucket.
        """
        if self.failure is not None:
            raise self.failure
        self.fence.present(self.table, writer.writer_id, task=UNDO_TASK)
        for other in self._writers.producer_writers():
            if other.task != UNDO_TASK and other[:2] == writer[:2]:
                raise ProducerStateError(
                    f"{self.table.info.path}: epoch {writer.epoch} of producer {writer.number} has "
                    "written to this bucket; changes of earlier epochs are undone before that, "
                    "or never. Begin a new epoch"
                )
        return PreparedPut(None, self._next_offset, max(now_ms, self._last_timestamp))

    def undo(self, writer: ProducerWriter, step: UndoStep, now_ms: int) -> PreparedPut:
        """Work out one step of an undo, as a put of the leader, and apply it.

        A step that changes no row takes no offset. Raises `StepTooLargeError` if the step has to
        be done in parts, because the stored rows of its keys are too large.
        """
        if self.failure is not None:
            raise self.failure
        table, writer_id = self.table, writer.writer_id
        owner = self.fence.present(table, writer_id, task=UNDO_TASK)
        now_ms = max(now_ms, self._last_timestamp)
        keys = Slices.contiguous(*table.key.encode(step.rows))
        hashes = hash_keys(keys)
        own = frozenset(c.id for c in table.schema.columns if owner.owns(c.id))
        try:
            change = undo_change(table, step, self._stored(keys, hashes), own)
        except RecordTooLargeError as e:
            raise StepTooLargeError(e.message) from e
        if not len(change.kinds):
            return PreparedPut(None, self._next_offset, now_ms)
        sequence = self._writers.next_sequence(writer_id)
        changes = Changes(table.changelog, change.rows, change.kinds, writer_id, sequence)
        try:
            return self._apply(keys, hashes, change.values, changes, now_ms)
        except RecordTooLargeError as e:
            if keys.count == 1:
                raise
            raise StepTooLargeError(e.message) from e

    # ---------------------------------------------------------------------------------- recovery

    def recover(self, changelog: Log, earlier: EarlierChangelog | None = None) -> None:
        """Replay the changelog up to the end of the log; nobody writes to it meanwhile.

        `earlier` is the part of the changelog before the log. Raises `CorruptRecordError` if the
        changelog begins after the end of the state: changes would be missing.
        """
        self.replay(self.missing(changelog, earlier))
        self.lead(changelog)

    def missing(
        self, changelog: Log, earlier: EarlierChangelog | None = None
    ) -> Iterator[ChangelogPiece]:
        """The changes from the end of the state to the end of the log; raises as `recover`."""
        offset, start = self._next_offset, changelog_start(changelog, earlier)
        if offset < start or offset > changelog.log_end_offset:
            raise CorruptRecordError(
                f"the state of {self.table.info.path} ends at offset {offset}, its changelog has "
                f"{start} to {changelog.log_end_offset}; the changes between "
                "are lost. Restore the files from a backup, or drop the table"
            )
        return pieces(self.table, changelog, offset, earlier)

    def lead(self, changelog: Log) -> None:
        """Take puts from here on: the state is that of the end of the log."""
        self._next_offset = changelog.log_end_offset
        self._last_timestamp = changelog.last_timestamp
        self._writers = changelog.writers.copy()
        self.store.horizon = changelog.high_watermark
        self._settled.until(self.store.horizon)
        self._settled.recovered(self._writers, self._next_offset, self.store.flushed_offset)

    def replay(self, changes: Iterable[ChangelogPiece]) -> None:
        """Apply changes that follow the present state."""
        for piece in changes:
            self.apply(piece)

    @property
    def applied_offset(self) -> int:
        """Every change below this offset is in the state."""
        return self._next_offset

    def apply(self, piece: ChangelogPiece, *, waits: bool = True) -> None:
        """Apply a piece of a changelog that follows the present state.

        With `waits` for as long as it takes until there is memory. Without,
        `StorageBackpressureError` says that there is none at present; nothing has changed then.
        """
        before, self._next_offset = self._next_offset, piece.end_offset
        try:
            self._replay(piece, waits=waits)
        except (StorageBackpressureError, RecordTooLargeError):
            self._next_offset = before
            raise
        self.store.horizon = piece.end_offset

    def _replay(self, piece: ChangelogPiece, *, waits: bool) -> None:
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
        self.store.put(keys, hashes, values, piece.base_offset, replay=waits)
        inserted = np.count_nonzero(piece.kinds == INSERT)
        self._count(int(inserted) - int(np.count_nonzero(piece.kinds == DELETE)))
        self.unflushed_bytes += piece.size

    # ------------------------------------------------------------------------------------- flush

    def flush_due(self, changelog_bytes: int) -> bool:
        """Whether this much changelog came since the last flush, and none is under way."""
        return self.unflushed_bytes >= changelog_bytes and not self.store.flushing

    def flush(self, rests: Rests = NO_PUTS) -> None:
        """Begin to write durable changes to RocksDB, unless a flush is under way."""
        if not self.store.flushing:
            horizon = self.store.horizon
            rows = self._settled.flush(horizon, self.store.flushed_offset)
            self.store.flush_begin(horizon, rows, done=self.on_flushed, rests=rests)
            self.unflushed_bytes = 0

    def checkpoint(self, target: Path, wanted: int) -> Checkpoint | Future[KvState]:
        """Copy the cold tier, flushed at least up to `wanted`, as hard links to a directory.

        Returns a future if a flush, or writing table files of an earlier version again, has to end
        first; the caller then tries again.
        """
        store = self.store
        remove_left_overs(store.files, store.directory)
        if (waiting := self._flush_to(wanted)) is not None:
            return waiting
        state = store.checkpoint(target)
        counted = state.row_count if self.table.before_images else None
        writers = self._settled.writers_at(state.flushed_offset)
        checkpoint = Checkpoint(target, state, counted, self.ids.ranges, writers)
        if self._readable_by_all or checkpoint.readable_by_all():
            self._readable_by_all = True  # later flushes write the present format
            return checkpoint
        log.info("kv_tables_rewritten", tablet=repr(store))
        self._readable_by_all = True
        return store.rewrite_begin()

    def pin(self, target: Path, wanted: int, rests: Rests = NO_PUTS) -> KvState | Future[KvState]:
        """Like `checkpoint`, for readers on this server, which read table files of every version.

        Creates no directory if there are no rows. A flush for it rests as `rests` says.
        """
        if (waiting := self._flush_to(wanted, rests)) is not None:
            return waiting
        return self.store.pin(target)

    def _flush_to(self, wanted: int, rests: Rests = NO_PUTS) -> Future[KvState] | None:
        """Return the flush that has to end before the files hold a state at `wanted` or later."""
        store = self.store
        store.flush_end()
        if not store.flushing and store.flushed_offset < wanted:
            self.flush(rests)
        return store.flush_under_way

    def close(self) -> None:
        """Flush, so that the next start replays nothing, and release memory and files."""
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
