"""The decorator that makes kernels, and the directory of those that numba compiled here.

If the compiled library can be used (`library.py`), a kernel is a function of the library and numba
is not imported. Otherwise numba compiles the kernel when its module is imported, once per install.

numba caches machine code beside the source, else in the user's cache directory, else not at all:
a container with a read-only install and no home would compile for seconds at every start. numba
also looks only at the file of the cached function, and misses a change in a function or constant
that the kernel takes from another file.

So the cache directory is our own, and its name is a digest of every file that determines the
machine code (`library.source_digest`). It stands under `NUMBA_CACHE_DIR` if that is set, else
beside the source if that is writable, else in the user's cache directory, else in a private
directory under the temporary one. Its content is loaded as code, so a directory that others can
write to is never used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from zufluss.record.kernels import library, progress
from zufluss.record.kernels.types import Signature, numba_type
from zufluss.system import is_private, user_id

F = TypeVar("F", bound=Callable[..., Any])

KEPT_GENERATIONS = 4
"""How many versions of the compiled kernels stay on disk."""


def _is_private(directory: Path) -> bool:
    """Create `directory` if it does not exist; return whether only this user can write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    return is_private(status) and os.access(directory, os.W_OK)


def choose_directory(candidates: tuple[Path, ...], temporary: Path) -> Path:
    """Return the first candidate fit for code, else a new directory under `temporary`."""
    for candidate in candidates:
        if _is_private(candidate):
            return candidate
    return Path(tempfile.mkdtemp(prefix="zufluss-kernels-", dir=temporary))


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
        temporary / f"zufluss-{user_id()}",
    ]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(chosen))
    base = choose_directory(tuple(candidates), temporary)
    directory = base / f"kernels-{library.source_digest()}"
    if not directory.exists():
        directory.mkdir(exist_ok=True)
        _forget_old(base)
    return directory


class Kernel(NamedTuple):
    """A kernel that numba compiled in this process."""

    name: str
    signature: Signature
    short: bool
    dispatcher: Any
    """numba's function."""


COMPILED: list[Kernel] = []
"""Kernels that numba compiled, or loaded from its cache, in this process."""


def kernel(
    signature: Signature | None = None,
    *,
    boundscheck: bool = False,
    inline: bool = False,
    short: bool = False,
    allocates: bool = False,
) -> Callable[[F], F]:
    """Make a kernel of a function: take it from the compiled library, or have numba compile it.

    Without a signature the function is a part of other kernels and is compiled with each of them.

    `boundscheck`: an index outside its array raises IndexError; for kernels that do not compare
    positions themselves. `inline`: compile the part into its caller, because it runs once per
    value and a call would cost more than its work. `short`: keep the GIL, because the kernel takes
    microseconds and getting the GIL back from other threads takes longer. `allocates`: the kernel
    creates arrays, so numba must count references. It does not otherwise: the caller keeps all
    arguments alive, and counting took a third of the time of some kernels.
    """
    options: dict[str, Any] = {
        "nogil": not short, "error_model": "numpy", "boundscheck": boundscheck, "_nrt": allocates,
    }  # fmt: skip
    if inline:
        options["forceinline"] = True

    def decorate(function: F) -> F:
        compiled = library.functions()
        name = f"{function.__module__}.{function.__qualname__}"
        if compiled is not None:
            return cast(F, compiled[name]) if signature is not None else function
        dispatcher = _compile(function, name, signature, options)
        if signature is not None:
            COMPILED.append(Kernel(name, signature, short, dispatcher))
        return cast(F, dispatcher)

    return decorate


def _compile(
    function: Callable[..., Any], name: str, signature: Signature | None, options: dict[str, Any]
) -> Any:
    """Compile a function with numba, or load it from the cache; user settings stay as they are."""
    import numba

    compiler: Any = numba.njit
    if signature is None:
        return compiler(**options)(function)
    directory = cache_directory()
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(directory)
    shown = nullcontext() if _is_on_disk(directory, name) else progress.compiling(name)
    try:
        with shown:
            return compiler([numba_type(signature)], cache=True, **options)(function)
    finally:
        settings.CACHE_DIR = before


def _is_on_disk(directory: Path, name: str) -> bool:
    """Return whether numba's cache has a kernel; decides only whether progress is shown."""
    module, function = name.split(".")[-2:]
    return any(directory.glob(f"*/{module}.{function}-*.nbi"))
