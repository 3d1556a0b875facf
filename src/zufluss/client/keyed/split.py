"""Divides the pinned states of a table into parts that other processes read, each row in one.

Buckets are divided first. With more parts than buckets, the keys of a bucket are divided into
ranges: the first and the last key are looked up, and the space between them is cut into pieces of
the same width. Ranges have about the same number of rows if the keys are spread evenly, which
depends on how they are encoded; they cover each key exactly once in any case. Keys that share their
first `WIDTH` bytes stay together.

The first ranges of a bucket have pins of their own, at the same offset: servers share one state
among these pins. The others are opened at that offset when their turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.keyed.cursor import ScanPiece
from zufluss.client.keyed.pins import BucketPin, BucketPins
from zufluss.errors import KvScanBusyError
from zufluss.model.table import TableBucket, TableInfo

PRECISION: Final = 8
"""The last key is looked up to this part of the width of a range."""
PINS_MAX: Final = 4
"""Ranges of a bucket that get a pin at once: half of what a server allows by default, so that other
scans, and ranges without a pin, find room."""
WIDTH: Final = 16
"""Bytes of a key that decide about its range."""


async def split_states(
    connection: ClusterConnection,
    info: TableInfo,
    places: Sequence[BucketPlace],
    at: Mapping[TableBucket, int],
    count: int,
) -> list[list[ScanPiece]]:
    """Pin buckets for other processes, and divide them into `count` parts."""
    pins = BucketPins(connection, info, resume=True, keep=False)
    try:
        if places:
            await pins.open(places, at, partial=True)
        parts = await _parts(pins, places, at, count)
    except BaseException:
        await pins.close()
        raise
    await pins.detach()
    return parts


async def _parts(
    pins: BucketPins, places: Sequence[BucketPlace], at: Mapping[TableBucket, int], count: int
) -> list[list[ScanPiece]]:
    if count <= len(places):
        whole = [pins.piece(place, None, at.get(place.bucket)) for place in places]
        return [whole[part::count] for part in range(count)]
    parts: list[list[ScanPiece]] = []
    for number, place in enumerate(places):
        ranges = count // len(places) + (number < count % len(places))
        if pins.offset(place.bucket) is None:
            await pins.open_one(place, at.get(place.bucket))
        parts += [[piece] for piece in await _ranges(pins, place, ranges)]
    return parts + [[] for _ in range(count - len(parts))]


async def _ranges(pins: BucketPins, place: BucketPlace, count: int) -> list[ScanPiece]:
    """The state of a bucket as at most `count` ranges of keys, each with a pin of its own."""
    pin = pins[place.bucket]
    piece = pins.piece(place, None, pin.log_offset)
    cuts = await _cuts(pins, pin, count) if count > 1 else []
    pieces: list[ScanPiece] = []
    for after, until in zip([None, *cuts], [*cuts, None], strict=True):
        pin_id = piece.pin_id
        if pieces:
            pin_id = await _another_pin(pins, pin) if len(pieces) < PINS_MAX else None
        pieces.append(piece._replace(after=after, until=until, pin_id=pin_id))
    return pieces


async def _another_pin(pins: BucketPins, pin: BucketPin) -> bytes | None:
    try:
        return (await pins.open_another(pin)).pin_id
    except KvScanBusyError:
        return None


async def _cuts(pins: BucketPins, pin: BucketPin, count: int) -> list[bytes]:
    """Keys that divide a bucket into at most `count` ranges, in order; none has to exist."""
    first = await pins.key_after(pin, None)
    if first is None:
        return []
    low, high = _number(first), await _last(pins, pin, _number(first), count)
    cuts = {low + (high - low) * part // count for part in range(1, count)}
    return [cut.to_bytes(WIDTH, "big") for cut in sorted(cuts) if low <= cut < high]


async def _last(pins: BucketPins, pin: BucketPin, first: int, count: int) -> int:
    """A number close to that of the last key, found by halving; keys may lie behind it.

    It is exact to a small part of a range, since each step costs a request.
    """
    low, high = first, 1 << 8 * WIDTH
    while high - low > max(1, (low - first) // (PRECISION * count)):
        middle = (low + high) // 2
        key = await pins.key_after(pin, middle.to_bytes(WIDTH, "big"))
        if key is None:
            high = middle
        else:
            low = max(middle, _number(key))
    return low


def _number(key: bytes) -> int:
    """The first bytes of a key as a number in the order of keys."""
    return int.from_bytes(key[:WIDTH].ljust(WIDTH, b"\0"), "big")
