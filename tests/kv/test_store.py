"""The store against its plain twin, through flushes, crashes and full memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kv.kv_samples import get, look_up, open_store, put, small_memory
from tests.kv.plain_store import PlainStore
from zufluss.errors import LogStorageError, StorageBackpressureError
from zufluss.kv.cold import flush
from zufluss.kv.cold.flush import TABLE_FILE
from zufluss.kv.cold.state import STATE_FILE, KvState, read_state
from zufluss.kv.hot import memtable
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.hot.order import successor
from zufluss.kv.memory import KvMemory
from zufluss.kv.rest import Rests
from zufluss.kv.store import KvStore, hash_keys
from zufluss.record.slices import Bytes, Positions, Slices

KEYS = [b"", b"a", b"a\0", b"a\xff", b"a\xff\xff", b"b" * 40] + [
    b"key-%05d" % i for i in range(300)
]


class StoreMachine(RuleBasedStateMachine):
    """Whatever happens to a store between two questions, it answers like a dictionary."""

    @initialize(segments=st.sampled_from([40, 100, 400]))
    def begin(self, segments: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "db" / "bucket-0"
        self.memory = small_memory(segments)
        self.store = open_store(self.path, self.memory)
        self.store.flush_wanted = self.begin_flush
        self.plain = PlainStore()
        self.eager = patch.object(memtable, "CLEAN_BYTES_MIN", 2048)
        self.eager.start()
        self.log: list[tuple[int, list[bytes], list[bytes | None]]] = []
        self.end = 0

    def rows_at(self, horizon: int) -> int:
        return len(self.plain.scan(None, 10**9, horizon)[0])

    def begin_flush(self) -> None:
        horizon = self.store.horizon
        self.store.flush_begin(horizon, self.rows_at(horizon), {"at": horizon})

    def write(self, keys: list[bytes], values: list[bytes | None]) -> None:
        self.log.append((self.end, keys, values))
        put(self.store, keys, values, self.end)
        self.plain.put(keys, values, self.end)
        self.end += len(keys)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=40, unique=True),
        size=st.sampled_from([0, 1, 77, 900, 20_000]),
        data=st.data(),
    )
    def put_some(self, keys: list[bytes], size: int, data: st.DataObject) -> None:
        if size == 20_000:
            keys = keys[:2]
            self.commit(0)
        deleted = data.draw(st.sets(st.sampled_from(keys), max_size=5))
        stamp = b"%d:" % self.end
        self.write(keys, [None if k in deleted else stamp + b"v" * size for k in keys])
        self.store.horizon = max(self.store.horizon, self.end - 60)

    @rule(start=st.integers(0, 250), size=st.sampled_from([30, 200]))
    def put_many(self, start: int, size: int) -> None:
        keys = KEYS[start : start + 50]
        self.write(keys, [b"%d" % self.end + b"x" * size for _ in keys])
        self.store.horizon = max(self.store.horizon, self.end - 60)

    @rule(back=st.integers(0, 100))
    def commit(self, back: int) -> None:
        self.store.horizon = max(self.store.horizon, self.end - back)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=60))
    def get_newest(self, keys: list[bytes]) -> None:
        assert get(self.store, keys) == self.plain.get(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=60), ahead=st.integers(0, 300))
    def get_at_a_horizon(self, keys: list[bytes], ahead: int) -> None:
        horizon = self.store.horizon + ahead
        expected = self.plain.get(keys, horizon)
        found = look_up(self.store, keys, horizon)
        assert found in (None, expected)
        assert self.store.get_at(Slices.of(keys), horizon).tolist() == expected

    @rule()
    def flush(self) -> None:
        if not self.store.flushing:
            self.begin_flush()

    @rule()
    def wait_for_the_flush(self) -> None:
        self.store.flush_wait()

    @rule(wanted=st.sampled_from([1, 50_000, 10**9]), flush=st.booleans())
    def evict(self, wanted: int, flush: bool) -> None:
        if flush:
            self.commit(0)
            self.store.flush_wait()
            self.begin_flush()
            self.store.flush_wait()
        self.store.evict(wanted)

    @rule(
        prefix=st.sampled_from([b"", b"a", b"a\xff", b"key-000", b"key-0010", b"zzz"]),
        rows=st.sampled_from([1, 3, 4096]),
    )
    def look_up_a_prefix(self, prefix: bytes, rows: int) -> None:
        horizon = self.store.horizon
        found: list[bytes | None] = []
        low: bytes | None = prefix
        while low is not None:
            page, low = self.store.page(low, successor(prefix), horizon, 10**9, rows)
            found += page.tolist()
        assert found == self.plain.prefix(prefix, horizon)

    @rule(after=st.none() | st.sampled_from(KEYS), limit=st.sampled_from([1, 7, 1000]))
    def scan(self, after: bytes | None, limit: int) -> None:
        horizon = self.store.horizon
        keys, values = self.store.scan(after, limit, 10**9, horizon)
        assert (keys.tolist(), values.tolist()) == self.plain.scan(after, limit, horizon)

    @rule(how=st.sampled_from(["not", "not", "not", "not", "not", "not", "crash", "stop"]))
    def restart(self, how: str) -> None:
        if how == "crash":
            self.crash_and_replay()
        elif how == "stop":
            self.stop_and_start()

    def crash_and_replay(self) -> None:
        horizon = self.store.horizon
        self.store.abandon()
        self.reopen()
        assert self.store.row_count == self.rows_at(self.store.flushed_offset)
        self.store.horizon = horizon
        for offset, keys, values in self.log:
            if offset >= self.store.flushed_offset:
                put(self.store, keys, values, offset)

    def stop_and_start(self) -> None:
        self.store.horizon = self.end
        self.store.close(self.end, self.rows_at(self.end), {"at": self.end})
        self.reopen()
        assert self.store.flushed_offset == self.end
        assert self.store.meta == {"at": self.end} or self.end == 0

    def reopen(self) -> None:
        self.store = open_store(self.path, self.memory)
        self.store.flush_wanted = self.begin_flush

    @invariant()
    def all_memory_is_accounted_for(self) -> None:
        if hasattr(self, "store") and not self.store.flushing:
            arena = self.memory.arena
            taken = arena.budget - arena.segment_bytes - arena.free_bytes
            assert taken == self.store.memory_bytes

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.eager.stop()
            self.store.abandon()
            self.memory.close()
            self.directory.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    memory = small_memory(64)
    yield memory
    memory.close()


@pytest.fixture
def store(tmp_path: Path, memory: KvMemory) -> Iterator[KvStore]:
    store = open_store(tmp_path / "bucket", memory)
    yield store
    store.abandon()


def rows(count: int, size: int = 100) -> tuple[list[bytes], list[bytes | None]]:
    return [b"k%06d" % i for i in range(count)], [b"%d" % i + b"v" * size for i in range(count)]


def test_a_version_above_the_horizon_is_not_seen(store: KvStore) -> None:
    put(store, [b"k"], [b"old"], 0)
    put(store, [b"k"], [b"new"], 1)
    assert look_up(store, [b"k"], 1) == [b"old"]
    assert look_up(store, [b"k"], 2) == [b"new"]
    assert look_up(store, [b"k"], 0) == [None]


def test_more_rows_than_memory_holds_come_back_from_the_cold_tier(
    tmp_path: Path,
) -> None:
    memory = small_memory(16)
    store = open_store(tmp_path / "bucket", memory)
    keys, values = rows(20_000)
    for i in range(0, len(keys), 500):
        store.horizon = i
        put(store, keys[i : i + 500], values[i : i + 500], i)
    assert not store.resident
    assert get(store, [*keys[:300], b"none"]) == [*values[:300], None]
    assert look_up(store, keys[:300], store.horizon) in (values[:300], None)
    assert store.memory_bytes <= memory.arena.budget
    store.abandon()
    memory.close()


def test_a_killed_flush_process_is_replaced_and_the_flush_succeeds(
    store: KvStore, memory: KvMemory
) -> None:
    keys, values = rows(100)
    put(store, keys, values, 0)
    store.horizon = 100
    store.flush_begin(100, 100)
    store.flush_wait()
    process = memory.flusher.process_id
    assert process is not None
    os.kill(process, signal.SIGKILL)
    put(store, keys[:50], [None] * 50, 100)
    store.horizon = 150
    store.flush_begin(150, 50)
    store.flush_wait()
    assert store.flushed_offset == 150
    assert memory.flusher.process_id != process
    store.evict(10**9)
    assert get(store, keys) == [None] * 50 + values[50:]


def test_a_store_whose_last_flush_fails_gives_back_memory_and_files_all_the_same(
    tmp_path: Path, memory: KvMemory
) -> None:
    """The state is opened again later, and RocksDB allows one owner of its files at a time."""
    store = open_store(tmp_path / "bucket", memory)
    keys, values = rows(100)
    put(store, keys, values, 0)
    store.horizon = 100
    (tmp_path / "bucket" / TABLE_FILE).mkdir()  # a table file cannot be written
    free = memory.arena.free_bytes
    with pytest.raises(OSError, match=TABLE_FILE):
        store.close(100, 100)
    assert memory.arena.free_bytes > free
    assert store not in memory.stores
    assert memory.dirty_bytes == 0
    (tmp_path / "bucket" / TABLE_FILE).rmdir()
    again = open_store(tmp_path / "bucket", memory)
    assert again.flushed_offset == 0
    again.abandon()


def test_a_flush_process_killed_in_the_middle_of_a_table_loses_nothing(
    store: KvStore, memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = flush._pieces
    kills: list[int] = []

    def broken(arena: Bytes, refs: Positions, rests: Rests) -> Iterator[bytes | memoryview]:
        parts = whole(arena, refs, rests)
        yield next(parts)
        if not kills:
            process = memory.flusher.process_id
            assert process is not None
            os.kill(process, signal.SIGKILL)
            kills.append(process)
        yield from parts

    monkeypatch.setattr(flush, "_pieces", broken)
    keys, values = rows(3000)
    put(store, keys, values, 0)
    store.horizon = 3000
    store.flush_begin(3000, 3000)
    store.flush_wait()
    assert len(kills) == 1
    store.evict(10**9)
    assert get(store, keys) == values


def test_a_flush_that_memory_ran_out_for_does_not_stop_the_next_one(
    store: KvStore, memory: KvMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The flush process has half a request by then, and must not take the next one for the rest."""
    other = open_store(tmp_path / "other", memory)
    put(other, [b"key"], [b"value"], 0)
    other.horizon = 1
    whole = flush._pieces

    def broken(arena: Bytes, refs: Positions, rests: Rests) -> Iterator[bytes | memoryview]:
        yield next(whole(arena, refs, rests))
        raise MemoryError

    keys, values = rows(100)
    put(store, keys, values, 0)
    store.horizon = 100
    with monkeypatch.context() as patch:
        patch.setattr(flush, "_pieces", broken)
        store.flush_begin(100, 100)
        with pytest.raises(MemoryError):
            store.flush_wait()
    other.flush_begin(1, 1)
    other.flush_wait()
    other.abandon()
    store.flush_begin(100, 100)
    store.flush_wait()
    assert store.flushed_offset == 100
    store.evict(10**9)
    assert get(store, keys) == values


def test_a_put_without_memory_leaves_the_store_as_it_was(
    store: KvStore, memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = rows(100)
    with monkeypatch.context() as patch:

        def fail(*arguments: object) -> int:
            raise MemoryError

        patch.setattr(memtable.Memtable, "_reserve_slots", fail)
        free = memory.arena.free_bytes
        with pytest.raises(StorageBackpressureError):
            put(store, keys, values, 0)
        assert memory.arena.free_bytes == free
    assert get(store, keys) == [None] * 100
    put(store, keys, values, 0)
    assert get(store, keys) == values


def test_a_flush_that_fails_twice_is_reported_and_loses_nothing(
    store: KvStore, memory: KvMemory
) -> None:
    keys, values = rows(100)
    put(store, keys, values, 0)
    store.horizon = 100
    (store.directory / TABLE_FILE).mkdir()
    (store.directory / TABLE_FILE / "in-the-way").touch()
    store.flush_begin(100, 100)
    with pytest.raises(OSError, match=TABLE_FILE):
        store.flush_wait()
    assert not store.flushing
    assert store.flushed_offset == 0
    assert get(store, keys) == values
    (store.directory / TABLE_FILE / "in-the-way").unlink()
    (store.directory / TABLE_FILE).rmdir()
    store.flush_begin(100, 100)
    store.flush_wait()
    assert store.flushed_offset == 100


def test_a_flush_says_when_it_is_done(store: KvStore) -> None:
    ends: list[str] = []
    put(store, [b"k"], [b"v"], 0)
    store.horizon = 1
    store.flush_begin(1, 1, {"next": 5}, done=lambda: ends.append("done"))
    store.flush_wait()
    assert ends == ["done"]
    assert read_state(store.directory) == KvState(1, 1, {"next": 5})


def test_memory_retired_during_a_flush_is_held_until_its_end(tmp_path: Path) -> None:
    """The flush thread reads the index blocks that growing replaces."""
    freed: list[object] = []
    memory = small_memory(64, freed.append)
    store = open_store(tmp_path / "bucket", memory)
    put(store, [b"k"], [b"v"], 0)
    store.horizon = 1
    store.flush_begin(1, 1)
    before = len(freed)
    keys, values = rows(600, 10)
    # `put` would take notice of a flush that is over by now; the index grows all the same
    store._memtable.put(
        Slices.of(keys), hash_keys(Slices.of(keys)),
        Slices.of(values), 1, 1, memory.alloc,
    )  # fmt: skip
    assert len(freed) == before
    store.flush_wait()
    assert len(freed) > before
    store.abandon()
    memory.close()


def test_damaged_state_is_refused(tmp_path: Path, memory: KvMemory) -> None:
    store = open_store(tmp_path / "bucket", memory)
    put(store, [b"k"], [b"v"], 0)
    store.horizon = 1
    store.close(store.horizon, 1)
    path = store.directory / STATE_FILE
    path.write_bytes(path.read_bytes().replace(b'"row_count": 1', b'"row_count": 2'))
    with pytest.raises(LogStorageError, match="damaged"):
        open_store(tmp_path / "bucket", memory)


def test_an_unfinished_table_is_removed_at_the_next_start(tmp_path: Path, memory: KvMemory) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / TABLE_FILE).write_bytes(b"half a table")
    store = open_store(tmp_path / "bucket", memory)
    assert not (tmp_path / "bucket" / TABLE_FILE).exists()
    store.destroy()
    assert not (tmp_path / "bucket").exists()


def test_a_checkpoint_is_the_flushed_state(tmp_path: Path, store: KvStore) -> None:
    put(store, [b"k"], [b"v"], 0)
    store.horizon = 1
    store.flush_begin(1, 1)
    store.flush_wait()
    assert store.checkpoint(tmp_path / "copy").flushed_offset == 1
    assert any(path.suffix == ".sst" for path in (tmp_path / "copy").iterdir())


def test_values_in_the_arena_cannot_be_put(store: KvStore) -> None:
    put(store, [b"k"], [b"v"], 0)
    names = Slices.of([b"k"])
    hashes = hash_keys(names)
    with pytest.raises(ValueError, match="copy them out"):
        store.put(names, hashes, store.get(names, hashes, NEWEST), 1)


def test_scans_keep_to_their_limits(store: KvStore) -> None:
    keys, values = rows(100, 50)
    put(store, keys, values, 0)
    found, _ = store.scan(None, 10, 10**9, 100)
    assert found.tolist() == keys[:10]
    found, _ = store.scan(keys[9], 1000, 150, 100)
    assert found.tolist() == keys[10:13]
    assert store.scan(keys[-1], 10, 10, 100)[0].count == 0


def test_the_flush_process_loads_neither_numba_nor_arrow() -> None:
    """They would cost it half a second and a hundred megabytes."""
    check = (
        "import sys, zufluss.kv.cold.flush_process; "
        "print([m for m in ('numba', 'pyarrow', 'numpy', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
