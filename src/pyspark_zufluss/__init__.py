"""Lets Spark find `format("fluss")` by itself.

Spark searches top-level modules named `pyspark_…` for a class `DefaultSource`. So nothing has to be
registered where zufluss is installed; relations then name their cluster (`bootstrap.servers`).
After `zufluss.spark.register(spark, bootstrap)` they need not.
"""

from __future__ import annotations

from zufluss.spark.source import FlussDataSource

__all__ = ["DefaultSource"]


class DefaultSource(FlussDataSource):
    """The source, under the name that Spark looks for."""
