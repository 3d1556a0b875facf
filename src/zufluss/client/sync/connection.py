"""The client for synchronous code: thin façades over the async one.

Each `Connection` has one background thread with an event loop on which all work happens; a call
hands a coroutine to the loop and waits. Therefore it works in scripts, threads and notebooks (which
run a loop of their own), and Ctrl-C cancels the waiting call. `sync/facade.py` says how the classes
are derived from the async ones.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Self

from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import Path
from zufluss.client.read.union_plan import UnionPlan, plan_union
from zufluss.client.sync.admin import Admin
from zufluss.client.sync.exit import catch_sigterm
from zufluss.client.sync.facade import Facade, documented_by, opens, waits
from zufluss.client.sync.loop import LoopThread
from zufluss.client.sync.table import Table
from zufluss.model.table import TableInfo


def connect(bootstrap: str, **options: Any) -> Connection:
    """Connect to a cluster.

    `bootstrap` is `host:port`, or several of them separated by commas. Options have the keys of
    `docs/configuration.md`.

    >>> with connect("localhost:9123", **{"client.request-timeout": "10s"}) as connection:
    ...     connection.admin.list_databases()  # doctest: +SKIP
    """
    catch_sigterm()
    thread = LoopThread()
    try:
        return Connection(thread, thread.run(connect_async(bootstrap, **options)))
    except BaseException:
        thread.close()
        raise


@documented_by(AsyncConnection)
class Connection(Facade[AsyncConnection]):
    """A connection to a cluster; `zufluss.connect` opens it. Threads may share it.

    Leaving its block flushes and closes the writers. If rows cannot be sent, `UnsentRowsError` says
    how many, and of which table. When an exception leaves the block, rows that `write` took before
    are still sent, for ten seconds at most; the exception gets a note about the rest. A script that
    ends without `close` sends its rows in the same way, and names the rest on stderr.

    >>> with zufluss.connect("localhost:9123") as connection:  # doctest: +SKIP
    ...     connection.table("fluss.events").head()
    """

    def __init__(self, thread: LoopThread, twin: AsyncConnection) -> None:
        super().__init__(thread, twin)
        self._closed = False

    @property
    def admin(self) -> Admin:
        return Admin(self._thread, self._twin.admin)

    table = opens(AsyncConnection.table, Table)
    call_coordinator = waits(AsyncConnection.call_coordinator)

    def plan_union(
        self,
        table: Path | TableInfo,
        partitions: Iterable[Partition] | None = None,
        *,
        read_optimized: bool = False,
    ) -> UnionPlan:
        """Pin a union read for an engine that reads lake and log itself.

        The plan has the lake snapshot and the range of each bucket's log behind it. With
        `read_optimized` the plan has the lake snapshot only.
        """
        plan = plan_union(self._twin, table, partitions, read_optimized=read_optimized)
        return self._thread.run(plan)

    def close(self) -> None:
        if not self._closed:
            self._end(self._twin.close())

    def _end(self, work: Coroutine[Any, Any, None]) -> None:
        self._closed = True
        try:
            self._thread.run(work)
        finally:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._closed:
            self._end(self._twin.__aexit__(kind, exc, trace))
