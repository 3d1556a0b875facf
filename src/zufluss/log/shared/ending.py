"""The end of a session that somebody else decides: a seal at its first free number.

A seal is an object like any other, put if absent. Once it lies at number k the session never
acknowledges k or anything above, because k is not its own (`writer.py`), and everything below k was
there when the seal was put. The session may go on writing meanwhile, so seals are put at several
numbers at once, and whoever seals looks again: the end is the lowest seal, or close, with no free
number below it. Two sealers find the same end, because each filled every number below it first.
Before it is returned the seal is put once more: in a directory, "it exists" syncs the names there,
so that neither the seal nor what lies below it can vanish with the power.

Numbers are counted from the recorded floor, not from the lowest object that is listed: what a live
session deleted looks free, and a seal in such a place would stop nobody. Seals are not deleted with
the objects below them: a name that is free again could still be taken by a request under way.

An object that was acknowledged and is gone looks free, too. But each object says how far the
session was durable when it was sent, so what is free below that is a loss: the end lies behind it,
and who reads the session refuses the buckets that may have been there. The newest objects can
vanish without a trace, as nothing behind them speaks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from typing import Final, NamedTuple

import structlog

from zufluss.log.shared.api import Session
from zufluss.log.shared.store import ObjectStore
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    ObjectMissingError,
    RemoteStorageError,
)
from zufluss.remote.wal import (
    HEADER_BYTES,
    WalHeader,
    WalKind,
    WalName,
    encode,
    read_header,
    session_directory,
)

ROUNDS_MAX: Final = 100
"""How often a session may outrun its sealer."""

_logger = structlog.get_logger(__name__)


class _Listing(NamedTuple):
    """The numbers of a session from its floor on."""

    first_free: int
    header_only: list[int]
    """Numbers below the first free one whose objects are as short as a seal, in order."""


async def seal(
    store: ObjectStore,
    session: Session,
    floor: int,
    coordinator_epoch: int,
    in_flight: int,
    nonce: Callable[[], bytes],
) -> int:
    """End a session; return its end."""

    async def put_seals(first: int, count: int) -> None:
        numbers = range(first, first + count)
        await _put_seals(
            store,
            [WalHeader(WalKind.SEAL, *session, n, nonce(), coordinator_epoch) for n in numbers],
        )

    for _ in range(ROUNDS_MAX):
        listing = await _list(store, session, floor)
        for number in listing.header_only:
            if await _ends_session(store, WalName(session.server_epoch, number)):
                await put_seals(number, 1)  # a sealer that died may have left names unsynced
                _logger.info("wal_session_sealed", **session._asdict(), floor=floor, end=number)
                return number
        await put_seals(listing.first_free, 2 * in_flight)
    raise LocationUnavailableError(
        store.uri.text,
        session_directory(session.server_epoch),
        f"no seal found a free number in {ROUNDS_MAX} rounds; try again",
    )


async def _list(store: ObjectStore, session: Session, floor: int) -> _Listing:
    lengths: dict[int, int] = {}
    async for page in store.list(session_directory(session.server_epoch)):
        for info in page:
            name = WalName.parse(info.path)
            if name is not None and name.number >= floor:
                lengths[name.number] = info.size
    first_free = _first_free(lengths, floor)
    durable = await _durable(store, session, [n for n in lengths if n > first_free], lengths)
    if durable > first_free:
        lost = sorted(set(range(first_free, durable)) - lengths.keys())
        _logger.error("wal_objects_lost", **session._asdict(), first=lost[0], count=len(lost))
        floor = durable
        first_free = _first_free(lengths, floor)
    short = [n for n in range(floor, first_free) if lengths[n] == HEADER_BYTES]
    return _Listing(first_free, short)


def _first_free(taken: Container[int], floor: int) -> int:
    number = floor
    while number in taken:
        number += 1
    return number


async def _durable(
    store: ObjectStore, session: Session, numbers: list[int], lengths: Mapping[int, int]
) -> int:
    """How far the session was durable, as the newest data object behind a free number says."""
    for number in sorted(numbers, reverse=True):
        if lengths[number] <= HEADER_BYTES:
            continue
        header = await _header(store, WalName(session.server_epoch, number))
        if header is not None and header.kind is WalKind.DATA:
            return header.said
    return 0


async def _ends_session(store: ObjectStore, name: WalName) -> bool:
    """Whether an object of the size of a seal is one; a data object may have been cut there."""
    header = await _header(store, name)
    return header is not None and header.kind is not WalKind.DATA


async def _header(store: ObjectStore, name: WalName) -> WalHeader | None:
    """The header of an object; None if it is damaged."""
    try:
        head = await store.get_range(name.path, 0, HEADER_BYTES)
        return read_header(head, name, store.uri.text)
    except ObjectMissingError as error:
        raise LocationUnavailableError(
            store.uri.text, name.path, "the object was listed and is missing"
        ) from error
    except ObjectCorruptError as error:
        _logger.error("wal_object_damaged", path=name.path, reason=error.message)
        return None


async def _put_seals(store: ObjectStore, headers: list[WalHeader]) -> None:
    """Put seals where nothing is. A later look at the session tells which are there."""
    outcomes = await asyncio.gather(
        *(store.create(header.name.path, encode(header)) for header in headers),
        return_exceptions=True,
    )
    errors = [o for o in outcomes if o is not None and not isinstance(o, ObjectExistsError)]
    for error in errors:
        if not isinstance(error, RemoteStorageError):
            raise error
    if len(errors) == len(headers):
        raise errors[0]
