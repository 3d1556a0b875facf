"""pyfluss looks rows up by the addresses it knows, while other servers lead the buckets by now.

pyfluss 1.0.0 never looks for a new leader when a lookup is refused: it asks the same server again,
without end. So a tablet server passes lookups of such clients on. Without that, the lookups of
these tests hang.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import connected, in_time
from tests.end_to_end.kv import create_keyed, lookup, upsert
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]

KEYED = pa.schema([("a", pa.int32()), ("b", pa.string()), ("v", pa.int64())])
BUCKETS, KEYS = 6, 30


@pytest.mark.slow
def test_pyfluss_lookups_go_on_when_their_server_comes_back_and_others_lead(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    victim = rng.choice(SERVERS)

    async def run() -> None:
        async with connected(servers.coordinator.bootstrap) as conn:
            path = fluss.TablePath("fluss", "keyed")
            table = await create_keyed(
                conn, path, KEYED, ["a", "b"], bucket_keys=["a"], bucket_count=BUCKETS
            )
            await upsert(table, *({"a": i, "b": "x", "v": i} for i in range(KEYS)))
            prefix = table.new_lookup().lookup_by(["a"]).create_lookuper()
            await check(table, prefix)
            assert victim in leaders(servers)
            await asyncio.to_thread(replace, servers, victim)
            await check(table, prefix)

    asyncio.run(run())


async def check(table: fluss.FlussTable, prefix: Any) -> None:
    """Every key is found, alone and by its prefix."""
    for i in range(KEYS):
        assert await in_time(lookup(table, [i, "x"])) == {"a": i, "b": "x", "v": i}
        assert [row["v"] for row in await in_time(prefix.lookup([i]))] == [i]


def leaders(servers: SharedServers) -> set[int | None]:
    return {servers.leader("fluss", "keyed", bucket) for bucket in range(BUCKETS)}


def replace(servers: SharedServers, victim: int) -> None:
    """Others take over the buckets of a server; then it comes back at its address, empty."""
    servers.lose(victim)
    eventually(
        lambda: not leaders(servers) & {victim, None}, "others lead the buckets of the lost server"
    )
    servers.start(victim)
    servers.await_registered(*SERVERS)
    assert victim not in leaders(servers)
