"""Every error of zufluss, declared once.

An error travels the wire as an integer code and a message. `ErrorCode` is the full list of the
protocol; `ZuflussError` is what both sides raise. A subclass exists for each error a user is
likely to catch by name, with the builtin they would expect as second base. `retriable` says that
the same request may succeed later, `refresh_metadata` that the client's picture of the cluster is
stale. A message names the thing, the value, the limit and the way out.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


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
    REMOTE_LOCATION_MOVED = 30012


RETRIABLE = frozenset(
    map(
        ErrorCode,
        (1, 3, 9, 10, 11, 12, 14, 21, 25, 26, 28, 29, 44, 70, 72, 73, 30004, 30010, 30012),
    )
)
REFRESH_METADATA = frozenset(map(ErrorCode, (1, 12, 21, 24, 44, 65)))


class ZuflussError(Exception):
    """An error of the protocol: `code`, a message, and whether trying again can help.

    Raise a subclass where one exists, or `error(code, message)` which picks it. A subclass names
    its code beside its bases.
    """

    code: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR

    def __init_subclass__(cls, *, code: ErrorCode | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if code is not None:
            cls.code = code

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


def reason_of(problem: object) -> str:
    """An exception in words; some exceptions of Python have none."""
    return problem.message if isinstance(problem, ZuflussError) else str(problem) or repr(problem)


def refusal_of(problem: BaseException) -> ZuflussError:
    """The answer to a request that an exception ended.

    Memory, descriptors and space come back, so refusals for lack of them are retriable. Everything
    else is a defect of the server, which its log explains.
    """
    if isinstance(problem, ZuflussError):
        return problem
    if isinstance(problem, MemoryError):
        return StorageBackpressureError(
            "the server has no memory for this request at present; try again later, or with less"
        )
    if isinstance(problem, OSError) and problem.errno is not None:
        return ZuflussError(
            f"the server could not use a file ({problem.strerror}); try again later",
            code=ErrorCode.STORAGE_EXCEPTION,
        )
    return ZuflussError("internal server error", code=ErrorCode.UNKNOWN_SERVER_ERROR)


class ConfigError(ZuflussError, ValueError, code=ErrorCode.INVALID_CONFIG_EXCEPTION):
    """A configuration key or table property is unknown or has a value that is not allowed."""


class NetworkError(ZuflussError, ConnectionError, code=ErrorCode.NETWORK_EXCEPTION):
    """The connection was lost or could not be made."""


class RequestTimeoutError(ZuflussError, TimeoutError, code=ErrorCode.REQUEST_TIME_OUT):
    """No answer within the deadline."""


class UnsentRowsError(ZuflussError):
    """Rows that a writer took are not acknowledged and will not be sent any more.

    The message names tables and numbers of rows; `code` is that of the cause.
    """


class UnsentRowsWarning(RuntimeWarning):
    """Says what `UnsentRowsError` says, where no caller is left to catch an error."""


class UnsupportedVersionError(ZuflussError, code=ErrorCode.UNSUPPORTED_VERSION):
    """The server does not know this API or this version of it."""


class CorruptMessageError(ZuflussError, ValueError, code=ErrorCode.CORRUPT_MESSAGE):
    """A message cannot be decoded."""


class CorruptRecordError(ZuflussError, ValueError, code=ErrorCode.CORRUPT_RECORD_EXCEPTION):
    """A record batch is malformed: checksum, sizes, counts or body do not agree."""


class RecordTooLargeError(ZuflussError, ValueError, code=ErrorCode.RECORD_TOO_LARGE_EXCEPTION):
    """A record or batch is over its limit."""


class DatabaseNotExistError(ZuflussError, LookupError, code=ErrorCode.DATABASE_NOT_EXIST):
    """No such database."""


class DatabaseNotEmptyError(ZuflussError, code=ErrorCode.DATABASE_NOT_EMPTY):
    """The database still has tables and the drop was not a cascade."""


class DatabaseAlreadyExistError(ZuflussError, code=ErrorCode.DATABASE_ALREADY_EXIST):
    """The database name is taken."""


class InvalidDatabaseError(ZuflussError, ValueError, code=ErrorCode.INVALID_DATABASE_EXCEPTION):
    """The database name or descriptor is not allowed."""


class TableNotExistError(ZuflussError, LookupError, code=ErrorCode.TABLE_NOT_EXIST):
    """No such table."""


class TableAlreadyExistError(ZuflussError, code=ErrorCode.TABLE_ALREADY_EXIST):
    """The table name is taken."""


class InvalidTableError(ZuflussError, ValueError, code=ErrorCode.INVALID_TABLE_EXCEPTION):
    """The table name or descriptor is not allowed, or the request does not fit the table's kind."""


class InvalidAlterTableError(
    ZuflussError, ValueError, code=ErrorCode.INVALID_ALTER_TABLE_EXCEPTION
):
    """The alteration is not allowed."""


class InvalidReplicationFactorError(
    ZuflussError, ValueError, code=ErrorCode.INVALID_REPLICATION_FACTOR
):
    """More replicas than live tablet servers."""


class BucketMaxNumError(ZuflussError, ValueError, code=ErrorCode.BUCKET_MAX_NUM_EXCEPTION):
    """Too many buckets."""


class SchemaNotExistError(ZuflussError, LookupError, code=ErrorCode.SCHEMA_NOT_EXIST):
    """No such schema id."""


class PartitionNotExistError(ZuflussError, LookupError, code=ErrorCode.PARTITION_NOT_EXISTS):
    """No such partition."""


class PartitionAlreadyExistError(ZuflussError, code=ErrorCode.PARTITION_ALREADY_EXISTS):
    """The partition exists."""


class PartitionMaxNumError(ZuflussError, code=ErrorCode.PARTITION_MAX_NUM_EXCEPTION):
    """Too many partitions."""


class InvalidPartitionError(
    ZuflussError, ValueError, code=ErrorCode.PARTITION_SPEC_INVALID_EXCEPTION
):
    """The partition spec does not fit the table."""


class TableNotPartitionedError(ZuflussError, code=ErrorCode.TABLE_NOT_PARTITIONED_EXCEPTION):
    """A partition call on a table without partitions."""


class InvalidColumnProjectionError(
    ZuflussError, ValueError, code=ErrorCode.INVALID_COLUMN_PROJECTION
):
    """The projected columns are not a sorted, non-empty list of column indexes of the table."""


class InvalidTargetColumnError(ZuflussError, ValueError, code=ErrorCode.INVALID_TARGET_COLUMN):
    """The target columns of a partial update are not allowed."""


class InvalidRequiredAcksError(ZuflussError, ValueError, code=ErrorCode.INVALID_REQUIRED_ACKS):
    """`acks` is not -1, 0 or 1."""


class InvalidTimestampError(ZuflussError, ValueError, code=ErrorCode.INVALID_TIMESTAMP_EXCEPTION):
    """The timestamp lies in the future."""


class OffsetOutOfRangeError(
    ZuflussError, IndexError, code=ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
):
    """The offset is outside the log."""


class NonPrimaryKeyTableError(ZuflussError, code=ErrorCode.NON_PRIMARY_KEY_TABLE_EXCEPTION):
    """A key-value call on a log table."""


class UnknownTableOrBucketError(
    ZuflussError, LookupError, code=ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
):
    """The table id, partition id or bucket is unknown to this server."""


class NotLeaderError(ZuflussError, code=ErrorCode.NOT_LEADER_OR_FOLLOWER):
    """The bucket is led by another server."""


class LeaderNotAvailableError(ZuflussError, code=ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION):
    """The bucket has no leader yet."""


class OutOfOrderSequenceError(ZuflussError, code=ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION):
    """A gap in the batch sequence of an idempotent writer."""


class UnknownWriterIdError(ZuflussError, code=ErrorCode.UNKNOWN_WRITER_ID_EXCEPTION):
    """The writer's state is gone."""


class FencedTieringEpochError(ZuflussError, code=ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION):
    """The table was handed to another tiering service, or another coordinator took over."""


class LakeNotConfiguredError(ZuflussError, code=ErrorCode.LAKE_STORAGE_NOT_CONFIGURED_EXCEPTION):
    """The cluster, or the table, has no lake."""


class KvSnapshotNotExistError(ZuflussError, LookupError, code=ErrorCode.KV_SNAPSHOT_NOT_EXIST):
    """The bucket has no such key-value snapshot, or no longer."""


class KvSnapshotLeaseNotFoundError(
    ZuflussError, LookupError, code=ErrorCode.KV_SNAPSHOT_LEASE_NOT_FOUND
):
    """There is no such lease, or it has expired."""


class KvSnapshotLeaseFencedError(ZuflussError, code=ErrorCode.KV_SNAPSHOT_LEASE_FENCED):
    """Another client has taken the lease over."""


class KvSnapshotRevokedError(ZuflussError, LookupError, code=ErrorCode.KV_SNAPSHOT_REVOKED):
    """A leased snapshot was taken away, because its table or partition was dropped."""


class KvPinGoneError(ZuflussError, LookupError, code=ErrorCode.KV_PIN_GONE):
    """The pinned state of a bucket is gone and cannot be rebuilt."""


class KvScanBusyError(ZuflussError, code=ErrorCode.KV_SCAN_BUSY):
    """Too many scans at once, or another call on the same scan; try again."""


class KvScanExpiredError(ZuflussError, LookupError, code=ErrorCode.SCANNER_EXPIRED):
    """A scan of a primary-key bucket, or its pinned state, has ended or was never there.

    Whether it expired (66) or is not known at all (67), the way out is the same: open it again, at
    its log offset if the rows must continue where they stopped.
    """


class InvalidScanRequestError(ZuflussError, ValueError, code=ErrorCode.INVALID_SCAN_REQUEST):
    """The request of a scan is malformed, or out of order."""


class TooManyScannersError(ZuflussError, code=ErrorCode.TOO_MANY_SCANNERS):
    """A bucket, or a server, has as many scans as it may have."""


class InvalidProducerIdError(
    ZuflussError, ValueError, code=ErrorCode.INVALID_PRODUCER_ID_EXCEPTION
):
    """The id of a producer is malformed."""


class ProducerFencedError(ZuflussError, code=ErrorCode.PRODUCER_FENCED):
    """A later epoch of the producer has begun; this writer must end."""


class ProducerNotFoundError(ZuflussError, LookupError, code=ErrorCode.PRODUCER_NOT_FOUND):
    """The table has no such producer, or no longer."""


class ProducerStateError(ZuflussError, ValueError, code=ErrorCode.PRODUCER_STATE_INVALID):
    """The producer cannot be restored to the state it asks for."""


class ColumnLockedError(ZuflussError, code=ErrorCode.COLUMN_LOCKED):
    """Another producer owns the columns."""


class AggregationError(ZuflussError, ValueError, code=ErrorCode.AGGREGATION_FAILED):
    """A value cannot be aggregated: it overflows, is malformed, or cannot be taken back."""


class UndoUnderWayError(ZuflussError, code=ErrorCode.UNDO_UNDER_WAY):
    """The bucket refuses puts of the producer until its earlier puts are undone."""


class UndoImpossibleError(ZuflussError, code=ErrorCode.UNDO_IMPOSSIBLE):
    """Changes cannot be undone: the changelog starts too late, or ends too early."""


class LocationMovedError(ZuflussError, code=ErrorCode.REMOTE_LOCATION_MOVED):
    """A remote location got another address after files were uploaded; upload them again."""


class RebalanceFailureError(ZuflussError, code=ErrorCode.REBALANCE_FAILURE_EXCEPTION):
    """A rebalance cannot begin, such as while another one is under way."""


class NoRebalanceError(
    ZuflussError, LookupError, code=ErrorCode.NO_REBALANCE_IN_PROGRESS_EXCEPTION
):
    """The rebalance of this id is not the newest one."""


class LakeTableAlreadyExistError(ZuflussError, code=ErrorCode.LAKE_TABLE_ALREADY_EXIST):
    """The lake has a table of this name that does not belong to the table."""


class LakeSnapshotNotExistError(ZuflussError, LookupError, code=ErrorCode.LAKE_SNAPSHOT_NOT_EXIST):
    """The table has no such snapshot in the lake."""


class LogStorageError(ZuflussError, OSError, code=ErrorCode.LOG_STORAGE_EXCEPTION):
    """The log cannot be read or written."""


class StorageBackpressureError(ZuflussError, code=ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION):
    """The server has no room for a write at this moment; try again after a pause."""


class AuthenticationError(ZuflussError, PermissionError, code=ErrorCode.AUTHENTICATE_EXCEPTION):
    """Authentication failed, or is missing."""


class AuthorizationError(ZuflussError, PermissionError, code=ErrorCode.AUTHORIZATION_EXCEPTION):
    """The principal may not do this."""


_BY_CODE: dict[ErrorCode, type[ZuflussError]] = {c.code: c for c in ZuflussError.__subclasses__()}
_BY_CODE[ErrorCode.UNKNOWN_SCANNER_ID] = KvScanExpiredError


def error(code: int, message: str) -> ZuflussError:
    """The error of a wire code, as the subclass declared for it."""
    try:
        known = ErrorCode(code)
    except ValueError:
        return ZuflussError(f"error code {code} of the server: {message}")
    return _BY_CODE.get(known, ZuflussError)(message, code=known)
