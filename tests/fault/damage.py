"""Ways in which a disk hurts a file while nobody looks.

`hurt` picks one and applies it, and sees to it that the next reader gets the bytes from the disk
and not from the page cache, because that is what happens after a reboot.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

BLOCK = 512


def flip(data: bytearray, rng: random.Random) -> None:
    """One bit."""
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def noise(data: bytearray, rng: random.Random) -> None:
    """Some bytes of rubbish."""
    at = rng.randrange(len(data))
    count = min(rng.randint(1, 64), len(data) - at)
    data[at : at + count] = rng.randbytes(count)


def zero(data: bytearray, rng: random.Random) -> None:
    """A block of zeros."""
    at = rng.randrange(len(data)) // BLOCK * BLOCK
    count = min(BLOCK, len(data) - at)
    data[at : at + count] = bytes(count)


def swap(data: bytearray, rng: random.Random) -> None:
    """Two blocks in each other's place."""
    one, two = (rng.randrange(max(1, len(data) // BLOCK)) * BLOCK for _ in range(2))
    first, second = data[one : one + BLOCK], data[two : two + BLOCK]
    if len(first) == len(second):
        data[one : one + BLOCK], data[two : two + BLOCK] = second, first


def cut(data: bytearray, rng: random.Random) -> None:
    """The end is missing."""
    del data[rng.randrange(len(data)) :]


def grow(data: bytearray, rng: random.Random) -> None:
    """Something follows the end."""
    count = rng.randint(1, 300)
    data += rng.choice((bytes(count), rng.randbytes(count), bytes(data[:count])))


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, noise, zero, swap, cut, grow)


def hurt(path: Path, rng: random.Random, *, may_vanish: bool) -> str:
    """Damage a file; returns what was done."""
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
    """Have a file come from the disk the next time it is read."""
    if path.exists():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
