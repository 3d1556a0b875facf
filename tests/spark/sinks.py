"""What tests of sinks share: sources whose tasks fail, files to stream from, what a table has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from zufluss.client.sync import Connection
from zufluss.spark.source import FlussDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class _FailsAfterwards:
    """A writer whose tasks write everything and then fail, the first time."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        written = super().write(iterator)  # type: ignore[misc]
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("this task fails after it has written")
        return written


class _FailsHalfway:
    """A writer whose tasks fail the first time, with rows already taken over."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        return super().write(_halfway(iterator))  # type: ignore[misc]


def _halfway(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows in batches:
        half = rows.num_rows // 2
        yield rows.slice(0, half)
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("this task fails halfway")
        yield rows.slice(half)


class _Faulty(FlussDataSource):
    """A source whose writers are changed."""

    fault: type

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return _changed(super().writer(schema, overwrite), self.fault)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return _changed(super().streamWriter(schema, overwrite), self.fault)


class FailsAfterwards(_Faulty):
    """`format("fails_afterwards")`."""

    fault = _FailsAfterwards

    @classmethod
    def name(cls) -> str:
        return "fails_afterwards"


class FailsHalfway(_Faulty):
    """`format("fails_halfway")`."""

    fault = _FailsHalfway

    @classmethod
    def name(cls) -> str:
        return "fails_halfway"


class FailsAlways(_Faulty):
    """`format("fails_always")`: the second task, after it has written."""

    class fault:
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
            written = super().write(iterator)  # type: ignore[misc]
            if TaskContext.get().partitionId() == 1:
                raise RuntimeError("this task always fails")
            return written

    @classmethod
    def name(cls) -> str:
        return "fails_always"


def _changed(writer: Any, fault: type) -> Any:
    kind = type(writer)
    faulty = object.__new__(type(f"Faulty{kind.__name__}", (fault, kind), {}))
    faulty.__dict__.update(writer.__dict__)
    return faulty


def append(frame: DataFrame, server: str, table: str, source: str = "fluss", **more: str) -> None:
    """Write a frame to a table."""
    options = {"bootstrap.servers": server, "table": table, **more}
    frame.write.format(source).options(**options).mode("append").save()


def log_rows(connection: Connection, table: str) -> list[dict[str, Any]]:
    """All rows of a log table."""
    return connection.table(table).scan().to_arrow().to_pylist()


def doubled(rows: Sequence[Mapping[str, Any]], column: str = "id") -> list[Any]:
    """Values that occur more than once."""
    return [value for value, n in Counter(row[column] for row in rows).items() if n > 1]


def state(connection: Connection, table: str, key: str = "id") -> dict[Any, dict[str, Any]]:
    """The rows of a primary-key table, by key."""
    return {row[key]: row for row in connection.table(table).scan().to_arrow().to_pylist()}


def write_files(directory: Path, files: int, rows: int, first: int = 0) -> Path:
    """Files of JSON rows (id, k, v) to stream from, one micro-batch each."""
    directory.mkdir(exist_ok=True)
    for number in range(first, first + files):
        ids = range(number * rows, (number + 1) * rows)
        lines = [json.dumps({"id": i, "k": i % 7, "v": i}) for i in ids]
        (directory / f"{number:05}.json").write_text("\n".join(lines))
    return directory


def stream(spark: SparkSession, directory: Path) -> DataFrame:
    """A stream of such files, one per micro-batch."""
    reader = spark.readStream.schema("id BIGINT, k BIGINT, v BIGINT")
    return reader.option("maxFilesPerTrigger", 1).json(str(directory))


def run(
    frame: DataFrame, server: str, table: str, checkpoint: Path, source: str = "fluss", **more: str
) -> None:
    """Write everything that a stream has now."""
    options = {"bootstrap.servers": server, "table": table, **more}
    options["checkpointLocation"] = str(checkpoint)
    writer = frame.writeStream.format(source).options(**options).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()


__all__ = [
    "FailsAfterwards",
    "FailsAlways",
    "FailsHalfway",
    "append",
    "doubled",
    "log_rows",
    "run",
    "state",
    "stream",
    "write_files",
]
