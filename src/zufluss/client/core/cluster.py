"""A client's connection to a cluster: sockets, metadata, routing, and retries of single calls.

Every part of the client takes a `ClusterConnection`; users get its subclass `AsyncConnection`
(`client/connection.py`), which also hands out the parts.

There is one socket per server address. It is opened when it is first needed and reopened after it
was lost. The kind of call decides which server receives it:

| call | server |
|---|---|
| admin | the coordinator |
| metadata, writer ids | any tablet server, then the coordinator, then the bootstrap list |
| produce, fetch, offsets | the leader of the bucket |

A call whose error may pass (`retry.PASSING`) is repeated with growing pauses; stale metadata is
refreshed before. All of it ends at `client.request-timeout`. A call that changes something is
repeated only if it certainly had no effect: the socket could not be opened, or a standby
coordinator refused the call. Writers and scans have retry rules of their own (`write/sender.py`,
`read/fetcher.py`).

A connection belongs to one event loop. Synchronous code uses `client/sync/connection.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from zufluss.client.core.metadata import Metadata, PartitionMetadata
from zufluss.client.core.options import ClientOptions, parse_bootstrap
from zufluss.client.core.remote_access import RemoteAccess
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.client.core.unsent import LAST_FLUSH_MS, OpenWriter, joined, warn
from zufluss.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    NetworkError,
    PartitionNotExistError,
    RequestTimeoutError,
    TableNotExistError,
    UnsentRowsError,
    ZuflussError,
)
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.net.client import RpcConnection, open_connection
from zufluss.tasks import forgive
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_to_proto

CODEC_THREADS_MAX: Final = 4
"""Threads that compress and decompress batches; Arrow releases the GIL meanwhile."""

R = TypeVar("R")
Address = tuple[str, int]
Path = str | TablePath
"""A table by its path; a text is `database.table`, or `table` in database `fluss`."""


class ClusterConnection:
    """The sockets and the metadata that writers, scans, lookups and admin calls share."""

    def __init__(self, bootstrap: str, options: Mapping[str, Any]) -> None:
        self.options = ClientOptions.of(options)
        self.metadata = Metadata()
        self._bootstrap = parse_bootstrap(bootstrap)
        self._sockets: dict[Address, asyncio.Task[RpcConnection]] = {}
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        """Background tasks; `close` cancels them."""
        self.closing = False
        """True once `close` began: writers take no more rows."""
        self._closed = False
        self.writers: weakref.WeakSet[OpenWriter] = weakref.WeakSet()
        """The writers of this connection; `close` ends them."""
        self._guard: AsyncGenerator[None, None] | None = None
        workers = min(CODEC_THREADS_MAX, os.cpu_count() or 1)
        self.executor = ThreadPoolExecutor(workers, thread_name_prefix="zufluss-codec")
        self.remote = RemoteAccess(
            self.call_any, self.call_coordinator, timeout_ms=self.options.request_timeout_ms
        )
        """Remote files of the cluster, opened with its tokens."""
        name = f"zufluss:{self.options.client_id}" if self.options.client_id else "zufluss"
        self._software = (name, version("zufluss"))

    async def close(self) -> None:
        """Flush and close the open writers, then close the connection.

        Raises `UnsentRowsError` with tables and numbers of rows if rows could not be sent; the
        connection is closed even so. Closing twice is no error.
        """
        await self._close(None)

    async def close_within(self, limit_ms: int) -> None:
        """Close after a failure: rows that writers have taken are sent for a limited time."""
        await self._close(limit_ms)

    async def _close(self, limit_ms: int | None) -> None:
        self.closing = True
        try:
            ends = [writer.end(limit_ms) for writer in self.writers]
            outcomes = await asyncio.gather(*ends, return_exceptions=True)
        finally:
            self._close_sockets()
        guard, self._guard = self._guard, None
        if guard is not None:
            await guard.aclose()
        problems = [e for e in outcomes if isinstance(e, UnsentRowsError)]
        if problems:
            raise joined(problems)
        for problem in filter(None, outcomes):
            raise problem

    def _close_sockets(self) -> None:
        self._closed = True
        for task in self.tasks:
            task.cancel()
        sockets, self._sockets = self._sockets, {}
        for task in sockets.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            else:
                task.cancel()
        self.executor.shutdown(wait=False, cancel_futures=True)

    @property
    def closed(self) -> bool:
        """True after `close`: every call raises `NetworkError`."""
        return self._closed

    def __repr__(self) -> str:
        servers = ", ".join(f"{host}:{port}" for host, port in self._bootstrap)
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {servers}, {state}>"

    def in_thread(self, work: Callable[[], R]) -> asyncio.Future[R]:
        """Run a conversion of rows in a thread; while the interpreter ends, in this one."""
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self.executor, work)
        except RuntimeError:  # threads take no more work
            done: asyncio.Future[R] = loop.create_future()
            try:
                done.set_result(work())
            except Exception as e:
                done.set_exception(e)
            return done

    # -- sockets -------------------------------------------------------------------------------

    async def socket(self, address: Address) -> RpcConnection:
        """The socket to an address. Callers that wait for a new socket share one attempt."""
        if self._closed:
            raise NetworkError("the connection was closed; open a new one")
        task = self._sockets.get(address)
        if task is None or (task.done() and _is_lost(task)):
            task = asyncio.ensure_future(self._open(address))
            self._sockets[address] = task
        return await asyncio.shield(task)

    def open_socket(self, address: Address) -> RpcConnection | None:
        """The socket to an address if it is open, else None."""
        task = self._sockets.get(address)
        return None if task is None or not task.done() or _is_lost(task) else task.result()

    async def _open(self, address: Address) -> RpcConnection:
        return await open_connection(
            *address,
            credentials=self.options.credentials,
            connect_timeout_ms=self.options.connect_timeout_ms,
            software=self._software,
        )

    # -- single calls --------------------------------------------------------------------------

    async def call_coordinator(
        self, api_key: ApiKey, request: Message, *, repeatable: bool = True
    ) -> Any:
        """Call the coordinator, again while it is away.

        `repeatable=False` is for calls that must not take effect twice: such a call is repeated
        only while it certainly had no effect.
        """
        backoff = Backoff(self.options.request_timeout_ms)
        while True:
            sent = False
            try:
                node = self.metadata.coordinator
                if node is None:
                    raise NetworkError("the cluster has no coordinator at the moment")
                async with backoff.attempt():
                    socket = await self.socket(node.address)
                    sent = True
                    return await socket.call(api_key, request, timeout_ms=backoff.left_ms)
            except ZuflussError as e:
                refused = e.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
                if e.code not in PASSING or (sent and not repeatable and not refused):
                    raise
                failure = e
            await backoff.pause(failure)
            async with backoff.attempt():
                await self._refresh_quietly()

    async def call_leader(self, bucket: TableBucket, api_key: ApiKey, request: Message) -> Any:
        """Call the leader of a bucket, once; the caller decides about retries."""
        node = self.metadata.leader(bucket)
        if node is None:
            raise LeaderNotAvailableError(
                f"{self.metadata.name_of(bucket)} has no leader at the moment"
            )
        return await self.call_at(node.address, api_key, request)

    async def call_at(self, address: Address, api_key: ApiKey, request: Message) -> Any:
        """Call the server at an address, once."""
        backoff = Backoff(self.options.request_timeout_ms)
        async with backoff.attempt():
            socket = await self.socket(address)
            return await socket.call(api_key, request, timeout_ms=backoff.left_ms)

    async def call_any(
        self, api_key: ApiKey, request: Message, timeout_ms: int | None = None
    ) -> Any:
        """Call the first server that answers; `NetworkError` or a timeout if none does.

        The servers share the time, `client.request-timeout` unless given, so that one that is
        silent leaves some for the others.
        """
        failure: ZuflussError | None = None
        whole = Backoff(timeout_ms or self.options.request_timeout_ms)
        addresses = self._addresses()
        for position, address in enumerate(addresses):
            share = Backoff(whole.left_ms / (len(addresses) - position))
            try:
                async with share.attempt():
                    socket = await self.socket(address)
                    return await socket.call(api_key, request, timeout_ms=share.left_ms)
            except ZuflussError as e:
                if e.code not in (
                    ErrorCode.NETWORK_EXCEPTION,
                    ErrorCode.REQUEST_TIME_OUT,
                    ErrorCode.UNSUPPORTED_VERSION,
                    ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION,
                ):
                    raise
                if failure is None or e.code is not ErrorCode.UNSUPPORTED_VERSION:
                    failure = e  # one that does not know the call says nothing of the others
        raise failure or NetworkError("no server is known")

    def _addresses(self) -> list[Address]:
        tablets = [node.address for node in self.metadata.tablets.values()]
        random.shuffle(tablets)
        coordinator = [self.metadata.coordinator.address] if self.metadata.coordinator else []
        return list(dict.fromkeys([*tablets, *coordinator, *self._bootstrap]))

    # -- metadata ------------------------------------------------------------------------------

    async def start(self, patience_ms: int = 0) -> None:
        """Find the cluster through the bootstrap list; `NetworkError` if no server answers.

        A server that refuses connections is an error at once, or tried again for `patience_ms`; one
        that is silent is waited for until `client.connect-timeout`.
        """
        self._guard = _close_with_loop(weakref.ref(self))
        await anext(self._guard)
        backoff = Backoff(patience_ms)
        while True:
            try:
                return await self._refresh(None, [], self.options.connect_timeout_ms)
            except (NetworkError, RequestTimeoutError) as e:
                failure = NetworkError(f"{e.message}; {self._advice()}")
            await backoff.pause(failure)

    def _advice(self) -> str:
        servers = ",".join(f"{host}:{port}" for host, port in self._bootstrap)
        return (
            "is a server running? Start one with `zufluss dev`, or check the address: "
            f"bootstrap.servers={servers}"
        )

    async def refresh(self, table: TablePath | None = None, partitions: Iterable[str] = ()) -> None:
        """Read the servers of the cluster, and optionally a table with some of its partitions.

        Callers that ask for the same thing at the same time share one request.
        """
        names = sorted(set(partitions))
        key = f"{table}:{','.join(names)}"
        task = self._refreshes.get(key)
        if task is None:
            task = asyncio.ensure_future(self._refresh(table, names))
            self._refreshes[key] = task
            task.add_done_callback(lambda _: self._refreshes.pop(key, None))
            task.add_done_callback(forgive)
        await asyncio.shield(task)

    async def _refresh(
        self, table: TablePath | None, partitions: list[str], timeout_ms: int | None = None
    ) -> None:
        request = m.MetadataRequest()
        if table is not None:
            request.table_path.add(database_name=table.database, table_name=table.table)
            for name in partitions:
                request.partitions_path.add(
                    database_name=table.database, table_name=table.table, partition_name=name
                )
        response: m.MetadataResponse = await self.call_any(ApiKey.GET_METADATA, request, timeout_ms)
        self.metadata.merge(response)

    async def _refresh_quietly(self) -> None:
        """Refresh the servers before the next try; a passing error is left to that try."""
        try:
            await self.refresh()
        except ZuflussError as e:
            if e.code not in PASSING:
                raise

    async def table_info(self, path: TablePath, *, refresh: bool = False) -> TableInfo:
        """The table, from the cache unless `refresh`; raises `TableNotExistError`."""
        info = self.metadata.tables.get(path)
        if info is not None and not refresh:
            return info
        backoff = Backoff(self.options.request_timeout_ms)
        while True:
            try:
                async with backoff.attempt():
                    await self.refresh_table(path)
                return self.metadata.tables[path]
            except ZuflussError as e:
                if e.code not in PASSING:
                    raise
                failure = e
            await backoff.pause(failure)

    async def refresh_table(self, path: TablePath, partitions: Iterable[str] = ()) -> None:
        """Refresh a table and some of its partitions; raises if one of them does not exist."""
        try:
            await self.refresh(path, partitions)
        except ZuflussError as e:
            # Apache Fluss answers an unknown error where the table is missing.
            if e.code is ErrorCode.UNKNOWN_SERVER_ERROR and not await self.table_exists(path):
                self.metadata.forget_table(path)
                raise TableNotExistError(f"table {path} does not exist") from None
            raise
        if path not in self.metadata.tables:
            raise TableNotExistError(f"table {path} does not exist")

    async def refresh_leaders(self, info: TableInfo, partitions: Iterable[str]) -> None:
        """Refresh the leaders of a table in use; raises if the table or a partition was dropped."""
        names = list(partitions)
        try:
            await self.refresh_table(info.path, names)
        except PartitionNotExistError:
            for name in names:
                self.metadata.forget_partition(info.table_id, name)
            raise
        if self.metadata.tables[info.path].table_id != info.table_id:
            raise TableNotExistError(
                f"table {info.path} was dropped and created again; open it anew"
            )

    async def table_exists(self, path: TablePath) -> bool:
        """Whether the table exists."""
        request = m.TableExistsRequest(table_path=path_to_proto(path))
        return bool((await self.call_any(ApiKey.TABLE_EXISTS, request)).exists)

    async def partition(self, info: TableInfo, name: str) -> PartitionMetadata:
        """A partition, from the cache or the cluster; raises `PartitionNotExistError`."""
        known = self.metadata.partitions.get((info.table_id, name))
        if known is not None:
            return known
        backoff = Backoff(self.options.request_timeout_ms)
        while True:
            try:
                async with backoff.attempt():
                    await self.refresh_table(info.path, [name])
                return self.metadata.partitions[info.table_id, name]
            except ZuflussError as e:
                if e.code not in PASSING:
                    raise
                failure = e
            except KeyError:
                raise PartitionNotExistError(
                    f"table {info.path} has no partition {name!r}"
                ) from None
            await backoff.pause(failure)


def as_path(path: Path) -> TablePath:
    """The path of a table."""
    return path if isinstance(path, TablePath) else TablePath.parse(path, "fluss")


async def _close_with_loop(of: weakref.ref[ClusterConnection]) -> AsyncGenerator[None, None]:
    """Close an unclosed connection at the end of its event loop.

    `asyncio.run` closes asynchronous generators last, when all tasks have ended.
    """
    try:
        yield
    finally:
        connection = of()
        if connection is not None and not connection.closing:
            connection._guard = None
            warnings.warn(
                f"unclosed {connection!r}", ResourceWarning, stacklevel=1, source=connection
            )
            try:
                await connection.close_within(LAST_FLUSH_MS)
            except UnsentRowsError as e:
                warn(e)


def _is_lost(task: asyncio.Task[RpcConnection]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return True
    return task.result().closed
