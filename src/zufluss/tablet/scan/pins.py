"""Pins: who holds which state of which bucket, and until when.

A pin is a random id that stands for the state of a bucket at one log offset. It belongs to the
principal that opened it, and ends for one of these reasons, whatever comes first:

| reason | answer to later calls |
|---|---|
| it was closed, or read to its end | UNKNOWN_SCANNER_ID, as for an id that never was |
| nobody used it for `kv.scanner.ttl` | SCANNER_EXPIRED |
| the connections of its clients ended, `…disconnect-grace` ago or longer | SCANNER_EXPIRED |
| it reached `zufluss.kv.scanner.age-max`, used or not | SCANNER_EXPIRED |
| its bucket stopped or has another leader epoch | SCANNER_EXPIRED |
| somebody ended it for its client (`scan/listing.py`) | KV_PIN_GONE: it is not opened again |

Every access looks at the clock, so no call gets through after the end, whether or not the sweep
came by. A pin that is in use does not expire by idleness, and what it holds is let go only after
the last call on it has left: nothing is closed under a reader. Ids that expired are remembered for
twice the time-to-live, to tell them from unknown ones; that is for people, clients treat both
alike.

A client holds its pin through every connection on which it opened or used the pin, and another
process may hold the same pin through its own. When the last of these connections has ended, the pin
lives on for a short grace: time to connect again, but a killed client does not block a bucket for
others. A *detached* pin waits for another process, which has not connected yet: no connection holds
it until that process uses it.

A pin counts towards the limits from before its state is made until its end. The numbers are those
of the pins that are there; nothing is counted beside them that could drift.

No I/O: the clock is passed in, and letting go is a call. Belongs to the event loop.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import (
    AuthorizationError,
    ErrorCode,
    KvPinGoneError,
    KvScanBusyError,
    KvScanExpiredError,
    NotLeaderError,
    ZuflussError,
)
from zufluss.model.table import TableBucket
from zufluss.net.services import Reader

T = TypeVar("T")

ID_BYTES: Final = 16
REMEMBERED_MAX: Final = 10_000
"""Expired ids that are remembered; older ones become unknown."""
RETRY_AFTER_MS: Final = 500
"""Milliseconds that a refused client should wait."""


@dataclass(frozen=True, slots=True)
class PinLimits:
    """How long pins live, and how many there may be."""

    idle_seconds: float
    """A pin that was not used for this time has ended."""
    grace_seconds: float
    """A pin whose last connection ended so long ago has ended."""
    age_seconds: float
    """A pin of this age has ended."""
    per_bucket: int
    """Pins of one bucket."""
    per_server: int
    """Pins of all buckets."""

    @classmethod
    def of(cls, conf: Configuration) -> PinLimits:
        """The configured limits."""
        return cls(
            conf.get(options.KV_SCANNER_TTL) / 1000,
            conf.get(options.ZUFLUSS_KV_SCANNER_DISCONNECT_GRACE) / 1000,
            conf.get(options.ZUFLUSS_KV_SCANNER_AGE_MAX) / 1000,
            conf.get(options.KV_SCANNER_MAX_PER_BUCKET),
            conf.get(options.KV_SCANNER_MAX_PER_SERVER),
        )


class StatePin(Generic[T]):
    """The state of a bucket, held for one principal."""

    __slots__ = (
        "bucket",
        "calls",
        "ended",
        "held",
        "leader_epoch",
        "left",
        "number",
        "opened",
        "owner",
        "peer",
        "pin_id",
        "readers",
        "used",
    )

    def __init__(
        self, number: int, bucket: TableBucket, owner: str | None, leader_epoch: int, now: float
    ) -> None:
        self.pin_id = secrets.token_bytes(ID_BYTES)
        """Random: whoever knows it can use the pin, if the owner is the same."""
        self.number = number
        """The pin's name for operators, which gives no access."""
        self.bucket = bucket
        self.owner = owner
        """The user who opened it, None without authentication."""
        self.leader_epoch = leader_epoch
        """The leader epoch of the bucket at the opening; the pin ends with it."""
        self.opened = now
        self.used = now
        """When the last valid call on the pin began or ended."""
        self.calls = 1
        """Calls under way, the making of the state included."""
        self.readers: set[Reader] = set()
        """Open connections of the clients that use it."""
        self.peer = "?"
        """Address of the last of them."""
        self.left: float | None = None
        """When the last of these connections ended; None while one is open, and if detached."""
        self.ended = False
        """The pin has ended: no call finds it."""
        self.held: T | None = None
        """The pinned content, None until it is made and after it was let go."""

    def __repr__(self) -> str:
        return f"Pin({self.pin_id.hex()}, {self.bucket}, {self.calls} calls)"

    @property
    def content(self) -> T:
        """The pinned content of a pin in use."""
        assert self.held is not None
        return self.held


class StatePins(Generic[T]):
    """All pins of a server."""

    def __init__(
        self,
        limits: PinLimits,
        let_go: Callable[[T], None],
        clock: Callable[[], float] = time.monotonic,
        name_of: Callable[[TableBucket], str] = str,
    ) -> None:
        """`let_go` is called once with what a pin held, after its end and its last call.

        `name_of` names a bucket in messages.
        """
        self.limits = limits
        self._let_go = let_go
        self._clock = clock
        self._name_of = name_of
        self._pins: dict[bytes, StatePin[T]] = {}
        self._of_bucket: dict[TableBucket, set[StatePin[T]]] = {}
        self._of_reader: dict[Reader, set[StatePin[T]]] = {}
        self._numbers = itertools.count(1)
        self._expired: dict[bytes, tuple[float, ZuflussError]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[StatePin[T]]:
        """The pins whose state is made, the oldest first."""
        self.sweep()
        return iter([pin for pin in self._pins.values() if pin.held is not None])

    def of_bucket(self, bucket: TableBucket) -> int:
        """How many pins a bucket has."""
        return len(self._of_bucket.get(bucket, ()))

    def age_seconds(self, pin: StatePin[T]) -> float:
        """The time since a pin was opened."""
        return self._clock() - pin.opened

    def idle_seconds(self, pin: StatePin[T]) -> float:
        """The time since the last call on a pin, 0 during a call."""
        return 0.0 if pin.calls else self._clock() - pin.used

    def remaining_seconds(self, pin: StatePin[T]) -> float:
        """How long a pin can live at most from now on."""
        return max(pin.opened + self.limits.age_seconds - self._clock(), 0.0)

    # -- opening ----------------------------------------------------------------------------

    def begin(self, bucket: TableBucket, owner: str | None, leader_epoch: int) -> StatePin[T]:
        """Add a pin whose state is being made: `complete` or `abandon` must follow.

        `KvScanBusyError` if there are too many, those that have expired not counted.
        """
        if self._full(bucket):
            self.sweep()
        if refusal := self._full(bucket):
            raise KvScanBusyError(refusal)
        number = next(self._numbers)
        pin: StatePin[T] = StatePin(number, bucket, owner, leader_epoch, self._clock())
        self._pins[pin.pin_id] = pin
        self._of_bucket.setdefault(bucket, set()).add(pin)
        return pin

    def complete(self, pin: StatePin[T], content: T) -> None:
        """The state of a pin is made; `NotLeaderError` if the bucket stopped meanwhile."""
        pin.held = content
        pin.opened = self._clock()
        self._leave(pin)
        if pin.ended:
            raise NotLeaderError(
                f"{self._name_of(pin.bucket)} stopped, or has another leader epoch, while its "
                "state was pinned; refresh the metadata and open it again"
            )

    def abandon(self, pin: StatePin[T]) -> None:
        """Remove a pin whose state could not be made or is not needed."""
        self._end(pin)

    def _full(self, bucket: TableBucket) -> str | None:
        """Why no pin of a bucket can be added."""
        limits = self.limits
        if self.of_bucket(bucket) >= limits.per_bucket:
            what = f"{self._name_of(bucket)} has {limits.per_bucket}"
            option = options.KV_SCANNER_MAX_PER_BUCKET
        elif len(self._pins) >= limits.per_server:
            what, option = f"this server has {limits.per_server}", options.KV_SCANNER_MAX_PER_SERVER
        else:
            return None
        return (
            f"{what} scans and pinned states open, as many as {option.key} allows; retry after "
            f"{RETRY_AFTER_MS} ms, or close one"
        )

    # -- using ------------------------------------------------------------------------------

    def find(self, pin_id: bytes, owner: str | None) -> StatePin[T]:
        """The pin of an id. Does not count as a use: the request may still be refused.

        `KvScanExpiredError` if it has ended or never was, `AuthorizationError` if it is not yours.
        """
        pin = self._pins.get(pin_id)
        if pin is None or pin.held is None:
            raise self._gone(pin_id)
        reason = self._over(pin)
        if reason is not None:
            self._expire(pin, reason)
            raise self._gone(pin_id)
        self._check_owner(pin, owner)
        return pin

    def hold(self, pin: StatePin[T], reader: Reader) -> None:
        """A client uses the pin through this connection."""
        if pin.ended:
            return
        pin.peer = reader.peer
        pin.left = None
        pin.readers.add(reader)
        pins = self._of_reader.get(reader)
        if pins is None:
            pins = self._of_reader[reader] = set()
            reader.when_gone(lambda: self._reader_gone(reader))
        pins.add(pin)

    def _reader_gone(self, reader: Reader) -> None:
        for pin in self._of_reader.pop(reader, ()):
            pin.readers.discard(reader)
            if not pin.readers:
                pin.left = self._clock()

    def _drop_readers(self, pin: StatePin[T]) -> None:
        for reader in pin.readers:
            self._of_reader[reader].discard(pin)
        pin.readers.clear()

    @contextmanager
    def use(self, pin: StatePin[T], reader: Reader) -> Iterator[T]:
        """Use a pin that `find` returned in this turn of the loop: it stays until the block ends.

        Its time-to-live begins anew, now and at the end, and the client of `reader` holds it.
        """
        self.hold(pin, reader)
        pin.used = self._clock()
        pin.calls += 1
        try:
            yield pin.content
        finally:
            self._leave(pin)

    def _leave(self, pin: StatePin[T]) -> None:
        pin.calls -= 1
        pin.used = self._clock()
        self._free(pin)

    def _gone(self, pin_id: bytes) -> ZuflussError:
        self._forget_old()
        expired = self._expired.get(pin_id)
        if expired is not None:
            return type(expired[1])(expired[1].message)
        return KvScanExpiredError(
            f"the scan or pin {pin_id.hex():.64} is not known here: it was closed, read to its "
            "end, or is none of this server's; open it again",
            code=ErrorCode.UNKNOWN_SCANNER_ID,
        )

    def _check_owner(self, pin: StatePin[T], owner: str | None) -> None:
        if pin.owner != owner:
            raise AuthorizationError(
                f"the scan or pin {pin.pin_id.hex()} was opened by another user; open your own"
            )

    # -- ending -----------------------------------------------------------------------------

    def close(self, pin_id: bytes, owner: str | None) -> None:
        """End a pin, if it exists. `AuthorizationError` if it belongs to another user."""
        pin = self._pins.get(pin_id)
        if pin is not None and pin.held is not None:
            self._check_owner(pin, owner)
            self._end(pin)

    def detach(self, pin_id: bytes, owner: str | None) -> None:
        """Keep a pin, if it exists, for another process, which has the time-to-live to use it.

        `AuthorizationError` if it belongs to another user.
        """
        pin = self._pins.get(pin_id)
        if pin is not None and pin.held is not None:
            self._check_owner(pin, owner)
            self._drop_readers(pin)
            pin.left, pin.used = None, self._clock()

    def end_bucket(self, bucket: TableBucket) -> None:
        """The bucket has stopped or begins a new leader epoch: its pins end."""
        for pin in [*self._of_bucket.get(bucket, ())]:
            self._expire(pin, f"{self._name_of(bucket)} stopped or has another leader epoch")

    def sweep(self) -> None:
        """End the pins that have expired."""
        for pin in [*self._pins.values()]:
            reason = self._over(pin)
            if reason is not None:
                self._expire(pin, reason)
        self._forget_old()

    def _over(self, pin: StatePin[T]) -> str | None:
        """Why a pin has expired, None if it has not or is being made."""
        if pin.held is None:
            return None
        now, limits = self._clock(), self.limits
        if now - pin.opened >= limits.age_seconds:
            key = options.ZUFLUSS_KV_SCANNER_AGE_MAX.key
            return f"it was open for {limits.age_seconds:g} s, the limit of {key}"
        if not pin.calls and now - pin.used >= limits.idle_seconds:
            key = options.KV_SCANNER_TTL.key
            return f"nobody used it for {limits.idle_seconds:g} s, the limit of {key}"
        if not pin.calls and pin.left is not None and now - pin.left >= limits.grace_seconds:
            key = options.ZUFLUSS_KV_SCANNER_DISCONNECT_GRACE.key
            return (
                f"its client was not connected for {limits.grace_seconds:g} s, the limit of {key}"
            )
        return None

    def kill(self, pin: StatePin[T], who: str | None) -> None:
        """End a pin for its client, which is told not to open it again."""
        self._remember(
            pin,
            KvPinGoneError(
                f"the scan of {self._name_of(pin.bucket)} was ended by {who or 'an operator'}; "
                "begin a new one if it is still needed"
            ),
        )

    def _expire(self, pin: StatePin[T], reason: str) -> None:
        text = f"the scan or pin {pin.pin_id.hex()} has ended: {reason}; open it again"
        self._remember(pin, KvScanExpiredError(text))

    def _remember(self, pin: StatePin[T], problem: ZuflussError) -> None:
        """End a pin and remember what to tell those who ask for it."""
        self._end(pin)
        self._expired[pin.pin_id] = (self._clock() + 2 * self.limits.idle_seconds, problem)
        if len(self._expired) > REMEMBERED_MAX:
            del self._expired[next(iter(self._expired))]

    def _end(self, pin: StatePin[T]) -> None:
        if pin.ended:
            return
        pin.ended = True
        self._drop_readers(pin)
        del self._pins[pin.pin_id]
        others = self._of_bucket[pin.bucket]
        others.remove(pin)
        if not others:
            del self._of_bucket[pin.bucket]
        self._free(pin)

    def _free(self, pin: StatePin[T]) -> None:
        if pin.ended and not pin.calls:
            held, pin.held = pin.held, None
            if held is not None:
                self._let_go(held)

    def _forget_old(self) -> None:
        """Forget old expired ids, which are in the order of their expiry."""
        now = self._clock()
        while self._expired:
            pin_id = next(iter(self._expired))
            if self._expired[pin_id][0] > now:
                return
            del self._expired[pin_id]
