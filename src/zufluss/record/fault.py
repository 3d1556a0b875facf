"""Reasons to refuse a batch, and their messages.

The kernel and its plain-Python twin return a fault as a number, with the node and two figures. The
message names the batch, the column, the value and what is allowed. Tests demand the same fault from
both.
"""

from __future__ import annotations

from enum import IntEnum

from zufluss.errors import CorruptRecordError


class BatchFault(IntEnum):
    """Reasons to refuse a batch; 0 to 2 are the three ways to accept it."""

    NONE = 0
    COMPRESSED = 1
    ROWS = 2
    OTHER_SCHEMA = 3
    HEADER_CUT = 4
    MAGIC = 5
    LENGTH_TOO_SMALL = 6
    LENGTH_TOO_LARGE = 7
    CRC = 8
    ATTRIBUTES = 9
    CHANGE_TYPES_UNEXPECTED = 10
    RECORD_COUNT = 11
    EMPTY = 12
    LAST_OFFSET_DELTA = 13
    WRITER = 14
    EMPTY_WITH_BODY = 15
    STATISTICS_LENGTH = 16
    STATISTICS_VERSION = 17
    STATISTICS_COLUMN = 18
    STATISTICS_NULL_COUNT = 19
    STATISTICS_ROW = 20
    CHANGE_TYPE = 21
    MESSAGE_CUT = 22
    MESSAGE_MARKER = 23
    METADATA_LENGTH = 24
    METADATA_TABLE = 25
    METADATA_FIELD = 26
    METADATA_VECTOR = 27
    MESSAGE_VERSION = 28
    MESSAGE_KIND = 29
    MESSAGE_EXTRAS = 30
    COMPRESSION = 31
    BODY_LENGTH = 32
    ARROW_LENGTH = 33
    NODE_COUNT = 34
    BUFFER_COUNT = 35
    NODE_LENGTH = 36
    NULL_COUNT = 37
    NULL_FORBIDDEN = 38
    BUFFER_PLACE = 39
    BUFFER_ORDER = 40
    COMPRESSED_SIZE = 41
    UNCOMPRESSED_SIZE = 42
    UNCOMPRESSED_TOTAL = 43
    VALIDITY_SIZE = 44
    VALIDITY_BITS = 45
    VALUES_SIZE = 46
    OFFSETS_SIZE = 47
    OFFSETS_RANGE = 48
    OFFSETS_ORDER = 49
    CHILD_LENGTH = 50
    UTF8 = 51
    VALUE_RANGE = 52


_TEXTS = {
    BatchFault.HEADER_CUT: "{a} bytes are left, a header takes {b}",
    BatchFault.MAGIC: "magic {a} is unknown, 0 to {b} are readable",
    BatchFault.LENGTH_TOO_SMALL: "it claims {a} bytes, less than its own header of {b}",
    BatchFault.LENGTH_TOO_LARGE: "it claims {a} bytes, {b} are there",
    BatchFault.CRC: "its CRC-32C is {a:#010x}, its bytes give {b:#010x}; send it again",
    BatchFault.ATTRIBUTES: "attributes {a:#04x} have unknown bits, only {b:#04x} is known",
    BatchFault.CHANGE_TYPES_UNEXPECTED: "it carries change types, an append to a log table sets "
    "the append-only attribute",
    BatchFault.RECORD_COUNT: "record count {a} is negative",
    BatchFault.EMPTY: "it has no records, an append has at least one",
    BatchFault.LAST_OFFSET_DELTA: "last offset delta {a} does not fit its record count {b}, "
    "it must be one less",
    BatchFault.WRITER: "writer id {a} with batch sequence {b}: both are −1 (no writer) or not "
    "negative",
    BatchFault.EMPTY_WITH_BODY: "it has no records but {a} bytes of body",
    BatchFault.STATISTICS_LENGTH: "statistics of {a} bytes do not fit, {b} are possible",
    BatchFault.STATISTICS_VERSION: "statistics version {a} is unknown, 1 is readable",
    BatchFault.STATISTICS_COLUMN: "statistics of column index {a}, which is out of order, outside "
    "the schema's {b} columns, or of a type that has none",
    BatchFault.STATISTICS_NULL_COUNT: "statistics count {a} nulls in {b} records",
    BatchFault.STATISTICS_ROW: "the statistics' minimum or maximum of column index {a} points "
    "outside its row of {b} bytes",
    BatchFault.CHANGE_TYPE: "change type {a} of record {b} is unknown, 0 to 4 are",
    BatchFault.MESSAGE_CUT: "its Arrow message is cut, {a} bytes are left, at least {b} are needed",
    BatchFault.MESSAGE_MARKER: "its Arrow message begins with {a:#010x} instead of 0xffffffff",
    BatchFault.METADATA_LENGTH: "Arrow metadata of {a} bytes: it must be a multiple of 8 and "
    "within {b}",
    BatchFault.METADATA_TABLE: "an Arrow metadata table at byte {a} points outside the metadata",
    BatchFault.METADATA_FIELD: "field {b} of the Arrow metadata table at byte {a} is missing, "
    "misaligned or outside the metadata",
    BatchFault.METADATA_VECTOR: "an Arrow metadata vector at byte {a} with {b} elements passes the "
    "end",
    BatchFault.MESSAGE_VERSION: "Arrow metadata version {a} is not readable, 3 (V4) and 4 (V5) are",
    BatchFault.MESSAGE_KIND: "its Arrow message is of kind {a}, only 3 (record batch) belongs here",
    BatchFault.MESSAGE_EXTRAS: "its Arrow message carries custom metadata or variadic buffers, "
    "a log batch has neither",
    BatchFault.COMPRESSION: "Arrow compression codec {a}, method {b}: codec 0 (LZ4 frame) or 1 "
    "(ZSTD) with method 0 are readable",
    BatchFault.BODY_LENGTH: "its Arrow body claims {a} bytes, the batch has {b}",
    BatchFault.ARROW_LENGTH: "its Arrow message has {a} records, its header says {b}",
    BatchFault.NODE_COUNT: "its Arrow message has {a} field nodes, the schema needs {b}; "
    "was it written with another table's schema?",
    BatchFault.BUFFER_COUNT: "its Arrow message has {a} buffers, the schema needs {b}; "
    "was it written with another table's schema?",
    BatchFault.NODE_LENGTH: "column {name!r} has {a} values instead of {b}",
    BatchFault.NULL_COUNT: "column {name!r} claims {a} nulls in {b} values",
    BatchFault.NULL_FORBIDDEN: "{name!r} has {a} nulls, it is NOT NULL (map keys always are)",
    BatchFault.BUFFER_PLACE: "a buffer of column {name!r} ({a} bytes at {b}) is misaligned or "
    "outside the body",
    BatchFault.BUFFER_ORDER: "a buffer of column {name!r} starts at {a}, inside the one before, "
    "which ends at {b}",
    BatchFault.COMPRESSED_SIZE: "a compressed buffer of column {name!r} has {a} bytes, "
    "its length prefix alone takes {b}",
    BatchFault.UNCOMPRESSED_SIZE: "a buffer of column {name!r} claims {a} bytes uncompressed, "
    "at most {b} are possible",
    BatchFault.UNCOMPRESSED_TOTAL: "it claims {a} bytes uncompressed at column {name!r}, "
    "the limit is {b}; send smaller batches",
    BatchFault.VALIDITY_SIZE: "the validity of column {name!r} has {a} bytes, {b} are needed",
    BatchFault.VALIDITY_BITS: "the validity of column {name!r} has {a} nulls, its node says {b}",
    BatchFault.VALUES_SIZE: "the values of column {name!r} have {a} bytes, {b} are needed",
    BatchFault.OFFSETS_SIZE: "the offsets of column {name!r} have {a} bytes, {b} are needed",
    BatchFault.OFFSETS_RANGE: "the offsets of column {name!r} reach {a}, 0 to {b} are possible",
    BatchFault.OFFSETS_ORDER: "the offsets of column {name!r} are not monotone: {b} follows at "
    "position {a}",
    BatchFault.CHILD_LENGTH: "column {name!r} has {a} values, its parent needs {b}",
    BatchFault.UTF8: "column {name!r}: value {a} is not UTF-8 (byte {b} of the data)",
    BatchFault.VALUE_RANGE: "column {name!r}: value {a} is out of the range of its type",
}


class RefusedBatchError(CorruptRecordError):
    """A batch that must not be written; `fault` is the reason."""

    def __init__(
        self, where: str, fault: BatchFault, a: int = 0, b: int = 0, name: str = ""
    ) -> None:
        super().__init__(f"{where}: {_TEXTS[fault].format(a=a, b=b, name=name)}")
        self.fault = fault
