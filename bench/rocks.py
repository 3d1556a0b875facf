"""RocksDB alone: what a store that keeps its rows there could do at best.

The rows of a batch are read in key order by one call and written by another, without write-ahead
log. Keys are sorted and made into Python objects before the clock runs; there is no server, no
check, no changelog and nobody who reads the old rows.
"""

from __future__ import annotations

import time
from pathlib import Path

from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

from bench.keyed import encoded_rows, every_key, keyed_rows, random_keys
from zufluss.model.table import TableInfo
from zufluss.record.slices import Positions

BLOCK_CACHE_BYTES = 256 << 20
WRITE_BUFFER_BYTES = 64 << 20
BLOOM_BITS = 10

Pairs = list[tuple[bytes, bytes]]


def _options() -> Options:
    table = BlockBasedOptions()
    table.set_bloom_filter(BLOOM_BITS, False)
    table.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    return options


class Rocks:
    """One database with the rows of a table."""

    def __init__(self, directory: Path, info: TableInfo, batch_rows: int) -> None:
        self.info = info
        self.batch_rows = batch_rows
        self.db = Rdict(str(directory), _options())
        self.no_log = WriteOptions()
        self.no_log.disable_wal = True
        self.seed = 0

    def load(self, keys: int) -> None:
        """Write each key once, and have it on disk."""
        ids = every_key(keys)
        for begin in range(0, keys, self.batch_rows):
            self._write(self._pairs(ids[begin : begin + self.batch_rows]))
        self.db.flush()

    def upsert(self, batches: int, keys: int) -> float:
        """Random upserts; rows per second."""
        work = []
        for _ in range(batches):
            self.seed += 1
            work.append(self._pairs(random_keys(self.batch_rows, keys, self.seed)))
        began = time.perf_counter()
        for pairs in work:
            self.db.get([key for key, _ in pairs])
            self._write(pairs)
        return batches * self.batch_rows / (time.perf_counter() - began)

    def close(self) -> None:
        """Close the files."""
        self.db.close()

    def _pairs(self, ids: Positions) -> Pairs:
        """Keys and rows in key order."""
        keys, rows = encoded_rows(self.info, keyed_rows(ids, self.seed))
        pairs = zip(keys.tolist(), rows.tolist(), strict=True)
        return sorted((key or b"", row or b"") for key, row in pairs)

    def _write(self, pairs: Pairs) -> None:
        batch = WriteBatch(raw_mode=True)
        for key, row in pairs:
            batch.put(key, row)
        self.db.write(batch, self.no_log)
