"""Data sources of Spark in Python that do nothing but hand out rows: what `bench.spark` compares
with.

| format | is | options |
|---|---|---|
| `bare` | the batches of Arrow files, one task each, mapped into memory | the directory, as path |
| `bare_stream` | a stream of a few rows per micro-batch and task, out of nothing | `tasks` |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

SCHEMA = "id BIGINT, a INT, b DOUBLE, c STRING, d TIMESTAMP_NTZ"
STREAM_ROWS = 10
"""Rows of a task of the stream."""


class BareSource(DataSource):
    """`format("bare")`."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return BareReader(str(self.options["path"]))


class BareReader(DataSourceReader):
    """One task per file."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def partitions(self) -> list[InputPartition]:
        files = sorted(Path(self.directory).glob("*.arrow"))
        return [InputPartition(str(file)) for file in files]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(partition.value) as file:
            yield from pa.ipc.open_stream(file)


class BareStream(DataSource):
    """`format("bare_stream")`."""

    @classmethod
    def name(cls) -> str:
        return "bare_stream"

    def schema(self) -> str:
        return "id BIGINT, at BIGINT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return BareStreamReader(int(self.options["tasks"]))


class BareStreamReader(DataSourceStreamReader):
    """There is always one more micro-batch."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def initialOffset(self) -> dict[str, int]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"n": start["n"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(task) for task in range(self.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ids = pa.array(range(STREAM_ROWS), pa.int64())
        yield pa.record_batch({"id": ids, "at": ids})
