"""Spark beside zufluss: a session that works, tables as DataFrames.

    import zufluss.spark

    spark = zufluss.spark.session()
    orders = zufluss.spark.table(spark, "shop.orders", bootstrap="localhost:9123")

Nothing here imports pyspark before it is used. `session` is bound at once, since its module has the
same name and would take its place when it is imported later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zufluss.spark.session import session as session

if TYPE_CHECKING:
    from zufluss.spark.union import table as table

__all__ = ["session", "table"]


def __getattr__(name: str) -> Any:
    if name != "table":
        raise AttributeError(f"module 'zufluss.spark' has no attribute {name!r}")
    from zufluss.spark.union import table

    return table
