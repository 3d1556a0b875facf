"""Pinned states of primary-key buckets: opened, read page by page, reopened, closed.

A pin is the state of a bucket at one offset of its changelog. It lives on the server that leads the
bucket. Each page begins behind the last key of the page before; the same request returns the same
rows, so a request whose answer was lost is simply repeated.

| event | reaction |
|---|---|
| connection lost, leader moved, storage error | the request is repeated, to the present leader |
| too many scans, or a state is still being rebuilt | the request is repeated after a pause |
| the pin is unknown or has expired | it is opened again at the same offset |
| the state at that offset cannot be rebuilt | `KvPinGoneError` |

Pauses grow and end at the delivery timeout, counted from the last page. Pins that were idle for a
third of their idle limit, or whose connection was replaced, are read in the background, so that
buckets that wait for their turn, and slow consumers, keep their pins. A run that was
garbage-collected without `close` stops doing so; so does a run that opens pins for other processes
(`keep=False`). The server limits the age of pins in any case.

A run opens pins by one request per server: all of them or none, or with `partial` as many as each
server has room for. The others are opened when it is their turn.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.client.keyed.cursor import ScanPiece
from zufluss.errors import (
    CorruptMessageError,
    ErrorCode,
    KvScanExpiredError,
    LeaderNotAvailableError,
    PartitionNotExistError,
    UnsupportedVersionError,
    ZuflussError,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.net.client import RpcConnection
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

log = logging.getLogger(__name__)

REOPENED_MAX: Final = 8
"""Times a pin is opened again before the next page arrives."""
KEPT_PARTS: Final = 3
"""A pin is read in the background after its idle limit divided by this number."""
CLOSED_TOGETHER: Final = 8
"""Pins that were read are closed by one request for this many, unless there is little room."""

AGAIN: Final = PASSING | {ErrorCode.KV_SCAN_BUSY}
"""Errors after which the same request may succeed later."""

ADOPTED_MS: Final = 3_000
"""How often a pin of another process is read in the background, whose limits are not known."""

_NOT_OPENED: Final = b"\0" * 16
"""An id that no pin has."""


@dataclass(slots=True)
class BucketPin:
    """The pinned state of one bucket."""

    place: BucketPlace
    """The bucket."""
    pin_id: bytes
    """The pin's id on the server."""
    log_offset: int
    """The changelog continues from this offset."""
    server: ServerNode | None
    """The server that holds the pin; None before it was opened."""
    idle_ms: int
    """The pin expires after this time without a request."""
    used: float
    """Loop time of the last request."""
    grace_ms: int | None = None
    """The pin expires after this time without a connection; None if the server does not say."""
    cursor: bytes | None = None
    """The last key that was read; None before the first page."""
    spent: bool = False
    """True when the last page was read."""
    until: bytes | None = None
    """The last key to read, inclusive; None for the end of the bucket."""

    @classmethod
    def not_opened(cls, place: BucketPlace, log_offset: int) -> BucketPin:
        """A pin that no server holds yet; the first read opens the state at this offset."""
        return cls(place, _NOT_OPENED, log_offset, None, 0, 0.0)


class BucketPins:
    """The pins of one run of a scan."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, *, resume: bool, keep: bool = True
    ) -> None:
        self._connection = connection
        self._info = info
        self._resume = resume
        self._keep = keep
        self._pins: dict[TableBucket, BucketPin] = {}
        self._read: list[BucketPin] = []
        self._more: list[BucketPin] = []
        self._together = CLOSED_TOGETHER
        self._sockets: dict[TableBucket, RpcConnection | None] = {}
        self._loop = asyncio.get_running_loop()
        self._keeper: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    # -- opening -------------------------------------------------------------------------------

    def __getitem__(self, bucket: TableBucket) -> BucketPin:
        return self._pins[bucket]

    def offset(self, bucket: TableBucket) -> int | None:
        """The offset at which a bucket is pinned; None if it is not pinned."""
        pin = self._pins.get(bucket)
        return None if pin is None else pin.log_offset

    async def open(
        self,
        places: Sequence[BucketPlace],
        at: Mapping[TableBucket, int],
        *,
        partial: bool = False,
    ) -> dict[TableBucket, int]:
        """Pin all buckets or none, each at its offset in `at` or at its present state.

        With `partial`, each server pins the first of its buckets, as many as it has room for.
        Returns the offset of each pin.
        """
        options = self._connection.options
        timeout_ms = options.delivery_timeout_ms if at else options.request_timeout_ms
        pins = await self._open(places, at, timeout_ms, partial=partial)
        self._add(pins)
        return {pin.place.bucket: pin.log_offset for pin in pins}

    async def open_one(self, place: BucketPlace, log_offset: int | None) -> BucketPin:
        """Pin one more bucket; waits for room for as long as for a page."""
        self._together = 1  # others may wait for room, and so may this run
        await self._close_read()
        at = {} if log_offset is None else {place.bucket: log_offset}
        timeout_ms = self._connection.options.delivery_timeout_ms
        [pin] = await self._open([place], at, timeout_ms)
        self._add([pin])
        return pin

    def _add(self, pins: Sequence[BucketPin]) -> None:
        for pin in pins:
            self._pins[pin.place.bucket] = pin
            self._sockets[pin.place.bucket] = self._socket(pin)
        if pins and self._keep and self._keeper is None:
            limits = [ms for pin in pins for ms in (pin.idle_ms, pin.grace_ms) if ms]
            seconds = min(limits, default=ADOPTED_MS) / KEPT_PARTS / 1000
            self._keeper = self._loop.create_task(_keep(weakref.ref(self), seconds))

    def adopt(self, pin: BucketPin) -> BucketPin:
        """Take over a pin that another process opened; `close` closes it."""
        adopted = replace(pin, used=self._loop.time())
        self._pins[adopted.place.bucket] = adopted
        return adopted

    async def continued(self, piece: ScanPiece) -> BucketPin:
        """The pin of a piece of another run: its own one, or one at the same offset."""
        leader = self._connection.metadata.leader(piece.place.bucket)
        if piece.pin_id is None or piece.log_offset is None:
            pin = await self.open_one(piece.place, piece.log_offset)
        else:
            pin = self.adopt(BucketPin(piece.place, piece.pin_id, piece.log_offset, leader, 0, 0.0))
            self._add([pin])
        pin.cursor, pin.until = piece.after, piece.until
        return pin

    def piece(self, place: BucketPlace, after: bytes | None, at: int | None) -> ScanPiece:
        """What is left of a bucket behind a key, for a cursor."""
        pin = self._pins.get(place.bucket)
        if pin is None:
            return ScanPiece(place, at, after)
        pin_id = None if pin.server is None else pin.pin_id
        return ScanPiece(place, pin.log_offset, after, pin.until, pin_id)

    async def open_another(self, pin: BucketPin) -> BucketPin:
        """Open a second pin of the same state; `KvScanBusyError` at once if there is no room."""
        [another] = await self._open_once([pin.place], {pin.place.bucket: pin.log_offset}, False)
        self._more.append(another)
        return another

    async def key_after(self, pin: BucketPin, key: bytes | None) -> bytes | None:
        """The first key of a pinned state behind another one; None if there is none."""
        probe = replace(pin, cursor=key)
        while True:
            answer = await self.scan(probe, self._touch(probe))
            pin.pin_id, pin.server = probe.pin_id, probe.server
            if answer.rows:
                return probe.cursor
            if answer.done:
                return None

    async def detach(self) -> None:
        """Leave the pins to other processes, which have the idle limit to use them."""
        pins, self._pins, self._more = [*self._pins.values(), *self._more], {}, []
        await self._close_pins(pins, detach=True)
        await self.close()

    async def _open(
        self,
        places: Sequence[BucketPlace],
        at: Mapping[TableBucket, int],
        timeout_ms: int,
        *,
        partial: bool = False,
    ) -> list[BucketPin]:
        busy = Backoff(timeout_ms)
        away: Backoff | None = None
        while True:
            begun = self._loop.time()
            limit = away or Backoff(self._connection.options.request_timeout_ms)
            try:
                async with limit.attempt():
                    return await self._unless_cancelled(self._open_once(places, at, partial))
            except ZuflussError as failure:
                if failure.code not in AGAIN:
                    raise
                away = self._away(failure, away, begun)
                await (away or busy).pause(failure)
            async with (away or busy).attempt():
                await self._find_leaders(places)

    def _away(self, failure: ZuflussError, away: Backoff | None, begun: float) -> Backoff | None:
        """The attempts to reach a server that is away; None if it answers, but is busy."""
        if failure.code not in PASSING:
            return None
        return away or Backoff(self._connection.options.request_timeout_ms, since=begun)

    async def _unless_cancelled(
        self, work: Coroutine[Any, Any, list[BucketPin]]
    ) -> list[BucketPin]:
        """Open pins; if the caller is cancelled, close the pins that are opened anyway."""
        opening = self._loop.create_task(work)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unclaimed)
            raise

    def _close_unclaimed(self, opening: asyncio.Task[list[BucketPin]]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._run(self._close_pins(opening.result()))

    async def _open_once(
        self, places: Sequence[BucketPlace], at: Mapping[TableBucket, int], partial: bool
    ) -> list[BucketPin]:
        """Ask every leader once; closes the opened pins if one leader failed."""
        groups: dict[ServerNode, list[BucketPlace]] = {}
        for place in places:
            leader = self._connection.metadata.leader(place.bucket)
            if leader is None:
                name = self._connection.metadata.name_of(place.bucket)
                raise LeaderNotAvailableError(f"{name} has no leader at the moment")
            groups.setdefault(leader, []).append(place)
        requests = (self._outcome(*group, at, partial) for group in groups.items())
        outcomes = await asyncio.gather(*requests)
        pins = [pin for opened, _ in outcomes for pin in opened]
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            await self._close_pins(pins)
            final = [failure for failure in failures if failure.code not in AGAIN]
            raise [*final, *failures][0]
        return pins

    async def _outcome(
        self,
        server: ServerNode,
        places: Sequence[BucketPlace],
        at: Mapping[TableBucket, int],
        partial: bool,
    ) -> tuple[list[BucketPin], ZuflussError | None]:
        try:
            return await self._open_at(server, places, at, partial), None
        except ZuflussError as e:
            return [], e

    async def _open_at(
        self,
        server: ServerNode,
        places: Sequence[BucketPlace],
        at: Mapping[TableBucket, int],
        partial: bool,
    ) -> list[BucketPin]:
        request = m.OpenKvSnapshotRequest(
            table_id=self._info.table_id,
            time_limit_ms=self._connection.options.request_timeout_ms // 2,
            partial=partial,
            detached=not self._keep,
        )
        for place in places:
            bucket = place.bucket
            request.buckets.add(
                partition_id=bucket.partition_id,
                bucket_id=bucket.bucket_id,
                log_offset=at.get(bucket),
            )
        answer = await self._call(server, ApiKey.OPEN_KV_SNAPSHOT, request)
        now = self._loop.time()
        pins = [
            _pin_of(place, message, server, now)
            for place, message in zip(places, answer.pins, strict=False)
        ]
        wrong = [p for p in pins if p.log_offset != at.get(p.place.bucket, p.log_offset)]
        if len(pins) < (1 if partial else len(places)) or wrong:
            await self._close_pins(pins)
            raise CorruptMessageError(
                f"{server} was to pin {len(places)} buckets of {self._info.path} and answered "
                f"{len(answer.pins)} pins, {len(wrong)} of them at another offset than asked for"
            )
        return pins

    async def _call(
        self, server: ServerNode, api_key: ApiKey, request: m.OpenKvSnapshotRequest
    ) -> m.OpenKvSnapshotResponse:
        socket = await self._connection.socket(server.address)
        timeout_ms = self._connection.options.request_timeout_ms
        try:
            answer: m.OpenKvSnapshotResponse = await socket.call(
                api_key, request, timeout_ms=timeout_ms
            )
        except UnsupportedVersionError:
            raise UnsupportedVersionError(
                f"{server} offers no scans of primary-key tables; for {self._info.path} use "
                "table.head(n) for some rows, table.lookup(keys) for rows by key, or "
                'table.scan(source="union") for all rows of a tiered table'
            ) from None
        return answer

    # -- reading -------------------------------------------------------------------------------

    async def scan(
        self, pin: BucketPin, request: m.ScanKvSnapshotRequest
    ) -> m.ScanKvSnapshotResponse:
        """Read a page of a pin, retrying passing errors and reopening an expired pin."""
        timeout_ms = self._connection.options.request_timeout_ms
        busy: Backoff | None = None
        away: Backoff | None = None
        reopened = 0
        while True:
            request.pin_id = pin.pin_id
            begun = self._loop.time()
            try:
                async with (away or Backoff(timeout_ms)).attempt():
                    return self._moved(pin, await self._ask(pin, request))
            except ZuflussError as e:
                failure = e
            if isinstance(failure, KvScanExpiredError):
                if not self._resume or reopened == REOPENED_MAX:
                    raise failure
                reopened += 1
                await self._reopen(pin, failure)
            elif failure.code in AGAIN:
                away = self._away(failure, away, begun)
                busy = busy or Backoff(self._connection.options.delivery_timeout_ms)
                await (away or busy).pause(failure)
                async with (away or busy).attempt():
                    await self._find_leaders([pin.place])
            else:
                raise failure

    def _moved(self, pin: BucketPin, answer: m.ScanKvSnapshotResponse) -> m.ScanKvSnapshotResponse:
        """Move the cursor behind an answer; raises if a page with rows did not move it."""
        before, pin.cursor = pin.cursor, answer.last_key or pin.cursor
        pin.spent = answer.done
        if answer.rows and not answer.done and pin.cursor == before:
            name = self._connection.metadata.name_of(pin.place.bucket)
            raise CorruptMessageError(
                f"{name}: an answer of a scan has {answer.rows} rows behind the key "
                f"{'(none)' if before is None else before.hex()} and ends there again"
            )
        return answer

    async def _ask(
        self, pin: BucketPin, request: m.ScanKvSnapshotRequest
    ) -> m.ScanKvSnapshotResponse:
        pin.used = self._loop.time()
        answer: m.ScanKvSnapshotResponse = await self._connection.call_leader(
            pin.place.bucket, ApiKey.SCAN_KV_SNAPSHOT, request
        )
        pin.used = self._loop.time()
        self._sockets[pin.place.bucket] = self._socket(pin)
        return answer

    def _socket(self, pin: BucketPin) -> RpcConnection | None:
        """The open connection to the leader of a pin's bucket; None without one."""
        leader = self._connection.metadata.leader(pin.place.bucket)
        return None if leader is None else self._connection.open_socket(leader.address)

    async def _reopen(self, pin: BucketPin, cause: ZuflussError) -> None:
        """Open the state at the pin's offset again, under a new id."""
        bucket, offset = pin.place.bucket, pin.log_offset
        log.info("scan.pin_reopened bucket=%r log_offset=%d cause=%s", bucket, offset, cause)
        timeout_ms = self._connection.options.delivery_timeout_ms
        [opened] = await self._open([pin.place], {bucket: offset}, timeout_ms)
        pin.pin_id, pin.server, pin.used = opened.pin_id, opened.server, opened.used
        pin.idle_ms, pin.grace_ms = opened.idle_ms, opened.grace_ms
        self._sockets[bucket] = self._socket(pin)

    async def _find_leaders(self, places: Sequence[BucketPlace]) -> None:
        """Refresh the leaders of buckets; raises if the table or a partition is gone."""
        names = {place.partition for place in places if place.partition is not None}
        try:
            await self._connection.refresh_leaders(self._info, names)
        except ZuflussError as e:
            if e.code not in PASSING:
                raise
        for place in places:
            known = self._connection.metadata.partitions.get(
                (self._info.table_id, place.partition or "")
            )
            if known is not None and known.partition_id != place.bucket.partition_id:
                raise PartitionNotExistError(
                    f"table {self._info.path}: partition {place.partition!r} was dropped and "
                    "created again"
                )

    # -- keeping and closing -------------------------------------------------------------------

    async def keep(self) -> None:
        """Read from idle pins and from those whose connection was replaced.

        Errors are left to the next read.
        """
        for pin in [*self._pins.values()]:
            idle_seconds = pin.idle_ms / KEPT_PARTS / 1000
            socket = self._socket(pin)
            held = socket is not None and socket is self._sockets.get(pin.place.bucket)
            if pin.spent or (held and self._loop.time() - pin.used < idle_seconds):
                continue
            try:
                await self._ask(pin, self._touch(pin))
            except ZuflussError as e:
                log.debug("scan.pin_not_kept bucket=%r error=%s", pin.place.bucket, e)

    def _touch(self, pin: BucketPin) -> m.ScanKvSnapshotRequest:
        """The smallest request that keeps a pin alive."""
        bucket = pin.place.bucket
        return m.ScanKvSnapshotRequest(
            table_id=bucket.table_id,
            partition_id=bucket.partition_id,
            bucket_id=bucket.bucket_id,
            pin_id=pin.pin_id,
            after_key=pin.cursor,
            limit=1,
            batch_size_bytes=1,
            schema_id=self._info.schema_id,
            projected_columns=[0],
        )

    def done(self, pin: BucketPin) -> None:
        """The run needs this pin no more; it is closed together with others."""
        if self._pins.pop(pin.place.bucket, None) is not None:
            self._read.append(pin)
        if len(self._read) >= self._together:
            self._run(self._close_read())

    async def _close_read(self) -> None:
        read, self._read = self._read, []
        await self._close_pins(read)

    def _run(self, closing: Coroutine[Any, Any, None]) -> None:
        """Close pins in the background."""
        ending = self._loop.create_task(closing)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close all pins. Closing twice is no error."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        pins = [*self._pins.values(), *self._read, *self._more]
        self._pins, self._read, self._more = {}, [], []
        await asyncio.gather(self._close_pins(pins), *self._ending)

    async def _close_pins(self, pins: Sequence[BucketPin], *, detach: bool = False) -> None:
        """Close pins at their servers, or detach them; on an error they expire by themselves."""
        groups: dict[ServerNode, list[bytes]] = {}
        for pin in pins:
            if pin.server is not None:
                groups.setdefault(pin.server, []).append(pin.pin_id)
        await asyncio.gather(*(self._close_at(*group, detach) for group in groups.items()))

    async def _close_at(self, server: ServerNode, pin_ids: list[bytes], detach: bool) -> None:
        request = m.CloseKvSnapshotRequest(pin_ids=pin_ids, detach=detach or None)
        try:
            socket = await self._connection.socket(server.address)
            timeout_ms = self._connection.options.request_timeout_ms
            await socket.call(ApiKey.CLOSE_KV_SNAPSHOT, request, timeout_ms=timeout_ms)
        except ZuflussError as e:
            log.debug("scan.pins_not_closed server=%s pins=%d error=%s", server, len(pin_ids), e)


def _pin_of(place: BucketPlace, message: m.PbPin, server: ServerNode, now: float) -> BucketPin:
    grace_ms = message.grace_ms if message.HasField("grace_ms") else None
    return BucketPin(
        place, message.pin_id, message.log_offset, server, message.idle_ms, now, grace_ms
    )


async def _keep(of: weakref.ref[BucketPins], seconds: float) -> None:
    """Keep pins alive until they are garbage-collected."""
    while True:
        await asyncio.sleep(seconds)
        pins = of()
        if pins is None:
            return
        await pins.keep()
        del pins
