"""A location in an object store, by obstore: S3, Google Cloud Storage, Azure, memory.

A request that fails with a network error, 429 or 5xx is sent at most three times within its
timeout; a transfer fails when it makes no progress for as long. Single requests are repeated here
and not by obstore, because the outcome of the first try may be unknown: a put that must create an
object and finds one on its second try has succeeded if that object has its bytes. A download that
breaks off continues where it was. Only the requests of a multipart upload are repeated by obstore;
it gets a few parts of the file at a time, so memory does not grow with the file.

obstore distinguishes most failures only by the text of one exception; `typed` parses that text.
`callers` is imported for the end of the process.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import obstore
from crc32c import crc32c
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from zufluss.remote import callers  # noqa: F401
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    ObjectForbiddenError,
    ObjectMissingError,
    RemoteStorageError,
    check_limit,
)
from zufluss.remote.stores import TRIES, UNSIGNED, open_store
from zufluss.remote.transfer import ReceivedFile, SentFile
from zufluss.remote.uri import LocationUri

T = TypeVar("T")

PART_BYTES: Final = 8 << 20
PARTS_AT_ONCE: Final = 4
PARTS_MAX: Final = 9000
"""Parts of an upload at most; larger files get larger parts. S3 allows 10,000."""
STREAM_BYTES: Final = 4 << 20
PAGE_OBJECTS: Final = 1000
BACKOFF_SECONDS: Final = 0.1

_STATUS = re.compile(r"status code: (\d{3})")
_NETWORK = re.compile(r"HTTP error|error sending request|timed out|body error")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
_RANGE_BEHIND_END = re.compile(r"[Rr]ange was invalid|Invalid range|status code: 416")
_KEY_CODE = re.compile(r"\(code: (\w+)\)")
_STATUS_OF_CODE: Final = {
    "AccessDenied": 403,
    "SlowDown": 503,
    "ServiceUnavailable": 503,
    "InternalError": 500,
}
_FORBIDDEN: Final = (401, 403)
_NOT_FOUND: Final = 404
_CONFLICTS: Final = ("ConditionalRequestConflict", "OperationAborted")
"""S3's codes for a request that met another one about the same object. Nothing was done, and
whether the object exists is open: the other request may be an earlier try of this one."""
_THROTTLED: Final = (429, 503)
_NOT_IMPLEMENTED: Final = 501
_AGAIN: Final = (408, 409, *_THROTTLED)


class CloudDirectory:
    """The objects below one prefix of a bucket."""

    def __init__(
        self,
        uri: LocationUri,
        properties: dict[str, str],
        timeout_ms: int,
        *,
        sign_payload: bool = True,
    ) -> None:
        self.uri = uri
        self._prefix = uri.path.strip("/")
        self._seconds = timeout_ms / 1000
        if not sign_payload:
            properties = properties | UNSIGNED
        self._store: Any = open_store(uri, properties, timeout_ms, retries=0)
        self._parts: Any = open_store(uri, properties, timeout_ms, retries=TRIES - 1)

    async def put(self, path: str, data: bytes | memoryview, if_absent: bool) -> None:
        """Create an object from bytes."""
        mode: Literal["create", "overwrite"] = "create" if if_absent else "overwrite"
        tries = 0

        async def request() -> None:
            nonlocal tries
            tries += 1
            await obstore.put_async(
                self._store, self._key(path), data, mode=mode, use_multipart=False
            )

        try:
            await self._tried(path, request)
        except ObjectExistsError:
            crc = await asyncio.to_thread(crc32c, data)
            if tries == 1 or not await self._is(path, len(data), crc):
                raise

    async def create(self, path: str, data: bytes | list[bytes]) -> None:
        """Create an absent object with a single request, which may have succeeded if it raises."""
        try:
            async with asyncio.timeout(self._seconds):
                await obstore.put_async(
                    self._store, self._key(path), data, mode="create", use_multipart=False
                )
        except (BaseError, OSError) as problem:
            raise self.typed(path, problem) from problem

    async def put_file(self, path: str, source: Path) -> tuple[int, int]:
        """Create an object from a file; return its size and checksum."""
        file = await asyncio.to_thread(SentFile, source, self.uri.text, path)
        try:
            if file.length <= PART_BYTES:
                await self.put(path, await asyncio.to_thread(file.read, PART_BYTES + 1), False)
            else:
                await self._put_parts(path, file)
            file.check_unchanged()
            return file.result
        finally:
            await _finished(file.close)

    async def _put_parts(self, path: str, file: SentFile) -> None:
        size = max(PART_BYTES, -(-file.length // PARTS_MAX))

        async def parts() -> AsyncIterator[bytes]:
            while part := await asyncio.to_thread(file.read, size):
                yield part

        try:
            await obstore.put_async(
                self._parts,
                self._key(path),
                parts(),
                chunk_size=size,
                max_concurrency=PARTS_AT_ONCE,
            )
        except FileNotFoundError as problem:
            # The answer to "complete" was lost: the repeated request does not find the upload.
            if file.size != file.length or not await self._is(path, *file.result):
                raise self.typed(path, problem) from problem
        except (BaseError, OSError) as problem:
            raise self.typed(path, problem) from problem

    async def get(self, path: str, limit: int) -> bytes:
        """Return all bytes of an object of at most `limit` bytes."""

        async def request() -> bytes:
            answer = await obstore.get_async(self._store, self._key(path))
            check_limit(self.uri.text, path, answer.meta["size"], limit)
            return bytes(await answer.bytes_async())

        return await self._tried(path, request)

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Return the bytes of a range, fewer at the end of the object."""

        async def request() -> memoryview:
            key = self._key(path)
            try:
                data = await obstore.get_range_async(self._store, key, start=start, end=end)
            except BaseError as problem:
                if _RANGE_BEHIND_END.search(str(problem)):
                    return memoryview(b"")
                raise
            return memoryview(data)

        return await self._tried(path, request)

    async def get_file(self, path: str, target: Path) -> tuple[int, int]:
        """Copy an object to a local file; return its size and checksum."""
        file = await asyncio.to_thread(ReceivedFile, target, self.uri.text, path)
        try:
            await self._receive(path, file)
            await asyncio.to_thread(file.sync)
        except BaseException:
            await _finished(file.discard)
            raise
        await _finished(file.keep)
        return file.result

    async def _receive(self, path: str, file: ReceivedFile) -> None:
        """Receive an object; each piece is written while the next one arrives."""
        writing: asyncio.Future[None] | None = None
        async for piece in self.stream(path, 0):
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(asyncio.to_thread(file.write, piece))
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        if writing is not None:
            await writing

    async def stream(self, path: str, start: int) -> AsyncIterator[memoryview]:
        """Yield the bytes from `start` on, in pieces; reconnects where the answer broke off."""
        etag: str | None = None
        tries = 0
        end = time.monotonic() + self._seconds
        while True:
            tries += 1
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    answer = await self._request_from(path, start, etag)
                if answer is None:
                    return
                etag = answer.meta["e_tag"]
                async for piece in answer.stream(min_chunk_size=STREAM_BYTES):
                    start += len(piece)
                    yield memoryview(piece)
                    tries, end = 0, time.monotonic() + self._seconds
                return
            except (BaseError, OSError) as problem:
                late = time.monotonic() + backoff(tries) >= end
                await self._again(path, problem, TRIES if late else tries)

    async def _request_from(self, path: str, start: int, etag: str | None) -> Any:
        """Request the bytes from `start` on; None if the object ends there."""
        options: Any = {"range": {"offset": start}} if start else {}
        if etag is not None:
            options["if_match"] = etag
        try:
            return await obstore.get_async(self._store, self._key(path), options=options)
        except BaseError as problem:
            if start and _RANGE_BEHIND_END.search(str(problem)):
                return None
            raise

    async def _again(self, path: str, problem: Exception, tries: int) -> None:
        """Wait before the next try; raises the error if there is no next try."""
        error = self.typed(path, problem)
        if not error.retriable or tries >= TRIES:
            raise error from problem
        await asyncio.sleep(backoff(tries))

    async def head(self, path: str) -> tuple[int, int]:
        """Return size and time of change (ms) of an object."""
        entry = await self._tried(path, lambda: obstore.head_async(self._store, self._key(path)))
        return entry["size"], _modified_ms(entry)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects."""
        for start in range(0, len(paths), PAGE_OBJECTS):
            page = paths[start : start + PAGE_OBJECTS]
            try:
                await self._delete(page)
            except ObjectMissingError:  # some stores report missing objects
                for path in page:
                    await self._delete_one(path)

    async def _delete(self, paths: Sequence[str]) -> None:
        keys = [self._key(path) for path in paths]
        await self._tried(paths[0], lambda: obstore.delete_async(self._store, keys))

    async def _delete_one(self, path: str) -> None:
        try:
            await self._delete([path])
        except ObjectMissingError:
            return

    async def list(
        self, prefix: str, after: str | None = None
    ) -> AsyncIterator[list[tuple[str, int, int]]]:
        """Yield path, size and time of change of the objects below a directory, in pages.

        With `after`, only those whose path in the directory sorts behind it.
        """
        key = self._key(prefix).strip("/")
        skipped = len(self._prefix) + 1 if self._prefix else 0
        last = None if after is None else f"{key}/{after}"
        tries = 0
        while True:
            tries += 1
            try:
                pages = obstore.list(self._store, key or None, offset=last, chunk_size=PAGE_OBJECTS)
                async for page in pages:
                    tries, last = 0, page[-1]["path"]
                    yield [(e["path"][skipped:], e["size"], _modified_ms(e)) for e in page]
                return
            except (BaseError, OSError) as problem:
                await self._again(prefix, problem, tries)

    async def directories(self, prefix: str) -> Sequence[str]:
        """Return the names that lead to objects further down, as a directory's directories."""
        key = self._key(prefix).strip("/")

        async def request() -> Sequence[str]:
            answer = await obstore.list_with_delimiter_async(self._store, key or None)
            return [path.rpartition("/")[2] for path in answer["common_prefixes"]]

        return await self._tried(prefix, request)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    async def _is(self, path: str, size: int, crc: int) -> bool:
        """Whether the object has this size and checksum."""
        try:
            if (await self.head(path))[0] != size:
                return False
            actual = 0
            async for piece in self.stream(path, 0):
                actual = await asyncio.to_thread(crc32c, piece, actual)
        except ObjectMissingError:
            return False
        return actual == crc

    async def _tried(self, path: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request, again while that can help and time is left; return the answer."""
        end = time.monotonic() + self._seconds
        for count in range(1, TRIES + 1):
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    return await request()
            except (BaseError, OSError) as problem:
                error = self.typed(path, problem)
                pause = backoff(count)
                late = time.monotonic() + pause >= end
                if not error.retriable or count == TRIES or late:
                    raise error from problem
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def typed(self, path: str, problem: Exception) -> RemoteStorageError:
        """Return our error for one of obstore's."""
        if isinstance(problem, RemoteStorageError):
            return problem
        uri, reason = self.uri.text, _reason(problem)
        if isinstance(problem, FileNotFoundError):
            return ObjectMissingError(uri, path, f"there is no such object ({reason})")
        if isinstance(problem, (PermissionDeniedError, UnauthenticatedError)):
            return ObjectForbiddenError(uri, path, reason)
        code = _CODE.search(str(problem))
        if isinstance(problem, AlreadyExistsError) and not (code and code[1] in _CONFLICTS):
            return ObjectExistsError(uri, path, "the object exists already")
        if isinstance(problem, PreconditionError):
            return ObjectCorruptError(uri, path, "the object was replaced while it was read")
        if isinstance(problem, TimeoutError):
            return LocationUnavailableError(uri, path, f"no answer within {self._seconds:g} s")
        return _by_status(uri, path, reason)


def _by_status(uri: str, path: str, reason: str) -> RemoteStorageError:
    """Return the error for a message with an HTTP status, or an S3 code for one of many keys."""
    match, code = _STATUS.search(reason), _KEY_CODE.search(reason)
    status = int(match[1]) if match else _STATUS_OF_CODE.get(code[1], 0) if code else 0
    if status in _FORBIDDEN:
        return ObjectForbiddenError(uri, path, reason)
    if status == _NOT_FOUND:
        return ObjectMissingError(uri, path, reason)
    broken = status >= 500 and status != _NOT_IMPLEMENTED
    if broken or status in _AGAIN or (not status and _NETWORK.search(reason)):
        return LocationUnavailableError(uri, path, reason, throttled=status in _THROTTLED)
    return RemoteStorageError(uri, path, reason)


def _reason(problem: Exception) -> str:
    """Return a message on one line; queries of addresses are removed, they have signatures."""
    text = str(problem)
    first = _QUERY.sub(r"\1", text.partition("\n")[0].partition("<")[0]).strip()
    code = _CODE.search(text)
    return f"{first} {code[1]}"[:500] if code else first[:500]


async def _finished(call: Callable[[], None]) -> None:
    """Call in a thread; a cancellation of the waiting task takes effect after the call."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _modified_ms(entry: Any) -> int:
    return int(entry["last_modified"].timestamp() * 1000)


def backoff(tries: int) -> float:
    """Return seconds before the next try: doubled each time, random so that clients spread out."""
    return BACKOFF_SECONDS * 2.0 ** (tries - 1) * random.uniform(0.5, 1.5)
