"""Every error of zufluss, declared once.

An error travels the wire as an integer code and a message. `ErrorCode` is the full list of the
protocol; `ZuflussError` is what both sides raise. A subclass exists for each error a user is
likely to catch by name, with the builtin they would expect as second base. `retriable` says that
the same request may succeed later, `refresh_metadata` that the client's picture of the cluster is
stale. A message names the thing, the value, the limit and the way out.
"""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Error codes of the wire protocol."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    NETWORK_EXCEPTION = 1
    UNSUPPORTED_VERSION = 2
    CORRUPT_MESSAGE = 3
    DATABASE_NOT_EXIST = 4
    DATABASE_NOT_EMPTY = 5
    DATABASE_ALREADY_EXIST = 6
    TABLE_NOT_EXIST = 7
    TABLE_ALREADY_EXIST = 8
    SCHEMA_NOT_EXIST = 9
    LOG_STORAGE_EXCEPTION = 10
    KV_STORAGE_EXCEPTION = 11
    NOT_LEADER_OR_FOLLOWER = 12
    RECORD_TOO_LARGE_EXCEPTION = 13
    CORRUPT_RECORD_EXCEPTION = 14
    INVALID_TABLE_EXCEPTION = 15
    INVALID_DATABASE_EXCEPTION = 16
    INVALID_REPLICATION_FACTOR = 17
    INVALID_REQUIRED_ACKS = 18
    LOG_OFFSET_OUT_OF_RANGE_EXCEPTION = 19
    NON_PRIMARY_KEY_TABLE_EXCEPTION = 20
    UNKNOWN_TABLE_OR_BUCKET_EXCEPTION = 21
    INVALID_UPDATE_VERSION_EXCEPTION = 22
    INVALID_COORDINATOR_EXCEPTION = 23
    FENCED_LEADER_EPOCH_EXCEPTION = 24
    REQUEST_TIME_OUT = 25
    STORAGE_EXCEPTION = 26
    OPERATION_NOT_ATTEMPTED_EXCEPTION = 27
    NOT_ENOUGH_REPLICAS_AFTER_APPEND_EXCEPTION = 28
    NOT_ENOUGH_REPLICAS_EXCEPTION = 29
    SECURITY_TOKEN_EXCEPTION = 30
    OUT_OF_ORDER_SEQUENCE_EXCEPTION = 31
    DUPLICATE_SEQUENCE_EXCEPTION = 32
    UNKNOWN_WRITER_ID_EXCEPTION = 33
    INVALID_COLUMN_PROJECTION = 34
    INVALID_TARGET_COLUMN = 35
    PARTITION_NOT_EXISTS = 36
    TABLE_NOT_PARTITIONED_EXCEPTION = 37
    INVALID_TIMESTAMP_EXCEPTION = 38
    INVALID_CONFIG_EXCEPTION = 39
    LAKE_STORAGE_NOT_CONFIGURED_EXCEPTION = 40
    KV_SNAPSHOT_NOT_EXIST = 41
    PARTITION_ALREADY_EXISTS = 42
    PARTITION_SPEC_INVALID_EXCEPTION = 43
    LEADER_NOT_AVAILABLE_EXCEPTION = 44
    PARTITION_MAX_NUM_EXCEPTION = 45
    AUTHENTICATE_EXCEPTION = 46
    SECURITY_DISABLED_EXCEPTION = 47
    AUTHORIZATION_EXCEPTION = 48
    BUCKET_MAX_NUM_EXCEPTION = 49
    FENCED_TIERING_EPOCH_EXCEPTION = 50
    RETRIABLE_AUTHENTICATE_EXCEPTION = 51
    INVALID_SERVER_RACK_INFO_EXCEPTION = 52
    LAKE_SNAPSHOT_NOT_EXIST = 53
    LAKE_TABLE_ALREADY_EXIST = 54
    INELIGIBLE_REPLICA_EXCEPTION = 55
    INVALID_ALTER_TABLE_EXCEPTION = 56
    DELETION_DISABLED_EXCEPTION = 57
    SERVER_NOT_EXIST_EXCEPTION = 58
    SEVER_TAG_ALREADY_EXIST_EXCEPTION = 59  # the protocol's own spelling
    SEVER_TAG_NOT_EXIST_EXCEPTION = 60
    REBALANCE_FAILURE_EXCEPTION = 61
    NO_REBALANCE_IN_PROGRESS_EXCEPTION = 62
    INVALID_PRODUCER_ID_EXCEPTION = 63
    CONFIG_EXCEPTION = 64
    NOT_COORDINATOR_LEADER_EXCEPTION = 65
    SCANNER_EXPIRED = 66
    UNKNOWN_SCANNER_ID = 67
    INVALID_SCAN_REQUEST = 68
    TOO_MANY_SCANNERS = 69
    DISK_WRITE_LOCKED = 70
    INSUFFICIENT_KV_LEADER_REPLICA_CAPACITY = 71
    STORAGE_BACKPRESSURE_EXCEPTION = 72
    HISTORICAL_PARTITION_THROTTLED = 73

    # Ours; a Fluss client reports them as unknown, with their messages.
    KV_SNAPSHOT_LEASE_NOT_FOUND = 30000
    KV_SNAPSHOT_LEASE_FENCED = 30001
    KV_SNAPSHOT_REVOKED = 30002
    KV_PIN_GONE = 30003
    KV_SCAN_BUSY = 30004
    PRODUCER_FENCED = 30005
    PRODUCER_NOT_FOUND = 30006
    PRODUCER_STATE_INVALID = 30007
    COLUMN_LOCKED = 30008
    AGGREGATION_FAILED = 30009
    UNDO_UNDER_WAY = 30010
    UNDO_IMPOSSIBLE = 30011


RETRIABLE = frozenset(
    map(ErrorCode, (1, 3, 9, 10, 11, 12, 14, 21, 25, 26, 28, 29, 44, 70, 72, 73, 30004, 30010))
)
REFRESH_METADATA = frozenset(map(ErrorCode, (1, 12, 21, 24, 44, 65)))


class ZuflussError(Exception):
    """An error of the protocol: `code`, a message, and whether trying again can help.

    Raise a subclass where one exists, or `error(code, message)` which picks it.
    """

    code: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR

    def __init__(self, message: str = "", *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    @property
    def retriable(self) -> bool:
        """The same request may succeed later."""
        return self.code in RETRIABLE

    @property
    def refresh_metadata(self) -> bool:
        """The caller's picture of leaders and servers is stale."""
        return self.code in REFRESH_METADATA

    def __str__(self) -> str:
        return f"{self.code.name} ({self.code.value}): {self.message}"


class ConfigError(ZuflussError, ValueError):
    """A configuration key or table property is unknown or has a value that is not allowed."""

    code = ErrorCode.INVALID_CONFIG_EXCEPTION


class NetworkError(ZuflussError, ConnectionError):
    """The connection was lost or could not be made."""

    code = ErrorCode.NETWORK_EXCEPTION


class RequestTimeoutError(ZuflussError, TimeoutError):
    """No answer within the deadline."""

    code = ErrorCode.REQUEST_TIME_OUT


class UnsupportedVersionError(ZuflussError):
    """The server does not know this API or this version of it."""

    code = ErrorCode.UNSUPPORTED_VERSION


class CorruptMessageError(ZuflussError, ValueError):
    """A message cannot be decoded."""

    code = ErrorCode.CORRUPT_MESSAGE


class CorruptRecordError(ZuflussError, ValueError):
    """A record batch is malformed: checksum, sizes, counts or body do not agree."""

    code = ErrorCode.CORRUPT_RECORD_EXCEPTION


class RecordTooLargeError(ZuflussError, ValueError):
    """A record or batch is over its limit."""

    code = ErrorCode.RECORD_TOO_LARGE_EXCEPTION


class DatabaseNotExistError(ZuflussError, LookupError):
    """No such database."""

    code = ErrorCode.DATABASE_NOT_EXIST


class DatabaseNotEmptyError(ZuflussError):
    """The database still has tables and the drop was not a cascade."""

    code = ErrorCode.DATABASE_NOT_EMPTY


class DatabaseAlreadyExistError(ZuflussError):
    """The database name is taken."""

    code = ErrorCode.DATABASE_ALREADY_EXIST


class InvalidDatabaseError(ZuflussError, ValueError):
    """The database name or descriptor is not allowed."""

    code = ErrorCode.INVALID_DATABASE_EXCEPTION


class TableNotExistError(ZuflussError, LookupError):
    """No such table."""

    code = ErrorCode.TABLE_NOT_EXIST


class TableAlreadyExistError(ZuflussError):
    """The table name is taken."""

    code = ErrorCode.TABLE_ALREADY_EXIST


class InvalidTableError(ZuflussError, ValueError):
    """The table name or descriptor is not allowed, or the request does not fit the table's kind."""

    code = ErrorCode.INVALID_TABLE_EXCEPTION


class InvalidAlterTableError(ZuflussError, ValueError):
    """The alteration is not allowed."""

    code = ErrorCode.INVALID_ALTER_TABLE_EXCEPTION


class InvalidReplicationFactorError(ZuflussError, ValueError):
    """More replicas than live tablet servers."""

    code = ErrorCode.INVALID_REPLICATION_FACTOR


class BucketMaxNumError(ZuflussError, ValueError):
    """Too many buckets."""

    code = ErrorCode.BUCKET_MAX_NUM_EXCEPTION


class SchemaNotExistError(ZuflussError, LookupError):
    """No such schema id."""

    code = ErrorCode.SCHEMA_NOT_EXIST


class PartitionNotExistError(ZuflussError, LookupError):
    """No such partition."""

    code = ErrorCode.PARTITION_NOT_EXISTS


class PartitionAlreadyExistError(ZuflussError):
    """The partition exists."""

    code = ErrorCode.PARTITION_ALREADY_EXISTS


class PartitionMaxNumError(ZuflussError):
    """Too many partitions."""

    code = ErrorCode.PARTITION_MAX_NUM_EXCEPTION


class InvalidPartitionError(ZuflussError, ValueError):
    """The partition spec does not fit the table."""

    code = ErrorCode.PARTITION_SPEC_INVALID_EXCEPTION


class TableNotPartitionedError(ZuflussError):
    """A partition call on a table without partitions."""

    code = ErrorCode.TABLE_NOT_PARTITIONED_EXCEPTION


class InvalidColumnProjectionError(ZuflussError, ValueError):
    """The projected columns are not a sorted, non-empty list of column indexes of the table."""

    code = ErrorCode.INVALID_COLUMN_PROJECTION


class InvalidTargetColumnError(ZuflussError, ValueError):
    """The target columns of a partial update are not allowed."""

    code = ErrorCode.INVALID_TARGET_COLUMN


class InvalidRequiredAcksError(ZuflussError, ValueError):
    """`acks` is none of -1, 0, 1."""

    code = ErrorCode.INVALID_REQUIRED_ACKS


class InvalidTimestampError(ZuflussError, ValueError):
    """The timestamp lies in the future."""

    code = ErrorCode.INVALID_TIMESTAMP_EXCEPTION


class OffsetOutOfRangeError(ZuflussError, IndexError):
    """The offset is outside the log."""

    code = ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION


class NonPrimaryKeyTableError(ZuflussError):
    """A key-value call on a log table."""

    code = ErrorCode.NON_PRIMARY_KEY_TABLE_EXCEPTION


class UnknownTableOrBucketError(ZuflussError, LookupError):
    """The table id, partition id or bucket is unknown to this server."""

    code = ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION


class NotLeaderError(ZuflussError):
    """The bucket is led by another server."""

    code = ErrorCode.NOT_LEADER_OR_FOLLOWER


class LeaderNotAvailableError(ZuflussError):
    """The bucket has no leader yet."""

    code = ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION


class OutOfOrderSequenceError(ZuflussError):
    """A gap in the batch sequence of an idempotent writer."""

    code = ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION


class UnknownWriterIdError(ZuflussError):
    """The writer's state is gone."""

    code = ErrorCode.UNKNOWN_WRITER_ID_EXCEPTION


class FencedTieringEpochError(ZuflussError):
    """The table was handed to another tiering service, or another coordinator took over."""

    code = ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION


class LakeNotConfiguredError(ZuflussError):
    """The cluster, or the table, has no lake."""

    code = ErrorCode.LAKE_STORAGE_NOT_CONFIGURED_EXCEPTION


class KvSnapshotNotExistError(ZuflussError, LookupError):
    """The bucket has no such key-value snapshot, or no longer."""

    code = ErrorCode.KV_SNAPSHOT_NOT_EXIST


class KvSnapshotLeaseNotFoundError(ZuflussError, LookupError):
    """There is no such lease, or it has expired."""

    code = ErrorCode.KV_SNAPSHOT_LEASE_NOT_FOUND


class KvSnapshotLeaseFencedError(ZuflussError):
    """Another client has taken the lease over."""

    code = ErrorCode.KV_SNAPSHOT_LEASE_FENCED


class KvSnapshotRevokedError(ZuflussError, LookupError):
    """A leased snapshot was taken away, because its table or partition was dropped."""

    code = ErrorCode.KV_SNAPSHOT_REVOKED


class KvPinGoneError(ZuflussError, LookupError):
    """The pinned state of a bucket is gone and cannot be rebuilt."""

    code = ErrorCode.KV_PIN_GONE


class KvScanBusyError(ZuflussError):
    """Too many scans at once, or another call on the same scan; try again."""

    code = ErrorCode.KV_SCAN_BUSY


class KvScanExpiredError(ZuflussError, LookupError):
    """A scan of a primary-key bucket, or its pinned state, has ended or was never there.

    Whether it expired (66) or is not known at all (67), the way out is the same: open it again, at
    its log offset if the rows must go on where they stopped.
    """

    code = ErrorCode.SCANNER_EXPIRED


class InvalidScanRequestError(ZuflussError, ValueError):
    """The request of a scan is malformed, or out of order."""

    code = ErrorCode.INVALID_SCAN_REQUEST


class TooManyScannersError(ZuflussError):
    """A bucket, or a server, has as many scans as it may have."""

    code = ErrorCode.TOO_MANY_SCANNERS


class InvalidProducerIdError(ZuflussError, ValueError):
    """The id of a producer is malformed."""

    code = ErrorCode.INVALID_PRODUCER_ID_EXCEPTION


class ProducerFencedError(ZuflussError):
    """A later epoch of the producer has begun; this writer must end."""

    code = ErrorCode.PRODUCER_FENCED


class ProducerNotFoundError(ZuflussError, LookupError):
    """The table has no such producer, or no longer."""

    code = ErrorCode.PRODUCER_NOT_FOUND


class ProducerStateError(ZuflussError, ValueError):
    """The producer cannot be restored to the state it asks for."""

    code = ErrorCode.PRODUCER_STATE_INVALID


class ColumnLockedError(ZuflussError):
    """Another producer owns the columns."""

    code = ErrorCode.COLUMN_LOCKED


class AggregationError(ZuflussError, ValueError):
    """A value cannot be aggregated: it overflows, is malformed, or cannot be taken back."""

    code = ErrorCode.AGGREGATION_FAILED


class UndoUnderWayError(ZuflussError):
    """The bucket refuses puts of the producer until its earlier puts are undone."""

    code = ErrorCode.UNDO_UNDER_WAY


class UndoImpossibleError(ZuflussError):
    """Changes cannot be undone: the changelog starts too late, or ends too early."""

    code = ErrorCode.UNDO_IMPOSSIBLE


class LakeSnapshotNotExistError(ZuflussError, LookupError):
    """The table has no such snapshot in the lake."""

    code = ErrorCode.LAKE_SNAPSHOT_NOT_EXIST


class LogStorageError(ZuflussError, OSError):
    """The log cannot be read or written."""

    code = ErrorCode.LOG_STORAGE_EXCEPTION

    def __str__(self) -> str:
        return ZuflussError.__str__(self)


class AuthenticationError(ZuflussError, PermissionError):
    """Authentication failed, or is missing."""

    code = ErrorCode.AUTHENTICATE_EXCEPTION

    def __str__(self) -> str:
        return ZuflussError.__str__(self)


class AuthorizationError(ZuflussError, PermissionError):
    """The principal may not do this."""

    code = ErrorCode.AUTHORIZATION_EXCEPTION

    def __str__(self) -> str:
        return ZuflussError.__str__(self)


_BY_CODE: dict[ErrorCode, type[ZuflussError]] = {c.code: c for c in ZuflussError.__subclasses__()}
_BY_CODE[ErrorCode.UNKNOWN_SCANNER_ID] = KvScanExpiredError


def error(code: int, message: str) -> ZuflussError:
    """The error of a wire code, as the subclass declared for it."""
    try:
        known = ErrorCode(code)
    except ValueError:
        return ZuflussError(f"error code {code} of the server: {message}")
    return _BY_CODE.get(known, ZuflussError)(message, code=known)
