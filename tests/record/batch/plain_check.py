"""The rules for a log batch in plain Python: the twin of `kernels/batch_check.py`.

Slow and meant to be read. Tests run both over the same right, mutated and truncated bytes and
demand the same fault, so the order of the checks matters. A batch must satisfy:

* the header's fields agree with each other and with the size of the batch;
* statistics name columns of the schema and stay inside their block;
* the Arrow message has exactly the nodes and buffers of the schema, for as many records as the
  header says; every buffer lies in the body, in order, aligned, and is long enough;
* validity bits count the nulls that the node claims; offsets rise and stay inside their data;
  strings are UTF-8; times of day and decimals are in the range of their type; map keys and
  entries are never null; struct children are as long as their parent, list children long enough;
* compressed buffers claim no more than they can need, and together no more than a limit; their
  content is checked after decompression (`batch/check.py`).
"""

from __future__ import annotations

import struct

from zufluss.record.arrow.layout import (
    BINARY,
    BOOL,
    DECIMAL,
    LIST,
    MASKED,
    NOT_NULL,
    SLOT_DECIMAL,
    SLOT_FIXED,
    SLOT_NONE,
    SLOT_TIMESTAMP,
    STRING,
    STRUCT,
    TIME,
    Layout,
    Node,
)
from zufluss.record.arrow.message import ArrowMessage, parse_message
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import MAX_MAGIC, Buffer, read_header

MAX_UNCOMPRESSED_BYTES = 256 * 1024 * 1024
MAX_VALUES = 2**31 - 1


class _Check:
    """The check of one batch."""

    def __init__(self, view: Buffer, layout: Layout, where: str) -> None:
        self.view, self.layout, self.where = memoryview(view), layout, where
        self.cursor = self.total = 0
        self.needs: dict[int, int] = {}
        self.valid: list[list[bool] | None] = []

    def refuse(
        self, fault: BatchFault, a: int = 0, b: int = 0, node: Node | None = None
    ) -> Exception:
        name = "" if node is None else node.path
        return RefusedBatchError(self.where, fault, a, b, name)

    def numbers(self, fmt: str, pos: int) -> tuple[int, ...]:
        return struct.unpack_from("<" + fmt, self.view, pos)

    # header and statistics

    def batch(self, start: int, end: int, rows: bool, changelog: bool) -> BatchFault:
        room = end - start
        if room < 48:
            raise self.refuse(BatchFault.HEADER_CUT, room, 48)
        length, magic = self.numbers("iB", start + 8)
        size, header_size = length + 12, 48 + 4 * magic
        if magic > MAX_MAGIC:
            raise self.refuse(BatchFault.MAGIC, magic, MAX_MAGIC)
        if size < header_size:
            raise self.refuse(BatchFault.LENGTH_TOO_SMALL, size, header_size)
        if size > room:
            raise self.refuse(BatchFault.LENGTH_TOO_LARGE, size, room)
        h = read_header(self.view, start)
        if h.attributes > 1:
            raise self.refuse(BatchFault.ATTRIBUTES, h.attributes, 1)
        if h.attributes == 0 and not changelog:
            raise self.refuse(BatchFault.CHANGE_TYPES_UNEXPECTED)
        if h.record_count < 0:
            raise self.refuse(BatchFault.RECORD_COUNT, h.record_count)
        if h.record_count == 0 and not changelog:
            raise self.refuse(BatchFault.EMPTY)
        if h.last_offset_delta != max(h.record_count - 1, 0):
            raise self.refuse(BatchFault.LAST_OFFSET_DELTA, h.last_offset_delta, h.record_count)
        if min(h.writer_id, h.batch_sequence) < -1 or (h.writer_id >= 0 > h.batch_sequence):
            raise self.refuse(BatchFault.WRITER, h.writer_id, h.batch_sequence)
        if h.record_count == 0:
            if size != header_size:
                raise self.refuse(BatchFault.EMPTY_WITH_BODY, size - header_size)
            return BatchFault.NONE
        room = size - header_size - h.change_types_size
        if not 0 <= h.statistics_length <= room:
            raise self.refuse(BatchFault.STATISTICS_LENGTH, h.statistics_length, max(room, 0))
        if h.statistics_length:
            self.statistics(start + header_size, h.statistics_length, h.record_count)
        if rows:
            return BatchFault.ROWS
        first = start + h.body_offset - h.change_types_size
        for i, change in enumerate(self.view[first : first + h.change_types_size]):
            if change > 4:
                raise self.refuse(BatchFault.CHANGE_TYPE, change, i)
        return self.message(start + h.body_offset, start + size, h.record_count)

    def statistics(self, start: int, size: int, count: int) -> None:
        if size < 11:
            raise self.refuse(BatchFault.STATISTICS_LENGTH, size, 11)
        version, n = self.numbers("Bh", start)
        if version != 1:
            raise self.refuse(BatchFault.STATISTICS_VERSION, version, 1)
        if n < 0 or 11 + 6 * n > size:
            raise self.refuse(BatchFault.STATISTICS_LENGTH, 11 + 6 * n, size)
        columns, slots = self.numbers(f"{n}h", start + 3), self.layout.slots
        nulls = self.numbers(f"{n}i", start + 3 + 2 * n)
        for column, null_count in zip(columns, nulls, strict=True):
            if not 0 <= column < len(slots) or slots[column] == SLOT_NONE:
                raise self.refuse(BatchFault.STATISTICS_COLUMN, column, len(slots))
            if not 0 <= null_count <= count:
                raise self.refuse(BatchFault.STATISTICS_NULL_COUNT, null_count, count)
        low, left = start + 3 + 6 * n, size - 11 - 6 * n
        (low_size,) = self.numbers("i", low)
        if not 0 <= low_size <= left:
            raise self.refuse(BatchFault.STATISTICS_LENGTH, low_size, size)
        high = low + 4 + low_size
        (high_size,) = self.numbers("i", high)
        if high_size != left - low_size:
            raise self.refuse(BatchFault.STATISTICS_LENGTH, high_size, size)
        self.statistics_row(low + 4, low_size, columns)
        self.statistics_row(high + 4, high_size, columns)

    def statistics_row(self, row: int, size: int, columns: tuple[int, ...]) -> None:
        if size == 0:
            return
        head = (len(columns) + 71) // 64 * 8
        if size < head + 8 * len(columns):
            raise self.refuse(BatchFault.STATISTICS_ROW, -1, size)
        for i, column in enumerate(columns):
            kind = self.layout.slots[column]
            null = self.view[row + (i + 8) // 8] >> (i % 8) & 1
            if kind == SLOT_FIXED or null:
                continue
            length, offset = self.numbers("Ii", row + head + 8 * i)
            if kind == SLOT_TIMESTAMP:
                length = 8
            elif offset < 0:
                inline = offset >> 24 & 0x7F
                offset, length = 0, 0 if inline <= 7 else size + 1
            if offset < 0 or offset + length > size or (kind == SLOT_DECIMAL and length > 16):
                raise self.refuse(BatchFault.STATISTICS_ROW, column, size)

    # the Arrow message

    def message(self, start: int, end: int, count: int) -> BatchFault:
        message = parse_message(self.view, start, end, self.where)
        nodes = self.layout.nodes
        if message.length != count:
            raise self.refuse(BatchFault.ARROW_LENGTH, message.length, count)
        if message.node_count != len(nodes):
            raise self.refuse(BatchFault.NODE_COUNT, message.node_count, len(nodes))
        if message.buffer_count != self.layout.buffer_count:
            raise self.refuse(
                BatchFault.BUFFER_COUNT, message.buffer_count, self.layout.buffer_count
            )
        index = 0
        for i, node in enumerate(nodes):
            n, nulls = self.numbers("qq", message.nodes_pos + 16 * i)
            self.node_length(node, n, nulls, count)
            self.node_buffers(message, i, node, index, n, nulls)
            index += node.buffer_count
        return BatchFault.NONE if message.codec is None else BatchFault.COMPRESSED

    def node_length(self, node: Node, n: int, nulls: int, count: int) -> None:
        if not 0 <= n <= MAX_VALUES or (node.parent < 0 and n != count):
            raise self.refuse(BatchFault.NODE_LENGTH, n, count, node)
        if node.parent >= 0:
            needed = self.needs[node.parent]
            exact = self.layout.nodes[node.parent].kind == STRUCT
            if n < needed or (exact and n != needed):
                raise self.refuse(BatchFault.CHILD_LENGTH, n, needed, node)
        if not 0 <= nulls <= n:
            raise self.refuse(BatchFault.NULL_COUNT, nulls, n, node)
        if node.nulls == NOT_NULL and nulls:
            raise self.refuse(BatchFault.NULL_FORBIDDEN, nulls, 0, node)

    def node_buffers(
        self, message: ArrowMessage, i: int, node: Node, index: int, n: int, nulls: int
    ) -> None:
        valid = self.validity(message, node, index, n, nulls)
        self.valid.append(valid)
        if node.nulls == MASKED and valid is not None:
            above = self.valid[node.parent] or [True] * n
            if any(there and not here for here, there in zip(valid, above, strict=True)):
                raise self.refuse(BatchFault.NULL_FORBIDDEN, nulls, 0, node)
        if node.kind == STRUCT:
            self.needs[i] = n
        elif node.kind in (STRING, BINARY, LIST):
            self.variable(message, i, node, index, n, valid)
        else:
            self.fixed(message, node, index, n, valid)

    def buffer(
        self, message: ArrowMessage, node: Node, index: int, most: int
    ) -> tuple[int, memoryview | None]:
        """Return size and bytes of a buffer; None instead of bytes if it is compressed."""
        offset, size = self.numbers("qq", message.buffers_pos + 16 * index)
        room = message.body_length
        if offset < 0 or offset % 8 or size < 0 or offset > room or size > room - offset:
            raise self.refuse(BatchFault.BUFFER_PLACE, size, offset, node)
        if size and offset < self.cursor:
            raise self.refuse(BatchFault.BUFFER_ORDER, offset, self.cursor, node)
        if size:
            self.cursor = offset + size
        begin = message.body_start + offset
        if message.codec is None:
            return size, self.view[begin : begin + size]
        return self.claimed(node, begin, size, most), None

    def claimed(self, node: Node, begin: int, size: int, most: int) -> int:
        """Return the uncompressed size of a buffer of a compressed message."""
        if size == 0:
            return 0
        if size < 8:
            raise self.refuse(BatchFault.COMPRESSED_SIZE, size, 8, node)
        (prefix,) = self.numbers("q", begin)
        claimed = size - 8 if prefix == -1 else prefix
        if not 0 <= claimed <= most:
            raise self.refuse(BatchFault.UNCOMPRESSED_SIZE, claimed, most, node)
        self.total += claimed
        if self.total > MAX_UNCOMPRESSED_BYTES:
            raise self.refuse(
                BatchFault.UNCOMPRESSED_TOTAL, self.total, MAX_UNCOMPRESSED_BYTES, node
            )
        return claimed

    def validity(
        self, message: ArrowMessage, node: Node, index: int, n: int, nulls: int
    ) -> list[bool] | None:
        """Return which values are not NULL; None if all are, or if the buffer is compressed."""
        needed = (n + 7) // 8
        size, bits = self.buffer(message, node, index, _round64(needed))
        if n == 0:
            return None
        if size < needed and (size or nulls):
            raise self.refuse(BatchFault.VALIDITY_SIZE, size, needed, node)
        if size == 0 or bits is None:
            return None
        valid = [bool(bits[i // 8] >> (i % 8) & 1) for i in range(n)]
        if valid.count(False) != nulls:
            raise self.refuse(BatchFault.VALIDITY_BITS, valid.count(False), nulls, node)
        return valid

    def fixed(
        self, message: ArrowMessage, node: Node, index: int, n: int, valid: list[bool] | None
    ) -> None:
        needed = (n + 7) // 8 if node.kind == BOOL else n * node.width
        size, data = self.buffer(message, node, index + 1, _round64(needed))
        if size < needed:
            raise self.refuse(BatchFault.VALUES_SIZE, size, needed, node)
        if data is None or node.kind not in (TIME, DECIMAL):
            return
        for i in range(n):
            raw = data[i * node.width : (i + 1) * node.width]
            value = int.from_bytes(raw, "little", signed=True)
            lowest = 0 if node.kind == TIME else 1 - node.limit
            if (valid is None or valid[i]) and not lowest <= value < node.limit:
                raise self.refuse(BatchFault.VALUE_RANGE, i, 0, node)

    def variable(
        self,
        message: ArrowMessage,
        i: int,
        node: Node,
        index: int,
        n: int,
        valid: list[bool] | None,
    ) -> None:
        needed = 4 * (n + 1)
        size, raw = self.buffer(message, node, index + 1, _round64(needed))
        if size < needed and (n or size):
            raise self.refuse(BatchFault.OFFSETS_SIZE, size, needed, node)
        data: memoryview | None = None
        limit = MAX_VALUES
        if node.kind != LIST:
            limit, data = self.buffer(message, node, index + 2, MAX_VALUES)
        offsets = struct.unpack_from(f"<{n + 1}i", raw) if raw else (0,)
        for k in range(n if raw else 0):
            if offsets[k + 1] < offsets[k]:
                raise self.refuse(BatchFault.OFFSETS_ORDER, k + 1, offsets[k + 1], node)
        if offsets[0] < 0 or offsets[-1] > limit:
            worst = offsets[0] if offsets[0] < 0 else offsets[-1]
            raise self.refuse(BatchFault.OFFSETS_RANGE, worst, limit, node)
        self.needs[i] = offsets[-1]
        if node.kind == STRING and data is not None and raw:
            self.strings(node, data, offsets, valid)

    def strings(
        self, node: Node, data: memoryview, offsets: tuple[int, ...], valid: list[bool] | None
    ) -> None:
        for i in range(len(offsets) - 1):
            if valid is not None and not valid[i]:
                continue
            try:
                str(data[offsets[i] : offsets[i + 1]], "utf-8")
            except UnicodeDecodeError as error:
                raise self.refuse(BatchFault.UTF8, i, offsets[i] + error.start, node) from None


def _round64(size: int) -> int:
    return (size + 63) // 64 * 64


def check_batch(
    view: Buffer,
    start: int,
    end: int,
    layout: Layout,
    *,
    rows: bool = False,
    changelog: bool = False,
    where: str = "batch",
) -> BatchFault:
    """Check the batch at `start`; returns NONE, COMPRESSED or ROWS, or raises the fault."""
    return _Check(view, layout, where).batch(start, end, rows, changelog)
