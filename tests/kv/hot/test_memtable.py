"""Memory: kernels against plain Python, readers beside a writer, damaged arenas."""

from __future__ import annotations

import ctypes
import itertools
import platform
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.kv_samples import SEGMENT, look_up, put, small_memory
from tests.waiting import eventually
from zufluss.errors import ConfigError
from zufluss.kv.hot import words
from zufluss.kv.hot.arena import AHEAD_BYTES, BLOCK_BYTES_MIN, Arena
from zufluss.kv.hot.memtable import FIRST_SEGMENT_BYTES, SEED, Memtable, group_keys, hash_keys
from zufluss.kv.hot.order import KeyOrder, successor
from zufluss.kv.hot.sorting import sort_by_key
from zufluss.kv.memory import KvMemory
from zufluss.kv.store import KvStore
from zufluss.log.files import Files
from zufluss.record.slices import Slices

MASK = 2**64 - 1
NEWEST = 2**63 - 1
keys_of_all_kinds = st.lists(st.binary(max_size=70) | st.sampled_from([b"", b"a", b"a\0"]))


def mix(a: int, b: int) -> int:
    product = (a & MASK) * (b & MASK)
    return (product ^ product >> 64) & MASK


def plain_hash(key: bytes, seed: int) -> int:
    """The twin of the hash kernel."""
    second = mix(seed, -7046029254386353131)
    h = (seed ^ len(key)) & MASK
    rest = key
    while len(rest) > 16:
        low, high = (int.from_bytes(rest[i : i + 8], "little") for i in (0, 8))
        h = mix(low ^ second, high ^ h)
        rest = rest[16:]
    low, high = int.from_bytes(rest[:8], "little"), int.from_bytes(rest[8:], "little")
    h = mix(low ^ second, high ^ h)
    return mix(h ^ len(key), second ^ -2024118823216138003 & MASK)


class Unlimited(Memtable):
    """A memtable that never waits for memory."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, lambda block: arena.free(*block))

    def alloc(self, size: int) -> int:
        position = self.arena.alloc(size)
        assert position is not None
        return position

    def put(self, *row: Any) -> int:  # type: ignore[override]
        return super().put(*row, self.alloc)


@given(keys_of_all_kinds)
def test_hashes_are_those_of_the_plain_twin(keys: list[bytes]) -> None:
    hashes = hash_keys(Slices.of(keys))
    assert [h & MASK for h in hashes.tolist()] == [plain_hash(k, SEED) for k in keys]


@given(keys_of_all_kinds)
def test_equal_keys_get_the_number_of_their_first_appearance(keys: list[bytes]) -> None:
    names = Slices.of(keys)
    group, first = group_keys(names, hash_keys(names))
    different = list(dict.fromkeys(keys))
    assert group.tolist() == [different.index(key) for key in keys]
    assert first.tolist() == [keys.index(key) for key in different]


def test_keys_that_collide_are_still_told_apart() -> None:
    names = Slices.of([b"%d" % i for i in range(100)])
    same = np.zeros(100, np.int64)
    assert len(group_keys(names, same)[1]) == 100
    memtable = Unlimited(Arena(64 * SEGMENT, SEGMENT))
    memtable.put(names, same, names, 0, 0)
    assert memtable.find(names, same, NEWEST)[0].tolist() == names.tolist()


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 5), (5, 9), (0, 2**40)])
def test_keys_outside_their_data_are_refused(start: int, end: int) -> None:
    bad = Slices(np.zeros(4, np.uint8), np.array([0, start]), np.array([4, end]))
    good = np.zeros(2, np.int64)
    memtable = Unlimited(Arena(64 * SEGMENT, SEGMENT))
    for call in (
        lambda: hash_keys(bad),
        lambda: group_keys(bad, good),
        lambda: memtable.find(bad, good, 0),
        lambda: memtable.put(bad, good, bad, 0, 0),
    ):
        with pytest.raises(ValueError, match="leaves its"):
            call()


ALIKE = [b"", b"12345678", b"1234567890abcdef12345678", bytes(8), bytes(17), bytes(255), b"1" * 260]
"""Beginnings of keys, so that many are equal in their first words."""


@given(
    st.lists(
        st.builds(bytes.__add__, st.sampled_from(ALIKE), st.binary(max_size=20))
        | st.integers(0, 300).map(bytes)
    )
)
@settings(max_examples=200)
def test_entries_sort_like_their_keys(keys: list[bytes]) -> None:
    keys = list(dict.fromkeys(keys))
    memtable = Unlimited(Arena(64 * SEGMENT, SEGMENT))
    names = Slices.of(keys)
    memtable.put(names, hash_keys(names), names, 0, 0)
    refs = memtable.heads()
    ordered = KeyOrder(memtable)
    assert len(sort_by_key(memtable.arena.data, refs)) == len(keys)
    assert ordered.keys_from(b"", None, 10**6) == sorted(keys)


def test_the_order_follows_what_is_appended_later() -> None:
    memtable = Unlimited(Arena(400 * SEGMENT, SEGMENT))
    order = KeyOrder(memtable)
    chosen = random.Random(3)
    known: set[bytes] = set()
    for step in range(12):
        keys = [b"%07d" % chosen.randrange(10**5) for _ in range(1 + 400 * (step % 3))]
        keys = list(dict.fromkeys(keys))
        known.update(keys)
        names = Slices.of(keys)
        memtable.put(names, hash_keys(names), names, step, step)
        low, high = b"%07d" % (step * 5000), b"%07d" % (step * 5000 + 9000)
        assert order.keys_from(low, high, 10**6) == sorted(k for k in known if low <= k < high)
        assert order.keys_from(low, None, 5) == sorted(k for k in known if low <= k)[:5]


@pytest.mark.parametrize(
    ("prefix", "behind"),
    [(b"", None), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", None), (b"a\xfe\xff", b"a\xff")],
)
def test_the_end_of_a_prefix(prefix: bytes, behind: bytes | None) -> None:
    assert successor(prefix) == behind


def test_an_index_of_many_blocks_finds_every_key() -> None:
    memtable = Unlimited(Arena(2000 * SEGMENT, SEGMENT))
    for start in range(0, 60_000, 5000):
        names = Slices.of([b"%d" % i for i in range(start, start + 5000)])
        memtable.put(names, hash_keys(names), names, start, start)
    everything = Slices.of([b"%d" % i for i in range(60_000)])
    found, unknown = memtable.find(everything, hash_keys(everything), NEWEST)
    assert unknown == 0
    assert memtable.root[0] > 4
    assert memtable.keys == 60_000
    assert found.tolist() == everything.tolist()
    memtable.release()
    assert memtable.arena.free_bytes == memtable.arena.budget - SEGMENT


def test_updates_in_place_of_growth_are_cleaned_away() -> None:
    memtable = Unlimited(Arena(200 * SEGMENT, SEGMENT))
    names = Slices.of([b"%d" % i for i in range(500)])
    hashes = hash_keys(names)
    for offset in range(400):
        values = Slices.of([b"%d-%d" % (offset, i) + b"v" * 80 for i in range(500)])
        written = memtable.put(names, hashes, values, offset, offset)
        memtable.clean_some(written, offset, 0)
    assert memtable.bytes < 60 * SEGMENT
    assert memtable.find(names, hashes, 400)[0].tolist() == values.tolist()
    assert memtable.find(names, hash_keys(names), 399)[0].item(3) == b"398-3" + b"v" * 80


def test_a_reader_beside_the_writer_sees_whole_values_only(tmp_path: Path) -> None:
    """Cleaning, growing and eviction move what the reader is about to read.

    The reader plays the event loop: it sets the horizon and frees what was retired, between calls.
    """
    retired: list[list[object]] = [[]]
    lock = threading.Lock()

    def later(free: object) -> None:
        with lock:
            retired[0].append(free)

    memory = KvMemory(100 * SEGMENT, later, SEGMENT, wait_seconds=60)
    store = KvStore.open(tmp_path / "bucket", memory, Files())
    keys = [b"key-%04d" % i for i in range(1500)]
    stop = threading.Event()
    wrong: list[object] = []
    seen = committed = 0

    def read() -> None:
        nonlocal seen
        chosen = random.Random(1)
        while not stop.is_set() and not wrong:
            names = chosen.sample(keys, 20)
            horizon = store.horizon = committed
            values = look_up(store, names, horizon) or []
            for name, value in zip(names, values, strict=False):
                if value is None and horizon >= 1500:
                    wrong.append((name, "missing"))
                if value is not None:
                    offset, of, _ = value.split(b"|")
                    if of != name or not horizon - 3100 <= int(offset) < horizon:
                        wrong.append((name, horizon, value))
            seen += len(values)
            with lock:
                free, retired[0] = retired[0], []
            for call in free:
                call()  # type: ignore[operator]

    reader = threading.Thread(target=read)
    reader.start()
    offset = 0
    for step in range(200):
        part = keys[step % 2 :: 2]
        put(store, part, [b"%d|%s|" % (offset, k) + b"x" * (step % 200) for k in part], offset)
        assert wrong == []
        offset += len(part)
        committed = offset if step else 0
        if step % 40 == 39 and not store.flushing:
            store.flush_begin(store.horizon, len(keys))
    stop.set()
    reader.join()
    assert wrong == []
    assert seen
    store.abandon()
    with lock:
        for call in retired[0]:
            call()  # type: ignore[operator]
    assert memory.arena.free_bytes == memory.arena.budget - SEGMENT
    memory.close()


def test_kernels_stay_inside_damaged_arenas() -> None:
    """In a process of its own: a read or write outside would kill it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kv.hot.damaged_arena"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1000


# --- the arena ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5 * SEGMENT) | st.just(None), max_size=60), st.randoms())
def test_blocks_never_overlap_and_all_come_back(
    sizes: list[int | None], chosen: random.Random
) -> None:
    arena = Arena(20 * SEGMENT, SEGMENT)
    held: dict[int, int] = {}
    for size in sizes:
        if size is None and held:
            start = chosen.choice(list(held))
            arena.free(start, held.pop(start))
        elif size is not None and (found := arena.alloc(size)) is not None:
            held[found] = arena.size_of(size)
            assert found % BLOCK_BYTES_MIN == 0
    ends = sorted((start, start + size) for start, size in held.items())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert not ends or (ends[0][0] >= SEGMENT and ends[-1][1] <= arena.budget)
    assert arena.free_bytes == arena.budget - SEGMENT - sum(held.values())
    for start, size in held.items():
        arena.free(start, size)
    assert arena.alloc(17 * SEGMENT) is not None


def test_the_reserve_is_for_work_that_frees_memory() -> None:
    arena = Arena(10 * SEGMENT, SEGMENT)
    while arena.alloc(SEGMENT) is not None:
        pass
    assert arena.free_bytes == arena.reserve
    assert arena.alloc(SEGMENT, urgent=True) is not None


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        Arena(1000)


OLD_LINUX = sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14)


def pages_there(data: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    """The share of a piece of memory that is faulted in."""
    page = resource.getpagesize()
    found = ctypes.create_string_buffer(len(data) // page)
    address, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data))
    assert ctypes.CDLL(None).mincore(address, size, found) == 0
    return sum(byte & 1 for byte in found.raw) / len(found.raw)


@pytest.mark.skipif(OLD_LINUX, reason="Linux 5.14 and later can fault in memory ahead")
def test_memory_is_faulted_in_before_it_is_handed_out() -> None:
    arena = Arena(8 * AHEAD_BYTES)
    second = slice(AHEAD_BYTES, 2 * AHEAD_BYTES)
    assert pages_there(arena.data[second]) == 0
    for _ in range(AHEAD_BYTES // 2 // arena.segment_bytes):
        assert arena.alloc(arena.segment_bytes) is not None
    eventually(lambda: pages_there(arena.data[second]) == 1)
    assert pages_there(arena.data[4 * AHEAD_BYTES :]) == 0, "no more than is needed soon"


def test_an_arena_can_be_used_to_its_end() -> None:
    arena = Arena(2 * AHEAD_BYTES)
    while (found := arena.alloc(arena.segment_bytes, urgent=True)) is not None:
        arena.data[found : found + arena.segment_bytes] = 1
    assert arena.free_bytes == 0


def test_small_buckets_take_little_memory() -> None:
    memory = small_memory(64)
    memtable = Unlimited(memory.arena)
    assert memtable.bytes == 0
    names = Slices.of([b"key"])
    memtable.put(names, hash_keys(names), names, 0, 0)
    assert memtable.bytes == BLOCK_BYTES_MIN + FIRST_SEGMENT_BYTES
    memory.close()


def test_the_hash_depends_on_its_seed() -> None:
    out = np.empty((2, 1), np.int64)
    names = Slices.of([b"key"])
    for seed in (1, 2):
        words.hash_all(names.data, names.starts, names.ends, seed, out[seed - 1])
    assert out[0] != out[1]
