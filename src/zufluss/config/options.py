"""Every option, declared once: those of servers here, and in `zookeeper_options.py`.

Those of clients are in `client_options.py`.

Keys of Fluss keep their names, value forms and, unless the help says otherwise, defaults, so that
an existing `server.yaml` works (`netty.*` keys too, although zufluss has no netty). Our own keys
start with `zufluss.`. Only keys that the code reads are declared; an unknown key in a configuration
is a warning (see `load.py`).

The constant of a key is the key in capitals: `log.segment.file-size` is `LOG_SEGMENT_FILE_SIZE`.
Table properties are in `table_options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zufluss.config.client_options import CLIENT_OPTIONS
from zufluss.config.option import Option as Option
from zufluss.config.option import (
    bool_option,
    duration_option,
    endpoints_option,
    enum_option,
    int_option,
    list_option,
    map_option,
    memory_option,
    string_option,
)
from zufluss.config.values import (
    DAY_MS,
    GIB,
    HOUR_MS,
    INT32_MAX,
    KIB,
    MIB,
    MINUTE_MS,
    SECOND_MS,
    Endpoint,
)
from zufluss.config.zookeeper_options import ZOOKEEPER_OPTIONS
from zufluss.lake_formats import LAKE_FORMATS

# -- Listeners and security --------------------------------------------------------------------

BIND_LISTENERS: Option[tuple[Endpoint, ...]] = endpoints_option(
    "bind.listeners",
    (Endpoint("FLUSS", "localhost", 9123),),
    "The addresses the server listens on, one named listener each. An empty host binds every "
    "interface, port 0 a free port.",
)
ADVERTISED_LISTENERS: Option[tuple[Endpoint, ...]] = endpoints_option(
    "advertised.listeners",
    (),
    "The addresses for clients, by listener name, where they differ from `bind.listeners` (NAT, "
    "containers). A client gets the addresses of the listener that it uses.",
    default_text="as bound",
)
INTERNAL_LISTENER_NAME = string_option(
    "internal.listener.name", "FLUSS", "The listener that servers use among themselves."
)
SECURITY_PROTOCOL_MAP: Option[dict[str, str]] = map_option(
    "security.protocol.map",
    {},
    "The security protocol of each listener, such as `CLIENT:sasl,INTERNAL:plaintext`. "
    "A listener that is not named is plaintext.",
    allowed=("plaintext", "sasl"),
    default_text="all plaintext",
)
SUPER_USERS = string_option(
    "super.users",
    None,
    "Users who may do everything, such as dropping the leases of others, separated by semicolons: "
    "`User:admin;User:root`.",
    default_text="nobody",
)
ZUFLUSS_OVERWRITE_USERS = string_option(
    "zufluss.overwrite.users",
    None,
    "The only users who may overwrite rows past the merge engine or the delete behavior of a "
    "table, beside `super.users`, in the same form; empty for no others. Flink's aggregation sinks "
    "overwrite when they undo. Without a `sasl` listener users have no names, and everybody may.",
    default_text="everybody",
)
SECURITY_SASL_PLAIN_JAAS_CONFIG = string_option(
    "security.sasl.plain.jaas.config",
    None,
    "The users of SASL/PLAIN in Fluss's form: "
    "`org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required "
    'user_NAME="PASSWORD" …;`',
    secret=True,
)

# -- Roles and directories ---------------------------------------------------------------------

ZUFLUSS_COORDINATOR_ID = int_option(
    "zufluss.coordinator.id",
    0,
    "The id under which the coordinator appears in cluster metadata.",
    minimum=0,
    maximum=INT32_MAX,
)
ZUFLUSS_COORDINATOR_ADDRESS = string_option(
    "zufluss.coordinator.address",
    None,
    "`host:port` of the coordinator's internal listener; a tablet server started on its own "
    "(`zufluss server --role tablet`) registers there. With `zookeeper.address` it registers at "
    "the coordinator that leads, and needs no address.",
)
TABLET_SERVER_ID = int_option(
    "tablet-server.id",
    1,
    "The id of this tablet server, unique in the cluster and kept over restarts.",
    minimum=0,
    maximum=INT32_MAX,
)
TABLET_SERVER_RACK = string_option(
    "tablet-server.rack",
    None,
    "The rack of this tablet server. The buckets of a new table or partition are spread over "
    "racks.",
    default_text="no rack",
)
DATA_DIR = string_option(
    "data.dir",
    "zufluss-data",
    "The directory for metadata and logs; relative to where the server is started.",
)

# -- Remote storage ----------------------------------------------------------------------------

REMOTE_DATA_DIR = string_option(
    "remote.data.dir",
    None,
    "The only location of remote files, a path or a URI (`file:`, `s3:`, `gs:`, `az:`, `abfs:`). "
    "With `remote.data.dirs` it must be one of these. Without either, log segments stay on the "
    "server, and snapshots and the offsets files of the lake are stored in its data directory.",
    default_text="`remote` in `data.dir`",
)
REMOTE_DATA_DIRS: Option[tuple[str, ...]] = list_option(
    "remote.data.dirs",
    (),
    "Several locations of remote files; new files are spread over them. A location that still has "
    "files must stay in the list, with weight 0 or drained.",
    dynamic=True,
)
REMOTE_DATA_DIRS_STRATEGY = enum_option(
    "remote.data.dirs.strategy",
    "ROUND_ROBIN",
    "How new files are spread: evenly, or by `remote.data.dirs.weights`.",
    allowed=("ROUND_ROBIN", "WEIGHTED_ROUND_ROBIN"),
    dynamic=True,
)
REMOTE_DATA_DIRS_WEIGHTS: Option[tuple[str, ...]] = list_option(
    "remote.data.dirs.weights",
    (),
    "The share of each of `remote.data.dirs` under WEIGHTED_ROUND_ROBIN, a whole number; a "
    "location with weight 0 gets no new files.",
    dynamic=True,
)
REMOTE_LOG_TASK_INTERVAL_DURATION = duration_option(
    "remote.log.task-interval-duration",
    MINUTE_MS,
    "How often closed log segments are copied to remote storage and expired ones removed there; "
    "0 leaves logs on the server, and is refused with `zufluss.log.durability` = remote.",
    minimum=0,
)
REMOTE_LOG_DATA_TRANSFER_THREAD_NUM = int_option(
    "remote.log.data-transfer-thread-num",
    4,
    "The number of files that a server sends to each remote location at once.",
    minimum=1,
    maximum=64,
)
KV_SNAPSHOT_INTERVAL = duration_option(
    "kv.snapshot.interval",
    10 * MINUTE_MS,
    "How often a bucket of a primary-key table that has changed is copied to remote storage.",
    minimum=1,
    dynamic=True,
)
KV_SNAPSHOT_NUM_RETAINED = int_option(
    "kv.snapshot.num-retained",
    2,
    "The number of snapshots of a bucket that are kept.",
    minimum=1,
    maximum=1000,
)
KV_SNAPSHOT_LEASE_EXPIRATION_CHECK_INTERVAL = duration_option(
    "kv.snapshot.lease.expiration-check-interval",
    10 * MINUTE_MS,
    "How often the remaining time of leases of snapshots is stored, so that it continues from "
    "there after a restart. An expired lease frees its snapshots at once in any case.",
    minimum=1,
)
ZUFLUSS_KV_SNAPSHOT_LEASE_DURATION_MAX = duration_option(
    "zufluss.kv.snapshot.lease.duration-max",
    7 * DAY_MS,
    "The longest duration of a lease of snapshots; a renewal begins a new one.",
    minimum=1,
)
ZUFLUSS_KV_SNAPSHOT_LEASE_COUNT_MAX = int_option(
    "zufluss.kv.snapshot.lease.count-max",
    10_000,
    "The number of leases that one user may have.",
    minimum=1,
)
ZUFLUSS_KV_SNAPSHOT_LEASE_BYTES_MAX = memory_option(
    "zufluss.kv.snapshot.lease.bytes-max",
    None,
    "The largest total size of the leased snapshots of a table; an acquire that would exceed it is "
    "refused.",
    minimum=1,
    default_text="no limit",
)
ZUFLUSS_KV_SNAPSHOT_LEASE_RESTART_GRACE = duration_option(
    "zufluss.kv.snapshot.lease.restart-grace",
    10 * MINUTE_MS,
    "The shortest time that a lease lives after a start of the coordinator, because nobody could "
    "renew it before.",
    minimum=0,
)
ZUFLUSS_KV_SNAPSHOT_LEASE_ON_DROP = enum_option(
    "zufluss.kv.snapshot.lease.on-drop",
    "wait",
    "What happens to leased snapshots of a table or partition that is dropped or expires: `wait` "
    "keeps their files, and an expired partition, until they are released or "
    "`zufluss.kv.snapshot.lease.drop-wait-max` is over; `revoke` deletes them at once, and the "
    "reader gets an error.",
    allowed=("wait", "revoke"),
)
ZUFLUSS_KV_SNAPSHOT_LEASE_DROP_WAIT_MAX = duration_option(
    "zufluss.kv.snapshot.lease.drop-wait-max",
    DAY_MS,
    "The longest time that leases keep files of dropped tables, and expired partitions; then they "
    "are revoked.",
    minimum=0,
)
COORDINATOR_PRODUCER_OFFSETS_TTL = duration_option(
    "coordinator.producer-offsets.ttl",
    DAY_MS,
    "How long the offsets that a producer registered are kept, unless it names a time itself.",
    minimum=1,
)
COORDINATOR_PRODUCER_OFFSETS_CLEANUP_INTERVAL = duration_option(
    "coordinator.producer-offsets.cleanup-interval",
    HOUR_MS,
    "How often expired offsets of producers are deleted. They are not returned after their expiry "
    "in any case.",
    minimum=1,
)
ZUFLUSS_PRODUCER_TTL_MAX = duration_option(
    "zufluss.producer.ttl-max",
    7 * DAY_MS,
    "The longest time without a sign of life for which a producer may own its columns.",
    minimum=1,
)
ZUFLUSS_PRODUCER_COUNT_MAX = int_option(
    "zufluss.producer.count-max",
    1000,
    "The number of producers that a table remembers; release or drop those that ended.",
    minimum=1,
)
ZUFLUSS_PRODUCER_HOLD_MAX = duration_option(
    "zufluss.producer.hold-max",
    7 * DAY_MS,
    "How long after its last sign of life the changelog that a producer would need for an undo is "
    "kept. A producer that owns no columns (of a log table, or of plain upserts) is forgotten "
    "after this time.",
    minimum=0,
)
ZUFLUSS_REMOTE_REQUEST_TIMEOUT = duration_option(
    "zufluss.remote.request-timeout",
    30 * SECOND_MS,
    "How long one request to remote storage may take.",
    minimum=100,
)
ZUFLUSS_REMOTE_DOWN_AFTER = int_option(
    "zufluss.remote.down-after",
    3,
    "After this many failures in a row a location gets no new files until it answers probes again.",
    minimum=1,
)
ZUFLUSS_REMOTE_PROBE_INTERVAL = duration_option(
    "zufluss.remote.probe-interval",
    5 * SECOND_MS,
    "How often a failed location is probed; the interval doubles, up to a minute, while probes "
    "fail.",
    minimum=10,
)
ZUFLUSS_REMOTE_ADAPTIVE_WEIGHTS = bool_option(
    "zufluss.remote.adaptive-weights",
    False,
    "Give slow, failing or throttled locations fewer new files than their weight says, never more.",
    dynamic=True,
)
ZUFLUSS_REMOTE_SWEEP_INTERVAL = duration_option(
    "zufluss.remote.sweep.interval",
    60 * MINUTE_MS,
    "How often locations are searched for files that nothing refers to; 0 never.",
    minimum=0,
)
ZUFLUSS_REMOTE_SWEEP_GRACE = duration_option(
    "zufluss.remote.sweep.grace",
    DAY_MS,
    "A file that nothing refers to is removed when it is older than this: an upload that is under "
    "way must be younger.",
    minimum=0,
)
ZUFLUSS_REMOTE_TOKENS = enum_option(
    "zufluss.remote.tokens",
    "session",
    "What clients get for reading remote files: `session`, short-lived credentials if the store "
    "issues them; `none`, no credentials, clients use their own.",
    allowed=("session", "none"),
)

# -- Catalog -----------------------------------------------------------------------------------

DEFAULT_BUCKET_NUMBER = int_option(
    "default.bucket.number", 1, "The number of buckets of a table that sets none.", minimum=1
)
DEFAULT_REPLICATION_FACTOR = int_option(
    "default.replication.factor",
    1,
    "The replication factor of a table that sets none. More than 1 needs "
    "zufluss.log.durability = remote and as many tablet servers.",
    minimum=1,
)
ZUFLUSS_AGGREGATION_DEFAULT_FUNCTION = string_option(
    "zufluss.aggregation.default-function",
    None,
    "The value of `table.merge-engine.aggregation.default-function` in new tables of that engine "
    "that do not set it. `last_value_ignore_nulls` is the behaviour of Fluss, for clients that "
    "name no functions.",
)
MAX_BUCKET_NUM = int_option(
    "max.bucket.num",
    4096,
    "The largest number of buckets of a table, or of each partition of a partitioned one.",
    minimum=1,
)
MAX_PARTITION_NUM = int_option(
    "max.partition.num", 1000, "The largest number of partitions a table may have.", minimum=1
)
AUTO_PARTITION_CHECK_INTERVAL = duration_option(
    "auto-partition.check.interval",
    10 * MINUTE_MS,
    "How often partitions are created ahead and expired ones dropped.",
    minimum=1,
)
DATALAKE_FORMAT = enum_option(
    "datalake.format",
    None,
    "The lake format of new tables that name none.",
    allowed=tuple(LAKE_FORMATS),
    dynamic=True,
)
DATALAKE_ENABLED = bool_option(
    "datalake.enabled",
    None,
    "Whether tables may be in the lake. With false, new tables are only prepared for it: they get "
    "the format, and table.datalake.enabled = true is refused. With true, datalake.format must be "
    "set. Tables that are in the lake stay there.",
    default_text="whether `datalake.format` is set",
    dynamic=True,
)
ZUFLUSS_LAKE_CATALOG_TIMEOUT = duration_option(
    "zufluss.lake.catalog-timeout",
    20 * SECOND_MS,
    "How long CREATE TABLE and ALTER TABLE wait for the lake's catalog to create or alter the lake "
    "table. If it does not answer, the lake table appears with the first round of tiering.",
    minimum=1,
)

# -- Log ---------------------------------------------------------------------------------------

LOG_SEGMENT_FILE_SIZE = memory_option(
    "log.segment.file-size",
    GIB,
    "A log segment is closed before it would exceed this size.",
    minimum=KIB,
    maximum=2 * GIB - 1,
)
LOG_INDEX_FILE_SIZE = memory_option(
    "log.index.file-size",
    10 * MIB,
    "The largest size of a segment's offset index and of its time index; a full index closes "
    "the segment.",
    minimum=KIB,
    maximum=GIB,
)
LOG_INDEX_INTERVAL_SIZE = memory_option(
    "log.index.interval-size",
    4 * KIB,
    "One index entry per this many bytes of log. Larger means smaller indexes and longer searches.",
    minimum=0,
    maximum=INT32_MAX,
)
LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL = duration_option(
    "log.flush.offset.checkpoint-interval",
    MINUTE_MS,
    "How often the recovery points are written; recovery after a crash starts there.",
    minimum=1,
)
LOG_RETENTION_CHECK_INTERVAL = duration_option(
    "log.retention.check-interval",
    5 * MINUTE_MS,
    "How often logs are searched for segments older than the table's `table.log.ttl`.",
    minimum=1,
)
LOG_RETENTION_ROLL_ACTIVE_SEGMENT_ENABLED = bool_option(
    "log.retention.roll-active-segment.enabled",
    True,
    "Let retention also close and delete the segment being written once all of it has expired. "
    "Fluss's default is false, which keeps the last segment of a quiet table for ever.",
    dynamic=True,
)
SERVER_WRITER_ID_EXPIRATION_TIME = duration_option(
    "server.writer-id.expiration-time",
    7 * DAY_MS,
    "An idempotent writer that has written nothing for this long is forgotten.",
    minimum=1,
)
ZUFLUSS_LOG_WRITERS_MAX = int_option(
    "zufluss.log.max-writers-per-bucket",
    10_000,
    "Idempotent writers that a bucket remembers. When more have written, those that wrote least "
    "recently are forgotten: such a writer is refused when it comes back, and gets a new id. Tasks "
    "of exactly-once producers are remembered besides.",
    minimum=100,
)
ZUFLUSS_LOG_FLUSH = enum_option(
    "zufluss.log.flush",
    "ack",
    "When appended bytes reach stable storage. `ack`: before they are acknowledged, with one sync "
    "for all waiting writers. `interval`: every `zufluss.log.flush-interval`. `os`: when the "
    "operating system decides; a power failure can lose acknowledged data of an unreplicated "
    "table.",
    allowed=("ack", "interval", "os"),
)
ZUFLUSS_LOG_DURABILITY = enum_option(
    "zufluss.log.durability",
    "local",
    "Where acknowledged rows are durable. `local`: on the disk of their tablet server, see "
    "`zufluss.log.flush`. `remote`: in the first remote location (`remote.data.dirs`), before they "
    "are acknowledged; another tablet server takes over the buckets of one that is lost. All "
    "servers of a cluster have the same value.",
    allowed=("local", "remote"),
)
ZUFLUSS_LOOKUP_LEASE = duration_option(
    "zufluss.lookup.lease",
    3000,
    "With `zufluss.log.durability = remote`: how long a tablet server answers lookups and scans "
    "after the coordinator confirmed it last. Another one that takes its primary-key buckets over "
    "acknowledges no write before that time is over. Heartbeats come three times as often. The "
    "coordinator's value counts: tablet servers get it when they register.",
    minimum=300,
)
ZUFLUSS_WAL_INTERVAL = duration_option(
    "zufluss.wal.interval",
    100,
    "With `zufluss.log.durability = remote`: the time between the starts of two objects that a "
    "tablet server writes. The first after a pause starts at once, and full ones do not wait. A "
    "longer interval costs latency, a shorter one requests.",
    minimum=0,
)
ZUFLUSS_WAL_RETAINED = memory_option(
    "zufluss.wal.retained",
    256 * MIB,
    "With `zufluss.log.durability = remote`: bytes of objects of a tablet server's session from "
    "which on the older ones are trimmed at once, not only every minute. Another server that takes "
    "its buckets over reads them.",
    minimum=MIB,
)
ZUFLUSS_LOG_FLUSH_INTERVAL = duration_option(
    "zufluss.log.flush-interval",
    100,
    "The time between syncs with `zufluss.log.flush = interval`; a power failure can lose the "
    "writes of this time.",
    minimum=1,
)

# -- Primary-key tables ------------------------------------------------------------------------

KV_SCANNER_TTL = duration_option(
    "kv.scanner.ttl",
    10 * MINUTE_MS,
    "How long a scan of a primary-key bucket, or its pinned state, is kept without a call.",
    minimum=1,
)
KV_SCANNER_EXPIRATION_INTERVAL = duration_option(
    "kv.scanner.expiration-interval",
    30 * SECOND_MS,
    "How often expired scans are removed; calls do not find them after their expiry in any case.",
    minimum=1,
)
KV_SCANNER_MAX_PER_BUCKET = int_option(
    "kv.scanner.max-per-bucket",
    8,
    "The number of scans and pinned states that a bucket may have at once.",
    minimum=1,
)
KV_SCANNER_MAX_PER_SERVER = int_option(
    "kv.scanner.max-per-server",
    200,
    "The number of scans and pinned states that a server may have at once.",
    minimum=1,
)
KV_SCANNER_MAX_BATCH_SIZE = memory_option(
    "kv.scanner.max-batch-size",
    10 * MIB,
    "The most bytes of rows in one answer of a scan, whatever the client asks for; a larger row is "
    "sent alone.",
    minimum=1,
    maximum=512 * MIB,
)
ZUFLUSS_KV_SCANNER_AGE_MAX = duration_option(
    "zufluss.kv.scanner.age-max",
    60 * MINUTE_MS,
    "How long a scan or pinned state is kept at most, even while it is read, because it occupies "
    "disk space.",
    minimum=1,
)
ZUFLUSS_KV_SCANNER_DISCONNECT_GRACE = duration_option(
    "zufluss.kv.scanner.disconnect-grace",
    15 * SECOND_MS,
    "How long a scan or pinned state is kept after the connection of its client has ended, for a "
    "client that connects again.",
    minimum=0,
)
ZUFLUSS_KV_SCANNER_TIME_LIMIT = duration_option(
    "zufluss.kv.scanner.time-limit",
    2 * SECOND_MS,
    "How long one call of a scan may search for rows; then the answer contains the position "
    "reached, and possibly no row.",
    minimum=1,
)
ZUFLUSS_KV_MEMORY = memory_option(
    "zufluss.kv.memory",
    None,
    "The memory for rows of primary-key tables, over all buckets of the server. Rows that do not "
    "fit are read from disk.",
    minimum=8 * MIB,
    default_text="a quarter of the memory of the machine or container",
)
ZUFLUSS_KV_FLUSH_LOG_SIZE = memory_option(
    "zufluss.kv.flush.log-size",
    64 * MIB,
    "The state of a bucket is flushed to disk after this much changelog. Recovery after a crash "
    "replays at most about this much per bucket.",
    minimum=MIB,
)
ZUFLUSS_KV_VALUE_MAX_SIZE = memory_option(
    "zufluss.kv.value.max-size",
    8 * MIB,
    "The largest row of a primary-key table; a larger one is refused.",
    minimum=KIB,
    maximum=INT32_MAX,
)
ZUFLUSS_KV_LOOKUP_MAX_ANSWER_SIZE = memory_option(
    "zufluss.kv.lookup.max-answer-size",
    64 * MIB,
    "The most bytes of rows in one answer to a lookup, a prefix lookup or a limit scan of a "
    "primary-key table; a request for more is refused, and zufluss clients then ask in parts.",
    minimum=64 * KIB,
    maximum=GIB,
)

# -- Network -----------------------------------------------------------------------------------

NETTY_SERVER_MAX_REQUEST_SIZE = memory_option(
    "netty.server.max-request-size",
    100 * MIB,
    "The largest request; a longer one closes its connection.",
    minimum=KIB,
    maximum=INT32_MAX,
)
NETTY_CONNECTION_MAX_IDLE_TIME = duration_option(
    "netty.connection.max-idle-time",
    10 * MINUTE_MS,
    "A connection on which nothing was sent or received for this long is closed.",
    minimum=1,
)
ZUFLUSS_NET_MAX_CONNECTIONS = int_option(
    "zufluss.net.max-connections",
    10_000,
    "The most connections open at once; further ones are refused. Half of the files that the "
    "process may open (`ulimit -n`) is another limit: the rest is for logs and tables.",
    minimum=1,
)
ZUFLUSS_NET_MAX_INFLIGHT_REQUESTS = int_option(
    "zufluss.net.max-inflight-requests",
    128,
    "The most unanswered requests of one connection; then the server stops reading from it.",
    minimum=1,
)
ZUFLUSS_NET_RECEIVE_MEMORY = memory_option(
    "zufluss.net.receive-memory",
    512 * MIB,
    "The memory for requests that are still arriving, over all connections. A declared length "
    "reserves nothing; only bytes that arrived count.",
    minimum=64 * KIB,
)
ZUFLUSS_NET_SEND_MEMORY = memory_option(
    "zufluss.net.send-memory",
    512 * MIB,
    "The memory for answers that clients have not read, over all connections. Beyond it clients "
    "with unread answers get no more, the others small ones, large answers wait, and a client that "
    "reads nothing for 10 s is disconnected.",
    minimum=MIB,
)
ZUFLUSS_NET_SEND_TIMEOUT = duration_option(
    "zufluss.net.send-timeout",
    MINUTE_MS,
    "A client that reads less than 1 MB of its answers, and not all of them, within this time is "
    "disconnected.",
    minimum=1,
)
ZUFLUSS_NET_LOGIN_TIMEOUT = duration_option(
    "zufluss.net.login-timeout",
    10 * SECOND_MS,
    "A new client must have logged in, or on a plaintext listener begun its first request, within "
    "this time. Such clients have a quarter of the connections, the oldest one goes when another "
    "comes, and an eighth of `zufluss.net.receive-memory`.",
    minimum=1,
)
ZUFLUSS_NET_FRAME_TIMEOUT = duration_option(
    "zufluss.net.frame-timeout",
    30 * SECOND_MS,
    "A request whose first byte has arrived must be complete within this time.",
    minimum=1,
)
ZUFLUSS_SHUTDOWN_TIMEOUT = duration_option(
    "zufluss.shutdown-timeout",
    30 * SECOND_MS,
    "How long a stopping server waits for running requests before it closes their connections. "
    "With `zufluss.log.durability` = remote, also how long a tablet server that got a SIGTERM "
    "waits before that until others lead its buckets.",
    minimum=0,
)

# -- Log output --------------------------------------------------------------------------------

ZUFLUSS_LOGGING_LEVEL = enum_option(
    "zufluss.logging.level",
    "info",
    "The least severe events that are logged.",
    allowed=("debug", "info", "warning", "error"),
)
ZUFLUSS_LOGGING_FORMAT = enum_option(
    "zufluss.logging.format",
    "console",
    "`console` for people, `json` for machines: one object per line.",
    allowed=("console", "json"),
)

# -- Metrics -----------------------------------------------------------------------------------

ZUFLUSS_METRICS_PORT = int_option(
    "zufluss.metrics.port",
    None,
    "Serve metrics for Prometheus (`docs/metrics.md`) and the probes `/health` and `/ready` "
    "(`docs/server.md`) on this port; 0 chooses a free port. Without it nothing is served.",
    minimum=0,
    maximum=65535,
)
ZUFLUSS_METRICS_HOST = string_option(
    "zufluss.metrics.host",
    "localhost",
    "The address metrics are served on. Everybody who can reach it can read them.",
)

OPTIONS: Mapping[str, Option[Any]] = {
    **{value.key: value for value in list(globals().values()) if isinstance(value, Option)},
    **ZOOKEEPER_OPTIONS,
    **CLIENT_OPTIONS,
}
"""Every server and client option by key, in the order declared."""


def is_client_option(key: str) -> bool:
    """Whether the key configures a client rather than a server."""
    return key.startswith("client.")
