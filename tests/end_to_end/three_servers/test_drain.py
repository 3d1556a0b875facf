"""The location of the shared log is drained under writes, and retired."""

from __future__ import annotations

from pathlib import Path

import pytest

import zufluss
from tests.cluster_of import ClusterServer
from tests.waiting import eventually


@pytest.mark.slow
def test_the_location_of_the_shared_log_is_drained_under_writes_and_retired(
    tmp_path: Path,
) -> None:
    properties = {
        "zufluss.log.durability": "remote",
        "remote.data.dir": str(tmp_path / "first"),
        "remote.log.task-interval-duration": "1s",
        "kv.snapshot.interval": "2s",
    }
    written: list[int] = []
    with (
        ClusterServer(tmp_path / "data", 2, properties) as cluster,
        zufluss.connect(cluster.bootstrap) as connection,
    ):
        admin = connection.admin
        admin.create_table("events", "id BIGINT", bucket_count=4)
        admin.create_table("latest", "id INT, n BIGINT", primary_key=["id"], bucket_count=4)
        admin.alter_location("add", uri=str(tmp_path / "second"))
        with (
            connection.table("events").append() as events,
            connection.table("latest").upsert() as latest,
        ):

            def is_drained() -> bool:
                written.append(len(written))
                events.write({"id": written[-1:]})
                latest.write({"id": [written[-1] % 5], "n": written[-1:]})
                events.flush()
                latest.flush()
                files = {x.location_id: x.live_files for x in admin.locations().locations}
                return files[1] == 0

            assert not is_drained()
            admin.alter_location("drain", 1)
            eventually(is_drained)
        admin.alter_location("retire", 1)
        rows = connection.table("events").scan().to_arrow()["id"].to_pylist()
        assert sorted(rows) == written
        keyed = connection.table("latest")
        for key in range(5):
            assert keyed.lookup(key) == {"id": key, "n": max(n for n in written if n % 5 == key)}
