"""The real service tiers tables that are being written to; other readers check the lake.

And clients of Apache Fluss go on beside it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import fluss
import pandas as pd
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import append, connected, create, ids, in_time, read_arrow
from tests.end_to_end.kv import create_keyed, delete, lookup, upsert
from tests.lake.readers import duckdb_rows, pyiceberg_rows
from tests.tiering.support import TIERED, create_table
from tests.tiering.tiered_cluster import Tiered, rows_of, seen_by_all
from tests.waiting import eventually
from zufluss.model.table import TableBucket

pytestmark = pytest.mark.slow
ROWS, CHUNK, BUCKETS = 1_000_000, 50_000, 4
KEYS, CHANGES = 5_000, 24
PER_BUCKET = """
    SELECT __bucket AS bucket, count(*) AS n, count(DISTINCT __offset) AS offsets,
           min(__offset) AS first, max(__offset) AS last
    FROM lake GROUP BY ALL ORDER BY ALL
"""
IDS = "SELECT count(*) AS n, count(DISTINCT id) AS ids, min(id) AS first, max(id) AS last FROM lake"
CHANGED = ["id", "name", "n", "__bucket", "__offset"]


def numbered(start: int, count: int) -> pa.Table:
    numbers = pa.array(range(start, start + count), pa.int64())
    return pa.table({"id": numbers, "name": numbers.cast(pa.string())})


def test_a_million_rows_appended_while_tiering_runs_are_in_the_lake_exactly_once(
    cluster: Tiered,
) -> None:
    path = create_table(
        cluster.connection,
        "million",
        "id BIGINT, name STRING",
        bucket_count=BUCKETS,
        bucket_keys=["id"],
    )
    with cluster.connection.table(path).append() as writer:
        for start in range(0, ROWS, CHUNK):
            writer.write(numbered(start, CHUNK))
            if start == ROWS // 4:
                writer.flush()
                eventually(lambda: cluster.admin.lake_snapshot(path) is not None)
    cluster.caught_up(path)
    ends = {b.bucket_id: end for b, end in cluster.admin.list_all_offsets(path).items()}
    assert sum(ends.values()) == ROWS
    assert len(ends) == BUCKETS
    lake = cluster.lake(path)
    assert len(lake.metadata.snapshots) > 1, "rows were appended between rounds"

    wanted = [
        {"bucket": bucket, "n": end, "offsets": end, "first": 0, "last": end - 1}
        for bucket, end in sorted(ends.items())
    ]
    assert duckdb_rows(lake.metadata_location, PER_BUCKET).to_pylist() == wanted
    assert duckdb_rows(lake.metadata_location, IDS).to_pylist() == [
        {"n": ROWS, "ids": ROWS, "first": 0, "last": ROWS - 1}
    ]
    assert per_bucket(pyiceberg_rows(lake.metadata_location)) == wanted


def per_bucket(rows: pa.Table) -> list[dict[str, int]]:
    """The same as `PER_BUCKET`, by Arrow."""
    counted = rows.group_by("__bucket").aggregate(
        [
            ("__offset", "count"),
            ("__offset", "count_distinct"),
            ("__offset", "min"),
            ("__offset", "max"),
        ]
    )
    names = ["bucket", "n", "offsets", "first", "last"]
    return counted.rename_columns(names).sort_by("bucket").to_pylist()


def test_a_primary_key_table_under_load_is_in_the_lake_as_it_was_at_the_tiered_offsets(
    cluster: Tiered,
) -> None:
    schema = "id BIGINT, name STRING, n INT, PRIMARY KEY (id)"
    path = create_table(cluster.connection, "changing", schema, bucket_count=3)
    chance = random.Random(7)
    pinned: dict[int, Mapping[TableBucket, int]] = {}
    with cluster.connection.table(path).upsert() as writer:
        for step in range(CHANGES):
            some = chance.sample(range(KEYS), 1500)
            names = [f"{step}-{key}" for key in some[:1200]]
            writer.write({"id": some[:1200], "name": names, "n": [step] * 1200})
            writer.delete({"id": some[1000:]})  # also what was written just now, or never
            writer.flush()
            if step % (CHANGES // 4) == 0:
                known = tiered_again(cluster, path, pinned)
                pinned |= known
    cluster.caught_up(path)
    pinned |= tiered_again(cluster, path, {})
    lake = cluster.lake(path)
    assert len(pinned) > 3
    for snapshot_id, offsets in pinned.items():
        found = seen_by_all(lake, CHANGED, snapshot_id=snapshot_id)
        assert found == rows_of(direct_scan(cluster, path, offsets), CHANGED)
        keys = [row[0] for row in found]
        assert len(set(keys)) == len(keys) > 0


def tiered_again(
    cluster: Tiered, path: str, before: Mapping[int, object]
) -> dict[int, Mapping[TableBucket, int]]:
    """A snapshot that is not among those before, and its offsets."""
    found = {}

    def is_new() -> bool:
        snapshot = cluster.admin.lake_snapshot(path)
        if snapshot is not None and snapshot.snapshot_id not in before:
            found[snapshot.snapshot_id] = snapshot.offsets
        return bool(found)

    eventually(is_new)
    return found


def direct_scan(cluster: Tiered, path: str, offsets: Mapping[TableBucket, int]) -> pa.Table:
    """The rows of a table at these offsets, from its changelog, folded by pandas."""
    table = cluster.connection.table(path)
    buckets = [
        table.changelog(stop={bucket: end}, buckets=[bucket.bucket_id])
        .to_pandas()
        .assign(__bucket=bucket.bucket_id)
        for bucket, end in offsets.items()
    ]
    changes = pd.concat(buckets).rename(columns={"_log_offset": "__offset"})
    newest = changes.sort_values("__offset").drop_duplicates("id", keep="last")
    live = newest[newest["_change_type"].isin(["+I", "+U"])]
    return pa.Table.from_pandas(live[CHANGED], preserve_index=False)


async def test_pyfluss_writes_and_reads_beside_tiering_and_sees_what_was_tiered(
    cluster: Tiered,
) -> None:
    logged = fluss.TablePath("fluss", "by_pyfluss")
    keyed = fluss.TablePath("fluss", "keyed_by_pyfluss")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    async with connected(cluster.server.bootstrap) as conn:
        table = await create(conn, logged, bucket_count=2, properties=TIERED)
        rows = await create_keyed(conn, keyed, schema, bucket_count=2, properties=TIERED)
        for start in range(0, 500, 100):
            await append(table, ids(start, start + 100))
            await upsert(rows, {"id": start, "text": "a"}, {"id": -1, "text": f"at {start}"})
            assert await lookup(rows, {"id": -1}) == {"id": -1, "text": f"at {start}"}
            cluster.caught_up("fluss.by_pyfluss", "fluss.keyed_by_pyfluss")
        await delete(rows, {"id": 0})
        cluster.caught_up("fluss.keyed_by_pyfluss")
        read = await read_arrow(table)
        assert sorted(read["id"].to_pylist()) == list(range(500))
        found = await in_time(conn.get_admin().get_latest_lake_snapshot(logged))
        offsets = {b.bucket_id: o for b, o in found.table_buckets_offset.items()}
    lake = cluster.lake("fluss.by_pyfluss")
    assert found.snapshot_id == lake.metadata.current_snapshot_id
    assert sum(offsets.values()) == 500
    assert seen_by_all(lake, ["id"]) == sorted((repr(i),) for i in range(500))
    wanted = [(repr(i), repr("a")) for i in range(100, 500, 100)] + [("-1", repr("at 400"))]
    assert seen_by_all(cluster.lake("fluss.keyed_by_pyfluss"), ["id", "text"]) == sorted(wanted)
