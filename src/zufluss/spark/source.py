"""`format("fluss")`: tables as a data source of Spark, for batch and streaming reads and writes.

Spark calls the methods in its own processes and pickles their results; these processes know only
the class that was registered. So `register` puts the address of the cluster into a class of its
own.

Filters and columns never use Spark's push-down hook: a filter that was pushed once stays in the
relation and is applied to every later use of it. They are options instead, and each set of options
is a relation of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import DataSource

from zufluss.spark.source_options import SourceOptions, Use, parse_options

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class FlussDataSource(DataSource):
    """Tables of a cluster, by the options `bootstrap.servers` and `table`."""

    bootstrap: ClassVar[str | None] = None
    """The address for relations without the option `bootstrap.servers`."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "fluss"

    def schema(self) -> StructType:
        """The columns of the table, or those asked for."""
        from zufluss.spark.read.batch import source_schema

        return source_schema(self._parsed())

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        from zufluss.spark.read.batch import FlussReader

        return FlussReader(self._parsed(Use.BATCH), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read."""
        from zufluss.spark.read.stream import FlussStreamReader

        return FlussStreamReader(self._parsed(Use.STREAM), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        from zufluss.spark.write.batch import make_writer

        return make_writer(self._parsed(Use.WRITE), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A streaming write."""
        from zufluss.spark.write.stream import make_stream_writer

        return make_stream_writer(self._parsed(Use.WRITE), schema, overwrite)

    def _parsed(self, use: Use | None = None) -> SourceOptions:
        options: Any = self.options
        parsed = parse_options(options, self.bootstrap)
        if use is not None:
            parsed.check_for(use)
        return parsed


def source_class(bootstrap: str | None) -> type[FlussDataSource]:
    """The source for a cluster; a class that is pickled by value, with the address."""

    class ClusterDataSource(FlussDataSource):
        """The source of one cluster."""

    ClusterDataSource.bootstrap = bootstrap
    return ClusterDataSource
