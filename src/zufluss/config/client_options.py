"""Every option of a client, declared once; names and defaults follow the rules of `options.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zufluss.config.option import (
    Option,
    bool_option,
    duration_option,
    enum_option,
    int_option,
    memory_option,
    string_option,
)
from zufluss.config.values import INT32_MAX, KIB, MIB, MINUTE_MS, SECOND_MS

CLIENT_ID = string_option("client.id", "", "A name for the client in server logs.")
CLIENT_CONNECT_TIMEOUT = duration_option(
    "client.connect-timeout",
    15 * SECOND_MS,
    "How long opening a connection may take, handshake included, if the server does not answer. "
    "Fluss's Java client waits 120 s.",
    minimum=1,
)
CLIENT_REQUEST_TIMEOUT = duration_option(
    "client.request-timeout",
    30 * SECOND_MS,
    "How long a call may take, retries included. Writers and scans that follow a log try for four "
    "times as long; docs/timeouts.md lists all calls.",
    minimum=1,
)
CLIENT_SECURITY_PROTOCOL = enum_option(
    "client.security.protocol",
    "plaintext",
    "How the client identifies itself to the server.",
    allowed=("plaintext", "sasl"),
)
CLIENT_SECURITY_SASL_MECHANISM = enum_option(
    "client.security.sasl.mechanism", "PLAIN", "The SASL mechanism.", allowed=("PLAIN",)
)
CLIENT_SECURITY_SASL_USERNAME = string_option(
    "client.security.sasl.username", None, "The user of SASL/PLAIN."
)
CLIENT_SECURITY_SASL_PASSWORD = string_option(
    "client.security.sasl.password", None, "The password of SASL/PLAIN.", secret=True
)
CLIENT_SECURITY_SASL_JAAS_CONFIG = string_option(
    "client.security.sasl.jaas.config",
    None,
    "User and password in Fluss's form, instead of the two keys above: "
    "`org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required "
    'username="NAME" password="PASSWORD";`',
    secret=True,
)
CLIENT_WRITER_ACKS = enum_option(
    "client.writer.acks",
    "all",
    "The meaning of an acknowledgement: `all` (or -1) stable on the in-sync replicas, `1` written "
    "by the leader, `0` no acknowledgement.",
    allowed=("all", "-1", "1", "0"),
)
CLIENT_WRITER_BATCH_SIZE = memory_option(
    "client.writer.batch-size",
    2 * MIB,
    "A batch of one bucket is sent when it reaches this size.",
    minimum=KIB,
    maximum=INT32_MAX,
)
CLIENT_WRITER_BATCH_TIMEOUT = duration_option(
    "client.writer.batch-timeout",
    100,
    "A batch is sent at the latest this long after its first row.",
    minimum=0,
)
CLIENT_WRITER_BUFFER_MEMORY_SIZE = memory_option(
    "client.writer.buffer.memory-size",
    64 * MIB,
    "The memory for rows not acknowledged yet; a writer waits when it is full.",
    minimum=KIB,
)
CLIENT_WRITER_REQUEST_MAX_SIZE = memory_option(
    "client.writer.request-max-size",
    10 * MIB,
    "The size one write request aims at; it always carries at least one batch.",
    minimum=KIB,
    maximum=INT32_MAX,
)
CLIENT_WRITER_RETRIES = int_option(
    "client.writer.retries",
    INT32_MAX,
    "How often a write is retried after a passing error.",
    minimum=0,
    maximum=INT32_MAX,
    default_text="2147483647, in effect without end",
)
CLIENT_WRITER_ENABLE_IDEMPOTENCE = bool_option(
    "client.writer.enable-idempotence",
    True,
    "Number the batches so that the server writes each once, in order, retries included.",
)
CLIENT_WRITER_MAX_INFLIGHT_REQUESTS_PER_BUCKET = int_option(
    "client.writer.max-inflight-requests-per-bucket",
    5,
    "The unacknowledged batches of one bucket. The server remembers five per idempotent writer.",
    minimum=1,
    maximum=5,
)
CLIENT_WRITER_DYNAMIC_CREATE_PARTITION_ENABLED = bool_option(
    "client.writer.dynamic-create-partition.enabled",
    True,
    "Create a partition that does not exist when a row for it is written.",
)
CLIENT_WRITER_BUCKET_NO_KEY_ASSIGNER = enum_option(
    "client.writer.bucket.no-key-assigner",
    "sticky",
    "How rows of a table without bucket key are assigned to buckets: `sticky` fills a batch before "
    "it moves to the next bucket, `round_robin` spreads rows evenly.",
    allowed=("sticky", "round_robin"),
)
CLIENT_COLUMN_LOCK_OWNER_ID = string_option(
    "client.column-lock.owner-id",
    None,
    "The id of exactly-once writers that are opened without one. It must be the same after a "
    "restart, and unique.",
    default_text="a new one per writer, which its checkpoints remember",
)
CLIENT_COLUMN_LOCK_TTL = duration_option(
    "client.column-lock.ttl",
    10 * MINUTE_MS,
    "Another writer may take over the columns of an exactly-once writer that sent no sign of life "
    "for this long.",
    minimum=1,
)
CLIENT_BUCKET_HASH = enum_option(
    "client.bucket.hash",
    "pyfluss",
    "The bucket hash of rows with a bucket key: that of pyfluss, or `java` for tables that Java "
    "clients also write. The two differ for some keys; all writers of a table must use the same.",
    allowed=("pyfluss", "java"),
)
CLIENT_SCANNER_LOG_CHECK_CRC = bool_option(
    "client.scanner.log.check-crc", True, "Verify the checksum of every batch that is read."
)
CLIENT_REMOTE_FILE_READ_TIMEOUT = duration_option(
    "client.remote-file.read-timeout",
    30 * SECOND_MS,
    "How long a scan retries a file in a remote location that does not answer. Then it fails with "
    "an error that names the location; the same scan may succeed later.",
    minimum=1,
)
CLIENT_SCANNER_KV_FETCH_MAX_BYTES = memory_option(
    "client.scanner.kv.fetch.max-bytes",
    4 * MIB,
    "The size one answer of a scan of a primary-key bucket aims at; the server has a limit of its "
    "own, `kv.scanner.max-batch-size`.",
    minimum=1,
    maximum=INT32_MAX,
)
CLIENT_SCANNER_LOG_FETCH_MAX_BYTES = memory_option(
    "client.scanner.log.fetch.max-bytes",
    16 * MIB,
    "The size that one fetch answer aims at; a larger first batch is still sent.",
    minimum=1,
    maximum=INT32_MAX,
)
CLIENT_SCANNER_LOG_FETCH_MAX_BYTES_FOR_BUCKET = memory_option(
    "client.scanner.log.fetch.max-bytes-for-bucket",
    MIB,
    "As `client.scanner.log.fetch.max-bytes`, for each bucket.",
    minimum=1,
    maximum=INT32_MAX,
)
CLIENT_SCANNER_LOG_FETCH_MIN_BYTES = memory_option(
    "client.scanner.log.fetch.min-bytes",
    1,
    "A fetch waits until this many bytes have arrived, at most "
    "`client.scanner.log.fetch.wait-max-time`.",
    minimum=1,
    maximum=INT32_MAX,
)
CLIENT_SCANNER_LOG_FETCH_WAIT_MAX_TIME = duration_option(
    "client.scanner.log.fetch.wait-max-time",
    500,
    "How long the server may hold a fetch while nothing new arrives.",
    minimum=0,
    maximum=INT32_MAX,
)

CLIENT_OPTIONS: Mapping[str, Option[Any]] = {
    value.key: value for value in list(globals().values()) if isinstance(value, Option)
}
"""Every client option by key, in the order declared."""
