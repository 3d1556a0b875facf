"""zufluss: streaming storage for lakehouses that speaks the Apache Fluss protocol.

    import zufluss

    with zufluss.connect("localhost:9123") as connection:
        print(connection.admin.list_databases())

`connect` is the entry for synchronous code, `connect_async` for asyncio, `col` starts a filter
expression, `Schema` describes what a column list cannot (auto-increment columns). The classes are
here for annotations, the errors for `except`; `zufluss.errors` has all of them, and every one is a
`ZuflussError`. Importing the package imports nothing heavy: each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zufluss.client import AsyncConnection as AsyncConnection
    from zufluss.client import ColumnMismatchError as ColumnMismatchError
    from zufluss.client import Connection as Connection
    from zufluss.client import ProducerHandle as ProducerHandle
    from zufluss.client import ProducerState as ProducerState
    from zufluss.client import connect as connect
    from zufluss.client import connect_async as connect_async
    from zufluss.client.sync.table import Table as Table
    from zufluss.client.table import AsyncTable as AsyncTable
    from zufluss.errors import AuthenticationError as AuthenticationError
    from zufluss.errors import AuthorizationError as AuthorizationError
    from zufluss.errors import ConfigError as ConfigError
    from zufluss.errors import DatabaseAlreadyExistError as DatabaseAlreadyExistError
    from zufluss.errors import DatabaseNotExistError as DatabaseNotExistError
    from zufluss.errors import InvalidTableError as InvalidTableError
    from zufluss.errors import NetworkError as NetworkError
    from zufluss.errors import PartitionNotExistError as PartitionNotExistError
    from zufluss.errors import RequestTimeoutError as RequestTimeoutError
    from zufluss.errors import TableAlreadyExistError as TableAlreadyExistError
    from zufluss.errors import TableNotExistError as TableNotExistError
    from zufluss.errors import UnsentRowsError as UnsentRowsError
    from zufluss.errors import UnsentRowsWarning as UnsentRowsWarning
    from zufluss.errors import ZuflussError as ZuflussError
    from zufluss.model.expression import Expression as Expression
    from zufluss.model.expression import col as col
    from zufluss.model.predicate import InvalidPredicateError as InvalidPredicateError
    from zufluss.model.schema import Column as Column
    from zufluss.model.schema import Schema as Schema
    from zufluss.model.table import TableBucket as TableBucket
    from zufluss.model.table import TableDescriptor as TableDescriptor
    from zufluss.model.table import TableInfo as TableInfo
    from zufluss.model.table import TablePath as TablePath

__version__ = "0.1.0"

_NAMES_OF = {
    "zufluss.client": (
        "AsyncConnection",
        "ColumnMismatchError",
        "Connection",
        "ProducerHandle",
        "ProducerState",
        "connect",
        "connect_async",
    ),
    "zufluss.client.sync.table": ("Table",),
    "zufluss.client.table": ("AsyncTable",),
    "zufluss.errors": (
        "AuthenticationError",
        "AuthorizationError",
        "ConfigError",
        "DatabaseAlreadyExistError",
        "DatabaseNotExistError",
        "InvalidTableError",
        "NetworkError",
        "PartitionNotExistError",
        "RequestTimeoutError",
        "TableAlreadyExistError",
        "TableNotExistError",
        "UnsentRowsError",
        "UnsentRowsWarning",
        "ZuflussError",
    ),
    "zufluss.model.expression": ("Expression", "col"),
    "zufluss.model.predicate": ("InvalidPredicateError",),
    "zufluss.model.schema": ("Column", "Schema"),
    "zufluss.model.table": ("TableBucket", "TableDescriptor", "TableInfo", "TablePath"),
}
_HOME_OF = {name: home for home, names in _NAMES_OF.items() for name in names}

__all__ = ["__version__", *_HOME_OF]

if not TYPE_CHECKING:  # type checkers would take any name for one that exists

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'zufluss' has no attribute {name!r}")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
