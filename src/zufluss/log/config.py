"""Settings of one log, and the commit modes; filled from the server's and the table's options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zufluss.config import options, table_options
from zufluss.config.load import Configuration
from zufluss.model.table import TableInfo

INT32_MAX = (1 << 31) - 1


class FlushMode(StrEnum):
    """When appended bytes are durable (`zufluss.log.flush`, `zufluss.log.durability`)."""

    ACK = "ack"
    """Before they are acknowledged, by group commit."""
    INTERVAL = "interval"
    """Some time after, by a sync in the background."""
    OS = "os"
    """When the operating system writes them; segments are synced when they are closed."""
    SHARED = "shared"
    """When the shared log has them (`zufluss.log.durability = remote`); the files are a cache."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Settings of one log."""

    segment_bytes_max: int = 1 << 30
    """A segment is closed before an entry would make it larger; index positions are 32 bits wide,
    so less than 2 GiB."""
    index_interval_bytes: int = 4096
    """More bytes than this since the last index entry make the next one due."""
    index_bytes_max: int = 10 << 20
    """A segment is closed when one of its indexes would pass this size."""
    ttl_ms: int = 7 * 24 * 3600 * 1000
    """A segment whose newest batch is older is deleted; 0 keeps everything."""
    local_segments: int = 2
    """Closed segments that stay when remote storage has them too."""
    local_ttl_ms: int = 7 * 24 * 3600 * 1000
    """A segment that remote storage has too goes when its newest batch is older; 0: not for age."""
    writer_expiry_ms: int = 7 * 24 * 3600 * 1000
    """A writer silent for longer may come back with any sequence number."""
    writers_max: int = 10_000
    """Writers that are remembered; those that wrote least recently are forgotten first."""

    def __post_init__(self) -> None:
        if not 0 < self.segment_bytes_max <= INT32_MAX:
            raise ValueError(
                f"segment_bytes_max={self.segment_bytes_max} is not in 1..{INT32_MAX}: positions "
                "in the index are 32 bits wide"
            )

    @classmethod
    def of(cls, conf: Configuration, info: TableInfo) -> LogConfig:
        """The settings of a table's logs on a server."""
        ttl_ms = info.property(table_options.TABLE_LOG_TTL)
        local_ttl_ms = info.property(table_options.TABLE_LOG_LOCAL_TTL)
        return cls(
            segment_bytes_max=conf.get(options.LOG_SEGMENT_FILE_SIZE),
            index_interval_bytes=conf.get(options.LOG_INDEX_INTERVAL_SIZE),
            index_bytes_max=conf.get(options.LOG_INDEX_FILE_SIZE),
            ttl_ms=ttl_ms,
            local_segments=info.property(table_options.TABLE_LOG_TIERED_LOCAL_SEGMENTS),
            local_ttl_ms=ttl_ms if local_ttl_ms is None else local_ttl_ms,
            writer_expiry_ms=conf.get(options.SERVER_WRITER_ID_EXPIRATION_TIME),
            writers_max=conf.get(options.ZUFLUSS_LOG_WRITERS_MAX),
        )
