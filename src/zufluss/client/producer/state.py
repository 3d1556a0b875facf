"""The checkpoint of an exactly-once writer: the offset of every bucket at that moment.

The caller stores it in one step with the position of its source, and passes it back after a crash.
Changes of the producer behind these offsets are then undone, and the source is read again from the
position that belongs to them.

`to_bytes` is JSON, one object:

| key                    | value                                                          |
|------------------------|----------------------------------------------------------------|
| zufluss_producer_state | the version of this format, 1                                  |
| table, table_id        | `database.table`, and the table's id                           |
| producer_id, epoch     | the producer and its epoch                                     |
| number                 | the producer's number: a later one of the same id has another  |
| column_ids             | ids of the written columns, which outlive renames; [] for all  |
| checkpoint             | 1, 2, … over the life of the producer                          |
| offsets                | [[partition id or null, [bucket ids], [offsets]], …], complete |
| crc32c                 | checksum of the text without this key                          |

Offsets are complete: they have every bucket of every partition of that moment. So a missing
partition is newer than the checkpoint, and everything in it is undone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from crc32c import crc32c

from zufluss.errors import ProducerStateError
from zufluss.model.table import TableBucket, TableInfo, TablePath

STATE_VERSION: Final = 1
_VERSION_KEY: Final = "zufluss_producer_state"
_CRC_KEY: Final = "crc32c"


@dataclass(frozen=True, slots=True)
class ProducerState:
    """A checkpoint of an exactly-once writer; `writer.checkpoint()` makes it.

    >>> ProducerState.from_bytes(state.to_bytes()) == state  # doctest: +SKIP
    True
    """

    table: TablePath
    """The table's path at the checkpoint."""
    table_id: int
    """The table's id; a table that was created again has another one."""
    producer_id: str
    """The producer's id."""
    number: int
    """The producer's number; a later producer of the same id has another one."""
    epoch: int
    """The epoch that made the checkpoint."""
    column_ids: tuple[int, ...]
    """Ids of the written columns beside the key, ascending; empty for all."""
    checkpoint: int
    """The checkpoint's number: 1, 2, … over the life of the producer."""
    offsets: Mapping[TableBucket, int]
    """The offset of each bucket of the table."""

    def to_bytes(self) -> bytes:
        """Serialise the state for storage; `from_bytes` reads it."""
        document = {
            _VERSION_KEY: STATE_VERSION,
            "table": str(self.table),
            "table_id": self.table_id,
            "producer_id": self.producer_id,
            "number": self.number,
            "epoch": self.epoch,
            "column_ids": list(self.column_ids),
            "checkpoint": self.checkpoint,
            "offsets": _columns(self.offsets),
        }
        return _dump(document | {_CRC_KEY: crc32c(_dump(document))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote; raises `ProducerStateError` if it is damaged."""
        document = _document(data)
        try:
            table_id = int(document["table_id"])
            return cls(
                TablePath.parse(document["table"], "fluss"),
                table_id,
                str(document["producer_id"]),
                int(document["number"]),
                int(document["epoch"]),
                tuple(map(int, document["column_ids"])),
                int(document["checkpoint"]),
                _offsets(table_id, document["offsets"]),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise ProducerStateError(
                f"the state of a producer lacks something: {problem!r}; give what "
                "checkpoint().to_bytes() returned"
            ) from problem

    @classmethod
    def merge(cls, states: Iterable[ProducerState]) -> ProducerState:
        """Merge the parts or copies of one checkpoint that the tasks of a job stored."""
        parts = list(states)
        if not parts:
            raise ProducerStateError(
                "there is no state to merge; a producer that starts without one is given state=None"
            )
        first = parts[0]
        offsets: dict[TableBucket, int] = {}
        for state in parts:
            if state._whose != first._whose:
                raise ProducerStateError(
                    f"states of one checkpoint belong together, and {state} is not of the same as "
                    f"{first}"
                )
            for bucket, offset in state.offsets.items():
                if offsets.setdefault(bucket, offset) != offset:
                    raise ProducerStateError(
                        f"states of producer {first.producer_id} contradict each other: "
                        f"{bucket.named(first.table)} stood at offset {offsets[bucket]} and at "
                        f"{offset}"
                    )
        return cls(*first._whose, offsets)

    @property
    def _whose(self) -> tuple[TablePath, int, str, int, int, tuple[int, ...], int]:
        place = (self.table, self.table_id, self.producer_id)
        return (*place, self.number, self.epoch, self.column_ids, self.checkpoint)

    def check(self, info: TableInfo) -> None:
        """Raise `ProducerStateError` unless this is a complete state of the table."""
        if self.table_id != info.table_id:
            raise ProducerStateError(
                f"{self} is of table id {self.table_id}, but {info.path} has id {info.table_id}: "
                "it was dropped and created again, or is another table. Start without a state"
            )
        partitions = {bucket.partition_id for bucket in self.offsets}
        if not info.is_partitioned:
            partitions = {None}
        for partition_id in partitions:
            for bucket_id in range(info.bucket_count):
                bucket = TableBucket(info.table_id, partition_id, bucket_id)
                if bucket not in self.offsets:
                    raise ProducerStateError(
                        f"{self} is not complete: {bucket.named(info.path)} is missing. If tasks "
                        "stored parts, ProducerState.merge joins them"
                    )

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} of producer {self.producer_id} of {self.table}"


States = ProducerState | bytes | Iterable[ProducerState | bytes]
"""A state, its bytes, or several of these to be merged."""


def state_of(state: States) -> ProducerState:
    """The state in any form that callers pass."""
    if isinstance(state, ProducerState):
        return state
    if isinstance(state, bytes | bytearray | memoryview):
        return ProducerState.from_bytes(bytes(state))
    return ProducerState.merge(map(state_of, state))


def _columns(offsets: Mapping[TableBucket, int]) -> list[list[Any]]:
    grouped: dict[int | None, tuple[list[int], list[int]]] = {}
    for bucket in sorted(offsets, key=lambda each: (each.partition_id or -1, each.bucket_id)):
        ids, values = grouped.setdefault(bucket.partition_id, ([], []))
        ids.append(bucket.bucket_id)
        values.append(offsets[bucket])
    return [[partition_id, *columns] for partition_id, columns in grouped.items()]


def _offsets(table_id: int, columns: Any) -> dict[TableBucket, int]:
    return {
        TableBucket(
            table_id, None if partition_id is None else int(partition_id), int(bucket)
        ): int(offset)
        for partition_id, buckets, offsets in columns
        for bucket, offset in zip(buckets, offsets, strict=True)
    }


def _document(data: bytes) -> dict[str, Any]:
    if not data:
        raise ProducerStateError(
            "the state of a producer is empty; a producer that starts without one is given "
            "state=None"
        )
    try:
        document = json.loads(data)
    except ValueError as problem:
        raise ProducerStateError(
            f"{len(data)} bytes are no state of a producer, or a damaged one: {problem}"
        ) from problem
    if not isinstance(document, dict) or _VERSION_KEY not in document:
        raise ProducerStateError(
            f"{len(data)} bytes are no state of a producer: the key {_VERSION_KEY} is missing"
        )
    version = document[_VERSION_KEY]
    if version != STATE_VERSION:
        raise ProducerStateError(
            f"the state of a producer has version {version!r:.40}, this client reads "
            f"{STATE_VERSION}; restore it with the client that wrote it, or a newer one"
        )
    crc = document.pop(_CRC_KEY, None)
    if crc != crc32c(_dump(document)):
        raise ProducerStateError(
            f"the state of producer {document.get('producer_id')!r:.140} is damaged: its checksum "
            "does not fit. Restore an earlier one"
        )
    return document


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
