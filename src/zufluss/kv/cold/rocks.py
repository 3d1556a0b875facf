"""The cold tier of one bucket: a RocksDB database that grows by whole table files.

A database is opened when it is needed, since each costs files and memory and most buckets of a
server are small; it is closed again when others need its descriptors (`open_databases.py`).
RocksDB's write-ahead log and memtable are not used: the flush process writes sorted table files
(`flush_process.py`), which the database takes over whole. They are durable when `ingest` returns.

RocksDB writes a few files whenever it opens a database, which a full disk does not allow. Readers
need none of these files: for them the database is then opened for reading only, until the next
change.

Checkpoints go to remote storage, where Fluss's Java clients open them with RocksDB 6.20.3. That
version reads table files up to block format 5 and checksums up to CRC-32C, so all files are written
like this. Files that an earlier version of zufluss wrote otherwise are written again before they
leave the server (`readable_by_all`, `ColdTier.rewrite`).

The flush process imports this module too, so it must not import numba or pyarrow.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    BottommostLevelCompaction,
    Cache,
    Checkpoint,
    ChecksumType,
    CompactOptions,
    DBCompressionType,
    Env,
    IngestExternalFileOptions,
    Options,
    Rdict,
)

from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    StorageBackpressureError,
    ZuflussError,
)
from zufluss.kv.cold.open_databases import OPEN, OpenDatabases, descriptors_max
from zufluss.threads import check_start

T = TypeVar("T")

BLOCK_CACHE_BYTES = 64 << 20
"""Size of the cache of unpacked blocks, which all databases of the process share."""

BLOOM_BITS = 10
"""Bits per key of the Bloom filter, which answers most lookups of missing keys."""

OPEN_FILES_MAX, OPEN_FILES_MIN = 256, 20
"""Table files one database keeps open; RocksDB takes fewer than the minimum for an error."""

FORMAT_VERSION = 5
"""Block format of table files: the last that RocksDB 6.20.3 reads."""

TABLE_SUFFIX = ".sst"
"""Suffix of table files. A database never uses a name twice."""

_NO_DESCRIPTOR = os.strerror(errno.EMFILE)
_NO_SPACE = os.strerror(errno.ENOSPC)
_LEFT_OPEN = "lock hold by current process"
"""RocksDB's error for a database that another object of this process has open."""
_IO_ERROR = "IO error"
"""RocksDB's errors are texts; those of the disk begin with this one."""
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
    options.set_max_open_files(_open_files_max())
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    return options


def start_rocksdb_threads() -> None:
    """Start the threads that all databases of the process share.

    Otherwise the first database starts them, and a failure then ends the process.
    """
    environment = Env()
    environment.set_low_priority_background_threads(1)
    environment.set_high_priority_background_threads(1)


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

    def __init__(self, directory: Path, databases: OpenDatabases = OPEN) -> None:
        self.directory = directory
        """Directory of the database; missing until the first flush."""
        self.empty = not directory.is_dir()
        """Nothing was ever flushed."""
        self._databases = databases
        self._opened: Rdict | None = None
        self._tables = -1
        """Table files that are open at most, −1 if they have to be counted."""
        self._read_only = False
        """The open database takes no changes."""
        self._users = 0
        """Calls that are using the open database."""
        self._lock = threading.Condition(threading.Lock())
        """Guards the fields above; notified when the last call that uses the database has ended."""

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of keys, in one call without the GIL; sorted keys are fastest."""
        values = self._use(lambda database: database.get([*keys]))
        assert isinstance(values, list)
        return values

    def ingest(self, table: Path) -> None:
        """Take over a table file; its rows replace those of earlier files."""
        options = IngestExternalFileOptions()
        options.set_move_files(True)
        self._change(lambda database: database.ingest_external_file([str(table)], options))
        self.empty = False

    def keys_from(self, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
        """Return the first keys in [low, high), in order."""
        if self.empty:
            return []
        return self._use(lambda database: list(islice(_keys(database, low, high), limit)))

    def checkpoint(self, target: Path) -> None:
        """Copy the database to a new directory; table files are hard links."""
        self._change(lambda database: Checkpoint(database).create_checkpoint(str(target)))

    def rewrite(self) -> None:
        """Write every table file again in the present format. Blocks, maybe for long."""
        options = CompactOptions()
        options.set_bottommost_level_compaction(BottommostLevelCompaction.force())
        self._change(lambda database: database.compact_range(None, None, options))

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._close()
        self._databases.closed(self)

    def close_if_idle(self) -> bool:
        """Close the database unless somebody uses it; return whether it is closed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._users:
                self._close()
            return self._opened is None
        finally:
            self._lock.release()

    def _change(self, work: Callable[[Rdict], T]) -> T:
        """Do as `_use`. A failure closes the database: RocksDB refuses all changes after some."""
        self._tables = -1
        try:
            return self._use(work, changes=True)
        except Exception:
            self.close_if_idle()
            raise

    def _use(self, work: Callable[[Rdict], T], *, changes: bool = False) -> T:
        """Run something with the open database.

        Raises `StorageBackpressureError` if there are no descriptors, for it or its table files,
        and a retriable error of the code KV_STORAGE_EXCEPTION if the disk fails or is full. A
        bucket that was given up may have left its database open, because memory ran out when it
        was to be closed; nobody uses it, so it is closed like the idle ones.
        """
        try:
            return self._try(work, changes)
        except Exception as e:
            if _NO_DESCRIPTOR not in str(e) and _LEFT_OPEN not in str(e):
                raise self._typed(e) from e
        self._databases.close_all_idle()
        try:
            return self._try(work, changes)
        except Exception as e:
            raise self._typed(e) from e

    def _typed(self, problem: Exception) -> Exception:
        """Return the error for a problem that RocksDB, or the work with it, reports."""
        if _NO_DESCRIPTOR in str(problem):
            return StorageBackpressureError(
                f"{self.directory} could not be opened: the process has no descriptor left "
                f"({problem}); try again after a pause, or raise the limit of open files of the "
                "server"
            )
        if str(problem).startswith(_IO_ERROR):
            return ZuflussError(
                f"{self.directory} cannot be used ({problem}); try again after a pause. If it "
                "lasts, free space on the disk, or look for its errors",
                code=ErrorCode.KV_STORAGE_EXCEPTION,
            )
        return problem

    def _try(self, work: Callable[[Rdict], T], changes: bool) -> T:
        with self._lock:
            if changes and self._read_only:
                self._lock.wait_for(lambda: not self._users)
                self._close()
            if self._opened is None:
                self._open(changes)
            assert self._opened is not None
            database = self._opened
            self._users += 1
        try:
            result = work(database)
            if self._tables < 0:
                self._tables = min(len(database.live_files()), _open_files_max())
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._lock.notify_all()
        self._databases.used(self, self._tables)
        return result

    def _open(self, changes: bool) -> None:
        """Open the database; for reading only if the disk is full and nothing is to be changed."""
        check_start()  # while a database is open, RocksDB has a thread for its timer
        options, path = table_options(), str(self.directory)
        self._tables = -1
        try:
            self._opened = Rdict(path, options, {"default": options})
        except Exception as e:
            if changes or _NO_SPACE not in str(e):
                raise
            self._opened = Rdict(path, options, {"default": options}, AccessType.read_only())
            self._read_only = True

    def _close(self) -> None:
        """Close the database, whatever RocksDB says: nothing in it waits to be written.

        Without descriptors RocksDB reports an error and is closed nevertheless. That error must
        end neither the request, maybe of another bucket, nor the use of this database.
        """
        database, self._opened, self._read_only = self._opened, None, False
        if database is None:
            return
        try:
            database.close()
        except Exception as e:
            import structlog  # not above: the flush process imports this module, and stays small

            log = structlog.get_logger(__name__)
            log.warning("database_not_closed_cleanly", directory=str(self.directory), error=str(e))


def _keys(database: Rdict, low: bytes, high: bytes | None) -> Iterator[bytes]:
    for key in database.keys(from_key=low):
        assert isinstance(key, bytes)
        if high is not None and key >= high:
            return
        yield key


def _open_files_max() -> int:
    """Return how many table files one database keeps open: no more than a part of the share."""
    return max(OPEN_FILES_MIN, min(OPEN_FILES_MAX, descriptors_max() // 4))
