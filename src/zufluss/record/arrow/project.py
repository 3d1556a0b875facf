"""Projection: rewrites an Arrow batch to some of its columns, without touching their bytes.

The header keeps all fields but length and statistics length, which becomes 0. The change types
stay. The Arrow message gets new metadata that lists only the nodes and buffers of the chosen
columns, nested ones with their parents. The buffers follow as they are, compressed or not, each
padded to 8. **The CRC stays too**, as in Apache Fluss, so a reader of projected batches cannot
check it. Empty batches pass unchanged.

Columns are indexes into the latest schema. A batch of an older schema is matched by column id, and
a column that it lacks becomes a column of nulls. Without columns, a message has nothing but the
number of records, for clients that count.

The metadata is a template (`arrow/template.py`): only numbers differ between the batches of a
table.

There are three ways to use it: `project_all` for the batches that a fetch read, in one kernel call;
`project` for one batch, as a list of views; `plan` for a large batch of which only the needed
ranges are read from disk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zufluss.errors import SchemaNotExistError
from zufluss.model.schema import Schema
from zufluss.record.arrow.layout import BINARY, BOOL, LIST, STRING, STRUCT, Layout
from zufluss.record.arrow.message import ArrowMessage
from zufluss.record.arrow.template import (
    BODY_LENGTH_AT,
    CODEC_AT,
    CODED_NODES_AT,
    LENGTH_AT,
    NODES_AT,
    STORED,
    message_template,
)
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import LENGTH_OVERHEAD, BatchHeader, Buffer, read_header
from zufluss.record.kernels import batch_project as kernel
from zufluss.record.kernels.message_read import read_message

Piece: TypeAlias = tuple[int, int] | bytes
"""Part of a projected body: a range of the source batch (offset, size), or new bytes."""

MAX_PLANS = 64
"""Projections kept per table; clients of one table rarely use more at once."""

EXTRA_ROOM = 4096
"""Bytes that a result may have beyond the source's size before a second piece is begun."""

_PAIR = struct.Struct("<qq")
_NUMBER = struct.Struct("<q")
_LENGTH = struct.Struct("<i")


class _Source(NamedTuple):
    """The source of one buffer of the result."""

    buffer: int
    """Buffer of the source, −1 if the column is missing there."""
    need: int
    """Zeros of a missing column's buffer: 0 none, 1 bits, 2 values, 3 offsets."""
    width: int
    """Bytes per value for need 2."""
    rows: int
    """1: as many rows as the batch has; 0: none, below a list."""


class _Plan(NamedTuple):
    """How to project batches of one schema."""

    source_nodes: int
    """Nodes of a batch of the schema."""
    source_buffers: int
    """Its buffers."""
    nodes: tuple[tuple[int, int], ...]
    """Nodes of the result: source node or −1, its rows as in `_Source`."""
    buffers: tuple[_Source, ...]
    """Buffers of the result."""
    program: npt.NDArray[np.int64]
    """The plan in the form of the kernel, see `kernels/batch_project.py`."""
    plain: npt.NDArray[np.uint8]
    """Template of an uncompressed message."""
    coded: npt.NDArray[np.uint8]
    """Template of a compressed one."""
    numbers: struct.Struct
    """Packs nodes, the number of buffers, and buffers."""

    def metadata_size(self, message: ArrowMessage) -> int:
        """Return the bytes of the result's metadata."""
        return len(self.plain if message.codec is None else self.coded) - 8


def _missing(layout: Layout, column: int) -> tuple[list[tuple[int, int]], list[_Source]]:
    """Return nodes and buffers of a column of NULLs."""
    first, last, _, _ = layout.columns[column]
    rows: dict[int, int] = {-1: 1}
    nodes: list[tuple[int, int]] = []
    buffers: list[_Source] = []
    for index in range(first, last):
        node = layout.nodes[index]
        here = rows[node.parent]
        rows[index] = 0 if node.kind == LIST else here
        nodes.append((-1, here))
        buffers.append(_Source(-1, 1, 0, here))
        if node.kind in (STRING, BINARY, LIST):
            buffers.append(_Source(-1, 3, 0, here))
            if node.kind != LIST:
                buffers.append(_Source(-1, 0, 0, here))
        elif node.kind != STRUCT:
            buffers.append(_Source(-1, 1 if node.kind == BOOL else 2, node.width, here))
    return nodes, buffers


def _make_plan(schema_id: int, batch: Schema, latest: Schema, columns: tuple[int, ...]) -> _Plan:
    source, target = Layout.of(batch.arrow), Layout.of(latest.arrow)
    positions = {column.id: i for i, column in enumerate(batch.columns)}
    nodes: list[tuple[int, int]] = []
    buffers: list[_Source] = []
    for column in columns:
        position = positions.get(latest.columns[column].id)
        if position is None:
            more_nodes, more_buffers = _missing(target, column)
        else:
            first, last, begin, end = source.columns[position]
            more_nodes = [(i, 1) for i in range(first, last)]
            more_buffers = [_Source(i, 0, 0, 1) for i in range(begin, end)]
        nodes += more_nodes
        buffers += more_buffers
    head = [schema_id, len(source.nodes), source.buffer_count, len(nodes), len(buffers), 0, 0, 0]
    flat = [*head, *chain.from_iterable(nodes), *chain.from_iterable(buffers)]
    return _Plan(
        len(source.nodes),
        source.buffer_count,
        tuple(nodes),
        tuple(buffers),
        np.array(flat, dtype=np.int64),
        np.frombuffer(message_template(len(nodes), len(buffers), coded=False), dtype=np.uint8),
        np.frombuffer(message_template(len(nodes), len(buffers), coded=True), dtype=np.uint8),
        struct.Struct(f"<{2 * len(nodes)}qII{2 * len(buffers)}q"),
    )


class Projector:
    """Projects the batches of one table; `schemas` returns the schema of an id, or None."""

    def __init__(self, schemas: Callable[[int], Schema | None], latest: Schema) -> None:
        self._schemas = schemas
        self._latest = latest
        self._plans: dict[tuple[int, tuple[int, ...]], _Plan] = {}

    def __repr__(self) -> str:
        return f"Projector({len(self._plans)} plans)"

    def _plan(self, schema_id: int, columns: tuple[int, ...]) -> _Plan:
        plan = self._plans.get((schema_id, columns))
        if plan is None:
            schema = self._schemas(schema_id)
            if schema is None:
                raise SchemaNotExistError(f"a stored batch has the unknown schema {schema_id}")
            if len(self._plans) >= MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = _make_plan(schema_id, schema, self._latest, columns)
            self._plans[schema_id, columns] = plan
        return plan

    def project_all(self, view: Buffer, columns: tuple[int, ...]) -> list[memoryview]:
        """Project the whole batches that fill `view`; returns a few large pieces."""
        buf = np.frombuffer(view, dtype=np.uint8)
        pieces: list[memoryview] = []
        pos, end = 0, buf.size
        room = end + EXTRA_ROOM
        while pos < end:
            plan = self._plan(read_header(view, pos).schema_id, columns)
            out = np.empty(room, dtype=np.uint8)
            stop, reached, filled, fault, a, b = kernel.project_batches(
                buf, pos, end, plan.program, plan.plain, plan.coded, out, 0
            )
            if stop == kernel.DAMAGED:
                raise RefusedBatchError(f"stored batch at byte {reached}", BatchFault(fault), a, b)
            if filled:
                pieces.append(_view(out)[:filled])
            elif stop == kernel.FULL:
                room *= 2
            pos = reached
        return pieces

    def plan(
        self, view: Buffer, pos: int, header: BatchHeader, columns: tuple[int, ...]
    ) -> tuple[bytearray, list[Piece]]:
        """Plan the projection of the batch at `pos`; `view` need not hold its body.

        Returns the new bytes up to the body, and the pieces of the body. The batch must have
        records.
        """
        plan = self._plan(header.schema_id, columns)
        where = f"stored batch at offset {header.base_offset}"
        if header.record_count < 0:
            raise RefusedBatchError(where, BatchFault.RECORD_COUNT, header.record_count)
        if header.statistics_length < 0:
            raise RefusedBatchError(where, BatchFault.STATISTICS_LENGTH, header.statistics_length)
        records = pos + header.body_offset
        message = _read_message(view, records, pos + header.size, plan, where)
        numbers: list[int] = []
        for source, rows in plan.nodes:
            if source < 0:
                numbers += (header.record_count * rows,) * 2
            else:
                numbers += _PAIR.unpack_from(view, message.nodes_pos + 16 * source)
        numbers += (0, len(plan.buffers))
        body = _Body(message, pos, where)
        for buffer in plan.buffers:
            if buffer.buffer < 0:
                numbers += body.add_nulls(buffer, header.record_count)
            else:
                numbers += body.add(view, buffer.buffer)
        prefix = _prefix(view, pos, header, plan, message)
        metadata = len(prefix) - plan.metadata_size(message)
        at = NODES_AT if message.codec is None else CODED_NODES_AT
        plan.numbers.pack_into(prefix, metadata + at, *numbers)
        _NUMBER.pack_into(prefix, metadata + BODY_LENGTH_AT, body.size)
        _LENGTH.pack_into(prefix, 8, len(prefix) + body.size - LENGTH_OVERHEAD)
        return prefix, body.pieces


def _read_message(view: Buffer, start: int, end: int, plan: _Plan, where: str) -> ArrowMessage:
    """Read the metadata of a stored message and compare it with its schema."""
    buf = np.frombuffer(view, dtype=np.uint8)
    fault, a, b, *fields = read_message(buf, start, end)
    if fault:
        raise RefusedBatchError(where, BatchFault(fault), a, b)
    if fields[5] < 0:
        fields[5] = None
    message = ArrowMessage._make(fields)
    if message.node_count != plan.source_nodes:
        raise RefusedBatchError(where, BatchFault.NODE_COUNT, message.node_count, plan.source_nodes)
    if message.buffer_count != plan.source_buffers:
        expected = plan.source_buffers
        raise RefusedBatchError(where, BatchFault.BUFFER_COUNT, message.buffer_count, expected)
    return message


def _prefix(
    view: Buffer, pos: int, header: BatchHeader, plan: _Plan, message: ArrowMessage
) -> bytearray:
    """Return the header without statistics, the change types, and the metadata to be completed."""
    data = memoryview(view)
    records = pos + header.body_offset
    prefix = bytearray(data[pos : pos + header.header_size])
    if header.magic:
        _LENGTH.pack_into(prefix, header.header_size - 4, 0)
    prefix += data[records - header.change_types_size : records]
    metadata = len(prefix) + 8
    prefix += _view(plan.plain if message.codec is None else plan.coded)
    if message.codec is not None:
        prefix[metadata + CODEC_AT] = message.codec
    _NUMBER.pack_into(prefix, metadata + LENGTH_AT, message.length)
    return prefix


class _Body:
    """Builds the body of a projected batch; adjacent buffers become one piece."""

    def __init__(self, message: ArrowMessage, pos: int, where: str) -> None:
        self.message, self.where = message, where
        self.begin = message.body_start - pos
        self.pieces: list[Piece] = []
        self.size = 0
        self.last = -1

    def add(self, view: Buffer, index: int) -> tuple[int, int]:
        """Append a buffer of the source, padded to 8; returns its new place."""
        offset, size = _PAIR.unpack_from(view, self.message.buffers_pos + 16 * index)
        room = self.message.body_length
        if offset < 0 or size < 0 or offset > room or size > room - offset:
            raise RefusedBatchError(self.where, BatchFault.BUFFER_PLACE, size, offset)
        place = (self.size, size)
        padded = (size + 7) & ~7
        available = min(padded, room - offset)
        if available and offset == self.last:
            begin, before = self.pieces[-1]
            self.pieces[-1] = (int(begin), int(before) + available)
        elif available:
            self.pieces.append((self.begin + offset, available))
        if available:
            self.last = offset + available
        if padded > available:
            self._append(bytes(padded - available))
        self.size += padded
        return place

    def add_nulls(self, source: _Source, count: int) -> tuple[int, int]:
        """Append a buffer of a column of NULLs; returns its place."""
        rows = count * source.rows
        size = (0, (rows + 7) // 8, rows * source.width, 4 * (rows + 1))[source.need]
        stored = STORED if size and self.message.codec is not None else b""
        place = (self.size, len(stored) + size)
        padded = (len(stored) + size + 7) & ~7
        if padded:
            self._append(stored + bytes(padded - len(stored)))
        self.size += padded
        return place

    def _append(self, new: bytes) -> None:
        self.pieces.append(new)
        self.last = -1


def _view(array: Any) -> memoryview:
    return memoryview(array)
