"""Key-value memory: buckets give all of it back, and a shortage refuses puts without harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv.kv_samples import SEGMENT, get, look_up, open_store, put, small_memory
from zufluss.errors import ErrorCode, RecordTooLargeError, StorageBackpressureError
from zufluss.kv import memory as kv_memory
from zufluss.kv import store as kv_store
from zufluss.kv.cold.flush import TABLE_FILE
from zufluss.kv.hot.index import SLOT_BYTES
from zufluss.kv.memory import KvMemory
from zufluss.kv.store import KvStore

ROWS = 1000
Rows = list[bytes]
Write = Callable[[KvStore, Rows, Rows, int], None]


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    memory = small_memory(64)
    yield memory
    memory.close()


def free_of_all(memory: KvMemory) -> int:
    """Free bytes of memory that no bucket uses."""
    return memory.arena.budget - memory.arena.segment_bytes


def put_as_clients_do(store: KvStore, keys: Rows, values: Rows, offset: int) -> None:
    """Try again after each refusal; the server polls flushes in between."""
    while True:
        try:
            return put(store, keys, values, offset)
        except StorageBackpressureError:
            store.flush_end()


def fill(store: KvStore, first: int, count: int = ROWS, size: int = 50, write: Write = put) -> None:
    """Put new rows in batches of 100; each is durable at once."""
    for begin in range(first, first + count, 100):
        keys = [b"%06d" % i for i in range(begin, begin + 100)]
        write(store, keys, [key + b"v" * size for key in keys], begin)
        store.horizon = begin + 100


def fill_until_refused(store: KvStore) -> tuple[int, StorageBackpressureError]:
    """Put new rows until memory is full; return how many, and the refusal."""
    for end in range(0, 10**6, 100):
        try:
            fill(store, end, 100)
        except StorageBackpressureError as e:
            return end, e
    raise AssertionError("memory has no end")


def flush(store: KvStore) -> None:
    store.flush_wait()
    store.flush_begin(store.horizon, store.horizon)
    store.flush_wait()


def sample(store: KvStore, count: int = ROWS) -> None:
    """Some rows of `fill` are all there."""
    keys = [b"%06d" % i for i in range(0, count, 37)]
    assert [value and value[:6] for value in get(store, keys)] == keys


def break_flushes(store: KvStore) -> None:
    (store.directory / TABLE_FILE).mkdir(parents=True)
    (store.directory / TABLE_FILE / "in-the-way").touch()


def mend_flushes(store: KvStore) -> None:
    (store.directory / TABLE_FILE / "in-the-way").unlink()
    (store.directory / TABLE_FILE).rmdir()


def test_buckets_filled_one_after_the_other_share_one_budget(
    tmp_path: Path, memory: KvMemory
) -> None:
    """Each of twenty partitions alone has more rows than memory holds."""
    stores = [open_store(tmp_path / f"bucket-{i}", memory) for i in range(20)]
    for store in stores:
        fill(store, 0, 20 * ROWS)
    for store in stores:
        fill(store, 20 * ROWS, 100)
        sample(store)
    for store in stores:
        store.abandon()
    assert memory.arena.free_bytes == free_of_all(memory)


def test_a_flushed_bucket_gives_back_all_memory_and_comes_back(
    tmp_path: Path, memory: KvMemory
) -> None:
    store = open_store(tmp_path / "bucket", memory)
    fill(store, 0)
    flush(store)
    assert store.evict(store.memory_bytes)
    assert store.memory_bytes == 0
    assert memory.arena.free_bytes == free_of_all(memory)
    sample(store)
    fill(store, ROWS)
    sample(store, 2 * ROWS)
    store.abandon()


def test_the_index_of_a_bucket_in_use_shrinks_with_its_keys(
    tmp_path: Path, memory: KvMemory
) -> None:
    """The last row is never flushed, so the bucket never gives back everything."""
    store = open_store(tmp_path / "bucket", memory)
    fill(store, 0, 4 * ROWS, size=1)
    flush(store)
    before = SLOT_BYTES * len(set(store._memtable.root[2:].tolist())) << int(
        store._memtable.root[1]
    )
    assert before > 2 * SEGMENT
    put(store, [b"last"], [b"row"], 4 * ROWS)
    store.evict(store.memory_bytes)
    assert 0 < store.memory_bytes <= 3 * SEGMENT
    assert get(store, [b"last", b"000001", b"none"]) == [b"row", b"000001v", None]
    sample(store, 4 * ROWS)
    store.abandon()


def test_a_bucket_that_nobody_uses_gives_way_before_one_in_use(
    tmp_path: Path, memory: KvMemory
) -> None:
    idle, used = (open_store(tmp_path / name, memory) for name in ("idle", "used"))
    fill(idle, 0)
    flush(idle)
    fill(used, 0, 20 * ROWS)
    assert idle.memory_bytes == 0
    assert used.memory_bytes > memory.arena.budget // 2
    idle.abandon()
    used.abandon()


def test_a_large_row_finds_room_where_free_memory_is_in_pieces(
    tmp_path: Path, memory: KvMemory
) -> None:
    """Forty buckets with one segment each lie all over the memory; the row needs 20 in a row."""
    stores = [open_store(tmp_path / f"bucket-{i}", memory) for i in range(40)]
    for store in stores:
        fill(store, 0, 100)
    for store in stores[::2]:
        store.abandon()
    row = b"r" * (20 * SEGMENT - 100)
    put(stores[1], [b"large"], [row], 100)
    assert get(stores[1], [b"large", b"000001"]) == [row, b"000001" + b"v" * 50]
    for store in stores[1::2]:
        sample(store, 100)
        store.abandon()


def test_a_put_larger_than_the_memory_is_refused_and_changes_nothing(
    tmp_path: Path, memory: KvMemory
) -> None:
    store = open_store(tmp_path / "bucket", memory)
    fill(store, 0, 100)
    before = store.memory_bytes
    with pytest.raises(RecordTooLargeError, match=r"zufluss\.kv\.memory") as refusal:
        put(store, [b"000001", b"huge"], [b"new", b"h" * memory.arena.budget], 100)
    assert str(memory.arena.budget) in refusal.value.message
    assert store.memory_bytes == before
    assert get(store, [b"000001", b"huge"]) == [b"000001" + b"v" * 50, None]
    store.abandon()


def test_a_put_without_memory_is_refused_and_taken_once_flushes_work_again(tmp_path: Path) -> None:
    memory = small_memory(32)
    store, other = (open_store(tmp_path / name, memory) for name in ("bucket", "other"))
    fill(other, 0, 100)
    break_flushes(store)
    end, refusal = fill_until_refused(store)
    assert refusal.code == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
    assert refusal.retriable
    sample(store, end)
    assert get(store, [b"%06d" % end]) == [None]
    mend_flushes(store)
    fill(store, end, 20 * ROWS, write=put_as_clients_do)
    sample(store, end + 20 * ROWS)
    sample(other, 100)
    store.abandon()
    other.abandon()
    memory.close()


def test_during_a_shortage_one_put_waits_and_the_others_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are not durable yet, so no flush can help."""
    memory = KvMemory(32 * SEGMENT, lambda free: free(), SEGMENT, wait_seconds=0.1)
    pauses: list[float] = []
    monkeypatch.setattr(kv_memory.time, "sleep", pauses.append)
    store = open_store(tmp_path / "bucket", memory)
    row = b"v" * SEGMENT
    for i in range(10):
        put(store, [b"%d" % i], [row], i)
    with pytest.raises(StorageBackpressureError):
        put(store, [b"many"], [20 * row], 10)
    assert pauses
    pauses.clear()
    for _ in range(3):
        with pytest.raises(StorageBackpressureError):
            put(store, [b"many"], [20 * row], 10)
    assert not pauses
    assert memory.refusals == 4
    store.horizon = 10
    monkeypatch.undo()
    put_as_clients_do(store, [b"many"], [20 * row], 10)
    assert get(store, [b"0", b"many"]) == [row, 20 * row]
    store.abandon()
    memory.close()


def test_a_lookup_beside_the_first_eviction_asks_the_worker(
    tmp_path: Path, memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop began with a bucket whose rows were all in memory, and finds one missing."""
    store = open_store(tmp_path / "bucket", memory)
    fill(store, 0)
    flush(store)
    answer = kv_store.answer_lookup

    def evicting(*arguments: Any) -> int:
        assert store.evict(1)
        return int(answer(*arguments))

    assert look_up(store, [b"000000"], store.horizon) == [b"000000" + b"v" * 50]
    with monkeypatch.context() as beside:
        beside.setattr(kv_store, "answer_lookup", evicting)
        assert look_up(store, [b"000000"], store.horizon) is None
    sample(store)
    store.abandon()
