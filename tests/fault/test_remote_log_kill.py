"""A server that dies at each step of its remote log: nothing is lost, doubled or deleted too early.

The data is written while nothing is copied. Then lives follow that end at some step, and at last
one that finishes. Then every row is read, most of them from remote storage.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.wire.helpers import (
    DATABASE,
    append,
    connected,
    create,
    eventually,
    fresh_path,
    ids,
    read_arrow,
)
from zufluss.log.files import KILL_AT_VARIABLE, STEPS
from zufluss.testing.server import DevServer

INTERVAL = "remote.log.task-interval-duration"
BATCHES, ROWS = 120, 20
PROPERTIES = {"table.log.tiered.local-segments": "1", "table.log.arrow.compression.type": "NONE"}
REMOTE_STEPS = [step for step in STEPS if step.startswith("remote-")]


def die_at(server: DevServer, point: str) -> None:
    """One life that ends at a step."""
    server.environ = {KILL_AT_VARIABLE: point}
    try:
        server.start()
    except RuntimeError:  # it died before it was ready
        pass
    assert server.wait() == -signal.SIGKILL


def segments(location: Path) -> list[tuple[int, int]]:
    """Start and end of the segments in the manifest with the most of them."""
    manifests = [json.loads(p.read_bytes()) for p in location.rglob("*.manifest")]
    longest = max((m["remote_log_segments"] for m in manifests), key=len)
    return [(s["start_offset"], s["end_offset"]) for s in longest]


@pytest.mark.parametrize("step", REMOTE_STEPS)
async def test_a_death_at_any_step_of_a_copy_loses_and_doubles_nothing(
    tmp_path: Path, step: str
) -> None:
    location = tmp_path / "remote"
    properties = {
        "log.segment.file-size": "4kb",
        "log.retention.check-interval": "50ms",
        "remote.data.dir": str(location),
    }
    server = DevServer(tmp_path / "data", {**properties, INTERVAL: "0"})
    path = fresh_path("killed")
    with server:
        async with connected(server.bootstrap) as conn:
            await conn.get_admin().create_database(DATABASE, ignore_if_exists=True)
            table = await create(conn, path, bucket_count=1, properties=PROPERTIES)
            await append(table, *(ids(at * ROWS, (at + 1) * ROWS) for at in range(BATCHES)))
        server.kill()
        server.properties[INTERVAL] = "20ms"
        for n in (1, 1, 3 if step == "remote-uploaded" else 1):
            die_at(server, f"{step}#{n}")
        server.environ = {KILL_AT_VARIABLE: ""}
        server.start()

        async def copied() -> bool:
            return len(list(server.data_dir.glob(f"{DATABASE}/*/log-0/*.log"))) <= 2

        await eventually(copied)
        async with connected(server.bootstrap) as conn:
            found = await read_arrow(await conn.get_table(path))
        assert found["id"].to_pylist() == list(range(BATCHES * ROWS))
        ends = segments(location)
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert server.stop() == 0
