"""The objects of a session in order, a few fetched ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from zufluss.log.shared.api import LostObject, Session
from zufluss.log.shared.store import ObjectStore
from zufluss.remote.errors import ObjectCorruptError, ObjectMissingError
from zufluss.remote.wal import OBJECT_BYTES_MAX, WalKind, WalName, WalObject, decode

FETCHES_AT_ONCE: Final = 16


async def read(
    store: ObjectStore, session: Session, floor: int, end: int | None
) -> AsyncGenerator[WalObject | LostObject, None]:
    """Yield each number from `floor` to before `end`, or what is wrong with it.

    Without an end, the objects up to the first number that is missing, a seal or a close.
    """
    fetches: deque[asyncio.Task[WalObject | LostObject | None]] = deque()
    number = floor
    try:
        while True:
            while len(fetches) < FETCHES_AT_ONCE and (end is None or number < end):
                name = WalName(session.server_epoch, number)
                fetches.append(asyncio.create_task(_fetch(store, session, name)))
                number += 1
            if not fetches:
                return
            read = await fetches.popleft()
            if end is None and (read is None or _is_end(read)):
                return
            yield _expected(read, WalName(session.server_epoch, number - len(fetches) - 1))
    finally:
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)


def _is_end(read: WalObject | LostObject) -> bool:
    return isinstance(read, WalObject) and read.header.kind is not WalKind.DATA


def _expected(read: WalObject | LostObject | None, name: WalName) -> WalObject | LostObject:
    """Return what was read; below the end of a session every number is a data object."""
    if read is None:
        return LostObject(name, "the object is missing")
    if isinstance(read, WalObject) and _is_end(read):
        return LostObject(name, f"a {read.header.kind.name} lies below the end of the session")
    return read


async def _fetch(
    store: ObjectStore, session: Session, name: WalName
) -> WalObject | LostObject | None:
    """Return an object, or what is wrong with it; None if it is missing."""
    try:
        data = await store.get(name.path, limit=OBJECT_BYTES_MAX)
        read = decode(data, name, store.uri.text)
    except ObjectMissingError:
        return None
    except ObjectCorruptError as error:
        return LostObject(name, error.message)
    header = read.header
    if (header.cluster_id, header.server_id) != session[:2]:
        whose = f"server {header.server_id} of cluster {header.cluster_id}"
        return LostObject(name, f"{store.uri.text}/{name.path} is an object of {whose}")
    return read
