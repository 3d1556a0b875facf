"""zufluss: streaming storage for lakehouses that speaks the Apache Fluss protocol.

    import zufluss

    with zufluss.connect("localhost:9123") as connection:
        print(connection.admin.list_databases())

`connect` is the entry for synchronous code, `connect_async` for asyncio, `col` starts a filter
expression, `Schema` describes what a column list cannot (auto-increment columns). Importing the
package imports nothing heavy: each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zufluss.client import connect as connect
    from zufluss.client import connect_async as connect_async
    from zufluss.model.expression import col as col
    from zufluss.model.schema import Schema as Schema

__version__ = "0.1.0"

__all__ = ["Schema", "__version__", "col", "connect", "connect_async"]

_LAZY = {
    "connect": "zufluss.client",
    "connect_async": "zufluss.client",
    "col": "zufluss.model.expression",
    "Schema": "zufluss.model.schema",
}


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'zufluss' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
