"""A store behind a network that delivers requests when a test says so, in any order, or never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    ObjectMissingError,
)
from zufluss.remote.objects import Content, ObjectInfo
from zufluss.remote.uri import parse_location

URI = "memory://network"


@dataclass(eq=False)
class Request:
    """A create or a delete that was sent."""

    path: str
    data: bytes | None
    """None for a delete."""
    reply: asyncio.Future[None]
    arrived: bool = False

    def answer(self, error: Exception | None = None) -> None:
        """Answer the client, if it still listens."""
        if self.reply.done():
            return
        if error is None:
            self.reply.set_result(None)
        else:
            self.reply.set_exception(error)

    def fail(self, *, throttled: bool = False) -> None:
        """Tell the client that nobody answered; the request may still be on its way."""
        self.answer(LocationUnavailableError(URI, self.path, "no answer", throttled=throttled))


@dataclass
class Network:
    """An `ObjectStore`. Creates and deletes wait until they are delivered; reads are at once."""

    objects: dict[str, bytes] = field(default_factory=dict)
    sent: list[Request] = field(default_factory=list)
    """Requests that did not arrive yet, oldest first."""
    reads_fail: bool = False
    at_once: bool = False
    """Creates and deletes are delivered as soon as they are sent."""

    uri = parse_location(URI, "test")

    async def create(self, path: str, data: Content) -> None:
        await self._send(path, data if isinstance(data, bytes) else b"".join(data))

    async def delete(self, paths: Sequence[str]) -> None:
        await asyncio.gather(*(self._send(path, None) for path in paths))

    async def _send(self, path: str, data: bytes | None) -> None:
        request = Request(path, data, asyncio.get_running_loop().create_future())
        self.sent.append(request)
        if self.at_once:
            self.deliver(request)
        await request.reply

    def deliver(self, request: Request, *, answer: bool = True) -> None:
        """Have a request arrive; its answer may be lost."""
        self.sent.remove(request)
        error = None
        if request.data is None:
            self.objects.pop(request.path, None)
        elif request.path in self.objects:
            error = ObjectExistsError(URI, request.path, "the object exists already")
        else:
            self.objects[request.path] = request.data
        if answer:
            request.answer(error)
        else:
            request.fail()

    def conflict(self, request: Request) -> None:
        """Answer as S3 when two requests met: "exists", though nothing may be there."""
        self.sent.remove(request)
        request.answer(ObjectExistsError(URI, request.path, "409"))

    def deliver_all(self) -> None:
        while self.sent:
            self.deliver(self.sent[0])

    async def get(self, path: str, *, limit: int) -> bytes:
        await self._read()
        if path not in self.objects:
            raise ObjectMissingError(URI, path, "there is no such object")
        return self.objects[path]

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        data = (await self.get(path, limit=end))[start:end]
        if len(data) != end - start:
            raise ObjectCorruptError(URI, path, "too short")
        return memoryview(data)

    async def list(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        await self._read()
        paths = sorted(path for path in self.objects if path.startswith(f"{prefix}/"))
        yield [ObjectInfo(path, len(self.objects[path]), 0) for path in paths]

    async def _read(self) -> None:
        await asyncio.sleep(0)
        if self.reads_fail:
            raise LocationUnavailableError(URI, "", "no answer")
