"""pyfluss and our client on tables whose buckets lie on three servers."""

from __future__ import annotations

import fluss
import pyarrow as pa

from tests.cluster_of import ClusterServer
from tests.end_to_end.helpers import append, connected, create, ids, read_arrow
from tests.end_to_end.kv import create_keyed, lookup, upsert
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection

KEYED = pa.schema([("a", pa.int32()), ("b", pa.string()), ("v", pa.int64())])


async def test_pyfluss_writes_reads_and_looks_up_over_three_servers(
    cluster: ClusterServer, ours: Connection
) -> None:
    async with connected(cluster.bootstrap) as conn:
        log = await create(conn, fluss.TablePath("fluss", "plog"), bucket_count=6)
        await append(log, *(ids(i, i + 10) for i in range(0, 200, 10)))
        rows = await read_arrow(log)
        assert sorted(rows.column("id").to_pylist()) == list(range(200))
        path = fluss.TablePath("fluss", "pkeyed")
        keyed = await create_keyed(conn, path, KEYED, ["a", "b"], bucket_keys=["a"], bucket_count=6)
        await upsert(keyed, *({"a": i, "b": b, "v": i} for i in range(60) for b in "xy"))
        for i in range(60):
            assert await lookup(keyed, [i, "x"]) == {"a": i, "b": "x", "v": i}
        prefix = keyed.new_lookup().lookup_by(["a"]).create_lookuper()
        for i in range(0, 60, 5):
            assert [row["b"] for row in await prefix.lookup([i])] == ["x", "y"]
    for name in ("plog", "pkeyed"):
        assert set(cluster.leaders("fluss", name).values()) == {1, 2, 3}
    assert ours.table("pkeyed").scan().to_arrow().num_rows == 120


def test_our_client_reads_what_it_wrote_over_three_servers(
    cluster: ClusterServer, ours: Connection
) -> None:
    ours.admin.create_table("olog", "id BIGINT, p STRING", partition_keys=["p"], bucket_count=3)
    for partition in ("x", "y"):
        ours.admin.create_partition("olog", {"p": partition})
    with ours.table("olog").append() as writer:
        writer.write({"id": list(range(300)), "p": ["x", "y"] * 150})
    assert sorted(ours.table("olog").scan().to_arrow()["id"].to_pylist()) == list(range(300))
    assert ours.table("olog").count() == 300
    ours.admin.create_table("okeyed", "k INT, v BIGINT", primary_key=["k"], bucket_count=6)
    table = ours.table("okeyed")
    with table.upsert() as upserts:
        upserts.write({"k": list(range(100)), "v": list(range(100))})
        upserts.write({"k": list(range(50)), "v": [-1] * 50})
        upserts.flush()
    found = table.lookup(pa.table({"k": pa.array(range(100), pa.int32())}))
    assert found["v"].to_pylist() == [-1] * 50 + list(range(50, 100))
    assert table.count() == 100
    changes = table.changelog().to_arrow()["_change_type"].to_pylist()
    assert (changes.count("+I"), changes.count("+U"), changes.count("-U")) == (100, 50, 50)
    assert set(cluster.leaders("fluss", "okeyed").values()) == {1, 2, 3}


def test_leases_and_exactly_once_writers_reach_every_server(ours: Connection) -> None:
    ours.admin.create_table(
        "views",
        "page INT, pv BIGINT SUM",
        primary_key=["page"],
        bucket_count=6,
        properties={"table.merge-engine": "aggregation"},
    )
    table = ours.table("views")
    rows = {"page": list(range(60)), "pv": [1] * 60}
    writer = table.exactly_once_writer("job")
    writer.write(rows)
    state = writer.checkpoint()
    writer.write(rows)
    writer.flush()
    assert set(table.scan().to_arrow()["pv"].to_pylist()) == {2}
    again = table.exactly_once_writer("job", state=state)
    assert set(table.scan().to_arrow()["pv"].to_pylist()) == {1}, "undone on all servers"
    again.close(release=True)

    def leased_rows() -> int:
        rows = 0
        with ours.admin.kv_snapshot_lease("views") as lease:
            for bucket in lease.snapshots:
                with table.kv_snapshot(bucket, lease=lease) as reader:
                    rows += sum(batch.num_rows for batch in reader)
        return rows

    eventually(lambda: leased_rows() == 60, "a snapshot of every bucket")
