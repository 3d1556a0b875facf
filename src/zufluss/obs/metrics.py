"""Every metric, declared once.

A process with `zufluss.metrics.port` serves its metrics to Prometheus (`endpoint.py`). A server is
asked for numbers it has anyway when somebody looks (`server.py` beside this module), so that the
paths of requests do no work for it; a tiering service counts rounds. Names, labels and meanings
stand in the declarations below and nowhere else; `docs/metrics.md` is generated from them:

    python -m zufluss.obs.metrics docs/metrics.md

`prometheus_client` is imported when something is served, not with this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

    from zufluss.model.table import TablePath


class MetricKind(StrEnum):
    """How the value of a metric changes."""

    COUNTER = "counter"
    """Up only, from 0 at the start of the process."""
    GAUGE = "gauge"
    """Up and down."""
    HISTOGRAM = "histogram"
    """Observations, counted in buckets."""


class MetricSource(StrEnum):
    """The process that serves a metric."""

    SERVER = "every server"
    TABLET = "tablet server"
    COORDINATOR = "coordinator"
    TIERING = "tiering service"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it is served."""

    name: str
    """The metric's name; counters end in `_total`, after the unit."""
    kind: MetricKind
    """How the value changes."""
    source: MetricSource
    """The process that serves the metric."""
    help: str
    """What the value means."""
    labels: tuple[str, ...] = ()
    """The names of the labels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of one series."""

    metric: Metric
    """The metric."""
    value: float
    """The value."""
    labels: tuple[str, ...] = ()
    """The values of the metric's labels."""


ReadSamples = Callable[[], Iterable[Sample]]
"""Reads some samples, on the event loop."""
OF_TABLE = ("database", "table")
OF_LOCATION = ("location",)
OF_SERVER = ("server",)


def declares(source: MetricSource) -> Callable[..., Metric]:
    """How the metrics of a source are declared: counters are those whose name says so."""

    def declare(name: str, help: str, labels: tuple[str, ...] = ()) -> Metric:
        kind = MetricKind.COUNTER if name.endswith("_total") else MetricKind.GAUGE
        return Metric(name, kind, source, help, labels)

    return declare


server_metric = declares(MetricSource.SERVER)
tablet_metric = declares(MetricSource.TABLET)
coordinator_metric = declares(MetricSource.COORDINATOR)
service_metric = declares(MetricSource.TIERING)

# -- Servers -----------------------------------------------------------------------------------

SERVER_INFO = server_metric(
    "zufluss_server_info",
    "Always 1; the labels are the version and the role of the process.",
    ("version", "role"),
)
DISK_FREE_BYTES = server_metric(
    "zufluss_disk_free_bytes",
    "Free bytes of the disk with `data.dir`. A server whose disk is full refuses writes for now.",
)
DISK_SIZE_BYTES = server_metric(
    "zufluss_disk_size_bytes", "Size of the disk with `data.dir`, free or not."
)
LOOP_LAG_SECONDS_MAX = server_metric(
    "zufluss_loop_lag_seconds_max",
    "The longest time in the last minute or two that the event loop was late for a timer that "
    "falls due ten times a second; all clients wait meanwhile. Holds below 0.1 s may be missed.",
)
CONNECTIONS = server_metric("zufluss_connections", "Open connections.")
CONNECTIONS_MAX = server_metric(
    "zufluss_connections_max", "Connections that the server accepts at most."
)
STRANGERS = server_metric(
    "zufluss_strangers", "Connections whose client has not logged in or sent a request yet."
)
CLOSED_CONNECTIONS = server_metric(
    "zufluss_closed_connections_total",
    "Connections that the server refused or closed, by reason.",
    ("reason",),
)
REQUESTS_IN_FLIGHT = server_metric(
    "zufluss_requests_in_flight",
    "Unanswered requests, long polls included.",
)
REQUESTS = server_metric("zufluss_requests_total", "Requests by API.", ("api",))
REQUEST_ERRORS = server_metric(
    "zufluss_request_errors_total",
    "Requests answered with an error, by error; errors of single buckets do not count.",
    ("error",),
)
RECEIVED_BYTES = server_metric("zufluss_received_bytes_total", "Bytes received.")
SENT_BYTES = server_metric("zufluss_sent_bytes_total", "Bytes sent.")
RECEIVE_MEMORY_BYTES = server_metric(
    "zufluss_receive_memory_bytes",
    "Memory of requests that are still arriving; `zufluss.net.receive-memory` bounds it.",
)
SEND_MEMORY_BYTES = server_metric(
    "zufluss_send_memory_bytes",
    "Memory of answers that clients have not read; `zufluss.net.send-memory` bounds it. Short "
    "answers are not counted.",
)
REMOTE_PLACED_FILES = server_metric(
    "zufluss_remote_placed_files_total",
    "Files that this server put into a remote location, by the location's id.",
    OF_LOCATION,
)
REMOTE_PLACED_BYTES = server_metric(
    "zufluss_remote_placed_bytes_total", "Bytes of these files.", OF_LOCATION
)
REMOTE_ERRORS = server_metric(
    "zufluss_remote_errors_total",
    "Failed requests to a remote location; forbidden and missing objects do not count.",
    OF_LOCATION,
)
REMOTE_LATENCY_SECONDS = server_metric(
    "zufluss_remote_latency_seconds",
    "Moving average of the time that this server needed to put a file into a remote location.",
    OF_LOCATION,
)
REMOTE_HEALTH = server_metric(
    "zufluss_remote_health",
    "The health of a remote location as this server sees it: 0 works, 1 suspect, 2 down.",
    OF_LOCATION,
)
REMOTE_EFFECTIVE_WEIGHT = server_metric(
    "zufluss_remote_effective_weight",
    "The current weight of a remote location, after health and adaptive weights.",
    OF_LOCATION,
)
TABLE_BUCKETS = tablet_metric(
    "zufluss_table_buckets", "Buckets of the table that this server serves.", OF_TABLE
)
TABLE_ROWS = tablet_metric(
    "zufluss_table_rows",
    "Rows in the buckets of the table on this server: records of a log table, keys of a "
    "primary-key table. Not served for tables whose rows are not counted.",
    OF_TABLE,
)
TABLE_RECORDS = tablet_metric(
    "zufluss_table_records",
    "Records that were ever written to the logs of these buckets, their high watermarks added up. "
    "Those of a primary-key table are changes.",
    OF_TABLE,
)
TABLE_RECORD_RATE = tablet_metric(
    "zufluss_table_records_per_second",
    "Records per second that were written to these logs, on average over the last minute.",
    OF_TABLE,
)
TABLE_LOG_SIZE_BYTES = tablet_metric(
    "zufluss_table_log_size_bytes", "Size of these logs on the disk of this server.", OF_TABLE
)
BUCKETS = tablet_metric("zufluss_buckets", "Buckets that this server serves.")
BUCKETS_REFUSED = tablet_metric(
    "zufluss_buckets_refused",
    "Buckets that cannot be served because their data is damaged; the log says why.",
)
BUCKETS_RECOVERING = tablet_metric(
    "zufluss_buckets_recovering",
    "Buckets that failed or could not be opened, and that the server tries to open by itself; "
    "`zufluss doctor` tells the reasons.",
)
BUCKET_RECOVERY_ATTEMPTS = tablet_metric(
    "zufluss_bucket_recovery_attempts_total", "Tries to open such buckets."
)
BUCKETS_RECOVERED = tablet_metric(
    "zufluss_buckets_recovered_total", "Tries that succeeded: the bucket is served again."
)
LOG_SIZE_BYTES = tablet_metric("zufluss_log_size_bytes", "Size of all logs on this server.")
REMOTE_LOG_SIZE_BYTES = tablet_metric(
    "zufluss_remote_log_size_bytes", "Size of the remote parts of the logs on this server."
)
REMOTE_LOG_WAITING_SEGMENTS = tablet_metric(
    "zufluss_remote_log_waiting_segments",
    "Closed log segments that are not in remote storage yet; grows while no location works.",
)
REMOTE_LOG_FAILURES = tablet_metric(
    "zufluss_remote_log_failures_total",
    "Failed rounds of copying, expiring and moving log segments of a bucket; they are repeated.",
)
WAL_OBJECTS = tablet_metric(
    "zufluss_wal_objects_total",
    "Objects of the shared log that this server made durable. Served, as all of "
    "`zufluss_wal_…`, with `zufluss.log.durability = remote` only.",
)
WAL_BYTES = tablet_metric("zufluss_wal_bytes_total", "Bytes of the rows in these objects.")
WAL_PUT_FAILURES = tablet_metric(
    "zufluss_wal_put_failures_total",
    "Requests to create an object of the shared log that failed; each is sent again.",
)
WAL_WAITING_BYTES = tablet_metric(
    "zufluss_wal_waiting_bytes",
    "Bytes of rows that wait for an object of the shared log; at 64 MiB writes are refused.",
)
WAL_WAITING_SECONDS = tablet_metric(
    "zufluss_wal_waiting_seconds",
    "How long the oldest object of the shared log has been under way, 0 if none is.",
)
WAL_RETAINED_BYTES = tablet_metric(
    "zufluss_wal_retained_bytes",
    "Bytes in the shared log that a take-over would read; `zufluss.wal.retained` bounds them.",
)
WAL_SESSIONS_FENCED = tablet_metric(
    "zufluss_wal_sessions_fenced_total",
    "Sessions of this server in the shared log that the coordinator or another server ended.",
)
LOOKUPS_FORWARDED = tablet_metric(
    "zufluss_lookups_forwarded_total",
    "Lookups of clients that look for no other leader (pyfluss) which the bucket's leader answered "
    "through this server. Many mean that such clients should connect anew.",
)
LOOKUPS_NOT_FORWARDED = tablet_metric(
    "zufluss_lookups_not_forwarded_total",
    "The same that were refused, because the leader did not answer or too many waited for it.",
)
STANDBY_BUCKETS = tablet_metric(
    "zufluss_standby_buckets", "Buckets of other leaders that this server follows."
)
STANDBY_BUCKETS_IN_SYNC = tablet_metric(
    "zufluss_standby_buckets_in_sync",
    "Followed buckets that had everything of their leader less than 10 s ago.",
)
STANDBY_LAG_SECONDS = tablet_metric(
    "zufluss_standby_lag_seconds",
    "How long ago the followed bucket of this leader that lags most had everything. Not served "
    "while one of them has never had it.",
    ("leader",),
)
STANDBYS_PROMOTED = tablet_metric(
    "zufluss_standbys_promoted_total",
    "Buckets that this server led at once, with what it had followed.",
)
KV_MEMORY_BYTES = tablet_metric(
    "zufluss_kv_memory_bytes",
    "Key-value memory in use, out of `zufluss.kv.memory`. Most of it may be given up at any time.",
)
KV_MEMORY_BUDGET_BYTES = tablet_metric(
    "zufluss_kv_memory_budget_bytes",
    "Key-value memory that may be used: `zufluss.kv.memory`. Served once there is a primary-key "
    "table.",
)
KV_MEMORY_DIRTY_BYTES = tablet_metric(
    "zufluss_kv_memory_dirty_bytes",
    "Key-value memory with rows that are not flushed yet, which cannot be given up.",
)
KV_MEMORY_REFUSALS = tablet_metric(
    "zufluss_kv_memory_refusals_total",
    "Puts and replays that were refused because no key-value memory became free. They are tried "
    "again; a number that grows tells of failed flushes or too little `zufluss.kv.memory`.",
)
KV_DATABASE_DESCRIPTORS = tablet_metric(
    "zufluss_kv_database_descriptors",
    "Descriptors of the open databases of primary-key buckets, about; idle ones are closed when "
    "they need more than a quarter of the process's limit.",
)
KV_PINS = tablet_metric(
    "zufluss_kv_pins",
    "Scans and pinned states of primary-key buckets that are open; `kv.scanner.max-per-server` "
    "bounds their sum over all tables.",
    OF_TABLE,
)
KV_PIN_OLDEST_AGE_SECONDS = tablet_metric(
    "zufluss_kv_pin_oldest_age_seconds",
    "Age of the oldest scan or pinned state, 0 without any; each occupies disk space.",
    OF_TABLE,
)
KV_SCAN_ROWS = tablet_metric(
    "zufluss_kv_scan_rows_total", "Rows that scans of primary-key buckets answered.", OF_TABLE
)
KV_SCAN_BYTES = tablet_metric(
    "zufluss_kv_scan_bytes_total", "Bytes of these rows, as they were sent.", OF_TABLE
)
PRODUCER_PUTS_FENCED = tablet_metric(
    "zufluss_producer_puts_fenced_total",
    "Puts refused as those of an earlier epoch, or to columns that another producer owns.",
)
UNDO_KEYS = tablet_metric(
    "zufluss_undo_keys_total",
    "Keys that were changed to undo the writes of restarted exactly-once writers.",
)
UNTIERED_ROWS = tablet_metric(
    "zufluss_untiered_rows",
    "Log records of a lake table that are not in the lake yet; retention keeps them.",
    OF_TABLE,
)

# -- Remote locations, as the coordinator sees them --------------------------------------------

REMOTE_LIVE_FILES = coordinator_metric(
    "zufluss_remote_live_files",
    "Files in a remote location that manifests, snapshots and lake tables refer to.",
    OF_LOCATION,
)
REMOTE_LIVE_BYTES = coordinator_metric(
    "zufluss_remote_live_bytes", "Bytes of these files, as far as they are known.", OF_LOCATION
)
REMOTE_STATE = coordinator_metric(
    "zufluss_remote_state",
    "The state of a remote location that the operator set: 0 active, 1 draining, 2 retired.",
    OF_LOCATION,
)
REMOTE_WEIGHT = coordinator_metric(
    "zufluss_remote_weight",
    "The weight of a remote location for new files, as configured.",
    OF_LOCATION,
)
REMOTE_REGISTRY_VERSION = coordinator_metric(
    "zufluss_remote_registry_version",
    "The version of the registry of remote locations; it grows with each change.",
)

# -- Tablet servers, as the coordinator sees them ----------------------------------------------

LEADERS = coordinator_metric(
    "zufluss_leaders", "Buckets that a tablet server leads, whether it is there or not.", OF_SERVER
)
SERVER_TAG = coordinator_metric(
    "zufluss_server_tag",
    "Always 1, for each tablet server with a tag, which gets no more buckets.",
    (*OF_SERVER, "tag"),
)

REBALANCE_MOVES = coordinator_metric(
    "zufluss_rebalance_moves",
    "Moves of the newest rebalance, by how far they are.",
    ("status",),
)

# -- Tiering, as the coordinator sees it -------------------------------------------------------

TIERING_PENDING_TABLES = coordinator_metric(
    "zufluss_tiering_pending_tables", "Tables that wait for a tiering service."
)
TIERING_RUNNING_TABLES = coordinator_metric(
    "zufluss_tiering_running_tables", "Tables that a tiering service works on."
)
TIERING_LAG_SECONDS = coordinator_metric(
    "zufluss_tiering_lag_seconds",
    "Time since the table was last tiered, or created; compare with its "
    "`table.datalake.freshness`.",
    OF_TABLE,
)
TIERING_LAST_DURATION_SECONDS = coordinator_metric(
    "zufluss_tiering_last_duration_seconds",
    "How long the last finished round of the table took.",
    OF_TABLE,
)
TIERING_PENDING_SECONDS = coordinator_metric(
    "zufluss_tiering_pending_seconds",
    "How long the table has been waiting for a tiering service; 0 if it is not waiting.",
    OF_TABLE,
)
TIERING_FAILURES = coordinator_metric(
    "zufluss_tiering_failures_total",
    "Rounds of the table that failed or fell silent.",
    OF_TABLE,
)
TIERING_FILE_SIZE_BYTES = coordinator_metric(
    "zufluss_tiering_file_size_bytes",
    "Size of the lake table, as last reported by a tiering service.",
    OF_TABLE,
)
TIERING_RECORDS = coordinator_metric(
    "zufluss_tiering_records",
    "Rows of the lake table, as last reported by a tiering service.",
    OF_TABLE,
)

# -- Producers ---------------------------------------------------------------------------------

PRODUCERS = coordinator_metric(
    "zufluss_producers",
    "Producers that tables remember, the lost ones included: see `zufluss producer list`.",
)
PRODUCERS_LOST = coordinator_metric(
    "zufluss_producers_lost",
    "Producers whose columns another producer took over after a silence; drop them.",
)

# -- Remote files that are not needed any more -------------------------------------------------

KV_SNAPSHOT_LEASES = coordinator_metric(
    "zufluss_kv_snapshot_leases", "Leases of key-value snapshots."
)
KV_SNAPSHOT_LEASED_SNAPSHOTS = coordinator_metric(
    "zufluss_kv_snapshot_leased_snapshots", "Key-value snapshots that leases hold, each once."
)
KV_SNAPSHOT_LEASED_BYTES = coordinator_metric(
    "zufluss_kv_snapshot_leased_bytes",
    "Size of the key-value snapshots that leases hold, each once; files that snapshots share count "
    "for each of them.",
)
KV_SNAPSHOT_LEASE_OLDEST_AGE_SECONDS = coordinator_metric(
    "zufluss_kv_snapshot_lease_oldest_age_seconds",
    "Age of the oldest lease, 0 without one; an old lease keeps files that nobody else needs.",
)
KV_SNAPSHOT_LEASES_DAMAGED = coordinator_metric(
    "zufluss_kv_snapshot_leases_damaged",
    "Leases whose record cannot be read: they hold all snapshots of their tables until they are "
    "dropped.",
)
KV_SNAPSHOT_DELETIONS = coordinator_metric(
    "zufluss_kv_snapshot_deletions_pending",
    "Buckets with dropped key-value snapshots whose files are still to be deleted.",
)
COORDINATOR_LEADS = coordinator_metric(
    "zufluss_coordinator_leads",
    "1 for the coordinator that leads the cluster, 0 for a standby.",
)
WAL_SESSIONS = coordinator_metric(
    "zufluss_wal_sessions",
    "Sessions of tablet servers in the shared log, by state: `live`, `closing` (where it ended is "
    "being found out), `sealed` (buckets are taken over from it), `released` (to be deleted).",
    ("state",),
)
WAL_BUCKETS_TAKEN_OVER = coordinator_metric(
    "zufluss_wal_buckets_taken_over_total",
    "Buckets of lost tablet servers that got another leader.",
)
CLEANER_PENDING = coordinator_metric(
    "zufluss_remote_cleaner_pending",
    "Dropped tables and partitions whose remote files are not all deleted, those that leases hold "
    "included.",
)
CLEANER_FILES = coordinator_metric(
    "zufluss_remote_cleaner_files_total",
    "Remote files of dropped tables and partitions that were deleted.",
)
CLEANER_FAILURES = coordinator_metric(
    "zufluss_remote_cleaner_failures_total",
    "Failed attempts to delete remote files of dropped tables; they are repeated.",
)
SWEEPS = coordinator_metric(
    "zufluss_remote_sweeps_total", "Searches of all locations for files that nothing refers to."
)
SWEEP_FILES = coordinator_metric(
    "zufluss_remote_sweep_files_total",
    "Remote files that nothing referred to and that were deleted.",
)
SWEEP_BYTES = coordinator_metric(
    "zufluss_remote_sweep_bytes_total",
    "Size of the remote files that nothing referred to and that were deleted.",
)
SWEEP_FAILURES = coordinator_metric(
    "zufluss_remote_sweep_failures_total",
    "Locations and buckets that a sweep left out because it could not read them.",
)
SWEEP_LAST = coordinator_metric(
    "zufluss_remote_sweep_last_timestamp_seconds",
    "When the last sweep was finished, in seconds since 1970; 0 before the first.",
)

# -- Tiering, as a service sees it -------------------------------------------------------------

SERVICE_ROUNDS = service_metric(
    "zufluss_tiering_service_rounds_total",
    "Ended rounds by outcome: `committed`, `empty` (nothing new), `fenced`, `failed`, `cancelled`.",
    ("outcome",),
)
SERVICE_ROWS = service_metric(
    "zufluss_tiering_service_rows_total",
    "Log records that committed rounds moved to the lake.",
    OF_TABLE,
)
SERVICE_BYTES = service_metric(
    "zufluss_tiering_service_bytes_total",
    "Bytes of the records that committed rounds moved to the lake, as Arrow in memory.",
    OF_TABLE,
)
SERVICE_LAG_ROWS = service_metric(
    "zufluss_tiering_service_lag_rows",
    "Log records of the table that were not in the lake when its last round ended.",
    OF_TABLE,
)
SERVICE_ROUND_SECONDS = Metric(
    "zufluss_tiering_service_round_seconds",
    MetricKind.HISTOGRAM,
    MetricSource.TIERING,
    "Duration of rounds, whatever their outcome.",
)
SERVICE_LAST_COMMIT = service_metric(
    "zufluss_tiering_service_last_commit_timestamp_seconds",
    "When this service last committed a round of the table, in seconds since 1970.",
    OF_TABLE,
)

METRICS: Mapping[str, Metric] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Metric)
}
"""Every metric by name, in the order declared."""

ROUND_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
"""Upper bounds of the buckets of round durations."""


class TieringServiceMetrics:
    """What a tiering service counts. Safe in any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def made(kind: Any, metric: Metric, **options: Any) -> Any:
            return kind(metric.name, metric.help, metric.labels, registry=registry, **options)

        self._rounds = made(Counter, SERVICE_ROUNDS)
        self._rows = made(Counter, SERVICE_ROWS)
        self._bytes = made(Counter, SERVICE_BYTES)
        self._lag = made(Gauge, SERVICE_LAG_ROWS)
        self._seconds = made(Histogram, SERVICE_ROUND_SECONDS, buckets=ROUND_SECONDS_BUCKETS)
        self._last_commit = made(Gauge, SERVICE_LAST_COMMIT)

    def round_ended(self, outcome: str, seconds: float) -> None:
        """Count a round by outcome: `committed`, `empty`, `fenced`, `failed` or `cancelled`."""
        self._rounds.labels(outcome).inc()
        self._seconds.observe(seconds)

    def committed(self, path: TablePath, rows: int, size: int, at_ms: int) -> None:
        """Count the log records, and their bytes in memory, that a round put into the lake."""
        self._rows.labels(*path).inc(rows)
        self._bytes.labels(*path).inc(size)
        self._last_commit.labels(*path).set(at_ms / 1000)

    def lag(self, path: TablePath, rows: int) -> None:
        """Set how many log records of the table are not yet in the lake."""
        self._lag.labels(*path).set(rows)

    def forget(self, path: TablePath) -> None:
        """Remove the series of a table that was dropped."""
        for metric in (self._rows, self._bytes, self._lag, self._last_commit):
            with suppress(KeyError):  # it never had a value
                metric.remove(*path)


class SampleCollector:
    """Serves the samples of a function that is called at each scrape."""

    def __init__(self, samples: ReadSamples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        """The samples by metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[Metric, Any] = {}
        for sample in self._samples():
            metric = sample.metric
            if metric not in families:
                counts = metric.kind is MetricKind.COUNTER
                family = CounterMetricFamily if counts else GaugeMetricFamily
                families[metric] = family(metric.name, metric.help, labels=metric.labels)
            families[metric].add_metric(sample.labels, sample.value)
        return iter(families.values())


def new_registry() -> CollectorRegistry:
    """A registry that shows this process: processor time, memory, open files."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


# -- The page ----------------------------------------------------------------------------------

INTRODUCTION = """\
# Metrics

<!-- Generated by `python -m zufluss.obs.metrics docs/metrics.md`; do not edit. -->

A server or tiering service with `zufluss.metrics.port` answers `GET /metrics` in the format of
Prometheus; `zufluss.metrics.host` says on which address, `localhost` by default, because whoever
reaches it may read it. Without a port nothing is served, and Prometheus' library is not loaded. The
same port answers `/health` and `/ready` ([server.md](server.md#probes)).

```
zufluss dev -D zufluss.metrics.port=9464
curl localhost:9464/metrics
```

Beside the metrics below there are the usual `process_*` ones: processor time, memory, open files.
A process with both roles shows what both show. Counters begin at 0 when the process starts.
"""


def render() -> str:
    """The page of all metrics."""
    sections = [INTRODUCTION]
    for source in MetricSource:
        lines = ["| Name | Kind | Labels | Meaning |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in METRICS.values() if metric.source is source]
        sections.append(f"## {source.value.capitalize()}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(sections)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zufluss.obs.metrics")
    parser.add_argument("path", type=Path, help="the page, docs/metrics.md")
    parser.add_argument("--check", action="store_true", help="fail when the page is stale")
    chosen = parser.parse_args(arguments)
    page = render()
    if not chosen.check:
        chosen.path.write_text(page, encoding="utf-8")
        return 0
    if chosen.path.is_file() and chosen.path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{chosen.path} is stale; run `python -m zufluss.obs.metrics`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
