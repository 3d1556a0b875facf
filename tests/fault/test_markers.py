"""A tablet server in its own process checks the marker of a location itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import zufluss
from tests.fault.test_kv_snapshots import OFTEN, create, newest_offset, upsert
from tests.servers import Apart, RoleServer
from tests.waiting import eventually
from zufluss.remote.layout import CLUSTER
from zufluss.remote.marker import to_json


def test_a_tablet_server_writes_nothing_where_the_marker_is_anothers(
    new_apart: Callable[..., Apart], tmp_path: Path
) -> None:
    root = tmp_path / "remote"
    remote = {"remote.data.dir": str(root), "zufluss.remote.probe-interval": "100ms"}
    coordinator, tablet = new_apart(OFTEN | remote)
    ours = (root / CLUSTER).read_bytes()
    (root / CLUSTER).write_bytes(to_json("another"))
    create(coordinator)
    upsert(coordinator, {1: "row"})
    eventually(lambda: "belongs to cluster another" in str(errors(coordinator)))
    assert [p.name for p in root.rglob("*") if p.is_file()] == [CLUSTER]
    (root / CLUSTER).write_bytes(ours)
    eventually(lambda: newest_offset(tablet) >= 1)


def errors(server: RoleServer) -> list[str | None]:
    """The newest failure of the location on each server."""
    with zufluss.connect(server.bootstrap) as conn:
        [location] = conn.admin.locations().locations
        return [seen.last_error for seen in location.servers]
