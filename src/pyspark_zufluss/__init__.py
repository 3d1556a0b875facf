"""Lets Spark find `format("fluss")` by itself.

Spark looks through the top-level modules called `pyspark_…` that Python finds, for a class
`DefaultSource`. So where zufluss is installed nothing has to be registered, and relations name
their cluster (`bootstrap.servers`). `zufluss.spark.register` takes it from them.
"""

from __future__ import annotations

from zufluss.spark.source import FlussDataSource

__all__ = ["DefaultSource"]


class DefaultSource(FlussDataSource):
    """The source, under the name by which Spark looks for one."""
