"""The memory that the server's container leaves it.

A container (a control group of Linux) may have a limit far below the memory of the machine; a
process that exceeds it is killed. Each group from that of the process up to the root may have one,
in a file:

| version | line in `/proc/self/cgroup` | file below `/sys/fs/cgroup` |
|---|---|---|
| 2 | `0::<path>` | `<path>/memory.max`, the text `max` for no limit |
| 1 | `<n>:memory:<path>` | `memory/<path>/memory.limit_in_bytes`, about 2^63 for no limit |

Inside of a container the root is usually that of the container, and the path need not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from zufluss.config import options
from zufluss.config.load import Configuration

MEMORY_SHARE = 4
"""One byte in this many of the machine's memory is for rows of primary-key tables."""
MEMORY_MIN = 8 << 20
"""Their memory on a machine that has hardly any."""

OWN_GROUPS = Path("/proc/self/cgroup")
"""The control groups of the process."""
GROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""


def kv_memory(conf: Configuration) -> int:
    """Return the bytes for rows of primary-key tables: as configured, or a share of the machine."""
    configured = conf.get(options.ZUFLUSS_KV_MEMORY)
    if configured is not None:
        return configured
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(memory, memory_limit() or memory) // MEMORY_SHARE, MEMORY_MIN)


def memory_limit(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int | None:
    """Return the least memory limit of the container in bytes, None if there is none."""
    limits = []
    for file in _files(own_groups, groups):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
    return min(limits, default=None)


def _files(own_groups: Path, groups: Path) -> Iterator[Path]:
    """Yield the files that may have a limit, whether they exist or not."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = PurePosixPath(path.strip("/"))
        if not controllers:
            roots: tuple[Path, ...] = (groups, groups / "unified")
            file = "memory.max"
        elif "memory" in controllers.split(","):
            roots = (groups / "memory",)
            file = "memory.limit_in_bytes"
        else:
            continue
        for root in roots:
            for group in (inner, *inner.parents):
                yield root / group / file
