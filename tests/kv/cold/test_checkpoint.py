"""Checkpoints that other versions of RocksDB open, and files installed in place of lost ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from rocksdict import BlockBasedOptions, DBCompressionType, Options, Rdict, SstFileWriter

from tests.kv.kv_samples import get, open_store, put, small_memory
from tests.log.support import append, batch, open_log
from zufluss.errors import CorruptRecordError, LogStorageError
from zufluss.kv.cold.checkpoint import (
    CHECKPOINT_DIRECTORY,
    COLD_DIRECTORY,
    INCOMING_DIRECTORY,
    Checkpoint,
    has_state,
    incoming_directory,
    install,
)
from zufluss.kv.cold.rocks import ColdTier, readable_by_all
from zufluss.kv.cold.state import KvState, read_state, write_state
from zufluss.kv.replay import EarlierChangelog, pieces_of
from zufluss.kv.store import KvStore
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.log.writer_state import WriterState
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath

ROWS = [(b"key-%04d" % i, b"value %d" % i) for i in range(500)]
SCHEMA = Schema.of("id BIGINT NOT NULL, text STRING", primary_key=["id"])


def flushed(directory: Path, rows: list[tuple[bytes, bytes]] = ROWS) -> KvStore:
    """A store whose cold tier has these rows."""
    store = open_store(directory, small_memory(100))
    end = store.flushed_offset + len(rows)
    put(store, [k for k, _ in rows], [v for _, v in rows], store.flushed_offset)
    store.horizon = end
    store.flush_begin(end, len(rows))
    store.flush_wait()
    return store


def end(store: KvStore) -> None:
    memory = store._memory
    store.abandon()
    memory.close()


def make_old_database(directory: Path, format_version: int = 6) -> None:
    """A database as earlier versions of ours made it: what RocksDB does by default."""
    table = BlockBasedOptions()
    table.set_format_version(format_version)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.lz4())
    database = Rdict(str(directory / COLD_DIRECTORY), options)
    writer = SstFileWriter(options)
    writer.open(str(directory / "old.sst"))
    for key, value in ROWS:
        writer[key] = value
    writer.finish()
    database.ingest_external_file([str(directory / "old.sst")])
    database.close()
    write_state(Files(), directory, KvState(len(ROWS), len(ROWS), {}))


def tablet_of(store: KvStore) -> KvTablet:
    descriptor = TableDescriptor(SCHEMA, None, (), ("id",), 1, {}, {})
    info = TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0)
    return KvTablet(KvTable(info, {1: SCHEMA}), store, 1 << 20)


def checkpoint_of(store: KvStore) -> Checkpoint:
    """A checkpoint, after whatever it has to wait for."""
    tablet, target = tablet_of(store), store.directory / CHECKPOINT_DIRECTORY
    while not isinstance(made := tablet.checkpoint(target, store.horizon), Checkpoint):
        made.result()
    return made


def test_flushed_table_files_are_readable_by_the_rocksdb_of_fluss(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    made = checkpoint_of(store)
    assert made.tables()
    assert all(map(readable_by_all, made.tables()))
    assert {p.name.strip("0123456789") for p in made.others()} == {
        "CURRENT", "MANIFEST-", "OPTIONS-",
    }  # fmt: skip
    assert (made.state.flushed_offset, made.row_count) == (len(ROWS), len(ROWS))
    end(store)


def test_compactions_of_a_database_opened_again_write_the_present_format(tmp_path: Path) -> None:
    make_old_database(tmp_path)
    cold = ColdTier(tmp_path / COLD_DIRECTORY)
    (old,) = (tmp_path / COLD_DIRECTORY).glob("*.sst")
    assert not readable_by_all(old)
    cold.rewrite()
    (new,) = {*(tmp_path / COLD_DIRECTORY).glob("*.sst")} - {old}
    assert readable_by_all(new)
    assert cold.get([key for key, _ in ROWS]) == [value for _, value in ROWS]
    cold.close()


def test_a_database_of_an_earlier_version_is_read_and_leaves_in_the_present_format(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "kv-0"
    directory.mkdir()
    make_old_database(directory)
    store = open_store(directory, small_memory(100))
    assert get(store, [key for key, _ in ROWS]) == [value for _, value in ROWS]
    made = checkpoint_of(store)
    assert made.readable_by_all()
    assert made.state == KvState(len(ROWS), len(ROWS), {})
    assert get(store, [key for key, _ in ROWS]) == [value for _, value in ROWS]
    end(store)


def test_a_checkpoint_waits_for_what_is_not_flushed_yet(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    tablet = tablet_of(store)
    put(store, [b"new"], [b"row"], len(ROWS))
    store.horizon = len(ROWS) + 1
    target = store.directory / CHECKPOINT_DIRECTORY
    waiting = tablet.checkpoint(target, store.horizon)
    assert not isinstance(waiting, Checkpoint)
    assert not target.exists()
    waiting.result()
    made = tablet.checkpoint(target, store.horizon)
    assert isinstance(made, Checkpoint)
    assert made.state.flushed_offset == len(ROWS) + 1
    end(store)


def test_a_store_that_flushes_makes_no_checkpoint(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    put(store, [b"new"], [b"row"], len(ROWS))
    store.horizon = len(ROWS) + 1
    go_on = threading.Event()
    store._memory.flusher._thread.submit(go_on.wait)
    store.flush_begin(store.horizon, 1)
    with pytest.raises(RuntimeError, match="ahead of its state"):
        store.checkpoint(store.directory / CHECKPOINT_DIRECTORY)
    go_on.set()
    store.flush_wait()
    end(store)


def test_installed_files_are_the_rows_of_the_bucket(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    made = checkpoint_of(store)
    other = tmp_path / "kv-1"
    late = flushed(other, [(b"key-0001", b"to be forgotten")])
    end(late)
    incoming = incoming_directory(Files(), other)
    for path in (*made.tables(), *made.others()):
        (incoming / path.name).write_bytes(path.read_bytes())
    install(Files(), other, made.state)
    assert read_state(other) == made.state
    back = open_store(other, small_memory(100))
    assert get(back, [key for key, _ in ROWS]) == [value for _, value in ROWS]
    assert (back.flushed_offset, back.row_count) == (len(ROWS), len(ROWS))
    end(back)
    end(store)


def test_a_directory_that_is_no_database_is_not_installed(tmp_path: Path) -> None:
    directory = tmp_path / "kv-0"
    end(flushed(directory))
    before = read_state(directory)
    incoming = incoming_directory(Files(), directory)
    (incoming / "CURRENT").write_bytes(b"MANIFEST-000007\n")
    with pytest.raises(CorruptRecordError, match="not a whole database"):
        install(Files(), directory, KvState(9, 9, {}))
    assert read_state(directory) == before


def test_a_crash_while_files_are_installed_leaves_a_bucket_without_state(tmp_path: Path) -> None:
    class Dying(Files):
        def rename(self, source: Path, target: Path) -> None:
            raise KeyboardInterrupt

    directory, incoming = tmp_path / "kv-0", tmp_path / "kv-0" / INCOMING_DIRECTORY
    store = flushed(directory)
    made = checkpoint_of(store)
    files = {p.name: p.read_bytes() for p in (*made.tables(), *made.others())}
    end(store)
    incoming_directory(Files(), directory)
    for name, data in files.items():
        (incoming / name).write_bytes(data)
    with pytest.raises(KeyboardInterrupt):
        install(Dying(), directory, made.state)
    assert not has_state(directory)
    end(open_store(directory, small_memory(100)))
    assert not incoming.exists()


def test_rows_outside_of_table_files_are_noticed(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    made = checkpoint_of(store)
    (made.directory / "000099.log").write_bytes(b"rows")
    with pytest.raises(LogStorageError, match="no table file has"):
        made.others()
    end(store)


def test_a_changelog_with_a_hole_is_not_replayed(tmp_path: Path) -> None:
    Log.create_at(tmp_path / "log-0", 3, WriterState(0).to_json(), 0, Files())
    changelog = open_log(tmp_path)
    append(changelog, batch(3))
    store = open_store(tmp_path / "kv-0", small_memory(100))
    with pytest.raises(CorruptRecordError, match="nothing from offset 0 to 3"):
        tablet_of(store).recover(changelog, EarlierChangelog(0, lambda offset: iter(())))
    end(store)
    changelog.close(clean=False)


def test_a_changelog_that_ends_early_is_not_replayed(tmp_path: Path) -> None:
    """Of a segment that was cut, the last batch is passed over as if it were not there yet."""
    store = open_store(tmp_path / "kv-0", small_memory(100))
    cut = memoryview(bytes(batch(3)))[:-1]
    with pytest.raises(CorruptRecordError, match="nothing from offset 0 to 3"):
        list(pieces_of(tablet_of(store).table, iter([cut]), 0, 3))
    end(store)
