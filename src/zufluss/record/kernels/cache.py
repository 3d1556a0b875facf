"""The decorator that makes kernels, and the directory that keeps their machine code.

numba caches machine code beside the source, else in the user's cache directory, else not at all:
a container with a read-only install and no home would compile for seconds at every start. numba
also looks only at the file of the cached function, and misses a change in a function or constant
that the kernel takes from another file.

So the cache directory is our own, and its name is a digest of every file that kernels take
functions or constants from: this package and `MODULES_OUTSIDE`. It stands under `NUMBA_CACHE_DIR`
if that is set, else beside the source if that is writable, else in the user's cache directory,
else in a private directory under the temporary one. Its content is loaded as code, so a directory
that others can write to is never used.
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

MODULES_OUTSIDE = (
    "zufluss.kv.hot.entries",
    "zufluss.kv.hot.index",
    "zufluss.kv.hot.segments",
    "zufluss.kv.hot.sorting",
    "zufluss.kv.hot.words",
    "zufluss.kv.hot.answer",
    "zufluss.kv.merge.gather",
    "zufluss.kv.merge.base",
    "zufluss.kv.merge.last_row",
    "zufluss.kv.merge.first_row",
    "zufluss.kv.merge.versioned",
    "zufluss.kv.merge.partial",
    "zufluss.record.fault",
    "zufluss.record.slices",
    "zufluss.record.aggregate.arithmetic",
    "zufluss.record.aggregate.cells",
    "zufluss.record.aggregate.column_fold",
    "zufluss.record.aggregate.compute",
    "zufluss.record.aggregate.opcodes",
    "zufluss.record.aggregate.script",
    "zufluss.record.aggregate.value_write",
)
"""Modules outside this package that define kernels, or that kernels take constants from.

The list is written down because finding these modules takes longer than loading them.
`tests/record/kernels/test_sources.py` fails if a module is missing or superfluous.
"""

KEPT_GENERATIONS = 4
"""How many versions of the compiled kernels stay on disk."""


def _is_private(directory: Path) -> bool:
    """Create `directory` if it does not exist; return whether only this user can write to it."""
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
    """Return the digest of every source file that kernels take functions or constants from."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    root = here.parents[2]
    outside = (root / f"{name.replace('.', '/')}.py" for name in MODULES_OUTSIDE)
    for path in (*outside, *sorted(here.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old(base: Path) -> None:
    """Delete all but the newest generations; a process that loses its own compiles again."""
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
    """Compile a function for `signatures` when its module is imported, or load it from the cache.

    Without signatures the function is a part of other kernels and is compiled with each of them.

    `boundscheck`: an index outside its array raises IndexError; for kernels that do not compare
    positions themselves. `inline`: compile the part into its caller, because it runs once per
    value and a call would cost more than its work. `short`: keep the GIL, because the kernel takes
    microseconds and getting the GIL back from other threads takes longer. `allocates`: the kernel
    creates arrays, so numba must count references. It does not otherwise: the caller keeps all
    arguments alive, and counting took a third of the time of some kernels.
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
