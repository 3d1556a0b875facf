"""Answers of rows by key: how large one may become, and how many are made at a time.

A request of a few bytes can ask for many rows, whose size is unknown before they are read. So every
answer is made within a number of bytes. It is first tried as a small answer, for which there is
always room soon. Only if it becomes larger is it begun again as a large one; few of those are made
at a time, and none while clients have left too much unread. No answer is made for a client that has
not read its earlier ones. An answer that waits holds no rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import Message

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import RecordTooLargeError, ZuflussError
from zufluss.kv.store import RowsTooLargeError
from zufluss.net.services import Reader
from zufluss.record.kernels.lookup import encode_values, encoded_size
from zufluss.record.slices import Slices
from zufluss.varint import encode_varint
from zufluss.wire.tables import partition_id_of

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

SMALL_BYTES_MAX: Final = 1 << 20
"""The most bytes of a small answer."""
SHORT_MEMORY_BYTES: Final = 64 * 1024
"""The same while the memory of unread answers is short."""
SMALL_ANSWERS: Final = 16
"""Small answers that are made at a time: enough to keep the key-value worker busy."""
LARGE_ANSWERS: Final = 2
"""Large answers that are made at a time, each with its bytes in memory."""
SHORT_BYTES: Final = 4096
"""Parts of an answer up to this length are copied together, because each buffer costs to send."""
TURN_BUCKETS: Final = 64
"""Buckets of a request that are refused in one turn of the event loop."""


class Answers:
    """The answers that a server is making. Belongs to the event loop."""

    def __init__(self, conf: Configuration) -> None:
        self.bytes_max = conf.get(options.ZUFLUSS_KV_LOOKUP_MAX_ANSWER_SIZE)
        """The most bytes of rows in an answer."""
        self._small = asyncio.Semaphore(SMALL_ANSWERS)
        self._large = asyncio.Semaphore(LARGE_ANSWERS)

    async def make(self, reader: Reader, small: bool, build: Callable[[int], Awaitable[T]]) -> T:
        """Return what `build` returns when it is called with the bytes that it may use.

        `build` raises `RowsTooLargeError` if these are too few. `small` is false for a request that
        takes long whatever it returns. Raises `RecordTooLargeError` if no answer may be so large.
        """
        while small:
            await reader.has_read()
            async with self._small:
                if reader.backlogged:  # by the answer to another of its requests
                    continue
                most = SHORT_MEMORY_BYTES if reader.short else SMALL_BYTES_MAX
                try:
                    return await build(min(most, self.bytes_max))
                except RowsTooLargeError:
                    break
        while True:
            await reader.room()
            async with self._large:
                if not reader.has_room:  # another answer has taken it
                    continue
                try:
                    return await build(self.bytes_max)
                except RowsTooLargeError:
                    raise self.too_large() from None

    def too_large(self) -> RecordTooLargeError:
        """Returns the refusal of a request whose rows do not fit into an answer."""
        return RecordTooLargeError(
            f"the rows of this request take more than {self.bytes_max} bytes, the most in one "
            f"answer ({options.ZUFLUSS_KV_LOOKUP_MAX_ANSWER_SIZE.key}); ask for fewer keys or rows "
            "at a time, or for longer prefixes"
        )


class RowsAnswer:
    """The answer to a lookup while it is made, bucket by bucket.

    LookupResponse and PrefixLookupResponse have the same form: `buckets_resp` is field 1, rows are
    field 5 of its entries.
    """

    def __init__(self, entry_type: type[Message], room: int) -> None:
        """`entry_type` is the message of a bucket, `room` the most bytes of the answer."""
        self._entry_type: Any = entry_type
        self.room = room
        """Bytes that may still be added."""
        self.partition_id: int | None = None
        """Partition of the bucket that the answer stands at."""
        self._done: list[Buffer] = []
        self._bucket_id: int | None = None
        self._refused: bytes | None = None
        self._parts: list[Buffer] = []
        self._turn = 0

    async def next_bucket(self, bucket: Any) -> None:
        """Go on with the next bucket of the request; lets other requests run in between."""
        self._end_bucket()
        self.partition_id, self._bucket_id = partition_id_of(bucket), bucket.bucket_id
        self._turn += 1
        if self._turn % TURN_BUCKETS == 0:
            await asyncio.sleep(0)

    def add(self, part: Buffer) -> None:
        """Add encoded rows to the bucket."""
        self.room -= len(part)
        if self.room < 0:
            raise RowsTooLargeError("the rows do not fit into the answer")
        if len(part) > SHORT_BYTES:
            self._parts.append(part)
        elif self._parts and isinstance(self._parts[-1], bytearray):
            self._parts[-1] += part
        else:
            self._parts.append(bytearray(part))

    def add_list(self, parts: Sequence[Buffer]) -> None:
        """Add the rows of one prefix to the bucket."""
        self.add(b"\x2a" + encode_varint(sum(map(len, parts))))
        for part in parts:
            self.add(part)

    def refuse(self, error: ZuflussError) -> None:
        """Answer the bucket with an error, without rows."""
        self._refused = self._entry(error_code=error.code, error_message=error.message)
        self.room -= len(self._refused)
        if self.room < 0:
            raise RowsTooLargeError("the errors of the buckets do not fit into the answer")

    def finish(self) -> list[Buffer]:
        """Returns the answer as buffers to send in turn."""
        self._end_bucket()
        return self._done

    def _entry(self, **fields: Any) -> bytes:
        entry = self._entry_type(bucket_id=self._bucket_id, **fields)
        if self.partition_id is not None:
            entry.partition_id = self.partition_id
        encoded: bytes = entry.SerializeToString()
        return encoded

    def _end_bucket(self) -> None:
        if self._bucket_id is None:
            return
        parts: list[Buffer] = [self._entry(), *self._parts]
        if self._refused is not None:
            parts = [self._refused]
        self._done.append(b"\x0a" + encode_varint(sum(map(len, parts))))
        self._done += parts
        self._refused, self._parts = None, []


def encoded(values: Slices, room: int, *, listed: bool) -> Buffer:
    """Returns values as they stand in an answer; raises if they take more than `room` bytes."""
    if not values.count:
        return b""
    size = encoded_size(*values, listed)
    if size > room:
        raise RowsTooLargeError("the rows do not fit into the answer")
    out = np.empty(max(size, 0), np.uint8)
    if encode_values(*values, listed, out) != len(out):
        raise ValueError("a row does not lie where the store says")
    return out.data if size else b""
