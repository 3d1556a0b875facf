"""The limits of the network layer, and the memory of frames that have not arrived whole.

| limit | what happens at it |
|---|---|
| connections | the new one is closed |
| frame length | error frame with the request id, then close |
| requests in flight on a connection | reading pauses until answers leave |
| answers the client does not read | reading pauses until it reads them; without progress: close |
| memory of half-received frames, all connections | reading pauses; one frame at a time continues |
| time a begun frame may take, idle time | close |
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Limits:
    """Named limits of the network layer."""

    connections_max: int = 10_000
    """Open connections."""
    frame_bytes_max: int = 100 * 1024 * 1024
    """Longest request frame."""
    inflight_max: int = 256
    """Unanswered requests of one connection."""
    receive_bytes_max: int = 512 * 1024 * 1024
    """Memory of half-received frames over all connections."""
    idle_seconds: float = 600.0
    """A connection without traffic for this long is closed."""
    frame_seconds: float = 60.0
    """A begun frame must be complete after this long."""


class Receiver(Protocol):
    """A connection that takes receive memory."""

    def resume_receive(self) -> None:
        """Called when memory was freed: ask again."""


class ReceiveMemory:
    """The bound on half-received frames over all connections.

    Over the bound connections wait for their turn. One at a time may exceed the bound, so that a
    frame always completes.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._overdraft: Receiver | None = None
        self._waiting: deque[Receiver] = deque()

    def take(self, owner: Receiver, size: int) -> bool:
        """Account for `size` more bytes of `owner`; False means wait for `resume_receive`."""
        if self.used + size > self.bytes_max:
            if self._overdraft not in (None, owner):
                self._waiting.append(owner)
                return False
            self._overdraft = owner
        self.used += size
        return True

    def give(self, owner: Receiver, size: int) -> None:
        """Return `size` bytes of `owner`, and wake the connections that wait for memory."""
        self.used -= size
        if self._overdraft is owner:
            self._overdraft = None
        waiting, self._waiting = self._waiting, deque()
        for connection in waiting:
            connection.resume_receive()

    def forget(self, owner: Receiver) -> None:
        """Remove `owner`, which closed while it waited."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(owner)


def new_buffer(size: int) -> tuple[Any, memoryview]:
    """Uninitialised memory, as a numpy array for kernels and as a view of it."""
    array: Any = np.empty(size, np.uint8)
    return array, memoryview(array)
