"""Ways in which a disk can damage a file.

`hurt` applies one at random, and drops the file from the page cache, so that the next reader gets
the bytes from the disk as after a reboot.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

BLOCK = 512


def flip(data: bytearray, rng: random.Random) -> None:
    """Flip one bit."""
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def noise(data: bytearray, rng: random.Random) -> None:
    """Overwrite some bytes with random ones."""
    at = rng.randrange(len(data))
    count = min(rng.randint(1, 64), len(data) - at)
    data[at : at + count] = rng.randbytes(count)


def zero(data: bytearray, rng: random.Random) -> None:
    """Overwrite a block with zeros."""
    at = rng.randrange(len(data)) // BLOCK * BLOCK
    count = min(BLOCK, len(data) - at)
    data[at : at + count] = bytes(count)


def swap(data: bytearray, rng: random.Random) -> None:
    """Swap two blocks."""
    one, two = (rng.randrange(max(1, len(data) // BLOCK)) * BLOCK for _ in range(2))
    first, second = data[one : one + BLOCK], data[two : two + BLOCK]
    if len(first) == len(second):
        data[one : one + BLOCK], data[two : two + BLOCK] = second, first


def cut(data: bytearray, rng: random.Random) -> None:
    """Cut the end off."""
    del data[rng.randrange(len(data)) :]


def grow(data: bytearray, rng: random.Random) -> None:
    """Append random bytes."""
    count = rng.randint(1, 300)
    data += rng.choice((bytes(count), rng.randbytes(count), bytes(data[:count])))


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, noise, zero, swap, cut, grow)


def hurt(path: Path, rng: random.Random, *, may_vanish: bool) -> str:
    """Damage a file; returns a description."""
    if rng.random() < 0.05 and may_vanish:
        path.unlink()
        return f"{path.name} is gone"
    before = path.read_bytes()
    data = bytearray(before)
    kind = rng.choice(KINDS)
    if data:
        kind(data, rng)
    path.write_bytes(data)
    forget_cached(path)
    changed = next((i for i, (a, b) in enumerate(zip(before, data, strict=False)) if a != b), None)
    return f"{path.name}: {kind.__name__}, {len(before)} to {len(data)} bytes, first at {changed}"


def forget_cached(path: Path) -> None:
    """Drop a file from the page cache."""
    if path.exists():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
