"""Whether a location creates an object only once, tried before anything depends on it.

Some stores ignore the condition of a put, and some look first and write then, so that two writers
at the same moment both succeed. Asking twice in turn would not find the second kind: eight requests
with different bytes race for one name, five times. Exactly one may succeed, and the object must
have its bytes. A round in which a request fails tells nothing and is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from zufluss.log.shared.api import UnsafeLocationError
from zufluss.log.shared.store import ObjectStore
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectExistsError,
    ObjectForbiddenError,
    ObjectMissingError,
    RemoteStorageError,
)
from zufluss.remote.layout import PROBE

ROUNDS: Final = 5
WRITERS: Final = 8
TRIES_MAX: Final = 4 * ROUNDS
"""Rounds at most, with those that told nothing."""
BYTES: Final = 4096


async def probe(store: ObjectStore, nonce: Callable[[], bytes]) -> None:
    """Raise UnsafeLocationError unless an object is created only once.

    Raises LocationUnavailableError if too many requests failed.
    """
    rounds = 0
    for _ in range(TRIES_MAX):
        path = f"{PROBE}/{nonce().hex()}"
        try:
            rounds += await _round(store, path, nonce)
        finally:
            await store.delete([path])
        if rounds == ROUNDS:
            return
    raise LocationUnavailableError(
        store.uri.text, PROBE, f"only {rounds} of {TRIES_MAX} rounds of the probe were complete"
    )


async def _round(store: ObjectStore, path: str, nonce: Callable[[], bytes]) -> bool:
    """Have writers race for a name; whether all requests had an outcome."""
    bodies = [nonce().ljust(BYTES, b"\0") for _ in range(WRITERS)]
    outcomes = await asyncio.gather(*(_create(store, path, body) for body in bodies))
    winners = [body for body, won in zip(bodies, outcomes, strict=True) if won]
    if len(winners) > 1:
        raise _unsafe(store, f"{len(winners)} of {WRITERS} requests at once created one object")
    try:
        data = await store.get(path, limit=BYTES)
    except ObjectMissingError as error:
        if winners:
            raise _unsafe(store, "an object that was created is missing") from error
        return False
    if winners and data != winners[0]:
        raise _unsafe(store, "an object has other bytes than the request that created it")
    if await _create(store, path, bodies[0]):
        raise _unsafe(store, "an object that existed was created again")
    return bool(winners) and None not in outcomes


async def _create(store: ObjectStore, path: str, body: bytes) -> bool | None:
    """Whether a request created the object; None if nobody knows."""
    try:
        await store.create(path, body)
    except ObjectExistsError:
        return False
    except ObjectForbiddenError:
        raise
    except LocationUnavailableError:
        return None
    except RemoteStorageError as error:
        raise _unsafe(store, f"it refuses conditional requests ({error.message})") from error
    return True


def _unsafe(store: ObjectStore, reason: str) -> UnsafeLocationError:
    return UnsafeLocationError(
        f"the location {store.uri.text} cannot have the shared log: {reason}; it needs a directory "
        "or an object store that honours `If-None-Match: *`"
    )
