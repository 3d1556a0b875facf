"""The nodes and buffers of an Arrow record batch, for one schema.

Arrow flattens a record batch depth first: every field, nested ones after their parent, has one node
(length, null count) and the buffers of its type, validity first. A `Layout` is the list of these
nodes, computed once per schema: as objects for plain code and projection, as an array of integers
(`program`) for the kernel.

The program, all int64:

| at                        | content                                                              |
|---------------------------|----------------------------------------------------------------------|
| 0                         | schema id                                                            |
| 1 / 2 / 3                 | number of nodes / buffers / top-level columns                        |
| 4                         | 1 if bodies are rows (INDEXED, COMPACTED) instead of Arrow messages  |
| 8 + 8·i                   | node i: kind, width, parent (−1), column, null rule, limit low,      |
|                           | limit high, 0                                                        |
| 8 + 8·nodes + c           | column c in a statistics row: see `_statistics_slot`                 |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types as pat

FIXED, BOOL, STRING, BINARY, LIST, STRUCT, TIME, DECIMAL = range(8)

NULLABLE, NOT_NULL, MASKED = range(3)

PROGRAM_HEAD = 8
PROGRAM_STRIDE = 8

BUFFER_COUNTS = (2, 2, 3, 3, 2, 1, 2, 2)
"""Buffers of a node by kind, validity included."""

SLOT_NONE, SLOT_FIXED, SLOT_VARIABLE, SLOT_TIMESTAMP, SLOT_DECIMAL = range(5)

_TICKS_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


@dataclass(frozen=True, slots=True)
class Node:
    """One field of the flattened schema."""

    kind: int
    """FIXED, BOOL, STRING, …"""
    width: int
    """Bytes per value, 0 for kinds without a width."""
    parent: int
    """Index of the parent node, −1 at the top."""
    column: int
    """Index of its top-level column."""
    path: str
    """Dotted name for messages."""
    nulls: int
    """NULLABLE, NOT_NULL (a NOT NULL column or element, map keys and entries) or MASKED (a NOT NULL
    field of a ROW: null only where its row is)."""
    limit: int = 0
    """Upper bound of values: ticks of a day (TIME) or 10^precision (DECIMAL, by magnitude)."""

    @property
    def buffer_count(self) -> int:
        """Buffers of this node, validity included."""
        return BUFFER_COUNTS[self.kind]


def _scalar(dtype: pa.DataType) -> tuple[int, int, int] | None:
    """Return kind, width and limit of a type without children, None for other types."""
    if pat.is_boolean(dtype):
        return BOOL, 0, 0
    if pat.is_string(dtype):
        return STRING, 0, 0
    if pat.is_binary(dtype):
        return BINARY, 0, 0
    if pat.is_decimal128(dtype):
        return DECIMAL, 16, 10**dtype.precision
    if pat.is_time(dtype):
        return TIME, dtype.bit_width // 8, _TICKS_PER_DAY[dtype.unit]
    if pat.is_fixed_size_binary(dtype) or pat.is_primitive(dtype):
        return FIXED, dtype.bit_width // 8, 0
    return None


def _nodes(field: pa.Field, parent: int, column: int, path: str, at: int, nulls: int) -> list[Node]:
    """Return the node of `field`, whose index is `at`, and those below it, depth first."""
    dtype = field.type
    if scalar := _scalar(dtype):
        kind, width, limit = scalar
        return [Node(kind, width, parent, column, path, nulls, limit)]
    if pat.is_map(dtype):
        nodes = [Node(LIST, 0, parent, column, path, nulls)]
        nodes.append(Node(STRUCT, 0, at, column, f"{path}.entries", NOT_NULL))
        children = [(dtype.key_field, "key", NOT_NULL), _child(dtype.item_field, "value", MASKED)]
    elif pat.is_list(dtype):
        nodes = [Node(LIST, 0, parent, column, path, nulls)]
        children = [_child(dtype.value_field, "element", NOT_NULL)]
    elif pat.is_struct(dtype):
        nodes = [Node(STRUCT, 0, parent, column, path, nulls)]
        children = [_child(child, child.name, MASKED) for child in dtype]
    else:
        raise TypeError(f"column {path!r}: Arrow type {dtype} does not occur in log batches")
    above = at + len(nodes) - 1
    for child, name, rule in children:
        nodes += _nodes(child, above, column, f"{path}.{name}", at + len(nodes), rule)
    return nodes


def _child(field: pa.Field, name: str, unless_nullable: int) -> tuple[pa.Field, str, int]:
    return field, name, NULLABLE if field.nullable else unless_nullable


def _statistics_slot(dtype: pa.DataType) -> int:
    """Return how minimum and maximum of a column stand in the 8-byte slot of a statistics row."""
    if pat.is_string(dtype):
        return SLOT_VARIABLE
    if pat.is_decimal128(dtype):
        return SLOT_DECIMAL if dtype.precision > 18 else SLOT_FIXED
    if pat.is_timestamp(dtype):
        return SLOT_TIMESTAMP if dtype.unit in ("us", "ns") else SLOT_FIXED
    if pat.is_nested(dtype) or pat.is_binary(dtype) or pat.is_fixed_size_binary(dtype):
        return SLOT_NONE
    return SLOT_FIXED


@dataclass(frozen=True)
class Layout:
    """The flattened form of one schema."""

    schema: pa.Schema
    """The Arrow schema."""
    nodes: tuple[Node, ...]
    """Every field, depth first."""

    @classmethod
    def of(cls, schema: pa.Schema) -> Layout:
        """Flatten `schema`."""
        nodes: list[Node] = []
        for column, field in enumerate(schema):
            rule = NULLABLE if field.nullable else NOT_NULL
            nodes += _nodes(field, -1, column, field.name, len(nodes), rule)
        return cls(schema, tuple(nodes))

    @cached_property
    def buffer_count(self) -> int:
        """Buffers of all nodes."""
        return sum(node.buffer_count for node in self.nodes)

    @cached_property
    def columns(self) -> tuple[tuple[int, int, int, int], ...]:
        """By top-level column: first node, node after, first buffer, buffer after."""
        spans: list[tuple[int, int, int, int]] = []
        buffer = 0
        for index, node in enumerate(self.nodes):
            first, begin = (index, buffer) if node.parent < 0 else (spans[-1][0], spans[-1][2])
            buffer += node.buffer_count
            span = (first, index + 1, begin, buffer)
            spans[node.column :] = [span]
        return tuple(spans)

    @cached_property
    def schema_message(self) -> bytes:
        """The schema message that begins an Arrow stream."""
        return bytes(self.schema.serialize())

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """By top-level column: the kind of its slot in a statistics row."""
        return tuple(_statistics_slot(field.type) for field in self.schema)

    def program(self, schema_id: int, rows: bool = False) -> npt.NDArray[np.int64]:
        """Return the layout as integers; `rows`: bodies are rows instead of Arrow messages."""
        columns = len(self.schema)
        size = PROGRAM_HEAD + PROGRAM_STRIDE * len(self.nodes) + columns
        program = np.zeros(size, dtype=np.int64)
        program[:5] = schema_id, len(self.nodes), self.buffer_count, columns, rows
        for i, n in enumerate(self.nodes):
            low, high = n.limit & (2**64 - 1), n.limit >> 64
            low -= 2**64 if low >= 2**63 else 0
            at = PROGRAM_HEAD + PROGRAM_STRIDE * i
            numbers = (n.kind, n.width, n.parent, n.column, n.nulls, low, high)
            program[at : at + 7] = numbers
        program[size - columns :] = self.slots
        program.setflags(write=False)
        return program
