"""The cold tier of one bucket: a RocksDB database that grows by whole table files.

A database is opened when it is first needed, since each costs files and memory and most buckets of
a server are small. RocksDB's write-ahead log and memtable are not used: the flush process writes
sorted table files (`flush_process.py`), which the database takes over whole. They are durable when
`ingest` returns.

Checkpoints go to remote storage, where Fluss's Java clients open them with RocksDB 6.20.3. That
version reads table files up to block format 5 and checksums up to CRC-32C, so all files are written
like this. Files that an earlier version of zufluss wrote otherwise are written again before they
leave the server (`readable_by_all`, `ColdTier.rewrite`).

The flush process imports this module too, so it must not import numba or pyarrow.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    BottommostLevelCompaction,
    Cache,
    Checkpoint,
    ChecksumType,
    CompactOptions,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
)

from zufluss.errors import CorruptRecordError

BLOCK_CACHE_BYTES = 64 << 20
"""Size of the cache of unpacked blocks, which all databases of the process share."""

BLOOM_BITS = 10
"""Bits per key of the Bloom filter, which answers most lookups of missing keys."""

OPEN_FILES_MAX = 256
"""Table files one database keeps open."""

FORMAT_VERSION = 5
"""Block format of table files: the last that RocksDB 6.20.3 reads."""

TABLE_SUFFIX = ".sst"
"""Suffix of table files. A database never uses a name twice."""

_CRC32C = 1
_FOOTER_BYTES = 53
_FOOTER_VERSION = struct.Struct("<I")
_VERSION_AT = _FOOTER_BYTES - 12


@cache
def _block_cache() -> Cache:
    return Cache(BLOCK_CACHE_BYTES)


def table_options() -> Options:
    """Return the options of databases and table files."""
    table = BlockBasedOptions()
    table.set_bloom_filter(BLOOM_BITS, False)
    table.set_block_cache(_block_cache())
    table.set_format_version(FORMAT_VERSION)
    table.set_checksum_type(ChecksumType.crc32c())
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(64 * 1024)
    options.set_max_open_files(OPEN_FILES_MAX)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    return options


def readable_by_all(table: Path) -> bool:
    """Whether RocksDB 6.20.3 reads a table file, by its footer.

    The footer is the last 53 bytes: checksum type (1 is CRC-32C), block handles, format version
    (u32, little-endian), 8 bytes of magic number.
    """
    with table.open("rb") as file:
        file.seek(-_FOOTER_BYTES, os.SEEK_END)
        footer = file.read()
    (version,) = _FOOTER_VERSION.unpack_from(footer, _VERSION_AT)
    return bool(version <= FORMAT_VERSION and footer[0] <= _CRC32C)


def check_opens(directory: Path) -> None:
    """Raise `CorruptRecordError` if a directory is not a whole database."""
    options = table_options()
    try:
        Rdict(str(directory), options, {"default": options}, AccessType.read_only()).close()
    except Exception as e:
        raise CorruptRecordError(f"{directory} is not a whole database: {e}") from e


class ColdTier:
    """The database of a bucket. Any thread may call it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Directory of the database; missing until the first flush."""
        self.empty = not directory.is_dir()
        """Nothing was ever flushed."""
        self._opened: Rdict | None = None
        self._lock = threading.Lock()

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of keys, in one call without the GIL; sorted keys are fastest."""
        values = self._open().get([*keys])
        assert isinstance(values, list)
        return values

    def ingest(self, table: Path) -> None:
        """Take over a table file; its rows replace those of earlier files."""
        options = IngestExternalFileOptions()
        options.set_move_files(True)
        self._open().ingest_external_file([str(table)], options)
        self.empty = False

    def keys_from(self, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
        """Return the first keys in [low, high), in order."""
        if self.empty:
            return []
        return list(islice(self._keys(low, high), limit))

    def _keys(self, low: bytes, high: bytes | None) -> Iterator[bytes]:
        for key in self._open().keys(from_key=low):
            assert isinstance(key, bytes)
            if high is not None and key >= high:
                return
            yield key

    def checkpoint(self, target: Path) -> None:
        """Copy the database to a new directory; table files are hard links."""
        Checkpoint(self._open()).create_checkpoint(str(target))

    def rewrite(self) -> None:
        """Write every table file again in the present format. Blocks, maybe for long."""
        options = CompactOptions()
        options.set_bottommost_level_compaction(BottommostLevelCompaction.force())
        self._open().compact_range(None, None, options)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _open(self) -> Rdict:
        with self._lock:
            if self._opened is None:
                options = table_options()
                self._opened = Rdict(str(self.directory), options, {"default": options})
            return self._opened
