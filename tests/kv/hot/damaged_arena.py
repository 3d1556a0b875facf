"""Runs the store's kernels over damaged arenas that lie between two pages nobody may touch.

Started as a process of its own by `test_memtable.py`: an access even one byte outside kills it, and
a kernel that does not end lets it run into the timeout of the test.
"""

from __future__ import annotations

import random
import sys

import numpy as np

from tests.record.guard_pages import PAGE, Guarded
from zufluss.kv.hot import entries, index, segments, sorting, words
from zufluss.record.slices import Slices

SEED = 7
BITS = 6
BLOCK = 8
FIRST = 8 + (index.SLOT_BYTES << BITS)
HOSTILE = (0, 1, -1, -2, 7, 8, 16, PAGE, PAGE - 8, PAGE - 24, -(2**63), 2**63 - 1, 2**31 - 1, 2**40)


def sample(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Slices, int]:
    """A whole little arena: block, entries with some older versions, the root."""
    arena = np.zeros(size, np.uint8)
    root = np.array([0, BITS, BLOCK], np.int64)
    names = Slices.of([b"%d" % i * (i % 9) for i in range(1, 12)])
    hashes = np.empty(names.count, np.int64)
    words.hash_all(names.data, names.starts, names.ends, SEED, hashes)
    at = FIRST
    counts = np.zeros(2, np.int64)
    for offset in range(3):
        refs = np.empty(names.count, np.int64)
        _, at = entries.append(arena, at, size, *names, *names, offset, 0, refs)
        index.publish(arena, root, refs, hashes, 0, counts)
    return arena, root, hashes, names, at


def exercise(
    arena: np.ndarray, root: np.ndarray, hashes: np.ndarray, names: Slices, at: int
) -> None:
    """Every kernel that reads or writes the arena."""
    n = names.count
    one, two, many = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(400, np.int64)
    counts = np.zeros(2, np.int64)
    index.find(arena, root, *names, hashes, 2, one, two)
    index.look_up(arena, root, SEED, *names, 1, one, two)
    segments.select(arena, root, SEED, FIRST, at, 0, 2, many)
    index.live_slots(arena, BLOCK, BITS)
    found = max(0, index.heads(arena, BLOCK, BITS, many, 0))
    refs = many[:found].copy()
    spans = np.empty(3 * found, np.int64)
    if sorting.spans(arena, refs, spans) >= 0:
        starts, ends = spans[0::3].copy(), spans[1::3].copy()
        for at in (0, 8):
            sorting.words_at(arena, starts, ends, at, np.empty(found, np.int64))
    entries.walk(arena, FIRST, at, many)
    index.without_room(arena, root, hashes, np.zeros(8, np.int64))
    index.publish(arena, root, refs[:n], hashes[: len(refs)], 2, counts)
    segments.clean(arena, root, SEED, FIRST, at, at, arena.size, 2, 1, True, counts)
    segments.clean(arena, root, SEED, FIRST, at, at, arena.size, 2, 1, False, counts)
    index.split(arena, BLOCK, BITS, FIRST, FIRST + 1024, BITS, 0)


def main() -> None:
    guarded = Guarded()
    chosen = random.Random(11)
    arena, root, hashes, names, at = sample(PAGE)
    count = 0
    for round_ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3000):
        bad, broken = arena.copy(), root.copy()
        for _ in range(chosen.randrange(1, 6)):
            position = 8 * chosen.randrange(1, PAGE // 8)
            bad[position : position + 8].view(np.int64)[0] = chosen.choice(HOSTILE)
            position = chosen.randrange(PAGE)
            bad[position] = chosen.randrange(256)
        if round_ % 5 == 0:
            broken[chosen.randrange(3)] = chosen.choice(HOSTILE)
        size = PAGE if round_ % 3 else 8 * chosen.randrange(4, PAGE // 8)
        for place in guarded.places(bad[:size].tobytes()):
            exercise(place, broken, hashes, names, min(at, size))
            count += 1
    print(count)


if __name__ == "__main__":
    main()
