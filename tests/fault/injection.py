"""Exceptions at chosen calls: any Python function of the server, any system call.

An `Injector` is a profile function (`sys.setprofile`) of every thread that a server starts. It sees
each call before the call happens, counts the calls by name, and raises an exception instead of the
call that a `Point` names: the n-th call of a function or of a system call. The server has no part
in it: nothing is replaced, no code is there for the tests.

| error | where |
|---|---|
| MemoryError | functions of `log`, `kv`, `replica`, `tablet` and `record` |
| EMFILE | system calls that need a descriptor, and RocksDB |
| ENOSPC | system calls that may need space, and RocksDB |

Functions are counted one by one, because threads take turns differently in each run: the third call
of a function is mostly the same call in the next run, the 3000th call of all is not. A coroutine or
a generator fails when it begins, not when it is resumed.
"""

from __future__ import annotations

import dis
import errno
import io
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import zufluss

PACKAGES: Final = ("log", "kv", "replica", "tablet", "record")
"""Packages of zufluss whose functions may fail."""

OPENING: Final = frozenset({os.open, io.open, os.scandir, os.pipe})
"""System calls that need a descriptor."""

WRITING: Final = frozenset(
    {os.open, os.pwrite, os.ftruncate, os.fdatasync, os.mkdir, os.replace, os.rename, os.link}
)
"""System calls that may need space."""

ROCKSDB: Final = "kv.cold.rocks.ColdTier._try"
"""Everything that is done with RocksDB."""

NEVER: Final = {"__del__", "__repr__", "__str__", "ThreadWorker._run", "ThreadWorker._report"}
"""Functions whose exceptions Python swallows, or that only logs call; and the beginning of a worker
thread and of its report to the event loop: nobody is left who could notice."""

_SOURCE: Final = f"{Path(zufluss.__file__).parent}{os.sep}"


class Point(NamedTuple):
    """The n-th call of a function or of a system call, and what it raises."""

    error: str
    """memory, EMFILE or ENOSPC."""
    name: str
    """Module and function, or `os.` and the system call."""
    hit: int
    """Which of its calls, from 1 on."""

    def __str__(self) -> str:
        return f"{self.error} at call {self.hit} of {self.name}"

    def exception(self) -> Exception:
        """Make the exception."""
        if self.error == "memory":
            return MemoryError()
        number = getattr(errno, self.error)
        if self.name == ROCKSDB:
            return Exception(f"IO error: {os.strerror(number)}: While open a file: 000012.sst")
        return OSError(number, os.strerror(number))


def _system_call(function: Any) -> str:
    return f"os.{function.__name__}"


def _function(code: CodeType) -> tuple[str, int]:
    """Return the name of a function that may fail and where it begins; no name for others."""
    path = code.co_filename
    if not path.startswith(_SOURCE):
        return "", 0
    module = path.removeprefix(_SOURCE).removesuffix(".py").replace(os.sep, ".")
    if module.partition(".")[0] not in PACKAGES or NEVER & {code.co_name, code.co_qualname}:
        return "", 0
    begin = next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")
    return f"{module}.{code.co_qualname}", begin


class Injector:
    """Counts calls while it is armed, and makes one of them fail."""

    def __init__(self) -> None:
        self.armed = False
        self.counts: Counter[tuple[str, str]] = Counter()
        """Calls by error and name."""
        self.raised: str | None = None
        """The calls that led to the one that failed; None while none has."""
        self._point: Point | None = None
        self._functions: dict[CodeType, tuple[str, int]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See the calls of the threads that are started meanwhile, as soon as it is armed."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def arming(self, point: Point | None) -> Iterator[None]:
        """Count calls, also of this thread, and make the named one fail."""
        self._point, self.armed = point, True
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.armed = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what the test itself calls."""
        armed, self.armed = self.armed, False
        try:
            yield
        finally:
            self.armed = armed and self.raised is None

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.armed:
            return
        if event == "call":
            code = frame.f_code
            try:
                name, begin = self._functions[code]
            except KeyError:
                name, begin = self._functions[code] = _function(code)
            if name and frame.f_lasti == begin:
                self._pass(frame, "memory", name)
                if name == ROCKSDB:
                    self._pass(frame, "EMFILE", name)
                    self._pass(frame, "ENOSPC", name)
        elif event == "c_call":
            for error, calls in (("EMFILE", OPENING), ("ENOSPC", WRITING)):
                if _is_in(calls, argument):
                    self._pass(frame, error, _system_call(argument))

    def _pass(self, frame: FrameType, error: str, name: str) -> None:
        self.counts[error, name] += 1
        point = self._point
        if point is None or point[:2] != (error, name):
            return
        if self.counts[error, name] == point.hit:
            self.armed = False
            self.raised = "".join(traceback.format_stack(frame))
            raise point.exception()


def _is_in(calls: frozenset[Callable[..., Any]], function: Any) -> bool:
    try:
        return function in calls
    except TypeError:  # a method of an object without a hash
        return False
