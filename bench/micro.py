"""What one batch costs on the server's hot path, step by step, without sockets and files.

Thread CPU time, median of many repetitions. The other side of the check and of the projection is
the CRC-32C of the same bytes, the least a server must do that checks what it stores; of the
request scanner it is protobuf parsing the same request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from crc32c import crc32c

from bench.report import Measure, compared
from bench.work import ROWS_1MIB, TEN_COLUMNS, UNCOMPRESSED, encoded, ten_columns
from zufluss.config.load import Configuration
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.model.validation import complete
from zufluss.record.arrow.project import Projector
from zufluss.record.batch.check import BatchChecker
from zufluss.wire import messages as m
from zufluss.wire.hot.produce import produce_request, scan_produce

SECONDS = 0.1
"""How long one step is repeated in a round."""
SIZES = ((10, "10 rows"), (ROWS_1MIB, "1 MiB"), (ROWS_1MIB, "1 MiB as zstd"))
ZSTD = {"table.log.arrow.compression.type": "ZSTD"}
COLUMNS = (0, 3)


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """A small and a large batch through every step."""
    schema = Schema.of(TEN_COLUMNS)
    checker = BatchChecker(lambda _: schema, "ARROW")
    projector = Projector(lambda _: schema, schema)
    for count, size in SIZES:
        properties = ZSTD if "zstd" in size else UNCOMPRESSED
        descriptor = TableDescriptor(schema, bucket_count=1, properties=properties)
        descriptor = complete(descriptor, Configuration.of({}))
        info = TableInfo(TablePath("fluss", "micro"), 1, 1, descriptor, 0, 0)
        batch = np.frombuffer(encoded(info, ten_columns(count)), dtype=np.uint8)
        steps: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
            (
                "check",
                "check a batch, against its CRC",
                lambda batch=batch: checker.check(batch, 0, batch.size),
                lambda batch=batch: crc32c(batch),
            ),
            (
                "project",
                "project 2 of 10 columns, against the CRC",
                lambda batch=batch: projector.project_all(batch.data, COLUMNS),
                lambda batch=batch: crc32c(batch),
            ),
        ]
        if count == 10:  # protobuf copies the records: with large ones that is all one would see
            body = b"".join(produce_request(-1, 1, 30_000, [(TableBucket(1, None, 0), batch.data)]))
            steps.append(
                (
                    "scan",
                    "scan the request, against protobuf",
                    lambda body=body: scan_produce(memoryview(body), 0, len(body)),
                    lambda body=body: m.ProduceLogRequest.FromString(body).buckets_req[0].records,
                )
            )
        for name, label, ours, other in steps:
            series = [(_micros(ours), _micros(other)) for _ in range(rounds + 1)][1:]
            yield compared(
                f"micro.{name}.{size.replace(' ', '_')}",
                f"{label}, {size}",
                [a for a, _ in series],
                [b for _, b in series],
                "µs",
                less_is_better=True,
            )


def _micros(step: Callable[[], object]) -> float:
    """Median CPU time of a call, in groups that are long enough for the clock."""
    step()
    once = _timed(step, 10) / 10
    group = max(1, int(200e-6 / once))
    series = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(series) < 3:
        series.append(_timed(step, group) / group)
    return statistics.median(series) * 1e6


def _timed(step: Callable[[], object], count: int) -> float:
    began = time.thread_time()
    for _ in range(count):
        step()
    return time.thread_time() - began
