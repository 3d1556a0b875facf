"""Spark beside zufluss: a session that works, and tables as DataFrames.

    import zufluss.spark

    spark = zufluss.spark.session()
    zufluss.spark.register(spark, "localhost:9123")
    orders = zufluss.spark.table(spark, "shop.orders")
    same = spark.read.format("fluss").load("shop.orders")

`import zufluss.spark` does not import pyspark: each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zufluss.spark.read.table import table as table
    from zufluss.spark.views import register as register
    from zufluss.spark.views import register_views as register_views
    from zufluss.spark.views import session as session

__all__ = ["register", "register_views", "session", "table"]

_HOMES = {
    "register": "zufluss.spark.views",
    "register_views": "zufluss.spark.views",
    "session": "zufluss.spark.views",
    "table": "zufluss.spark.read.table",
}

if not TYPE_CHECKING:  # type checkers would take any name for one that exists

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'zufluss.spark' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
