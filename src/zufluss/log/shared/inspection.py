"""What lies in the shared log of a location, for people who look at it without a server.

Reads and changes nothing. A seal at a number ends its session there for good, so the lowest seal is
the end; before a sealer has filled the numbers below it, the end that counts may still be lower.

The floor of a session is in the metadata, which is not asked here. So a number that is missing
among the first ones of a session may be the rest of a trim that was interrupted, which does no
harm, or a loss: whoever knows the floor says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

from zufluss.log.shared.api import LostObject, Session
from zufluss.log.shared.reading import read
from zufluss.log.shared.store import ObjectStore
from zufluss.model.table import TableBucket
from zufluss.remote.errors import ObjectCorruptError, ObjectMissingError
from zufluss.remote.objects import ObjectInfo
from zufluss.remote.wal import (
    HEADER_BYTES,
    EntryKind,
    WalEntry,
    WalEntryDamagedError,
    WalHeader,
    WalKind,
    WalName,
    WalObject,
    read_header,
    session_directory,
)

DIRECTORY: Final = "wal"
READS_AT_ONCE: Final = 16


class StoredSession(NamedTuple):
    """A session as its objects show it."""

    server_epoch: int
    session: Session | None
    """Whose it is; None if no object has a readable header."""
    first_number: int
    """The lowest number that is there."""
    end: int
    """The number of the lowest seal or close; without one, the number behind the last object."""
    ended_by: WalKind | None
    """What ended it; None if it is live, or was lost and not sealed yet."""
    objects: int
    """Objects with rows below the end."""
    bytes: int
    """The size of these."""


class StoredObject(NamedTuple):
    """An object of a session."""

    number: int
    bytes: int
    header: WalHeader | None
    """None if the header is damaged."""
    problem: str
    """What is wrong with the header; empty if nothing is."""


class Problem(NamedTuple):
    """Rows that cannot be read."""

    number: int
    """Of the object."""
    bucket: TableBucket | None
    """None if every bucket may be concerned."""
    text: str


async def sessions(store: ObjectStore) -> list[StoredSession]:
    """Return the sessions of a location in the order of their epochs."""
    sizes: dict[int, dict[int, int]] = {}
    async for name, info in _objects(store, DIRECTORY):
        sizes.setdefault(name.server_epoch, {})[name.number] = info.size
    return [await _stored(store, epoch, sizes[epoch]) for epoch in sorted(sizes)]


async def objects(store: ObjectStore, server_epoch: int) -> list[StoredObject]:
    """Return the objects of a session in the order of their numbers."""
    infos = [each async for each in _objects(store, session_directory(server_epoch))]
    turns = asyncio.Semaphore(READS_AT_ONCE)

    async def look(name: WalName, info: ObjectInfo) -> StoredObject:
        async with turns:
            header, problem = await _header(store, name)
        return StoredObject(name.number, info.size, header, problem)

    return await asyncio.gather(*(look(name, info) for name, info in sorted(infos)))


async def problems(store: ObjectStore, stored: StoredSession) -> list[Problem]:
    """Read a session from its first object to its end; returns what cannot be read of it.

    A live session may be trimmed meanwhile; it is read again then.
    """
    while True:
        found = [each async for each in _problems(store, stored)]
        first = await _first_number(store, stored.server_epoch)
        if not found or first is None or first <= stored.first_number:
            return found
        if first >= stored.end:
            return []  # all of it was trimmed
        stored = stored._replace(first_number=first)


async def _problems(store: ObjectStore, stored: StoredSession) -> AsyncIterator[Problem]:
    if stored.session is None:
        yield Problem(stored.first_number, None, "no object of the session has a readable header")
        return
    ends: dict[TableBucket, int] = {}
    number = stored.first_number
    async for each in read(store, stored.session, stored.first_number, stored.end):
        if isinstance(each, LostObject):
            yield Problem(number, None, each.reason)
        else:
            for entry in each.entries:
                for text in _problems_of(each, entry, ends):
                    yield Problem(number, entry.bucket, text)
        number += 1


async def _first_number(store: ObjectStore, server_epoch: int) -> int | None:
    """Return the lowest object number of a session; None if it has no objects any more."""
    numbers = [name.number async for name, _ in _objects(store, session_directory(server_epoch))]
    return min(numbers, default=None)


def _problems_of(
    read_object: WalObject, entry: WalEntry, ends: dict[TableBucket, int]
) -> Sequence[str]:
    """Say what is wrong with an entry, and note where its bucket ends."""
    if entry.kind is EntryKind.RELEASE:
        return ()
    found = []
    end = ends.get(entry.bucket, entry.first_offset)
    if entry.first_offset > end:
        found.append(f"offsets {end} to {entry.first_offset - 1} are in no object before it")
    ends[entry.bucket] = max(end, entry.end_offset)
    try:
        read_object.bytes_of(entry)
    except WalEntryDamagedError as error:
        found.append(error.message)
    return found


async def _objects(store: ObjectStore, directory: str) -> AsyncIterator[tuple[WalName, ObjectInfo]]:
    async for page in store.list(directory):
        for info in page:
            name = WalName.parse(info.path)
            if name is not None:
                yield name, info


async def _stored(store: ObjectStore, server_epoch: int, sizes: dict[int, int]) -> StoredSession:
    numbers = sorted(sizes)
    end, ended_by = numbers[-1] + 1, None
    for number in numbers:
        if sizes[number] == HEADER_BYTES:
            header, _ = await _header(store, WalName(server_epoch, number))
            if header is not None and header.kind is not WalKind.DATA:
                end, ended_by = number, header.kind
                break
    data = [sizes[number] for number in numbers if number < end]
    session = await _session(store, server_epoch, numbers)
    return StoredSession(server_epoch, session, numbers[0], end, ended_by, len(data), sum(data))


async def _session(store: ObjectStore, server_epoch: int, numbers: Sequence[int]) -> Session | None:
    """Whose session it is, by the first header that can be read."""
    for number in numbers:
        header, _ = await _header(store, WalName(server_epoch, number))
        if header is not None:
            return Session(header.cluster_id, header.server_id, server_epoch)
    return None


async def _header(store: ObjectStore, name: WalName) -> tuple[WalHeader | None, str]:
    """The header of an object, or what is wrong with it."""
    try:
        head = await store.get_range(name.path, 0, HEADER_BYTES)
        return read_header(head, name, store.uri.text), ""
    except (ObjectCorruptError, ObjectMissingError) as error:  # it may have been trimmed meanwhile
        return None, error.message
