"""The cold tier of one bucket: RocksDB, read and fed by whole tables, never written row by row.

A database is opened when it is first needed, since each costs files and memory and most buckets of
a server are small. It has no write-ahead log and no memtable worth the name: rows arrive as sorted
table files that the flush process wrote (`flush_process.py`) and are taken over whole. All of that
is durable when `ingest` returns.

Checkpoints go to remote storage, where Fluss's Java clients open them with RocksDB 6.20.3. That
reads no table file later than block format 5, and no checksum later than CRC-32C, so everything is
written like this, and what an earlier version of ours wrote otherwise is written again before it
leaves the server (`readable_by_all`, `ColdTier.rewrite`).

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
"""Blocks kept unpacked, for all databases of the process together."""

BLOOM_BITS = 10
"""Bits per key of the filter that answers most questions for keys that are not there."""

OPEN_FILES_MAX = 256
"""Table files one database keeps open."""

FORMAT_VERSION = 5
"""Of the blocks of table files; the last that RocksDB 6.20.3 reads."""

TABLE_SUFFIX = ".sst"
"""Names of table files end like this; a name is given once in the life of a database."""

_CRC32C = 1
_FOOTER_BYTES = 53
_FOOTER_VERSION = struct.Struct("<I")
_VERSION_AT = _FOOTER_BYTES - 12


@cache
def _block_cache() -> Cache:
    return Cache(BLOCK_CACHE_BYTES)


def table_options() -> Options:
    """How databases and table files are made."""
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

    The footer is the last 53 bytes: the checksum type first (1 is CRC-32C), then block handles, the
    format version (u32, little-endian) and 8 bytes that say that it is a table file.
    """
    with table.open("rb") as file:
        file.seek(-_FOOTER_BYTES, os.SEEK_END)
        footer = file.read()
    (version,) = _FOOTER_VERSION.unpack_from(footer, _VERSION_AT)
    return bool(version <= FORMAT_VERSION and footer[0] <= _CRC32C)


def check_opens(directory: Path) -> None:
    """Refuse a directory that is no whole database: `CorruptRecordError`."""
    options = table_options()
    try:
        Rdict(str(directory), options, {"default": options}, AccessType.read_only()).close()
    except Exception as e:
        raise CorruptRecordError(f"{directory} is no whole database: {e}") from e


class ColdTier:
    """The database of a bucket. Any thread may call it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Where its files are; missing until the first flush."""
        self.empty = not directory.is_dir()
        """Nothing was ever flushed."""
        self._opened: Rdict | None = None
        self._lock = threading.Lock()

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """The values of keys, which are best given in order; one call for all, without the GIL."""
        found = self._open().get([*keys])
        assert isinstance(found, list)
        return found

    def ingest(self, table: Path) -> None:
        """Take over a table file; its rows hide those of all earlier ones."""
        options = IngestExternalFileOptions()
        options.set_move_files(True)
        self._open().ingest_external_file([str(table)], options)
        self.empty = False

    def keys_from(self, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
        """The first keys in [low, high), in order."""
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
        """Make a copy of the database as it is; its table files are hard links."""
        Checkpoint(self._open()).create_checkpoint(str(target))

    def rewrite(self) -> None:
        """Write every table file again, in the present format. Takes as long as it takes."""
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
