"""`zufluss dev --tablet-servers N` for tests: which process is which, and who leads what."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.end_to_end.raw import RawClient, table_path
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

READY = re.compile(r"server_ready.* child='?(coordinator|tablet server \d+)'? pid=(\d+)")


class ClusterServer(WarmServer):
    """A coordinator and tablet servers under one supervisor; `pid` is the supervisor's."""

    def __init__(
        self,
        data_dir: str | Path,
        servers: int = 3,
        properties: Mapping[str, str] | None = None,
        **options: int,
    ) -> None:
        command = ("dev", "--tablet-servers", str(servers))
        super().__init__(data_dir, properties, command=command, **options)

    def starts(self, child: str) -> list[int]:
        """The processes of a child that were ready, the last one is the present one."""
        found = (READY.search(line) for line in [*self.output])
        return [int(match[2]) for match in found if match and match[1] == child]

    def child(self, name: str) -> int:
        """The present process of a child, such as `tablet server 2`."""
        return self.starts(name)[-1]

    def await_start(self, name: str, number: int) -> int:
        """Wait until a child was ready so often; its process."""
        eventually(lambda: len(self.starts(name)) >= number, f"start {number} of {name}")
        return self.child(name)

    def ports(self) -> dict[int, int]:
        """The port of each tablet server that is there."""
        with RawClient(self.port) as client:
            answer = client.call(ApiKey.GET_METADATA, m.MetadataRequest())
        return {node.node_id: _port(node) for node in answer.tablet_servers}

    def leaders(self, database: str, table: str) -> dict[int, int]:
        """The leader of each bucket of a table."""
        request = m.MetadataRequest(table_path=[table_path(database, table)])
        with RawClient(self.port) as client:
            (found,) = client.call(ApiKey.GET_METADATA, request).table_metadata
        return {each.bucket_id: each.leader_id for each in found.bucket_metadata}


def _port(node: m.PbServerNode) -> int:
    if node.listeners:
        port = urlsplit(node.listeners.split(",")[0]).port
        assert port is not None
        return port
    return int(node.port)


def one_led_by_each(leaders: Mapping[str, Mapping[int, int]], servers: Sequence[int]) -> list[str]:
    """For each server a table of one bucket that it leads."""
    by_leader = {buckets[0]: name for name, buckets in leaders.items()}
    return [by_leader[server] for server in servers]
