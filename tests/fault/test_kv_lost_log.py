"""State on disk whose changelog lost its end in a power failure.

With `zufluss.log.flush=os` this can happen, and rows that only the state has would contradict the
changelog for ever. So the state is rebuilt from the changelog. With `ack` it means damage, and the
bucket is not served.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import zufluss
from zufluss.record.header import iter_headers
from zufluss.testing.server import DevServer

BATCHES = 8


def written(server: DevServer) -> Path:
    """Write batches of one row, stop so that the state is flushed; the directory of the log."""
    with zufluss.connect(server.bootstrap) as conn:
        columns = "id INT NOT NULL, v STRING"
        conn.admin.create_table("fluss.t", columns, primary_key=["id"], bucket_count=1)
        with conn.table("fluss.t").upsert() as writer:
            for i in range(BATCHES):
                writer.write({"id": [i], "v": [f"row {i}"]})
                writer.flush()
    server.stop()
    (log,) = server.data_dir.glob("fluss/t-*/log-0")
    return log


def cut(log: Path, batches: int) -> None:
    """Cut the log to so many batches, and remove all files that know of more."""
    (segment,) = log.glob("*.log")
    data = segment.read_bytes()
    position, _ = [*iter_headers(data)][batches]
    os.truncate(segment, position)
    for other in log.iterdir():
        if other != segment:
            other.unlink()
    for commit in log.parents[2].glob(".commit-log/*"):
        commit.unlink()


def test_state_ahead_of_a_log_that_was_not_synced_is_made_again(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server({"zufluss.log.flush": "os"})
    cut(written(server), 3)
    server.start()
    with zufluss.connect(server.bootstrap) as conn:
        table = conn.table("fluss.t")
        rows = table.lookup([*range(BATCHES)], missing="drop").to_pylist()
        assert rows == [{"id": i, "v": f"row {i}"} for i in range(3)]
        with table.upsert() as writer:
            writer.write({"id": [7], "v": ["again"]})
        changes = table.changelog(["id"]).to_arrow()
        assert changes["_change_type"].to_pylist() == ["+I"] * 4
    assert "kv_state_rebuilt" in server.log()


def test_state_ahead_of_a_log_that_was_synced_is_not_served(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server()
    cut(written(server), 3)
    server.start()
    assert "bucket_refused" in server.log()
    assert "the changes between are lost" in server.log()
