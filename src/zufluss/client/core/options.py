"""The options of a client, taken once from the configuration and checked together.

Keys, forms and defaults are declared in `zufluss.config.client_options`; this is what the client's
code reads, with user and password already resolved.
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
"""A write or a fetch is tried again for this many times `client.request-timeout`, then it fails."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What a connection and the writers and scans on it are set to."""

    client_id: str
    """A name for the server's log."""
    connect_timeout_ms: int
    """For a new connection, handshake included."""
    request_timeout_ms: int
    """For one request."""
    credentials: Credentials | None
    """None on a plain connection."""
    acks: int
    """-1, 1 or 0."""
    batch_bytes: int
    """A batch of one bucket is sent when it has this much, counted before compression."""
    batch_timeout_ms: int
    """A batch is sent at the latest this long after its first row."""
    buffer_bytes: int
    """Rows not acknowledged yet; a writer waits when there are more."""
    request_bytes: int
    """What one write request aims at."""
    retries: int
    """How often a batch is sent again."""
    idempotent: bool
    """Batches are numbered so that each is written once."""
    inflight_max: int
    """Unacknowledged batches of one bucket."""
    create_partitions: bool
    """A writer creates partitions that do not exist."""
    assigner: Literal["sticky", "round_robin"]
    """How rows without bucket key find their bucket."""
    bucket_hash: Literal["pyfluss", "java"]
    """How rows with a bucket key find their bucket."""
    check_crc: bool
    """Verify the checksum of unprojected batches."""
    fetch_bytes: int
    """What one fetch answer aims at."""
    fetch_bucket_bytes: int
    """The same for each bucket in it."""
    fetch_bytes_min: int
    """A fetch waits until this much is there, at most `fetch_wait_ms`."""
    fetch_wait_ms: int
    """How long the server may hold a fetch."""
    kv_fetch_bytes: int
    """What one answer of a scan of a primary-key bucket aims at."""
    producer_id: str | None
    """The id of exactly-once writers that are given none; None makes one up each time."""
    producer_ttl_ms: int
    """Others may take the columns of such a writer when it gave no sign of life for so long."""

    @property
    def delivery_timeout_ms(self) -> int:
        """How long a write or fetch is tried again before it fails."""
        return DELIVERY_TIMEOUTS * self.request_timeout_ms

    @classmethod
    def of(cls, pairs: Mapping[str, Any]) -> ClientOptions:
        """The options of `client.*` pairs, everything else at its default.

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
            kv_fetch_bytes=conf.get(o.CLIENT_SCANNER_KV_FETCH_MAX_BYTES),
            producer_id=conf.get(o.CLIENT_COLUMN_LOCK_OWNER_ID),
            producer_ttl_ms=conf.get(o.CLIENT_COLUMN_LOCK_TTL),
        )


def parse_bootstrap(bootstrap: str) -> tuple[tuple[str, int], ...]:
    """The addresses of `host:port[,host:port…]`; an IPv6 host stands in brackets.

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
