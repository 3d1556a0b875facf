"""One column out of ten moves a tenth of the bytes, counted where they leave: at the server.

That the source keeps up with a bare one is a matter of time and stands in `bench/spark.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import zufluss.spark
from tests.client.rounds import lake_table
from tests.end_to_end.kv_scans.support import metric
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.obs.metrics import SENT_BYTES
from zufluss.testing.server import DevServer

pytestmark = pytest.mark.slow

ROWS = 100_000
NAMES = [f"c{i}" for i in range(10)]


@pytest.fixture
def table(request: pytest.FixtureRequest, connection: Connection) -> Iterator[Table]:
    """Ten columns of equal size; numbers that do not compress."""
    keyed = request.param == "primary key"
    schema = ", ".join(f"{name} BIGINT NOT NULL" for name in NAMES)
    options = {"primary_key": ["c0"]} if keyed else {}
    with lake_table(connection, schema, bucket_count=2, **options) as made:
        rng = np.random.default_rng(10)
        rows = {name: rng.integers(1 << 62, 1 << 63, ROWS) for name in NAMES}
        with made.upsert() if keyed else made.append() as writer:
            writer.write(rows)
        yield made


@pytest.mark.parametrize(
    ("table", "way"),
    [("log", "format"), ("log", "helper"), ("primary key", "format")],
    indirect=["table"],
)
def test_one_of_ten_equal_columns_moves_a_tenth_of_the_bytes(
    spark: Any, lake_server: DevServer, table: Table, way: str
) -> None:
    zufluss.spark.register(spark, lake_server.bootstrap)

    def read(columns: list[str]) -> Any:
        if way == "helper":
            return zufluss.spark.table(spark, str(table.path), columns=columns)
        wanted = spark.read.format("fluss").option("columns", ",".join(columns))
        return wanted.load(str(table.path))

    whole = sent(lake_server, lambda: read(NAMES))
    one = sent(lake_server, lambda: read(["c7"]))
    assert 0.09 * whole < one < 0.13 * whole, f"{one} bytes of {whole}"


def sent(server: DevServer, frame: Callable[[], Any]) -> float:
    """Bytes that the server has sent while every row was read."""
    before = metric(server, SENT_BYTES.name)
    found = frame()
    found.write.format("noop").mode("overwrite").save()
    after = metric(server, SENT_BYTES.name)
    assert found.count() == ROWS
    return after - before
