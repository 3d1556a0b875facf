"""The cluster of a Spark process: its address, and the one connection that the process keeps to it.

Driver and Python workers live on from task to task, and so does their connection. It is made at
first use; a forked process never uses the connection of its parent.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from zufluss.client.connection import AsyncConnection, connect_patiently
from zufluss.client.sync.loop import LoopThread
from zufluss.config.client_options import (
    CLIENT_REQUEST_TIMEOUT,
    CLIENT_SCANNER_LOG_FETCH_MAX_BYTES_FOR_BUCKET,
)
from zufluss.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BOOTSTRAP_SETTING: Final = "spark.zufluss.bootstrap.servers"
"""The setting of a Spark session that holds the address given to `register`."""

FETCH: Final = {CLIENT_SCANNER_LOG_FETCH_MAX_BYTES_FOR_BUCKET.key: "8mb"}
"""A task reads one bucket after the other, so a fetch may be as large as one over many buckets."""

PATIENCE: Final = {CLIENT_REQUEST_TIMEOUT.key: "120s"}
"""A job outlives the restart of a server; a person at a prompt would rather know at once."""

R = TypeVar("R")


def known_bootstrap(spark: SparkSession, bootstrap: str | None) -> str:
    """The address `bootstrap`, or else the one given to `register`; `ConfigError` without both."""
    address = bootstrap or spark.conf.get(BOOTSTRAP_SETTING, None)
    if not address:
        raise ConfigError(
            "where is the cluster? Give bootstrap, host:port, here or to "
            "zufluss.spark.register(spark, bootstrap)"
        )
    return address


@dataclass(frozen=True, slots=True)
class Client:
    """A connection, and the thread of its event loop."""

    thread: LoopThread
    """The thread on which the connection lives."""
    connection: AsyncConnection
    """The connection; use it on `thread` only."""

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the connection's thread and wait for its result."""
        return self.thread.run(work)


_clients: dict[tuple[Any, ...], Client] = {}
"""Clients by process id, address and options."""


def client(bootstrap: str, options: Mapping[str, Any]) -> Client:
    """This process's client of a cluster, connected at first use and kept."""
    key = _key(bootstrap, options)
    if key not in _clients:
        thread = LoopThread()
        try:
            connection = thread.run(
                connect_patiently(bootstrap, **{**FETCH, **PATIENCE, **options})
            )
        except BaseException:
            thread.close()
            raise
        _clients[key] = Client(thread, connection)
    return _clients[key]


def drop_client(bootstrap: str, options: Mapping[str, Any]) -> None:
    """Close this process's client of a cluster, if it has one; the next use connects anew."""
    dropped = _clients.pop(_key(bootstrap, options), None)
    if dropped is not None:
        dropped.run(dropped.connection.close())
        dropped.thread.close()


def _key(bootstrap: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    return (os.getpid(), bootstrap, *sorted(options.items()))
