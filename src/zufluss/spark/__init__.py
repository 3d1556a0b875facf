"""Spark beside zufluss: a session that works, tables as DataFrames.

    import zufluss.spark

    spark = zufluss.spark.session()
    zufluss.spark.register(spark, "localhost:9123")
    orders = zufluss.spark.table(spark, "shop.orders")
    same = spark.read.format("fluss").load("shop.orders")

Nothing here imports pyspark before it is used. `session` is bound at once, since its module has the
same name and would take its place when it is imported later.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zufluss.spark.session import session as session

if TYPE_CHECKING:
    from zufluss.spark.read.union import table as table
    from zufluss.spark.views import register as register
    from zufluss.spark.views import register_views as register_views

__all__ = ["register", "register_views", "session", "table"]

_HOMES = {
    "register": "zufluss.spark.views",
    "register_views": "zufluss.spark.views",
    "table": "zufluss.spark.read.union",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zufluss.spark' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
