"""Where compiled kernels are kept, and the one decorator that makes them.

numba caches machine code beside the source, else in the user's cache directory, else not at all:
in a container with a read-only install and no home every start would compile for seconds. And it
looks only at the file of the cached function, so a change in a function that it calls from
another file goes unnoticed. Hence a directory of our own, named after the content of every file
that kernels may take constants and functions from (this package, `SOURCES_OUTSIDE`,
`MODULES_OUTSIDE`): under
`NUMBA_CACHE_DIR` if set, beside the source if that is writable, in the user's cache directory, or
in a private directory under the temporary one. The cache is loaded as code, so a directory that
others can write to is never used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SOURCES_OUTSIDE = ("fault.py", "header.py", "lz4.py", "slices.py")
"""Files of `zufluss.record` that kernel modules import from, besides their own package."""

MODULES_OUTSIDE = (
    "zufluss.kv.hot.kernels",
    "zufluss.kv.hot.sorting",
    "zufluss.kv.hot.words",
    "zufluss.kv.hot.answer",
    "zufluss.kv.merge.gather",
    "zufluss.kv.merge.base",
    "zufluss.kv.merge.last_row",
    "zufluss.kv.merge.first_row",
    "zufluss.kv.merge.versioned",
    "zufluss.kv.merge.partial",
    "zufluss.record.aggregate.arithmetic",
    "zufluss.record.aggregate.cells",
    "zufluss.record.aggregate.kernels",
    "zufluss.record.aggregate.value_write",
)
"""Modules with kernels that belong to what they do more than to this package."""

KEPT_GENERATIONS = 4
"""How many versions of the compiled kernels stay on disk."""


def _is_private(directory: Path) -> bool:
    """Create `directory` if need be; whether it is ours, writable, and nobody else's to write."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not shared and os.access(directory, os.W_OK)


def choose_directory(candidates: tuple[Path, ...], temporary: Path) -> Path:
    """Return the first candidate fit for code, else a new directory under `temporary`."""
    for candidate in candidates:
        if _is_private(candidate):
            return candidate
    return Path(tempfile.mkdtemp(prefix="zufluss-kernels-", dir=temporary))


def source_digest() -> str:
    """Digest of every source file that a kernel can depend on."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    outside = (here.parent / name for name in SOURCES_OUTSIDE)
    source = here.parents[2]
    modules = (source / f"{name.replace('.', '/')}.py" for name in MODULES_OUTSIDE)
    for path in (*outside, *modules, *sorted(here.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old(base: Path) -> None:
    """Keep the newest generations; losing one that is in use only costs its next start."""
    generations = sorted(base.glob("kernels-*"), key=lambda path: path.stat().st_mtime)
    for path in generations[:-KEPT_GENERATIONS]:
        shutil.rmtree(path, ignore_errors=True)


@cache
def cache_directory() -> Path:
    """Directory of the compiled kernels of this version of the sources."""
    temporary = Path(tempfile.gettempdir())
    home_cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    candidates = [
        Path(__file__).parent / "__pycache__",
        Path(home_cache) / "zufluss",
        temporary / f"zufluss-{os.getuid()}",
    ]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(chosen))
    base = choose_directory(tuple(candidates), temporary)
    directory = base / f"kernels-{source_digest()}"
    if not directory.exists():
        directory.mkdir(exist_ok=True)
        _forget_old(base)
    return directory


def kernel(
    *signatures: Any,
    boundscheck: bool = False,
    inline: bool = False,
    short: bool = False,
    allocates: bool = False,
) -> Callable[[F], F]:
    """Compile a function for `signatures` now, from the cache if it can; it runs without the GIL.

    Without signatures the function is a part of other kernels and compiled with them. A kernel that
    does not compare positions itself is compiled with `boundscheck`. A part that runs once per
    value is compiled into its caller with `inline`: the call would cost more than the work. A
    kernel that is done in some microseconds is `short` and keeps the GIL: with threads around, to
    get it back takes longer than that.

    Arrays are not counted in and out of a kernel and its parts: who calls it keeps them alive, and
    counting took a third of the time of some kernels. One that makes an array of its own
    `allocates`, and there they are counted.
    """
    import numba

    options: dict[str, Any] = {
        "nogil": not short, "error_model": "numpy", "boundscheck": boundscheck, "_nrt": allocates,
    }  # fmt: skip
    if inline:
        options["forceinline"] = True

    def decorate(function: F) -> F:
        compiler: Any = numba.njit
        if not signatures:
            part: F = compiler(**options)(function)
            return part
        settings: Any = numba.config
        before = settings.CACHE_DIR
        settings.CACHE_DIR = str(cache_directory())
        try:
            compiled: F = compiler(list(signatures), cache=True, **options)(function)
        finally:
            settings.CACHE_DIR = before
        return compiled

    return decorate
