"""What a shared log is: what a server and a coordinator ask of it.

A *session* is one registration of one server. It appends entries of many buckets; an entry is
durable when the log has it, and the session hears of durable entries in the order of its appends.
A coordinator *seals* the session of a server that is gone: it learns where the session ended, and
from then on nothing of the session becomes durable any more, even if the server was only paused and
its requests are still under way. Others read what the session has, from its *floor* to its end.

What is acknowledged is exactly what is read behind a seal; everything else follows from that:

* An entry that was not reported durable may be there or not. One that was reported is there.
* All sealers of a session find the same end, at the same time or one after the other.
* The floor is the permission to delete. It is recorded in the metadata before anything below it
  is deleted, never beyond what is durable, and no more once the session is being sealed.

`zufluss.testing.shared_log.SharedLogConformance` has these promises as tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zufluss.errors import ConfigError, CorruptRecordError, NotLeaderError
from zufluss.model.table import TableBucket
from zufluss.remote.wal import EntryKind, WalName, WalObject

OnDurable = Callable[[list[tuple[TableBucket, int]]], None]
"""Is told in the order of the appends which buckets are durable up to which offset. If it raises,
because memory ran out, it is told again."""


class Session(NamedTuple):
    """A registration of a server."""

    cluster_id: str
    """A UUID in 32 hexadecimal digits."""
    server_id: int
    server_epoch: int
    """Of this registration; no other registration of the cluster has it."""


class SessionFencedError(NotLeaderError):
    """The session was ended by somebody else, or given up: its server leads nothing any more.

    What it appended and did not hear of may be durable or not.
    """


@dataclass(slots=True)
class SessionCounts:
    """What a session wrote, for whoever looks after it."""

    objects: int = 0
    """Durable objects."""
    bytes: int = 0
    """Bytes of their entries."""
    failures: int = 0
    """Requests that failed; each was sent again."""

    def add(self, other: SessionCounts) -> None:
        """Add what another session wrote."""
        self.objects += other.objects
        self.bytes += other.bytes
        self.failures += other.failures


class Waiting(NamedTuple):
    """What a session has not made durable yet."""

    bytes: int
    """Bytes of entries that have no object yet."""
    seconds: float
    """How long the oldest object has been under way; 0 if none is."""
    reason: str
    """Why its last request failed; empty if none did."""


class WrittenObject(NamedTuple):
    """An object of the session that is durable, as trimming needs to know it."""

    number: int
    """The last of its numbers."""
    length: int
    """Bytes of its entries."""
    ends: list[tuple[TableBucket, int]]
    """The end offset of each of its entries."""
    first_number: int
    """The same number; a smaller one where several objects in a row are described as one."""


OnFenced = Callable[[SessionFencedError], None]
"""Is told once that the session was ended; it hears of no durable entries after that. Never
raises."""


class UnsafeLocationError(ConfigError):
    """The location does not create an object only once, so it cannot have a shared log."""


class LostOffsetsError(CorruptRecordError):
    """A session does not have offsets of a bucket that it should have."""

    def __init__(self, bucket: TableBucket, first_offset: int, reason: str) -> None:
        super().__init__(f"offsets from {first_offset} on of {bucket} cannot be read: {reason}")
        self.bucket = bucket
        self.first_offset = first_offset


class LostObject(NamedTuple):
    """A number of a session whose object is missing or damaged."""

    name: WalName
    reason: str


class SessionWriter(Protocol):
    """The session of this server; belongs to an event loop."""

    counts: SessionCounts
    """What it wrote."""

    @property
    def waiting(self) -> Waiting:
        """What is not durable yet."""

    def append(
        self,
        bucket: TableBucket,
        leader_epoch: int,
        first_offset: int,
        end_offset: int,
        batches: bytes | memoryview,
        kind: EntryKind = EntryKind.BATCHES,
    ) -> None:
        """Have batches made durable; they are copied.

        Within a leader epoch the batches of a bucket follow each other without a gap. A carry ends
        where the bucket's entries end. Ask `full` before the batches are anywhere else: here they
        are taken in any case. Raises SessionFencedError, and ValueError if the offsets do not
        follow.
        """

    @property
    def full(self) -> bool:
        """So much waits that nothing more should be appended before there is `room`."""

    def go_on(self) -> None:
        """Do what a lack of memory has interrupted; called periodically."""

    async def room(self) -> None:
        """Wait until the session should take entries, or is fenced."""

    def end_offset(self, bucket: TableBucket) -> int | None:
        """The end of what was appended of a bucket, durable or not; None if nothing was."""

    async def drained(self, *, at_once: bool = False) -> int:
        """Wait until everything that was appended before the call is durable.

        `at_once` starts the object that gathers entries without waiting for more of them. Returns
        the number behind the last object of it. Raises SessionFencedError if the session ends
        before.
        """

    @property
    def written(self) -> Sequence[WrittenObject]:
        """The durable objects that were not trimmed, in order."""

    def trimmed(self, floor: int) -> None:
        """Forget the objects below a floor: they were deleted, or will be."""

    async def close(self) -> None:
        """Make everything durable and end the session; raises SessionFencedError."""

    async def stop(self) -> None:
        """Give up: what is not durable yet may become durable or not."""


class SharedLog(Protocol):
    """The log that all servers of a cluster write to and read from."""

    async def probe(self) -> None:
        """Raise UnsafeLocationError unless the log can keep its promises where it is."""

    def begin(self, session: Session, on_durable: OnDurable, on_fenced: OnFenced) -> SessionWriter:
        """Begin a new session: each session is begun once."""

    async def seal(self, session: Session, floor: int, coordinator_epoch: int) -> int:
        """End a session and return its end, the number behind its last object.

        `floor` is the recorded one, read after the metadata refused further ones. Raises
        RemoteStorageError if that could not be completed; seal again then.
        """

    def read(
        self, session: Session, floor: int, end: int | None
    ) -> AsyncIterator[WalObject | LostObject]:
        """Yield each number from `floor` to before `end`; without an end, to the first gap."""

    async def trim(self, session: Session, recorded_floor: int) -> int:
        """Delete what is below a floor that the metadata has; return how many objects went."""

    async def forget(self, session: Session) -> None:
        """Delete everything of a session, its seals, too.

        Only when no request of its server can be under way any more: what ended it goes as well.
        """
