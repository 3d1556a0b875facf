"""The metrics of a tablet server, read when somebody looks (`obs/server.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress

from zufluss.errors import InvalidTableError
from zufluss.kv.cold.open_databases import OPEN
from zufluss.log.holds import Holder
from zufluss.obs import metrics
from zufluss.obs.metrics import ReadSamples, Sample
from zufluss.tablet.buckets import TableState
from zufluss.tablet.rates import records
from zufluss.tablet.server import TabletServer
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.standby.standbys import Standbys


def tablet_samples(tablet: TabletServer) -> ReadSamples:
    """Buckets and logs of a tablet server."""

    def read() -> Iterable[Sample]:
        tables = tablet.buckets.tables.values()
        yield Sample(metrics.BUCKETS, sum(len(table.replicas) for table in tables))
        refused = [*tablet.buckets.refused()]
        recovering, retries = sum(each.recovering for each in refused), tablet.assignments.retries
        yield Sample(metrics.BUCKETS_REFUSED, len(refused) - recovering)
        yield Sample(metrics.BUCKETS_RECOVERING, recovering)
        yield Sample(metrics.BUCKET_RECOVERY_ATTEMPTS, retries.attempts)
        yield Sample(metrics.BUCKETS_RECOVERED, retries.opened)
        yield Sample(metrics.LOG_SIZE_BYTES, sum(each.size for each in tablet.logs.logs))
        yield from _remote_log_samples(tablet)
        if tablet.shared is not None:
            yield from _shared_log_samples(tablet.shared)
        if tablet.standbys is not None:
            yield from _standby_samples(tablet.standbys)
        yield Sample(metrics.LOOKUPS_FORWARDED, tablet.forwarding.answered)
        yield Sample(metrics.LOOKUPS_NOT_FORWARDED, tablet.forwarding.unanswered)
        yield from _memory_samples(tablet)
        yield from _scan_samples(tablet)
        yield Sample(metrics.PRODUCER_PUTS_FENCED, tablet.put.fenced)
        yield Sample(metrics.UNDO_KEYS, tablet.undos.keys_total)
        yield from _table_samples(tablet)
        for table in tables:
            if table.settings.tiered:
                yield Sample(metrics.UNTIERED_ROWS, _untiered(table), tuple(table.info.path))

    return read


def _table_samples(tablet: TabletServer) -> Iterable[Sample]:
    """Buckets, rows, records and bytes of each table."""
    for table_id, table in tablet.buckets.tables.items():
        labels, replicas = tuple(table.info.path), table.replicas.values()
        yield Sample(metrics.TABLE_BUCKETS, len(replicas), labels)
        yield Sample(metrics.TABLE_RECORDS, records(table), labels)
        yield Sample(metrics.TABLE_RECORD_RATE, tablet.rates.of(table_id), labels)
        yield Sample(metrics.TABLE_LOG_SIZE_BYTES, sum(r.log.size for r in replicas), labels)
        with suppress(InvalidTableError):  # its rows are not counted
            yield Sample(metrics.TABLE_ROWS, sum(r.row_count() for r in replicas), labels)


def _memory_samples(tablet: TabletServer) -> Iterable[Sample]:
    """Memory and open files of primary-key buckets."""
    yield Sample(metrics.KV_DATABASE_DESCRIPTORS, OPEN.descriptors)
    memory = tablet.kv.memory
    if memory is not None:
        arena = memory.arena
        in_use = arena.budget - arena.segment_bytes - arena.free_bytes
        yield Sample(metrics.KV_MEMORY_BYTES, in_use)
        yield Sample(metrics.KV_MEMORY_BUDGET_BYTES, arena.budget)
        yield Sample(metrics.KV_MEMORY_DIRTY_BYTES, memory.dirty_bytes)
        yield Sample(metrics.KV_MEMORY_REFUSALS, memory.refusals)


def _scan_samples(tablet: TabletServer) -> Iterable[Sample]:
    """The scans of each table that has or had some."""
    scans = tablet.scans
    ages: dict[int, list[float]] = {}
    for pin in scans.pins:
        ages.setdefault(pin.bucket.table_id, []).append(scans.pins.age_seconds(pin))
    for table_id, table in tablet.buckets.tables.items():
        counts, pins = scans.counts.get(table_id), ages.get(table_id, [])
        if counts is None and not pins:
            continue
        labels = tuple(table.info.path)
        yield Sample(metrics.KV_PINS, len(pins), labels)
        yield Sample(metrics.KV_PIN_OLDEST_AGE_SECONDS, max(pins, default=0.0), labels)
        yield Sample(metrics.KV_SCAN_ROWS, 0 if counts is None else counts.rows, labels)
        yield Sample(metrics.KV_SCAN_BYTES, 0 if counts is None else counts.bytes, labels)


def _remote_log_samples(tablet: TabletServer) -> Iterable[Sample]:
    size = waiting = 0
    for replica in tablet.buckets.replicas():
        if replica.remote is not None:
            size += sum(segment.log.size for segment in replica.remote.manifest.segments)
            waiting += len(replica.log.closed_from(replica.remote.copied_to))
    yield Sample(metrics.REMOTE_LOG_SIZE_BYTES, size)
    yield Sample(metrics.REMOTE_LOG_WAITING_SEGMENTS, waiting)
    yield Sample(metrics.REMOTE_LOG_FAILURES, tablet.remote_logs.failures)


def _shared_log_samples(shared: SharedHost) -> Iterable[Sample]:
    counts, waiting, live = shared.counts, shared.waiting, shared.live
    written = () if live is None else live.writer.written
    yield Sample(metrics.WAL_OBJECTS, counts.objects)
    yield Sample(metrics.WAL_BYTES, counts.bytes)
    yield Sample(metrics.WAL_PUT_FAILURES, counts.failures)
    yield Sample(metrics.WAL_WAITING_BYTES, waiting.bytes)
    yield Sample(metrics.WAL_WAITING_SECONDS, waiting.seconds)
    yield Sample(metrics.WAL_RETAINED_BYTES, sum(each.length for each in written))
    yield Sample(metrics.WAL_SESSIONS_FENCED, shared.fenced)


def _standby_samples(standbys: Standbys) -> Iterable[Sample]:
    yield Sample(metrics.STANDBY_BUCKETS, len(standbys))
    yield Sample(metrics.STANDBY_BUCKETS_IN_SYNC, standbys.in_sync)
    for leader, seconds in standbys.lags().items():
        if math.isfinite(seconds):
            yield Sample(metrics.STANDBY_LAG_SECONDS, seconds, (str(leader),))
    yield Sample(metrics.STANDBYS_PROMOTED, standbys.promoted)


def _untiered(table: TableState) -> int:
    total = 0
    for replica in table.replicas.values():
        log = replica.log
        start = log.log_start_offset if replica.remote is None else 0
        untiered_from = log.holds.floor(log.high_watermark, Holder.LAKE)
        total += max(log.high_watermark - max(untiered_from, start), 0)
    return total
