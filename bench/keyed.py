"""Primary-key tables for the benchmarks: rows by key, put and lookup frames, the state alone.

Everything is made from columns at once; frames of a million rows take a second or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.work import TEN_COLUMNS, ten_columns
from zufluss.kv.memory import KvMemory
from zufluss.kv.store import KvStore
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.log.files import Files
from zufluss.model.table import TableBucket, TableInfo
from zufluss.record.batch.kv import build_kv_batch
from zufluss.record.keys.encoding import KeyEncoder, bucket_assign
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Bytes, Positions, Slices
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import pack_request
from zufluss.wire.hot.put import put_request

KEY = ("id",)
STEP_ROWS = 200_000
"""Rows that are encoded at a time."""
TIMEOUT_MS = 30_000
VALUE_BYTES_MAX = 1 << 20

Batch = tuple[int, bytes]
"""The bucket and the bytes of a KV batch."""


def keyed_rows(ids: Positions, seed: int = 0) -> pa.RecordBatch:
    """Rows of ten columns, 74 bytes each in the store, under the given keys."""
    columns = ten_columns(len(ids), seed).columns
    return pa.record_batch([pa.array(ids), *columns[1:]], schema=TEN_COLUMNS)


def every_key(count: int) -> Positions:
    """Each key once, in an order that does not help anybody."""
    return np.random.default_rng(count).permutation(count)


def random_keys(count: int, keys: int, seed: int) -> Positions:
    """Some of the keys, any of them perhaps several times."""
    return np.random.default_rng(seed).integers(0, keys, count)


def encoded_rows(info: TableInfo, rows: pa.RecordBatch) -> tuple[Slices, Slices]:
    """The keys and rows as they are sent and stored."""
    keys = Slices.contiguous(*KeyEncoder.of_stored_key(info).encode(rows))
    return keys, RowCodec(info.schema).encode(rows)


def kv_batches(info: TableInfo, ids: Positions, batch_rows: int, seed: int = 0) -> list[Batch]:
    """Rows of these keys as batches, each for the bucket its keys belong to, buckets in turn."""
    batches: list[Batch] = []
    for begin in range(0, len(ids), STEP_ROWS):
        rows = keyed_rows(ids[begin : begin + STEP_ROWS], seed + begin)
        keys, values = encoded_rows(info, rows)
        for bucket, chosen in _pieces(bucket_assign(rows, info), info.bucket_count, batch_rows):
            batch = build_kv_batch(info.schema_id, keys.take(chosen), values.take(chosen))
            batches.append((bucket, bytes(batch)))
    return batches


def _pieces(buckets: np.ndarray, count: int, size: int) -> Iterator[tuple[int, Positions]]:
    """Positions of the rows of each bucket in pieces of a size, buckets in turn."""
    places = [np.flatnonzero(buckets == bucket) for bucket in range(count)]
    for begin in range(0, max(map(len, places)), size):
        for bucket, place in enumerate(places):
            if begin < len(place):
                yield bucket, place[begin : begin + size]


def put_frames(info: TableInfo, batches: Sequence[Batch]) -> list[bytes]:
    """A request per batch."""
    frames = []
    for i, (bucket, batch) in enumerate(batches):
        entry = (TableBucket(info.table_id, None, bucket), batch)
        body = put_request((), -1, info.table_id, TIMEOUT_MS, [entry])
        frames.append(pack_request(ApiKey.PUT_KV, 0, i, b"".join(body)))
    return frames


def lookup_frames(info: TableInfo, ids: Positions, keys_each: int) -> list[bytes]:
    """Requests for `keys_each` keys of one bucket, buckets in turn; the last of each has fewer."""
    wanted = pa.record_batch([pa.array(ids)], names=[*KEY])
    data, offsets = KeyEncoder.of_stored_key(info).encode(wanted)
    joined, ends = data.tobytes(), offsets.tolist()
    frames: list[bytes] = []
    for bucket, chosen in _pieces(bucket_assign(wanted, info), info.bucket_count, keys_each):
        keys = [joined[ends[i] : ends[i + 1]] for i in chosen.tolist()]
        entry = m.PbLookupReqForBucket(bucket_id=bucket, keys=keys)
        request = m.LookupRequest(table_id=info.table_id, buckets_req=[entry])
        frames.append(pack_request(ApiKey.LOOKUP, 0, len(frames), request.SerializeToString()))
    return frames


class Pipeline:
    """What a put costs without a server: one bucket's state, in this process and thread.

    Parse, check, find, decide, changelog batch, new state: everything the key-value worker of a
    server does, with nothing around it, no socket, no log, no other thread, no flush.
    """

    def __init__(self, directory: Path, info: TableInfo, memory_bytes: int) -> None:
        self.memory = KvMemory(memory_bytes, lambda free: free())
        store = KvStore.open(directory, self.memory, Files())
        self.tablet = KvTablet(KvTable(info, {info.schema_id: info.schema}), store, VALUE_BYTES_MAX)

    def put(self, batches: Sequence[Bytes]) -> None:
        """Work out batches; each is durable at once, as far as the state is concerned."""
        tablet = self.tablet
        for batch in batches:
            prepared = tablet.prepare(batch, (), 0, 0)
            assert prepared.changes is not None
            prepared.changes.encode()
            tablet.store.horizon = prepared.end_offset

    def close(self) -> None:
        """Give the memory back; nothing is written."""
        self.tablet.store.abandon()
        self.memory.close()
