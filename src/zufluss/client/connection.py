"""The connection of a client to a cluster: sockets, metadata, routing, retries of single calls.

`AsyncConnection` holds one socket per server address, opened when first needed and again after it
was lost. Calls are routed by what they are about:

| call | goes to |
|---|---|
| admin | the coordinator |
| metadata, writer ids | any tablet server, then the coordinator, then the bootstrap list |
| produce, fetch, offsets | the leader of the bucket |

A call is tried again with growing pauses until `client.request-timeout` when its error may pass
(`retry.PASSING`), after the metadata was refreshed where it was stale. A call that changes
something is sent again only when it certainly was not carried out: the connection could not be
made, or a standby coordinator refused it. Writers and scans have their own retry rules
(`write/append.py`, `read/log_scan.py`).

Everything here lives on one event loop; `zufluss.client.sync.connection` is the façade for
everybody else.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Self

from google.protobuf.message import Message

from zufluss.client.core.metadata import Metadata, PartitionMetadata
from zufluss.client.core.options import ClientOptions, parse_bootstrap
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.client.read.remote import RemoteReader
from zufluss.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    NetworkError,
    PartitionNotExistError,
    TableNotExistError,
    ZuflussError,
)
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.net.client import RpcConnection, open_connection
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_to_proto

if TYPE_CHECKING:
    from zufluss.client.admin import AsyncAdmin
    from zufluss.client.table import AsyncTable

CODEC_THREADS_MAX: Final = 4
"""Threads that compress and decompress; Arrow releases the GIL in them."""

LAKE_SUFFIX: Final = "$lake"
"""Behind a table's name: what the lake has of it."""

Address = tuple[str, int]


class AsyncConnection:
    """A connection to a cluster. Open it with `zufluss.connect_async`.

    >>> async with await connect_async("localhost:9123") as connection:  # doctest: +SKIP
    ...     print(await connection.admin.list_databases())
    """

    def __init__(self, bootstrap: str, options: Mapping[str, Any]) -> None:
        self.options = ClientOptions.of(options)
        self.metadata = Metadata()
        self._bootstrap = parse_bootstrap(bootstrap)
        self._sockets: dict[Address, asyncio.Task[RpcConnection]] = {}
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        """Work in the background that ends with the connection."""
        self._closed = False
        workers = min(CODEC_THREADS_MAX, os.cpu_count() or 1)
        self.executor = ThreadPoolExecutor(workers, thread_name_prefix="zufluss-codec")
        self.remote = RemoteReader(self)
        name = f"zufluss:{self.options.client_id}" if self.options.client_id else "zufluss"
        self._software = (name, version("zufluss"))

    # -- what users call -----------------------------------------------------------------------

    @property
    def admin(self) -> AsyncAdmin:
        """Databases, tables, partitions, offsets."""
        from zufluss.client.admin import AsyncAdmin

        return AsyncAdmin(self)

    async def table(self, path: str | TablePath) -> AsyncTable:
        """Open a table to write to it or read it; with `$lake` behind its name only the lake's.

        >>> table = await connection.table("fluss.events")  # doctest: +SKIP
        """
        from zufluss.client.table import AsyncTable

        name = as_path(path)
        plain = name._replace(table=name.table.removesuffix(LAKE_SUFFIX))
        info = await self.table_info(plain, refresh=True)
        return AsyncTable(self, info, lake_only=plain != name)

    async def close(self) -> None:
        """Close the sockets. Writers and scanners must be closed before."""
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
        """Nothing can be called any more."""
        return self._closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        servers = ", ".join(f"{host}:{port}" for host, port in self._bootstrap)
        return f"<AsyncConnection {servers}, {'closed' if self._closed else 'open'}>"

    # -- sockets -------------------------------------------------------------------------------

    async def socket(self, address: Address) -> RpcConnection:
        """The connection to an address; everybody who waits for a new one shares it."""
        if self._closed:
            raise NetworkError("the connection was closed; open a new one")
        task = self._sockets.get(address)
        if task is None or (task.done() and _is_lost(task)):
            task = asyncio.ensure_future(self._open(address))
            self._sockets[address] = task
        return await asyncio.shield(task)

    def open_socket(self, address: Address) -> RpcConnection | None:
        """The connection to an address if there is one that works, else None."""
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
        """Call the coordinator; `repeatable` says that doing it twice does no harm."""
        backoff = Backoff(self.options.request_timeout_ms)
        while True:
            sent = False
            try:
                node = self.metadata.coordinator
                if node is None:
                    raise NetworkError("the cluster has no coordinator at the moment")
                socket = await self.socket(node.address)
                sent = True
                timeout_ms = self.options.request_timeout_ms
                return await socket.call(api_key, request, timeout_ms=timeout_ms)
            except ZuflussError as e:
                refused = e.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
                if e.code not in PASSING or (sent and not repeatable and not refused):
                    raise
                failure = e
            await backoff.pause(failure)
            await self._refresh_quietly()

    async def call_leader(self, bucket: TableBucket, api_key: ApiKey, request: Message) -> Any:
        """Call the server that leads a bucket, once; the caller decides about trying again."""
        node = self.metadata.leader(bucket)
        if node is None:
            raise LeaderNotAvailableError(f"{bucket} has no leader at the moment")
        socket = await self.socket(node.address)
        return await socket.call(api_key, request, timeout_ms=self.options.request_timeout_ms)

    async def call_any(self, api_key: ApiKey, request: Message) -> Any:
        """Call any server that answers: tablet servers, then coordinator, then bootstrap list."""
        failure: ZuflussError = NetworkError("no server is known")
        for address in self._addresses():
            try:
                socket = await self.socket(address)
                return await socket.call(
                    api_key, request, timeout_ms=self.options.request_timeout_ms
                )
            except ZuflussError as e:
                if e.code not in (
                    ErrorCode.NETWORK_EXCEPTION,
                    ErrorCode.REQUEST_TIME_OUT,
                    ErrorCode.UNSUPPORTED_VERSION,
                ):
                    raise
                failure = e
        raise failure

    def _addresses(self) -> list[Address]:
        tablets = [node.address for node in self.metadata.tablets.values()]
        random.shuffle(tablets)
        coordinator = [self.metadata.coordinator.address] if self.metadata.coordinator else []
        return list(dict.fromkeys([*tablets, *coordinator, *self._bootstrap]))

    # -- metadata ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the cluster through the bootstrap list."""
        backoff = Backoff(self.options.connect_timeout_ms)
        while True:
            try:
                return await self.refresh()
            except NetworkError as e:
                failure = e
            await backoff.pause(failure)

    async def refresh(self, table: TablePath | None = None, partitions: Iterable[str] = ()) -> None:
        """Ask the cluster for its servers, and for a table and some of its partitions."""
        names = sorted(set(partitions))
        key = f"{table}:{','.join(names)}"
        task = self._refreshes.get(key)
        if task is None:
            task = asyncio.ensure_future(self._refresh(table, names))
            self._refreshes[key] = task
            task.add_done_callback(lambda _: self._refreshes.pop(key, None))
        await asyncio.shield(task)

    async def _refresh(self, table: TablePath | None, partitions: list[str]) -> None:
        request = m.MetadataRequest()
        if table is not None:
            request.table_path.add(database_name=table.database, table_name=table.table)
            for name in partitions:
                request.partitions_path.add(
                    database_name=table.database, table_name=table.table, partition_name=name
                )
        response: m.MetadataResponse = await self.call_any(ApiKey.GET_METADATA, request)
        self.metadata.merge(response)

    async def _refresh_quietly(self) -> None:
        """Refresh the servers for the next try; that try reports it if nobody answers."""
        try:
            await self.refresh()
        except ZuflussError as e:
            if e.code not in PASSING:
                raise

    async def table_info(self, path: TablePath, *, refresh: bool = False) -> TableInfo:
        """A table, from the cache unless `refresh`; `TableNotExistError` if there is none."""
        info = self.metadata.tables.get(path)
        if info is not None and not refresh:
            return info
        backoff = Backoff(self.options.request_timeout_ms)
        while True:
            try:
                await self.refresh_table(path)
                return self.metadata.tables[path]
            except ZuflussError as e:
                if e.code not in PASSING:
                    raise
                failure = e
            await backoff.pause(failure)

    async def refresh_table(self, path: TablePath, partitions: Iterable[str] = ()) -> None:
        """Refresh a table and some of its partitions; raise if one of them does not exist."""
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
        """Refresh a table that is in use; raise if it, or one of the partitions, is gone."""
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
        """Whether there is such a table."""
        request = m.TableExistsRequest(table_path=path_to_proto(path))
        return bool((await self.call_any(ApiKey.TABLE_EXISTS, request)).exists)

    async def partition(self, info: TableInfo, name: str) -> PartitionMetadata:
        """A partition, from the cache or the cluster; `PartitionNotExistError` if there is none."""
        known = self.metadata.partitions.get((info.table_id, name))
        if known is not None:
            return known
        backoff = Backoff(self.options.request_timeout_ms)
        while True:
            try:
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


async def connect_async(bootstrap: str, **options: Any) -> AsyncConnection:
    """Connect to a cluster.

    `bootstrap` is `host:port`, several separated by commas; options have the keys of
    `docs/configuration.md`.

    >>> connection = await connect_async(  # doctest: +SKIP
    ...     "localhost:9123", **{"client.request-timeout": "10s"}
    ... )
    """
    connection = AsyncConnection(bootstrap, options)
    try:
        await connection.start()
    except BaseException:
        await connection.close()
        raise
    return connection


def as_path(path: str | TablePath) -> TablePath:
    """A table path from `database.table`, or from `table` in database `fluss`."""
    return path if isinstance(path, TablePath) else TablePath.parse(path, "fluss")


def _is_lost(task: asyncio.Task[RpcConnection]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return True
    return task.result().closed
