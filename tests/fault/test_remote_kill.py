"""SIGKILL at every named step of remote storage, and at random moments, under appends and upserts.

After each death everything that was acknowledged is read with our client from the first offset on,
mostly from remote storage, and the state of the primary-key table is the fold of its changelog. At
the end the locations themselves are looked at: what is referred to is there and whole, after a
sweep nothing else is there, and after a drop nothing at all.
"""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import zufluss
from tests.counts import rounds
from tests.fault.load import DATABASE
from tests.fault.remote_load import (
    BUSY,
    CLIENT,
    DIRECTORY,
    IN_S3,
    QUIET,
    SWEEPING,
    Locations,
    Traffic,
    check_locations,
    remotes,
    run,
    settle,
)
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.errors import ZuflussError
from zufluss.log.files import KILL_AT_VARIABLE, STEPS
from zufluss.testing.proxy import FaultProxy
from zufluss.testing.s3 import S3Server

AT_THE_END = ("sweep-delete", "clean-delete", "clean-deleted")
"""Steps that happen while nobody writes."""
UNDER_LOAD = [step for step in STEPS if step not in AT_THE_END]
FIRST_FEW = {"retain-delete": 3, "retain-deleted": 3}
"""Upper bound of n for a kill at the n-th visit of a step; 6 for other steps."""


class Deaths:
    """A server that is killed again and again."""

    def __init__(self, server: WarmServer, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        self.count = 0

    def die_at(self, step: str, n: int, then: Callable[[], None] | None = None) -> None:
        """Start the server to be killed at the n-th visit of a step, and run `then` meanwhile."""
        server = self.server
        server.environ = {KILL_AT_VARIABLE: f"{step}#{n}"}
        try:
            server.start()
            if then is not None:
                with suppress(ZuflussError):
                    then()
        except RuntimeError as e:
            assert "before it was ready" in str(e)  # noqa: PT017  it may well be that quick
        assert server.wait() == -signal.SIGKILL, f"{step} was not reached"
        self.count += 1

    def die(self) -> None:
        """Kill the server at a random moment, sometimes during its start."""
        time.sleep(self.rng.random() * 0.5)
        self.server.kill()
        self.count += 1
        if self.rng.random() < 0.3:
            self.server.launch()
            time.sleep(self.rng.random() * 0.3)
            self.server.kill()
            self.count += 1

    def live(self) -> None:
        """Start the server without a kill point."""
        self.server.environ = {KILL_AT_VARIABLE: ""}
        self.server.start()


def plant(locations: Locations, traffic: Traffic) -> None:
    """Files that nothing refers to, as a crash leaves them."""

    async def put() -> None:
        for location_id in (DIRECTORY, IN_S3):
            for target, kind in ((traffic.log, "log"), (traffic.keyed, "log")):
                owner = f"{kind}/{DATABASE}/{target.name}-{target.table_id}/0"
                objects = locations.objects(location_id)
                await objects.put(f"{owner}/{uuid.uuid4()}/{0:020d}.log", b"no")
                await objects.put(f"{owner}/metadata/{uuid.uuid4()}.manifest", b"no")
            owner = f"kv/{DATABASE}/{traffic.keyed.name}-{traffic.keyed.table_id}/1"
            await objects.put(f"{owner}/shared/{uuid.uuid4()}", b"no")
            await objects.put(f"{owner}/snap-999999/_METADATA", b"no")

    run(put())


def drop(server: WarmServer) -> None:
    with zufluss.connect(server.bootstrap, **CLIENT) as conn:
        for name in ("log", "keyed"):
            conn.admin.drop_table(f"{DATABASE}.{name}", ignore_if_not_exists=True)


def finish(deaths: Deaths, traffic: Traffic, locations: Locations) -> None:
    """Assert that only referenced files exist, and none of dropped tables."""
    server = deaths.server
    traffic.pause()
    settle(traffic)
    before = check_locations(traffic, locations)
    server.kill()
    plant(locations, traffic)
    server.properties |= SWEEPING
    deaths.die_at("sweep-delete", 1)
    deaths.live()
    eventually(lambda: run(locations.names()) == before.names, "the sweep deletes all orphans")
    traffic.check()
    server.kill()
    server.properties |= QUIET | {"zufluss.remote.sweep.interval": "0"}
    deaths.die_at("clean-delete", deaths.rng.randint(1, 4), lambda: drop(server))
    deaths.die_at("clean-deleted", 1, lambda: drop(server))
    deaths.live()
    drop(server)
    eventually(
        lambda: not run(locations.names()), "the cleaner deletes the files of dropped tables"
    )
    assert remotes(server, traffic.buckets) == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(rounds(1, 20)))
def test_a_death_at_any_step_of_remote_storage_loses_doubles_and_leaves_nothing(
    warm_server: Callable[..., WarmServer],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    rng: random.Random,
    part: int,
) -> None:
    locations = Locations(tmp_path, s3, proxy)
    server = warm_server(BUSY | locations.properties).start()
    deaths = Deaths(server, rng)
    traffic = Traffic(server, rng)
    with traffic:
        traffic.progress()
        for step in rng.sample(UNDER_LOAD, rounds(3, len(UNDER_LOAD))):
            deaths.die()
            deaths.die_at(step, rng.randint(1, FIRST_FEW.get(step, 6)))
            deaths.live()
            traffic.pause()
            traffic.check()
            traffic.resume()
            traffic.progress()
        finish(deaths, traffic, locations)
    print(f"{deaths.count} deaths, {traffic.acked_rows} rows acknowledged")
