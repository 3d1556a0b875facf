"""A protocol client for tests: raw frames over a blocking socket.

It sends any bytes, valid or not, and returns the answer, or reports that the server closed the
connection. It uses the messages of `zufluss.wire`, without retries, metadata and reconnects.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

from tests.waiting import WAIT_SECONDS
from zufluss.errors import ZuflussError
from zufluss.record.header import BatchHeader, iter_headers
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.frame import ResponseFrame, pack_request, unpack_response

TIMEOUT_SECONDS = WAIT_SECONDS
INTRODUCTION_ID = (1 << 31) - 1
"""The id of a connection's first request."""
OFFSET_EARLIEST, OFFSET_LATEST, OFFSET_TIMESTAMP = 0, 1, 2


class ConnectionEndedError(Exception):
    """The server closed the connection."""


class RawClient:
    """One connection."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, silent: bool = False) -> None:
        """A `silent` connection is a stranger until its first request, which has a deadline."""
        self.socket = socket.create_connection((host, port), timeout=TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next_id = 0
        self._early: dict[int, ResponseFrame] = {}
        if not silent:
            self._introduce()

    def _introduce(self) -> None:
        """Send a first request, whose answer is left out."""
        body = versions_request().SerializeToString()
        with suppress(ConnectionEndedError):  # the next request finds it, too
            self.send(pack_request(ApiKey.API_VERSIONS, 0, INTRODUCTION_ID, body))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    # -- bytes ------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send bytes; the server may close the connection before it has read all of them."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionEndedError from None

    def receive(self) -> ResponseFrame:
        """The next frame, whichever request it answers."""
        while True:
            (length,) = struct.unpack(">i", self._exactly(4))
            frame = unpack_response(memoryview(self._exactly(length)))
            if frame.request_id != INTRODUCTION_ID:
                return frame

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.socket.recv(size - len(parts))
            except ConnectionResetError:
                part = b""
            if not part:
                raise ConnectionEndedError
            parts += part
        return bytes(parts)

    def finish(self) -> list[ResponseFrame]:
        """Close the sending side; returns what the server still answers before it closes too."""
        frames = []
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while True:
                frames.append(self.receive())
        except (ConnectionEndedError, OSError):
            return frames

    def closed(self) -> bool:
        """Wait for the server to close the connection; False if it answers instead."""
        try:
            self.receive()
        except ConnectionEndedError:
            return True
        return False

    # -- requests ---------------------------------------------------------------------------

    def begin(self, key: int, body: Message | bytes, version: int = 0) -> int:
        """Send one request; returns its id."""
        request_id = self._next_id
        self._next_id += 1
        data = body if isinstance(body, bytes) else body.SerializePartialToString()
        self.send(pack_request(key, version, request_id, data))
        return request_id

    def answer(self, request_id: int) -> ResponseFrame:
        """The answer to one request; answers to others are kept."""
        while request_id not in self._early:
            frame = self.receive()
            assert frame.request_id is not None
            self._early[frame.request_id] = frame
        return self._early.pop(request_id)

    def request(self, key: int, body: Message | bytes, version: int = 0) -> ResponseFrame:
        """Send one request and wait for its answer."""
        return self.answer(self.begin(key, body, version))

    def call(self, key: int, body: Message, version: int = 0) -> Any:
        """The response message; raises the error of an error frame."""
        frame = self.request(key, body, version)
        if frame.error is not None:
            raise frame.error
        return decode(APIS[key].response, frame.body)

    def error_code(self, key: int, body: Message | bytes, version: int = 0) -> int:
        """The code of the error frame that answers, 0 if it is no error."""
        problem = self.request(key, body, version).error
        return 0 if problem is None else int(problem.code)

    # -- what the tests often ask -----------------------------------------------------------

    def alive(self) -> bool:
        """The connection answers."""
        return self.request(ApiKey.API_VERSIONS, versions_request()).error is None

    def table_id(self, database: str, table: str) -> int:
        """The id of a table."""
        request = m.GetTableInfoRequest(table_path=table_path(database, table))
        return int(self.call(ApiKey.GET_TABLE_INFO, request).table_id)

    def end_offset(self, table_id: int, bucket: int = 0, partition_id: int | None = None) -> int:
        """The latest offset of a bucket."""
        request = m.ListOffsetsRequest(
            follower_server_id=-1,
            offset_type=OFFSET_LATEST,
            table_id=table_id,
            partition_id=partition_id,
            bucket_id=[bucket],
        )
        (entry,) = self.call(ApiKey.LIST_OFFSETS, request).buckets_resp
        assert not entry.error_code, entry.error_message
        return int(entry.offset)

    def produce(self, table_id: int, records: bytes, bucket: int = 0, acks: int = -1) -> Any:
        """Append records to one bucket; the bucket's answer."""
        request = produce_request(table_id, records, bucket, acks)
        (entry,) = self.call(ApiKey.PRODUCE_LOG, request).buckets_resp
        return entry

    def fetch(self, table_id: int, offset: int = 0, bucket: int = 0, **options: Any) -> Any:
        """Fetch from one bucket; the bucket's answer."""
        request = fetch_request(table_id, offset, bucket, **options)
        (table,) = self.call(ApiKey.FETCH_LOG, request).tables_resp
        (entry,) = table.buckets_resp
        return entry

    def batches(self, table_id: int, bucket: int = 0) -> list[BatchHeader]:
        """The headers of all batches of a bucket."""
        found: list[BatchHeader] = []
        offset, end = 0, self.end_offset(table_id, bucket)
        while offset < end:
            entry = self.fetch(table_id, offset, bucket)
            assert not entry.error_code, entry.error_message
            found.extend(header for _, header in iter_headers(entry.records))
            offset = found[-1].next_offset
        return found


def versions_request() -> m.ApiVersionsRequest:
    """The first request of a client."""
    return m.ApiVersionsRequest(client_software_name="raw", client_software_version="1")


def table_path(database: str, table: str) -> m.PbTablePath:
    """A table's path."""
    return m.PbTablePath(database_name=database, table_name=table)


def produce_request(
    table_id: int,
    records: bytes,
    bucket: int = 0,
    acks: int = -1,
    partition_id: int | None = None,
) -> m.ProduceLogRequest:
    """A produce request with one bucket entry."""
    request = m.ProduceLogRequest(acks=acks, table_id=table_id, timeout_ms=30_000)
    request.buckets_req.add(partition_id=partition_id, bucket_id=bucket, records=records)
    return request


def fetch_request(
    table_id: int,
    offset: int = 0,
    bucket: int = 0,
    *,
    max_wait_ms: int = 200,
    max_bytes: int = 16 << 20,
    max_bucket_bytes: int = 1 << 20,
    min_bytes: int = 1,
    columns: tuple[int, ...] | None = None,
    partition_id: int | None = None,
) -> m.FetchLogRequest:
    """A fetch request for one bucket."""
    request = m.FetchLogRequest(
        follower_server_id=-1, max_bytes=max_bytes, max_wait_ms=max_wait_ms, min_bytes=min_bytes
    )
    table = request.tables_req.add(
        table_id=table_id,
        projection_pushdown_enabled=columns is not None,
        projected_fields=columns or (),
    )
    entry = table.buckets_req.add(
        bucket_id=bucket, fetch_offset=offset, max_fetch_bytes=max_bucket_bytes
    )
    if partition_id is not None:
        entry.partition_id = partition_id
    return request


def code_of(error: ZuflussError | None) -> int:
    """The code of an error, 0 for none."""
    return 0 if error is None else int(error.code)
