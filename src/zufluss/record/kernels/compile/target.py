"""The processor that the compiled library is made for.

A library for the processor that builds it would not run on older ones. x86-64-v3 (Haswell of 2013,
Zen of 2017) has the instructions that the kernels name: vectors of 32 bytes and counts of bits. On
ARM the first version of the 64-bit architecture has their like.
"""

from __future__ import annotations

import platform
from typing import NamedTuple


class Target(NamedTuple):
    """A processor in LLVM's terms."""

    cpu: str
    features: tuple[str, ...]
    """Features of `cpu` beyond those of every processor of the architecture."""


X86_64_V3 = Target(
    "x86-64-v3",
    (
        *("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt"),
        *("sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
    ),
)
ARM_64 = Target("generic", ())

_TARGETS = {"x86_64": X86_64_V3, "aarch64": ARM_64, "arm64": ARM_64}


def target() -> Target | None:
    """Return the target for the architecture of this machine, None if there is none."""
    return _TARGETS.get(platform.machine())
