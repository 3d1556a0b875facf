"""The options of a client, read once from the configuration and checked together.

`zufluss.config.client_options` declares keys, types and defaults. The client reads the values here,
with user and password already resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from zufluss.config import client_options as o
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError
from zufluss.net.client import Credentials
from zufluss.wire.sasl import parse_jaas

DELIVERY_TIMEOUTS: Final = 4
"""A write, or a scan that follows a log, fails after this many times `client.request-timeout`."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of a connection, and of the writers and scans on it."""

    client_id: str
    """The client's name in the server's log."""
    connect_timeout_ms: int
    """Limit for opening a socket, handshake included."""
    request_timeout_ms: int
    """Limit for one call, retries included."""
    credentials: Credentials | None
    """User and password; None on a plaintext connection."""
    acks: int
    """Acknowledgements a write waits for: -1 (all replicas in sync), 1 (the leader) or 0."""
    batch_bytes: int
    """A batch of one bucket is sent at this size, before compression."""
    batch_timeout_ms: int
    """A batch is sent at most this long after its first row."""
    buffer_bytes: int
    """Unacknowledged rows that a writer holds at most; beyond that it waits."""
    request_bytes: int
    """The size that a write request aims at."""
    retries: int
    """Retries of a batch."""
    idempotent: bool
    """Batches are numbered, so that the server writes each one once."""
    inflight_max: int
    """Unacknowledged batches of one bucket that may be under way."""
    create_partitions: bool
    """A writer creates missing partitions."""
    assigner: Literal["sticky", "round_robin"]
    """How rows of a table without bucket key are spread over its buckets."""
    bucket_hash: Literal["pyfluss", "java"]
    """The hash that assigns rows with a bucket key to their bucket."""
    check_crc: bool
    """Verify the checksums of batches that the server did not project."""
    fetch_bytes: int
    """The size that the answer to a fetch aims at."""
    fetch_bucket_bytes: int
    """The size that each bucket in the answer aims at."""
    fetch_bytes_min: int
    """The server holds a fetch until this many bytes arrived, at most `fetch_wait_ms`."""
    fetch_wait_ms: int
    """Limit for holding a fetch."""
    remote_read_timeout_ms: int
    """How long a scan retries a remote location that does not answer."""
    kv_fetch_bytes: int
    """The size that a page of a primary-key bucket aims at."""
    producer_id: str | None
    """The id of exactly-once writers without one; None means a random id for each writer."""
    producer_ttl_ms: int
    """Another writer may take over the columns of a writer that was silent for this long."""

    @property
    def delivery_timeout_ms(self) -> int:
        """How long a write, or a scan that follows a log, is retried before it fails."""
        return DELIVERY_TIMEOUTS * self.request_timeout_ms

    @classmethod
    def of(cls, pairs: Mapping[str, Any]) -> ClientOptions:
        """Read `client.*` pairs; missing options have their defaults.

        >>> ClientOptions.of({"client.request-timeout": "5s"}).request_timeout_ms
        5000
        """
        conf = Configuration.of(pairs, origin="connect()")
        idempotent = conf.get(o.CLIENT_WRITER_ENABLE_IDEMPOTENCE)
        acks = _acks(conf.get(o.CLIENT_WRITER_ACKS))
        if idempotent and acks != -1:
            raise ConfigError(
                f"client.writer.acks = {acks} is not allowed while "
                "client.writer.enable-idempotence is true; use all, or switch idempotence off"
            )
        return cls(
            client_id=conf.get(o.CLIENT_ID),
            connect_timeout_ms=conf.get(o.CLIENT_CONNECT_TIMEOUT),
            request_timeout_ms=conf.get(o.CLIENT_REQUEST_TIMEOUT),
            credentials=_credentials(conf),
            acks=acks,
            batch_bytes=conf.get(o.CLIENT_WRITER_BATCH_SIZE),
            batch_timeout_ms=conf.get(o.CLIENT_WRITER_BATCH_TIMEOUT),
            buffer_bytes=conf.get(o.CLIENT_WRITER_BUFFER_MEMORY_SIZE),
            request_bytes=conf.get(o.CLIENT_WRITER_REQUEST_MAX_SIZE),
            retries=conf.get(o.CLIENT_WRITER_RETRIES),
            idempotent=idempotent,
            inflight_max=conf.get(o.CLIENT_WRITER_MAX_INFLIGHT_REQUESTS_PER_BUCKET),
            create_partitions=conf.get(o.CLIENT_WRITER_DYNAMIC_CREATE_PARTITION_ENABLED),
            assigner=conf.get(o.CLIENT_WRITER_BUCKET_NO_KEY_ASSIGNER),  # type: ignore[arg-type]
            bucket_hash=conf.get(o.CLIENT_BUCKET_HASH),  # type: ignore[arg-type]
            check_crc=conf.get(o.CLIENT_SCANNER_LOG_CHECK_CRC),
            fetch_bytes=conf.get(o.CLIENT_SCANNER_LOG_FETCH_MAX_BYTES),
            fetch_bucket_bytes=conf.get(o.CLIENT_SCANNER_LOG_FETCH_MAX_BYTES_FOR_BUCKET),
            fetch_bytes_min=conf.get(o.CLIENT_SCANNER_LOG_FETCH_MIN_BYTES),
            fetch_wait_ms=conf.get(o.CLIENT_SCANNER_LOG_FETCH_WAIT_MAX_TIME),
            remote_read_timeout_ms=conf.get(o.CLIENT_REMOTE_FILE_READ_TIMEOUT),
            kv_fetch_bytes=conf.get(o.CLIENT_SCANNER_KV_FETCH_MAX_BYTES),
            producer_id=conf.get(o.CLIENT_COLUMN_LOCK_OWNER_ID),
            producer_ttl_ms=conf.get(o.CLIENT_COLUMN_LOCK_TTL),
        )


def parse_bootstrap(bootstrap: str) -> tuple[tuple[str, int], ...]:
    """Parse `host:port[,host:port…]`; an IPv6 host stands in brackets.

    >>> parse_bootstrap("a:9123, [::1]:9124")
    (('a', 9123), ('::1', 9124))
    """
    addresses = []
    for item in filter(None, (part.strip() for part in bootstrap.split(","))):
        host, colon, port = item.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"bootstrap server {item!r} is not of the form host:port")
        addresses.append((host.removeprefix("[").removesuffix("]"), int(port)))
    if not addresses:
        raise ConfigError(f"no bootstrap server in {bootstrap!r}; give host:port")
    return tuple(addresses)


def _acks(text: str) -> int:
    return -1 if text == "all" else int(text)


def _credentials(conf: Configuration) -> Credentials | None:
    if conf.get(o.CLIENT_SECURITY_PROTOCOL) == "plaintext":
        return None
    text = conf.get(o.CLIENT_SECURITY_SASL_JAAS_CONFIG)
    jaas = parse_jaas(text).options if text else {}
    username = conf.get(o.CLIENT_SECURITY_SASL_USERNAME) or jaas.get("username")
    password = conf.get(o.CLIENT_SECURITY_SASL_PASSWORD) or jaas.get("password")
    if not username or not password:
        raise ConfigError(
            "client.security.protocol = sasl needs client.security.sasl.username and "
            "client.security.sasl.password, neither of them empty"
        )
    return Credentials(username, password)
