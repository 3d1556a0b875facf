"""A wire between client and server that can be cut: any bytes, both directions.

A server is told to advertise the relay's address, so that clients never find a way around it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self


class Relay:
    """Listens on a free port and passes everything on to `target`; a context manager."""

    def __init__(self) -> None:
        self.port = 0
        self.target = 0
        """The port of the server, on this host."""
        self._up = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection, and each new one at once."""
        self._call(self._set(False))

    def mend(self) -> None:
        self._call(self._set(True))

    async def _set(self, up: bool) -> None:
        self._up = up
        if not up:
            for writer in list(self._writers):
                writer.transport.abort()

    def _call(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *exc: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._set(False)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self._up:
                return
            source, sink = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(sink)
            ways = [
                asyncio.ensure_future(_pass(*way)) for way in ((reader, sink), (source, writer))
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            sink.transport.abort()
            writer.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(sink)
        except OSError:
            return  # the server is away
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()
