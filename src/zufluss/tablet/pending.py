"""Writes that are appended and not yet acknowledged.

The answer to a request with `acks` = all waits until each of its entries is below the high
watermark of its bucket, or until the request has waited for too long. Appends (`produce.py`) and
puts (`put.py`) wait in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zufluss.errors import ErrorCode, InvalidRequiredAcksError, ZuflussError
from zufluss.net.connection import ServerConnection
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire.hot.buckets import ENTRIES_AT_ONCE
from zufluss.wire.hot.produce import ProducedBucket, produce_response

ALL = -1
ACKS = (ALL, 1, 0)
_LONE = {0}
"""The waiting positions of a request with one entry; shared, since it is never changed."""


def check_acks(acks: int) -> None:
    """Refuse a write with a value of `acks` that has no meaning."""
    if acks not in ACKS:
        raise InvalidRequiredAcksError(
            f"Invalid required acks: {acks}. Use -1 (all), 1 (leader) or 0 (none)"
        )


class PendingOwner(Protocol):
    """A handler with requests that wait to be acknowledged."""

    pending: set[PendingProduce]
    tasks: BackgroundTasks


class PendingProduce:
    """A request of which some entries are written and not yet acknowledged."""

    __slots__ = (
        "answered",
        "connection",
        "deadline",
        "entries",
        "owner",
        "request_id",
        "waiting",
    )

    def __init__(
        self, owner: PendingOwner, connection: ServerConnection, request_id: int, deadline: float
    ) -> None:
        self.owner = owner
        self.connection = connection
        self.request_id = request_id
        self.deadline = deadline
        self.answered = False
        self.entries: list[ProducedBucket] = []
        self.waiting: set[int] = _LONE
        """Positions of the entries that are not acknowledged yet."""

    def acknowledged(self) -> None:
        """The only entry passed the high watermark."""
        self._answer()

    def failed(self, error: ZuflussError) -> None:
        """Refuse the entries that still wait; acknowledged entries stay acknowledged."""
        for position in self.waiting:
            self.refuse(position, error)
        self._answer()

    def refuse(self, position: int, error: ZuflussError) -> None:
        """Answer one entry with an error."""
        self.entries[position] = self.entries[position]._replace(
            base_offset=None, error_code=error.code, error_message=error.message
        )

    def settled(self, position: int) -> None:
        """The outcome of one of several entries is known."""
        self.waiting.discard(position)
        if not self.waiting:
            self._answer()

    def timed_out(self) -> None:
        """The client's timeout passed before the data was durable."""
        self.failed(
            ZuflussError(
                "the write was not durable within the request's timeout_ms; it may still become "
                "so: retry with the same writer id and sequence",
                code=ErrorCode.REQUEST_TIME_OUT,
            )
        )

    def body(self, entries: Sequence[ProducedBucket]) -> bytes:
        """The answer about these entries; answers of several parts are joined by their bytes."""
        return produce_response(entries)

    def _answer(self) -> None:
        if self.answered:
            return
        body = self.body(self.entries)
        self.answered = True
        self.owner.pending.discard(self)
        self.connection.finish(self.request_id, body)


class LongProduce(PendingProduce):
    """A request with many entries, whose answer is encoded in turns of the event loop."""

    __slots__ = ()

    def failed(self, error: ZuflussError) -> None:
        """Refuse the entries that still wait; acknowledged entries stay acknowledged."""
        self._begin_answer(error)

    def _answer(self) -> None:
        self._begin_answer(None)

    def _begin_answer(self, error: ZuflussError | None) -> None:
        if self.answered:
            return
        self.owner.tasks.answer(self.connection, self._answer_in_turns(error), lambda: None)
        self.answered = True
        self.owner.pending.discard(self)

    async def _answer_in_turns(self, error: ZuflussError | None) -> None:
        """Answer the request; entries that still wait are refused if there is an `error`."""
        pace = self.connection.pace
        buffers = []
        for start in range(0, len(self.entries), ENTRIES_AT_ONCE):
            await pace.pause()
            stop = min(start + ENTRIES_AT_ONCE, len(self.entries))
            if error is not None:
                for position in self.waiting.intersection(range(start, stop)):
                    self.refuse(position, error)
            buffers.append(self.body(self.entries[start:stop]))
        self.connection.respond(self.request_id, buffers, sum(map(len, buffers)))
        self.connection.done()


class PendingEntry:
    """One of several entries of a pending request."""

    __slots__ = ("pending", "position")

    def __init__(self, pending: PendingProduce, position: int) -> None:
        self.pending = pending
        self.position = position

    def acknowledged(self) -> None:
        """The entry passed the high watermark."""
        self.pending.settled(self.position)

    def failed(self, error: ZuflussError) -> None:
        """Refuse the entry; the others may still be acknowledged."""
        if not self.pending.answered:
            self.pending.refuse(self.position, error)
            self.pending.settled(self.position)
