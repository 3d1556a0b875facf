"""The client: connect, administer, append, scan; Arrow from end to end.

`connect` is for synchronous code (notebooks included), `connect_async` for asyncio. The async
classes are the truth; `sync/connection.py` is a thin façade over them.
"""

from __future__ import annotations

from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.convert import ColumnMismatchError
from zufluss.client.producer.handle import ProducerHandle
from zufluss.client.producer.state import ProducerState
from zufluss.client.sync.connection import Connection, connect

__all__ = [
    "AsyncConnection",
    "ColumnMismatchError",
    "Connection",
    "ProducerHandle",
    "ProducerState",
    "connect",
    "connect_async",
]
