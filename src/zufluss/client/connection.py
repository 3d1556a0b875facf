"""`AsyncConnection`, the object that asyncio users hold: it hands out admin calls and tables."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from zufluss.client.admin import AsyncAdmin
from zufluss.client.core.cluster import ClusterConnection, as_path
from zufluss.client.core.unsent import LAST_FLUSH_MS, note
from zufluss.client.table import LAKE_SUFFIX, AsyncTable
from zufluss.errors import UnsentRowsError
from zufluss.model.table import TablePath


class AsyncConnection(ClusterConnection):
    """A connection to a cluster; `zufluss.connect_async` opens it.

    Leaving its block flushes and closes the writers. If rows cannot be sent, `UnsentRowsError` says
    how many, and of which table. When an exception leaves the block, rows that `write` took before
    are still sent, for ten seconds at most; the exception gets a note about the rest.

    >>> async with await connect_async("localhost:9123") as connection:  # doctest: +SKIP
    ...     print(await connection.admin.list_databases())
    """

    @property
    def admin(self) -> AsyncAdmin:
        """Calls that administer databases, tables, partitions, leases and remote locations."""
        return AsyncAdmin(self)

    async def table(self, path: str | TablePath) -> AsyncTable:
        """Open a table for writing and reading; raises `TableNotExistError`.

        `path` is `"database.table"`, or `"table"` in database `fluss`. With `$lake` appended the
        table shows only the rows that its lake table has, and can only be scanned.

        >>> table = await connection.table("fluss.events")  # doctest: +SKIP
        """
        name = as_path(path)
        plain = name._replace(table=name.table.removesuffix(LAKE_SUFFIX))
        info = await self.table_info(plain, refresh=True)
        return AsyncTable(self, info, lake_only=plain != name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection; an exception is raised unchanged, with a note on lost rows."""
        if exc is None:
            await self.close()
            return
        try:
            await self.close_within(LAST_FLUSH_MS)
        except UnsentRowsError as e:
            note(exc, e)


async def connect_async(bootstrap: str, **options: Any) -> AsyncConnection:
    """Connect to a cluster.

    `bootstrap` is `host:port`, or several of them separated by commas. Options have the keys of
    `docs/configuration.md`.

    >>> connection = await connect_async(  # doctest: +SKIP
    ...     "localhost:9123", **{"client.request-timeout": "10s"}
    ... )
    """
    return await _opened(AsyncConnection(bootstrap, options), 0)


async def connect_patiently(bootstrap: str, **options: Any) -> AsyncConnection:
    """Connect as `connect_async` does, but wait for a cluster that restarts.

    For tasks of a job that outlives a restart. They wait for `client.connect-timeout`.
    """
    connection = AsyncConnection(bootstrap, options)
    return await _opened(connection, connection.options.connect_timeout_ms)


async def _opened(connection: AsyncConnection, patience_ms: int) -> AsyncConnection:
    try:
        await connection.start(patience_ms)
    except BaseException:
        await connection.close()
        raise
    return connection
