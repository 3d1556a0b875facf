"""The metrics of a server: numbers that it has anyway, read at each scrape.

Everything a server knows belongs to its event loop, so a scrape, which comes in a thread, has the
loop read it: one visit, no locks, and nothing to keep up to date in between. A loop that does not
find the time within `SCRAPE_SECONDS` is a server in trouble; the scrape then fails, which is what a
monitor should see.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from zufluss import __version__
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode
from zufluss.obs import metrics
from zufluss.obs.endpoint import HttpEndpoint
from zufluss.obs.lag import LoopLag
from zufluss.obs.metrics import ReadSamples, Sample, SampleCollector
from zufluss.obs.pulse import Pulse
from zufluss.wire import messages as m
from zufluss.wire.api import APIS

if TYPE_CHECKING:
    from zufluss.cluster.image import ClusterImage
    from zufluss.coordinator.lake.queue import TieringStatus
    from zufluss.coordinator.leases.book import LeaseBook
    from zufluss.coordinator.producers.calls import ProducerCalls
    from zufluss.coordinator.rebalance.rebalances import Rebalances
    from zufluss.coordinator.remote.keeper import RemoteKeeper
    from zufluss.coordinator.remote.locations import LocationRegistry
    from zufluss.coordinator.turn import Turn
    from zufluss.coordinator.wal.book import SessionBook
    from zufluss.coordinator.wal.takeover import Takeovers
    from zufluss.net.server import NetServer
    from zufluss.net.services import RequestContext
    from zufluss.remote.storage import RemoteStorage

log = structlog.get_logger(__name__)

SCRAPE_SECONDS = 10.0
"""How long a scrape waits for the event loop."""


def serve_http(
    conf: Configuration, sources: Sequence[ReadSamples], pulse: Pulse
) -> HttpEndpoint | None:
    """Serve what the sources read and the pulse, if a port is configured. Call it on the loop.

    Sources that are added to `sources` later are served from then on.
    """
    port = conf.get(options.ZUFLUSS_METRICS_PORT)
    if port is None:
        return None
    loop = asyncio.get_running_loop()

    async def read() -> list[Sample]:
        return [sample for source in sources for sample in source()]

    def samples() -> list[Sample]:
        return asyncio.run_coroutine_threadsafe(read(), loop).result(SCRAPE_SECONDS)

    registry = metrics.new_registry()
    registry.register(SampleCollector(samples))
    host = conf.get(options.ZUFLUSS_METRICS_HOST)
    endpoint = HttpEndpoint(registry, host, port, health=pulse.health, ready=pulse.ready)
    log.info("metrics_served", address=f"http://{host}:{endpoint.port}/metrics")
    return endpoint


class ServerDescription:
    """The handler of DESCRIBE_SERVER, which needs no port for metrics."""

    def __init__(
        self,
        role: str,
        samples: Sequence[ReadSamples],
        lag: LoopLag,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lag` is measured from the first request on."""
        self._role = role
        self._samples = samples
        self._lag = lag
        self._clock = clock
        self._began = clock()

    async def describe_server(
        self, request: m.DescribeServerRequest, context: RequestContext
    ) -> m.DescribeServerResponse:
        """DESCRIBE_SERVER (30051): version, role, uptime and all samples."""
        self._lag.begin()
        response = m.DescribeServerResponse(
            version=__version__,
            role=self._role,
            uptime_ms=round((self._clock() - self._began) * 1000),
        )
        for source in self._samples:
            for sample in source():
                response.samples.add(
                    metric=sample.metric.name, labels=sample.labels, value=sample.value
                )
        return response


def disk_samples(data_dir: Path) -> ReadSamples:
    """The disk of a server."""

    def read() -> Iterable[Sample]:
        usage = shutil.disk_usage(data_dir)
        yield Sample(metrics.DISK_FREE_BYTES, usage.free)
        yield Sample(metrics.DISK_SIZE_BYTES, usage.total)

    return read


def net_samples(net: NetServer, role: str) -> ReadSamples:
    """Connections and requests of a server."""

    def read() -> Iterable[Sample]:
        yield Sample(metrics.SERVER_INFO, 1, (__version__, role))
        yield Sample(metrics.CONNECTIONS, len(net.connections))
        yield Sample(metrics.CONNECTIONS_MAX, net.limits.connections_max)
        yield Sample(metrics.STRANGERS, len(net.strangers))
        for reason, count in net.closed.items():
            yield Sample(metrics.CLOSED_CONNECTIONS, count, (reason,))
        yield Sample(metrics.SEND_MEMORY_BYTES, net.sending.used)
        yield Sample(metrics.REQUESTS_IN_FLIGHT, sum(c.inflight for c in net.connections))
        yield Sample(metrics.RECEIVED_BYTES, net.received_bytes)
        yield Sample(metrics.SENT_BYTES, net.sent_bytes)
        yield Sample(metrics.RECEIVE_MEMORY_BYTES, net.memory.used)
        for key, count in net.requests.items():
            yield Sample(metrics.REQUESTS, count, (APIS[key].name,))
        for code, count in net.errors.items():
            yield Sample(metrics.REQUEST_ERRORS, count, (ErrorCode(code).name,))

    return read


def location_samples(storage: RemoteStorage) -> ReadSamples:
    """Health of the remote locations as this process sees it."""

    def read() -> Iterable[Sample]:
        for report in storage.reports():
            values = {
                metrics.REMOTE_PLACED_FILES: report.placed_files,
                metrics.REMOTE_PLACED_BYTES: report.placed_bytes,
                metrics.REMOTE_ERRORS: report.errors,
                metrics.REMOTE_LATENCY_SECONDS: report.latency_ms / 1000,
                metrics.REMOTE_HEALTH: report.health,
                metrics.REMOTE_EFFECTIVE_WEIGHT: report.effective_weight,
            }
            for metric, value in values.items():
                yield Sample(metric, value, (str(report.location_id),))

    return read


def registry_samples(registry: LocationRegistry) -> ReadSamples:
    """The registry of remote locations, and their files."""

    def read() -> Iterable[Sample]:
        locations, live = registry.locations, registry.live()
        yield Sample(metrics.REMOTE_REGISTRY_VERSION, locations.version)
        for location in locations.locations:
            used = live.get(location.location_id)
            values = {
                metrics.REMOTE_LIVE_FILES: 0 if used is None else used.files,
                metrics.REMOTE_LIVE_BYTES: 0 if used is None else used.bytes,
                metrics.REMOTE_STATE: location.state,
                metrics.REMOTE_WEIGHT: location.weight,
            }
            for metric, value in values.items():
                yield Sample(metric, value, (str(location.location_id),))

    return read


def balance_samples(image: ClusterImage, rebalances: Rebalances) -> ReadSamples:
    """How the buckets are shared out among the tablet servers."""

    def read() -> Iterable[Sample]:
        for server_id in sorted(image.tablets.keys() | (+image.leaders).keys()):
            yield Sample(metrics.LEADERS, image.leaders[server_id], (str(server_id),))
        for server_id, tag in sorted(image.tags.items()):
            yield Sample(metrics.SERVER_TAG, 1, (str(server_id), tag.name))
        if rebalances.newest is not None:
            for status, count in rebalances.newest.counts.items():
                yield Sample(metrics.REBALANCE_MOVES, count, (status.name,))

    return read


def tiering_samples(status: Callable[[], Sequence[TieringStatus]]) -> ReadSamples:
    """The queue of tables to tier."""

    def read() -> Iterable[Sample]:
        tables = status()
        states = [table.state.value for table in tables]
        yield Sample(metrics.TIERING_PENDING_TABLES, states.count("pending"))
        yield Sample(metrics.TIERING_RUNNING_TABLES, states.count("tiering"))
        for table in tables:
            values = {
                metrics.TIERING_LAG_SECONDS: table.tier_lag_ms / 1000,
                metrics.TIERING_LAST_DURATION_SECONDS: _seconds(table.last_duration_ms),
                metrics.TIERING_PENDING_SECONDS: table.pending_ms / 1000,
                metrics.TIERING_FAILURES: table.failures,
                metrics.TIERING_FILE_SIZE_BYTES: table.file_size,
                metrics.TIERING_RECORDS: table.record_count,
            }
            for metric, value in values.items():
                if value is not None:
                    yield Sample(metric, value, tuple(table.path))

    return read


def remote_files_samples(remote: RemoteKeeper) -> ReadSamples:
    """Deletions in remote storage."""

    def read() -> Iterable[Sample]:
        cleaner, sweep = remote.cleaner, remote.sweep.counts
        yield Sample(metrics.KV_SNAPSHOT_DELETIONS, remote.snapshots.deletions.pending)
        yield Sample(metrics.CLEANER_PENDING, cleaner.pending)
        yield Sample(metrics.CLEANER_FILES, cleaner.deleted_files)
        yield Sample(metrics.CLEANER_FAILURES, cleaner.drops.failures)
        yield Sample(metrics.SWEEPS, sweep.sweeps)
        yield Sample(metrics.SWEEP_FILES, sweep.deleted_files)
        yield Sample(metrics.SWEEP_BYTES, sweep.deleted_bytes)
        yield Sample(metrics.SWEEP_FAILURES, sweep.failures)
        yield Sample(metrics.SWEEP_LAST, sweep.finished_ms / 1000)

    return read


def lease_samples(leases: LeaseBook) -> ReadSamples:
    """The leases of key-value snapshots."""

    def read() -> Iterable[Sample]:
        counts = leases.counts
        yield Sample(metrics.KV_SNAPSHOT_LEASES, counts.leases)
        yield Sample(metrics.KV_SNAPSHOT_LEASED_SNAPSHOTS, counts.snapshots)
        yield Sample(metrics.KV_SNAPSHOT_LEASED_BYTES, counts.bytes)
        yield Sample(metrics.KV_SNAPSHOT_LEASE_OLDEST_AGE_SECONDS, counts.oldest_age_seconds)
        yield Sample(metrics.KV_SNAPSHOT_LEASES_DAMAGED, counts.damaged)

    return read


def turn_samples(turn: Turn | None) -> ReadSamples:
    """Whether this coordinator leads; without an election it does."""

    def read() -> Iterable[Sample]:
        yield Sample(metrics.COORDINATOR_LEADS, int(turn is None or turn.leads))

    return read


def session_samples(book: SessionBook, takeovers: Takeovers | None) -> ReadSamples:
    """The sessions of the shared log, and what was taken over from them."""

    def read() -> Iterable[Sample]:
        for state, count in book.counts.items():
            yield Sample(metrics.WAL_SESSIONS, count, (state,))
        if takeovers is not None:
            yield Sample(metrics.WAL_BUCKETS_TAKEN_OVER, takeovers.count)

    return read


def producer_samples(producers: ProducerCalls) -> ReadSamples:
    """The producers of tables."""

    def read() -> Iterable[Sample]:
        counts = producers.counts
        yield Sample(metrics.PRODUCERS, counts.producers)
        yield Sample(metrics.PRODUCERS_LOST, counts.lost)

    return read


def _seconds(value_ms: int | None) -> float | None:
    return None if value_ms is None else value_ms / 1000
