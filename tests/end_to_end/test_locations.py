"""pyfluss beside remote locations: it sees none of them, and works as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fluss
import pytest

import zufluss
from tests.end_to_end.helpers import append, connected, create, ids, read_arrow
from tests.servers import RoleServer
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


class Roles:
    """A coordinator and a tablet server, told of two locations."""

    def __init__(self, directory: Path) -> None:
        self.dirs = [f"file://{directory}/{name}" for name in "ab"]
        self.coordinator = RoleServer(
            "coordinator", directory, {"remote.data.dirs": ",".join(self.dirs)}
        )
        address = {"zufluss.coordinator.address": self.coordinator.bootstrap}
        self.tablet = RoleServer("tablet", directory, address)


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(roles.coordinator)
        stack.enter_context(roles.tablet)
        yield roles


async def advertised(address: str) -> set[int]:
    host, _, port = address.rpartition(":")
    connection = await open_connection(host, int(port), connect_timeout_ms=10_000)
    request = m.ApiVersionsRequest(client_software_name="test", client_software_version="1")
    answer = await connection.call(ApiKey.API_VERSIONS, request, timeout_ms=10_000)
    connection.close()
    return {each.api_key for each in answer.api_versions}


async def test_pyfluss_works_with_servers_that_offer_apis_of_their_own(roles: Roles) -> None:
    assert await advertised(roles.coordinator.bootstrap) >= OURS
    async with connected(roles.tablet.bootstrap) as conn:
        table = await create(conn, fluss.TablePath("fluss", "events"), bucket_count=2)
        await append(table, ids(0, 100))
        found = await read_arrow(table, {0: fluss.EARLIEST_OFFSET, 1: fluss.EARLIEST_OFFSET})
        assert sorted(found.column("id").to_pylist()) == list(range(100))
    with zufluss.connect(roles.tablet.bootstrap) as ours:
        added = ours.admin.alter_location("add", uri=f"{roles.dirs[0]}-more")
        found = ours.admin.locations()
        assert [x.uri for x in found.locations] == [*roles.dirs, added.uri]
        configs = {c.key: c.value for c in ours.admin.cluster_configs()}
        assert configs["remote.data.dirs"] == ",".join(roles.dirs)
