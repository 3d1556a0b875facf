"""pyfluss beside remote locations: it sees none of them, and works as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fluss

import zufluss
from tests.end_to_end.helpers import append, connected, create, ids, read_arrow
from tests.servers import Apart
from zufluss.net.client import open_connection
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

OURS = {
    ApiKey.LIST_LOCATIONS,
    ApiKey.ALTER_LOCATION,
    ApiKey.PROBE_LOCATION,
    ApiKey.INSPECT_LOCATION,
    ApiKey.SWEEP_LOCATIONS,
}


async def advertised(address: str) -> set[int]:
    host, _, port = address.rpartition(":")
    connection = await open_connection(host, int(port), connect_timeout_ms=10_000)
    request = m.ApiVersionsRequest(client_software_name="test", client_software_version="1")
    answer = await connection.call(ApiKey.API_VERSIONS, request, timeout_ms=10_000)
    connection.close()
    return {each.api_key for each in answer.api_versions}


async def test_pyfluss_works_with_servers_that_offer_apis_of_their_own(
    new_apart: Callable[..., Apart], tmp_path: Path
) -> None:
    dirs = [f"file://{tmp_path}/{name}" for name in "ab"]
    coordinator, tablet = new_apart({"remote.data.dirs": ",".join(dirs)})
    assert await advertised(coordinator.bootstrap) >= OURS
    async with connected(tablet.bootstrap) as conn:
        table = await create(conn, fluss.TablePath("fluss", "events"), bucket_count=2)
        await append(table, ids(0, 100))
        found = await read_arrow(table, {0: fluss.EARLIEST_OFFSET, 1: fluss.EARLIEST_OFFSET})
        assert sorted(found.column("id").to_pylist()) == list(range(100))
    with zufluss.connect(tablet.bootstrap) as ours:
        added = ours.admin.alter_location("add", uri=f"{dirs[0]}-more")
        found = ours.admin.locations()
        assert [x.uri for x in found.locations] == [*dirs, added.uri]
        configs = {c.key: c.value for c in ours.admin.cluster_configs()}
        assert configs["remote.data.dirs"] == ",".join(dirs)
