"""The probe refuses locations that do not create an object only once, and only those."""

from __future__ import annotations

import asyncio

import pytest

from tests.log.shared.network import URI, Network
from zufluss.log.shared.api import UnsafeLocationError
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectExistsError,
    ObjectForbiddenError,
    RemoteStorageError,
)


class Careful(Network):
    """A store as it should be; counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__(at_once=True)
        self.creates = 0

    async def create(self, path: str, data: bytes) -> None:
        self.creates += 1
        await asyncio.sleep(0)
        await super().create(path, data)


class Ignoring(Careful):
    """Ignores the condition."""

    async def create(self, path: str, data: bytes) -> None:
        self.objects[path] = data


class Racing(Careful):
    """Looks first and writes then."""

    async def create(self, path: str, data: bytes) -> None:
        if path in self.objects:
            raise ObjectExistsError(URI, path, "the object exists already")
        await asyncio.sleep(0)
        self.objects[path] = data


class Mixing(Careful):
    """Answers the first request, and keeps the bytes of the last."""

    async def create(self, path: str, data: bytes) -> None:
        exists = path in self.objects
        self.objects[path] = data
        if exists:
            raise ObjectExistsError(URI, path, "the object exists already")


class Forgetting(Careful):
    """Says yes and stores nothing, once for each name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    async def create(self, path: str, data: bytes) -> None:
        if path in self.names:
            raise ObjectExistsError(URI, path, "the object exists already")
        self.names.add(path)


class Refusing(Careful):
    """Does not know conditions."""

    async def create(self, path: str, data: bytes) -> None:
        raise RemoteStorageError(URI, path, "501 Not Implemented")


class Failing(Careful):
    """Fails every n-th request; the request may have succeeded all the same."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    async def create(self, path: str, data: bytes) -> None:
        if self.creates % self.every == 0:
            self.creates += 1
            self.objects.setdefault(path, data)
            raise LocationUnavailableError(URI, path, "500")
        await super().create(path, data)


class Conflicting(Careful):
    """Answers some requests that meet with a conflict, as S3 does, though nobody has won yet."""

    async def create(self, path: str, data: bytes) -> None:
        if self.creates < 16:
            self.creates += 1
            raise ObjectExistsError(URI, path, "409")
        await super().create(path, data)


def log_over(store: Network) -> ObjectLog:
    return ObjectLog(store, WalSettings())


async def test_a_store_that_keeps_the_condition_passes_and_nothing_is_left() -> None:
    store = Careful()
    await log_over(store).probe()
    assert store.creates == 5 * 9
    assert store.objects == {}


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (Ignoring(), "8 of 8 requests at once created one object"),
        (Racing(), "requests at once created one object"),
        (Mixing(), "other bytes than the request that created it"),
        (Forgetting(), "an object that was created is missing"),
        (Refusing(), "refuses conditional requests .*501"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_store_that_breaks_the_promise_is_refused_by_name(
    store: Network, reason: str
) -> None:
    with pytest.raises(UnsafeLocationError, match=reason) as caught:
        await log_over(store).probe()
    assert URI in caught.value.message
    assert "If-None-Match" in caught.value.message
    assert store.objects == {}


async def test_rounds_with_failed_requests_are_repeated() -> None:
    store = Failing(every=20)
    await log_over(store).probe()
    assert store.creates > 5 * 9


async def test_a_store_that_always_fails_is_unavailable_and_not_unsafe() -> None:
    with pytest.raises(LocationUnavailableError, match="0 of 20 rounds"):
        await log_over(Failing(every=1)).probe()


async def test_conflicts_without_a_winner_are_repeated() -> None:
    await log_over(Conflicting()).probe()


async def test_missing_permissions_are_reported_as_such() -> None:
    class Forbidding(Careful):
        async def create(self, path: str, data: bytes) -> None:
            raise ObjectForbiddenError(URI, path, "403")

    with pytest.raises(ObjectForbiddenError):
        await log_over(Forbidding()).probe()
