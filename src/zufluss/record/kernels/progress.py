"""Tells people that kernels are being compiled, which happens once per install.

Compiling takes seconds per kernel. A terminal shows one line that is updated and removed at the
end; a file gets a few lines, one whenever the number of kernels has doubled. A worker of
`compile/workers.py` tells its parent process the names instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_NOTE = ", once per install …"


class Display:
    """The progress line of this process."""

    def __init__(self, stream: TextIO, total: int | None = None) -> None:
        self._stream = stream
        self._total = total
        self._count = 0

    def begin(self) -> None:
        """Show that one more kernel is being compiled."""
        self._count += 1
        if self._total is None:
            line = f"compiling kernel {self._count}{_NOTE}"
        else:
            line = f"compiling {self._count} of {self._total} kernels{_NOTE}"
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{line}")
        elif self._count & (self._count - 1) == 0 or self._count == self._total:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()


_display = Display(sys.stderr)
_to_parent = False


def tell_parent() -> None:
    """Write the names of compiled kernels to stdout, for the parent of this worker."""
    global _to_parent
    _to_parent = True


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Show that the kernel is being compiled in a block."""
    if _to_parent:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        yield
        return
    _display.begin()
    try:
        yield
    finally:
        _display.clear()
