"""A proxy that makes a TCP service misbehave on purpose, whatever its protocol is, say ZooKeeper.

    with TcpProxy("127.0.0.1", zookeeper.members[0].port) as proxy:
        conf = Configuration.of({"zookeeper.address": proxy.address})
        proxy.lose_answers()    # the service gets requests, nobody hears of it
        proxy.cut()             # and the connections end

| call | connections that exist | new connections |
|---|---|---|
| `lose_answers` | what the service says is dropped | the same |
| `hold_requests` | what the client says is kept back | the same |
| `heal` | everything passes again | the same |
| `cut` | the client's side ends; the service's side stays until `release` | as they were |
| `release` | what was kept back is sent to the service, then its side ends | as they were |
| `refuse` | end, as by `cut` | end at once |

A connection keeps the mode in which `cut` found it, so a request that was held is delivered late,
by `release`, on the connection that its client has long given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final, Literal, Self

PIECE_BYTES: Final = 1 << 16

Mode = Literal["pass", "lose_answers", "hold_requests"]


class _Pair:
    """A connection of a client, and the one to the service that belongs to it."""

    def __init__(
        self, client: asyncio.StreamWriter, service: asyncio.StreamWriter, mode: Mode
    ) -> None:
        self.client = client
        self.service = service
        self.mode: Mode = mode
        self.held: list[bytes] = []
        self.is_cut = False


class TcpProxy:
    """A proxy on a free port of this host, in a thread of its own; a context manager."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = 0
        self._target = target_host, target_port
        self._mode: Mode = "pass"
        self._refuses = False
        self._pairs: set[_Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lose_answers(self) -> None:
        """Drop what the service says from now on."""
        self._do(lambda: self._set("lose_answers"))

    def hold_requests(self) -> None:
        """Keep back what clients say from now on."""
        self._do(lambda: self._set("hold_requests"))

    def heal(self) -> None:
        """Let everything pass that comes from now on, on new connections and those not cut."""

        def work() -> None:
            self._refuses = False
            self._set("pass")

        self._do(work)

    def cut(self) -> None:
        """End the connections of clients; new ones are as if nothing had been wrong."""

        def work() -> None:
            for pair in self._pairs:
                pair.is_cut = True
                pair.client.transport.abort()
            self._mode = "pass"

        self._do(work)

    def refuse(self) -> None:
        """End the connections of clients, and new ones at once."""
        self.cut()
        self._do(lambda: setattr(self, "_refuses", True))

    def release(self) -> None:
        """Send what was kept back of connections that were cut, and end these connections."""

        def work() -> None:
            for pair in tuple(self._pairs):
                if pair.is_cut:
                    for data in pair.held:
                        pair.service.write(data)
                    pair.service.close()
                    self._pairs.discard(pair)

        self._do(work)

    def held_bytes(self) -> int:
        """How much is kept back."""
        return sum(len(data) for pair in tuple(self._pairs) for data in tuple(pair.held))

    def _set(self, mode: Mode) -> None:
        self._mode = mode
        for pair in self._pairs:
            if not pair.is_cut:
                pair.mode = mode

    def _do(self, work: Callable[[], None]) -> None:
        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for pair in self._pairs:
            pair.client.transport.abort()
            pair.service.transport.abort()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            answers, service = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, service, self._mode)
        self._pairs.add(pair)
        await asyncio.gather(self._requests(pair, reader), self._answers(pair, answers))

    async def _requests(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                if pair.mode == "hold_requests":
                    pair.held.append(data)
                else:
                    pair.service.write(data)
        if not pair.is_cut:
            pair.service.close()
            self._pairs.discard(pair)

    async def _answers(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                if pair.mode != "lose_answers" and not pair.is_cut:
                    pair.client.write(data)
        pair.client.transport.abort()
