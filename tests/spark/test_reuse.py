"""One DataFrame in two queries, self-joins and self-unions with filters: right each time.

Spark's own hook for filters leaves what was pushed in the relation, so that the next query of the
same DataFrame has rows missing. The source never uses it; columns and filters are options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import zufluss.spark
from tests.client.rounds import Rounds, lake_table
from tests.counts import FULL
from tests.spark.read.test_table import append, plain, upsert
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.spark.read.batch import FlussReader
from zufluss.testing.server import DevServer

pytestmark = pytest.mark.slow

KINDS = ["primary key", "lake and changes", *(["lake and log"] if FULL else [])]
ALL = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


@pytest.fixture(scope="module", params=KINDS)
def table(
    request: pytest.FixtureRequest, connection: Connection, rounds: Rounds
) -> Iterator[Table]:
    """A table of four rows; of tiered ones the last two are not in the lake."""
    keyed = request.param in ("primary key", "lake and changes")
    write, keys = (upsert, ["id"]) if keyed else (append, [])
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=keys, bucket_count=2) as made:
        write(made, id=[1, 2], name=["a", "b"])
        if "lake" in request.param:
            rounds.tier(made)
        write(made, id=[3, 4], name=["c", "d"])
        yield made


@pytest.fixture(params=["format", "helper"])
def frame(request: pytest.FixtureRequest, spark: Any, lake_server: DevServer, table: Table) -> Any:
    zufluss.spark.register(spark, lake_server.bootstrap)
    if request.param == "helper":
        return zufluss.spark.table(spark, str(table.path))
    return spark.read.format("fluss").load(str(table.path))


def test_a_frame_filtered_in_one_query_is_whole_in_the_next(frame: Any) -> None:
    assert plain(frame.filter("id = 2")) == [(2, "b")]
    assert plain(frame) == ALL
    assert plain(frame.filter("name = 'd'").select("id")) == [(4,)]


def test_a_join_and_a_union_with_itself_filter_each_side_alone(spark: Any, frame: Any) -> None:
    few = frame.filter("id <= 3")
    assert plain(few.alias("x").join(frame.filter("id >= 3").alias("y"), "id")) == [(3, "c", "c")]
    pairs = frame.filter("id = 1").select("id").crossJoin(frame.select("name"))
    assert plain(pairs) == [(1, name) for _, name in ALL]
    frame.createOrReplaceTempView("twice")
    union = "SELECT id FROM twice WHERE name = 'a' UNION ALL SELECT id FROM twice"
    assert plain(spark.sql(union)) == [(1,), (1,), (2,), (3,), (4,)]


def test_pushed_filters_of_one_relation_are_not_those_of_another(
    spark: Any, lake_server: DevServer, table: Table
) -> None:
    zufluss.spark.register(spark, lake_server.bootstrap)
    first = zufluss.spark.table(spark, str(table.path), filter=col("id") <= 2)
    last = zufluss.spark.table(spark, str(table.path), filter=col("id") >= 4)
    reader = spark.read.format("fluss")
    named = reader.option("filter", "name IN ('b', 'd')").load(str(table.path))
    assert plain(first.union(last).union(named)) == sorted([*ALL[:2], ALL[3], ALL[1], ALL[3]])
    assert plain(first) == ALL[:2]
    assert plain(first.join(named, "id").select("id")) == [(2,)]
    assert plain(named.filter("id > 2")) == [(4, "d")]
    assert plain(named) == [(2, "b"), (4, "d")]


def test_a_view_is_used_twice_in_one_query_and_in_two(
    spark: Any, lake_server: DevServer, table: Table
) -> None:
    name = f"v_{table.path.table}"
    made = zufluss.spark.register_views(spark, "fluss", "v_", bootstrap=lake_server.bootstrap)
    assert name in made
    join = f"SELECT x.id, y.name FROM {name} x JOIN {name} y ON x.id = y.id WHERE x.id = 2"
    assert plain(spark.sql(join)) == [(2, "b")]
    union = f"SELECT * FROM {name} WHERE id = 1 UNION ALL SELECT * FROM {name} WHERE id > 1"
    assert plain(spark.sql(union)) == ALL
    assert plain(spark.sql(f"SELECT * FROM {name}")) == ALL


def test_the_source_does_not_use_sparks_hook_for_filters() -> None:
    assert "pushFilters" not in vars(FlussReader)
