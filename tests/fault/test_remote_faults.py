"""An object store that misbehaves under appends and upserts: nothing is lost, doubled or stuck.

Requests to the S3 location are slow, refused, reset, never answered, answered with an error
although they were executed, or answered by half. The log table is pinned to that location, so each
of its segments has to get through. In another test the location fails for a while: new files of
other tables go elsewhere, readers get the rows or a clear error, and the location is used again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import zufluss
from tests.counts import rounds
from tests.fault.remote_load import (
    BUSY,
    CLIENT,
    DIRECTORY,
    IN_S3,
    Locations,
    Traffic,
    check_locations,
    run,
    settle,
)
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.errors import ZuflussError
from zufluss.remote.locations import Health
from zufluss.testing.proxy import Fault, FaultProxy, Kind
from zufluss.testing.s3 import S3Server

PATIENT = {**BUSY, "zufluss.remote.down-after": "1000000"}
"""Options with which a location is used however often it fails."""
TRIES = 200
"""Attempts to read everything, of which one must succeed."""
FAULTS: dict[Kind, tuple[float, int, int]] = {
    "status_503": (0.3, 10, 1000),
    "error_after_success": (0.3, 10, 1000),
    "reset": (0.3, 10, 1000),
    "cut_body": (0.3, 10, 1000),
    "latency": (0.3, 10, 1000),
    "half_open": (0.05, 3, 60),
}
"""Probability of a fault, and the number of faults in `make test` and in `make fault`."""
SAMPLE: tuple[Kind, ...] = ("error_after_success",)
"""The kinds of faults in `make test`."""


def hits(proxy: FaultProxy, kind: Kind) -> int:
    return sum(kind in request.faults for request in tuple(proxy.seen))


def read_through(traffic: Traffic) -> int:
    """Read everything in spite of faults; returns the number of errors."""
    for errors in range(TRIES):
        try:
            traffic.check()
        except ZuflussError:  # an error is allowed, a wrong answer is not
            continue
        return errors
    raise AssertionError("no read got through")


def finish(traffic: Traffic, locations: Locations) -> None:
    """Wait until everything is uploaded, and check the locations."""
    traffic.pause()
    settle(traffic)
    check_locations(traffic, locations)
    traffic.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS if rounds(0, 1) else SAMPLE)
def test_nothing_is_lost_doubled_or_stuck_while_requests_fail(
    warm_server: Callable[..., WarmServer],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    rng: random.Random,
    kind: Kind,
) -> None:
    probability, few, many = FAULTS[kind]
    locations = Locations(tmp_path, s3, proxy)
    server = warm_server(PATIENT | locations.properties).start()
    pinned = {"table.zufluss.remote.placement": f"pinned:{IN_S3}"}
    with Traffic(server, rng, pinned) as traffic:
        traffic.progress()
        proxy.set([Fault(kind, probability=probability, seed=rng.randrange(1 << 32))])
        wanted, errors = rounds(few, many), 0
        while (found := hits(proxy, kind)) < wanted:
            traffic.progress(200)
            if found >= wanted / 2 and not errors:
                traffic.pause()
                errors = 1 + read_through(traffic)
                traffic.resume()
        proxy.set()
        finish(traffic, locations)
    print(f"{kind}: {hits(proxy, kind)} requests hit, {traffic.acked_rows} rows acknowledged")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(rounds(1, 10)))
def test_a_location_that_dies_again_and_again_stops_nobody_and_is_used_again(
    warm_server: Callable[..., WarmServer],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    rng: random.Random,
    part: int,
) -> None:
    locations = Locations(tmp_path, s3, proxy)
    server = warm_server(BUSY | locations.properties).start()
    with Traffic(server, rng) as traffic:
        for _ in range(rounds(1, 5)):
            proxy.set()
            eventually(lambda: health(server) is Health.ACTIVE, "the location is used again")
            await_files(traffic, locations, IN_S3)
            kind: Kind = rng.choice(("reset", "status_503"))
            proxy.set([Fault(kind)])
            eventually(lambda: health(server) is Health.DOWN, "the location is down")
            await_files(traffic, locations, DIRECTORY)
        proxy.set()
        finish(traffic, locations)
    print(f"{rounds(1, 5)} deaths, {traffic.acked_rows} rows acknowledged")


def health(server: WarmServer) -> Health:
    """The health of the S3 location, as the server reports it."""
    with zufluss.connect(server.bootstrap, **CLIENT) as conn:
        return {x.location_id: x.health for x in conn.admin.locations().locations}[IN_S3]


def await_files(traffic: Traffic, locations: Locations, location_id: int) -> None:
    """Continue until a location has new files."""
    before = {name for at, name in run(locations.names()) if at == location_id}
    while not {name for at, name in run(locations.names()) if at == location_id} - before:
        traffic.progress()
