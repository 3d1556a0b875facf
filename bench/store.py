"""An object store for benchmarks: as much of S3 as zufluss uses, in memory, with a latency.

    with Store() as store:
        store.latency(0.05)

It is a process of its own that costs little for each byte, so that what is measured is the server
in front of it. Every request is answered `latency` after its last byte. It checks no signature and
forgets everything at its end. Only `bench` uses it; tests have moto, which checks more.

| request | answer |
|---|---|
| PUT of an object, with `If-None-Match: *` | 412 if it exists |
| GET with a range, HEAD, DELETE of an object | as S3 |
| POST of a multipart upload, PUT of its parts | as S3 |
| GET of a bucket | the list, all in one page |
| POST `?delete` to a bucket | deletes the keys |
| PUT `/-/SECONDS` | sets the latency |
| GET `/-/` | the number of puts below `wal/` so far |
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import sys
import time
import urllib.request
from collections.abc import Sequence
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import uvloop

from zufluss.testing.process import ReadyProcess
from zufluss.testing.s3 import properties

HEAD_END = b"\r\n\r\n"
BUCKET = "bench"
_READY = re.compile(r"store at (\d+)")
_KEY = re.compile(r"<Key>(.*?)</Key>")


class Store(ReadyProcess):
    """The store in a process of its own."""

    def __init__(self) -> None:
        super().__init__(_READY)
        self.port = 0

    def arguments(self) -> Sequence[str]:
        """The command line."""
        return [sys.executable, "-m", "bench.store"]

    def became_ready(self, line: re.Match[str]) -> None:
        """Take the port."""
        self.port = int(line[1])

    def latency(self, seconds: float) -> None:
        """Answer each request so long after its last byte."""
        address = f"http://127.0.0.1:{self.port}/-/{seconds}"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()

    def wal_puts(self) -> int:
        """How many requests put an object of the shared log, answered or not."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/") as answer:
            return int(answer.read())

    def settings(self, prefix: str) -> dict[str, str]:
        """Cluster keys for a location below a prefix."""
        endpoint = properties(f"http://127.0.0.1:{self.port}")
        return {"remote.data.dirs": f"s3://{BUCKET}/{prefix}", **endpoint}


class _Objects:
    """What the store has."""

    def __init__(self) -> None:
        self.latency = 0.0
        self.wal_puts = 0
        self.objects: dict[str, tuple[bytes, float]] = {}
        """Content and time of change, by path."""
        self.uploads: dict[str, dict[int, bytes]] = {}

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[str, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        url = urlsplit(target)
        path, query = unquote(url.path)[1:], parse_qs(url.query, keep_blank_values=True)
        if path.startswith("-/") and method == "GET":
            return "200 OK", {}, str(self.wal_puts).encode()
        if path.startswith("-/"):
            self.latency = float(path[2:])
            return "200 OK", {}, b""
        if method == "GET" and "list-type" in query:
            return "200 OK", {}, self._list(path.strip("/"), query)
        if method == "POST":
            return "200 OK", {}, self._post(path, query, body)
        if method == "PUT":
            return self._put(path, query, headers, body)
        if method == "DELETE":
            self.objects.pop(path, None)
            return "204 No Content", {}, b""
        return self._get(path, headers)

    def _put(
        self, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> tuple[str, dict[str, str], bytes]:
        self.wal_puts += "/wal/" in path
        if "uploadId" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        elif "if-none-match" in headers and path in self.objects:
            return "412 Precondition Failed", {}, _error("PreconditionFailed")
        else:
            self.objects[path] = body, time.time()
        return "200 OK", {"ETag": f'"{len(body):x}"'}, b""

    def _post(self, path: str, query: dict[str, list[str]], body: bytes) -> bytes:
        if "delete" in query:
            keys = [unescape(key) for key in _KEY.findall(body.decode())]
            for key in keys:
                self.objects.pop(f"{path.strip('/')}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return f"<DeleteResult>{deleted}</DeleteResult>".encode()
        if "uploads" in query:
            upload = f"{len(self.uploads)}-{time.monotonic_ns()}"
            self.uploads[upload] = {}
            ids = f"<Bucket>{BUCKET}</Bucket><Key>{escape(path)}</Key><UploadId>{upload}</UploadId>"
            root = "InitiateMultipartUploadResult"
            return f"<{root}>{ids}</{root}>".encode()
        parts = self.uploads.pop(query["uploadId"][0])
        self.objects[path] = b"".join(parts[number] for number in sorted(parts)), time.time()
        root = "CompleteMultipartUploadResult"
        return f'<{root}><ETag>"1"</ETag></{root}>'.encode()

    def _get(self, path: str, headers: dict[str, str]) -> tuple[str, dict[str, str], bytes]:
        if path not in self.objects:
            return "404 Not Found", {}, _error("NoSuchKey")
        data, changed = self.objects[path]
        found = {
            "ETag": f'"{len(data):x}"',
            "Last-Modified": email.utils.formatdate(changed, usegmt=True),
        }
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if match is None:
            return "200 OK", found, data
        start, end = int(match[1]), min(len(data), int(match[2] or len(data) - 1) + 1)
        if start >= len(data):
            return "416 Range Not Satisfiable", {}, _error("InvalidRange")
        found["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return "206 Partial Content", found, data[start:end]

    def _list(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
        after = query.get("start-after", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        contents, common = [], set()
        for path in sorted(path for path in self.objects if path.startswith(prefix)):
            key = path[len(bucket) + 1 :]
            inner, found, _ = path[len(prefix) :].partition(delimiter or "\0")
            if found:
                common.add(prefix[len(bucket) + 1 :] + inner + delimiter)
            elif key > after:
                data, changed = self.objects[path]
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(changed))
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                    f'<ETag>"{len(data):x}"</ETag><Size>{len(data)}</Size></Contents>'
                )
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(common)
        )
        inside = f"<IsTruncated>false</IsTruncated>{''.join(contents)}{prefixes}"
        return f"<ListBucketResult>{inside}</ListBucketResult>".encode()


class _Connection(asyncio.BufferedProtocol):
    """One request after the other."""

    def __init__(self, store: _Objects) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._request: tuple[str, str, dict[str, str]] | None = None
        self._buffer = bytearray(1 << 16)
        self._body: memoryview | None = None
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer) if self._body is None else self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._filled += nbytes
        else:
            self._head += self._buffer[:nbytes]
            head, end, rest = self._head.partition(HEAD_END)
            if not end:
                return
            self._head = b""
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            self._request = method, target, headers
            self._body = memoryview(bytearray(int(headers.get("content-length", 0))))
            self._body[: len(rest)] = rest
            self._filled = len(rest)
        if self._filled == len(self._body):
            assert self._request is not None
            method, target, headers = self._request
            body, self._body, self._filled = self._body.obj, None, 0
            status, fields, data = self._store.answer(method, target, headers, body)
            fields |= {"Content-Length": str(len(data)), "x-amz-request-id": "1"}
            lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            answer = f"HTTP/1.1 {status}\r\n{lines}\r\n".encode()
            answer = answer if method == "HEAD" else answer + data
            self._loop.call_later(self._store.latency, self._transport.write, answer)


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code></Error>".encode()


async def main() -> None:
    """Serve until killed."""
    store = _Objects()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(store), "127.0.0.1", 0)
    print(f"store at {server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
