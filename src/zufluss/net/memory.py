"""The limits of the network layer, and the memory of frames: half-received, and not yet read.

| limit | what happens at it |
|---|---|
| connections | the oldest stranger is closed, or the new one refused |
| frame length | error frame with the request id, then close |
| requests in flight on a connection | reading pauses until answers leave |
| answers the client does not read | reading pauses until it reads them; without progress: close |
| memory of half-received frames, all connections | reading pauses; one frame at a time continues |
| time a begun frame may take, idle time | close |
| silence of the machine at the other end | the system ends it (`system.watch_peers`) |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog

log = structlog.get_logger(__name__)


STRANGERS_SHARE = 4
"""One in this many connections may be a stranger."""
STRANGERS_MIN = 16
"""How many connections may be strangers, however few connections are allowed."""
STRANGERS_MEMORY_SHARE = 8
"""Strangers get this fraction (1/n) of the memory of half-received frames."""
SHORT_SEND_SECONDS = 10.0
"""How long a client may read nothing while the memory of unread answers is short."""
SEND_PROGRESS_BYTES = 1024 * 1024
"""What a slow client must read of its answers, each time, to be kept."""


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
    login_seconds: float = 10.0
    """A stranger must have logged in, or begun its first request, after this long."""
    send_bytes_max: int = 512 * 1024 * 1024
    """Answers that clients have not read, over all connections."""
    send_seconds: float = 60.0
    """A client must read `SEND_PROGRESS_BYTES`, or all of its answers, within this time."""

    @property
    def short_seconds(self) -> float:
        """The same while the memory of unread answers is short: others wait for it."""
        return min(self.send_seconds, SHORT_SEND_SECONDS)

    @property
    def strangers_max(self) -> int:
        """Connections that may be strangers at once."""
        return max(STRANGERS_MIN, self.connections_max // STRANGERS_SHARE)


class Receiver(Protocol):
    """A connection that takes receive memory."""

    @property
    def stranger(self) -> bool:
        """Whether the client is not known yet."""
        ...

    def resume_receive(self) -> None:
        """Called when memory was freed: ask again."""


class ReceiveMemory:
    """The bound on half-received frames over all connections.

    Over the bound a connection waits its turn; the first to ask may go on beyond it (so that
    something always finishes), one at a time. Strangers have a share, and never go beyond it. They
    wait apart from the others, so that no frame of a known client wakes them.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._overdraft: Receiver | None = None
        self._waiting: deque[Receiver] = deque()
        self._strangers: dict[Receiver, int] = {}
        self._strangers_used = 0
        self._strangers_waiting: deque[Receiver] = deque()

    def take(self, owner: Receiver, size: int) -> bool:
        """Account for `size` more bytes of `owner`; False means wait for `resume_receive`."""
        if owner.stranger:
            if self._strangers_used + size > self.bytes_max // STRANGERS_MEMORY_SHARE:
                self._strangers_waiting.append(owner)
                return False
            self._strangers_used += size
            self._strangers[owner] = self._strangers.get(owner, 0) + size
        elif self.used + size > self.bytes_max:
            if self._overdraft not in (None, owner):
                self._waiting.append(owner)
                return False
            self._overdraft = owner
        self.used += size
        return True

    def give(self, owner: Receiver, size: int) -> None:
        """Return all `size` bytes of `owner`, and wake the connections that wait for memory."""
        self.used -= size
        if self._overdraft is owner:
            self._overdraft = None
        waiting, self._waiting = self._waiting, deque()
        if owner in self._strangers:
            self._strangers_used -= self._strangers.pop(owner)
            waiting += self._strangers_waiting
            self._strangers_waiting = deque()
        for connection in waiting:
            connection.resume_receive()

    def forget(self, owner: Receiver) -> None:
        """Remove `owner`, which closed while it waited."""
        for waiting in (self._waiting, self._strangers_waiting):
            with contextlib.suppress(ValueError):
                waiting.remove(owner)


class Sender(Protocol):
    """A connection with answers that its client has not read."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not read."""
        ...

    def narrow(self, narrow: bool) -> None:
        """Let the client have few unread bytes before it gets no more, or the usual number."""


class SendMemory:
    """The bound on answers that clients have not read, over all connections.

    Over the bound memory is `short`: clients with unread answers get no more until they have read,
    and the others get small ones; large ones wait. Who does not read is disconnected sooner.
    So a server in which some clients do not read goes on with those that do, and has at most the
    bound and a few kilobytes per connection of unread answers.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.short = False
        """More is unread than the bound, and not yet three quarters of it again."""
        self._behind: dict[Sender, int] = {}
        self._narrowed: set[Sender] = set()
        self._changed: asyncio.Event | None = None

    def note(self, sender: Sender, unsent: int) -> None:
        """Account for what a client has not read at the moment."""
        self._count(sender, unsent)
        if self.short and unsent:
            self._narrow(sender)
        self._check()

    def forget(self, sender: Sender) -> None:
        """Remove a connection that has ended, with its unread answers."""
        self._narrowed.discard(sender)
        self.note(sender, 0)
        self._wake()

    def hold(self, more: int) -> None:
        """Account for `more` bytes of answers that are still being made; negative gives back."""
        self.used += more
        self._check()

    def _check(self) -> None:
        if self.short:
            self._relax()
        elif self.used > self.bytes_max:
            self.refresh()
            if self.used > self.bytes_max:
                self.short = True
                log.warning("answers_unread", bytes=self.used, connections=len(self._behind))
                for sender in tuple(self._behind):
                    self._narrow(sender)

    def refresh(self) -> None:
        """Ask every connection that was behind how far it is now."""
        for sender in tuple(self._behind):
            self._count(sender, sender.unsent_bytes)
        self._relax()

    async def changed(self) -> None:
        """Wait until memory may not be short any more, or a connection has ended."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def _count(self, sender: Sender, unsent: int) -> None:
        self.used += unsent - self._behind.pop(sender, 0)
        if unsent:
            self._behind[sender] = unsent

    def _narrow(self, sender: Sender) -> None:
        if sender not in self._narrowed:
            self._narrowed.add(sender)
            sender.narrow(True)

    def _relax(self) -> None:
        if not self.short or self.used > self.bytes_max * 3 // 4:
            return
        self.short = False
        narrowed, self._narrowed = self._narrowed, set()
        for sender in narrowed:
            sender.narrow(False)
        self._wake()


def new_buffer(size: int) -> tuple[Any, memoryview]:
    """Uninitialised memory, as a numpy array for kernels and as a view of it."""
    array: Any = np.empty(size, np.uint8)
    return array, memoryview(array)
