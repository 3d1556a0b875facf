"""Makes the compiled library: compiles the kernels, links them, and labels the result.

Linking needs a C compiler and the header files of Python and numpy. An install from source on a
machine without them uses numba's cache instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from zufluss.record.kernels import library
from zufluss.record.kernels.compile.target import Target, target
from zufluss.record.kernels.compile.workers import compile_in_parallel

FRAME = Path(__file__).with_name("library.c")
_PROBE = "#include <Python.h>\n"


class LinkError(Exception):
    """The library cannot be made on this machine; the message says why."""


def make_library(directory: Path) -> None:
    """Compile the kernels and write the library with its label into a directory.

    Raises `LinkError` if that is not possible.
    """
    processor = target()
    if processor is None:
        raise LinkError("there is no target processor for this architecture")
    try:
        _make(processor, directory)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise LinkError(str(problem)) from problem


def _make(processor: Target, directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="zufluss-kernels-") as name:
        work = Path(name)
        _try_compiler(work)
        environ = {
            **os.environ,
            "NUMBA_CPU_NAME": processor.cpu,
            "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in processor.features),
            "NUMBA_CACHE_DIR": name,
            "PYTHONPATH": _python_path(),
        }
        compile_in_parallel(environ)
        objects = [sys.executable, "-m", "zufluss.record.kernels.compile.objects", name]
        subprocess.run(objects, env=environ, check=True)
        publish(link(work), processor, directory)


def _python_path() -> str:
    """Return the search path for processes that compile: our sources and all that this one sees.

    pip builds a wheel with numba and numpy in directories that only its own processes know.
    """
    return os.pathsep.join([str(library.HERE.parents[2]), *filter(None, sys.path)])


def link(work: Path) -> Path:
    """Link the object files and the table in a directory to a library in the same directory."""
    made = work / library.LIBRARY
    objects = sorted(map(str, work.glob("kernel-*.o")))
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    sources = (*_INCLUDES, f"-I{work}", str(FRAME))
    _cc("-shared", "-O2", *sources, *objects, *undefined, "-o", str(made))
    return made


def publish(made: Path, processor: Target, directory: Path) -> None:
    """Copy a library into a directory, then write its label.

    Each file is replaced at once, but not both together: a process that loads in between finds a
    label of another library, or none, and does not use the library.
    """
    content = made.read_bytes()
    label = {
        "sources": library.source_digest(),
        "sha256": hashlib.sha256(content).hexdigest(),
        "features": processor.features,
    }
    for name, data in (
        (library.LIBRARY, content),
        (library.LABEL, json.dumps(label, indent=1).encode()),
    ):
        new = directory / f"{name}.{os.getpid()}"
        new.write_bytes(data)
        new.replace(directory / name)


def _try_compiler(work: Path) -> None:
    """Raise if there is no C compiler with Python's header files, before anything is compiled."""
    probe = work / "probe.c"
    probe.write_text(_PROBE)
    _cc(*_INCLUDES, "-c", str(probe), "-o", str(work / "probe.o"))


_INCLUDES = ("-fPIC", f"-I{sysconfig.get_path('include')}", f"-I{np.get_include()}")


def _cc(*arguments: str) -> None:
    command = [*shlex.split(os.environ.get("CC", "cc")), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as problem:
        raise LinkError(f"there is no C compiler ({problem})") from None
    if done.returncode != 0:
        raise LinkError(f"{' '.join(command)} failed:\n{done.stderr}")
