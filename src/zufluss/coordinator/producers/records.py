"""Producers in the metadata store: a head each, and the offsets that an undo begins at.

| path below `/producers/tables` | value |
|---|---|
| `TABLE_ID/ID` | the head: an object with `number`, `epoch`, `owner`, `columns` (ids), `all_columns`, `exclusive`, `ttl_ms`, `checkpointed`, `checkpoint_id` (or null), `stateful`, `lost`, `fence_only` (or not there: false), `parts` |
| `TABLE_ID/ID/offsets/N` | part N of the baseline, from 0; as many as `parts` says, null before it is known |

A part is a deflated array: per partition `[id or null, [buckets], [offsets]]`, of at most
`BUCKETS_PER_PART` buckets. Head and parts change in one transaction. The next number of a producer
is `/counters/producer`, from 1 on.

Producers do not lie below `/tables`, because they change apart from the catalog. Those of a dropped
table are deleted after the drop, or by the next start.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final

from zufluss.cluster.producers import Baseline
from zufluss.coordinator.producers.rules import ProducerRecord
from zufluss.coordinator.records import guarded
from zufluss.meta.api import Create, Delete, Entry, Op, Put
from zufluss.model.schema import dump_object

PRODUCERS_PATH: Final = "/producers/tables"
PRODUCER_COUNTER: Final = "/counters/producer"
BUCKETS_PER_PART: Final = 40_000
"""Buckets of one part: with the largest numbers it is still smaller than a value may be."""


def table_path(table_id: int) -> str:
    """The path above the producers of a table."""
    return f"{PRODUCERS_PATH}/{table_id}"


def head_path(table_id: int, producer_id: str) -> str:
    """The path of a producer's head."""
    return f"{table_path(table_id)}/{producer_id}"


def create(producer: ProducerRecord) -> list[Op]:
    """Operations that create a producer."""
    path = head_path(producer.table_id, producer.producer_id)
    return [Create(path, _head(producer)), *change_parts(path, 0, producer.baseline)]


def change(before: ProducerRecord, after: ProducerRecord) -> list[Op]:
    """Operations that replace a producer; offsets that did not change are not written."""
    path = head_path(after.table_id, after.producer_id)
    ops: list[Op] = []
    if before.baseline is not after.baseline:
        ops = change_parts(path, part_count(before.baseline) or 0, after.baseline)
    head = _head(after)
    return ops if head == _head(before) else [Put(path, head), *ops]


def delete(producer: ProducerRecord) -> list[Op]:
    """Operations that delete a producer."""
    path = head_path(producer.table_id, producer.producer_id)
    return [Delete(path), *change_parts(path, part_count(producer.baseline) or 0, None)]


def change_parts(path: str, before: int, offsets: Baseline | None) -> list[Op]:
    """Operations that replace the `before` parts of offsets below a path; None deletes them."""
    values = [] if offsets is None else encode_parts(offsets)
    ops: list[Op] = [
        (Put if at < before else Create)(f"{path}/offsets/{at}", value)
        for at, value in enumerate(values)
    ]
    gone = range(len(values), before)
    return [*ops, *(Delete(f"{path}/offsets/{at}") for at in gone)]


def part_count(offsets: Baseline | None) -> int | None:
    """The number of parts of some offsets; None without offsets."""
    return None if offsets is None else -(-len(offsets) // BUCKETS_PER_PART)


def encode_parts(offsets: Baseline) -> list[bytes]:
    """Offsets as they are stored."""
    rest = iter(sorted(offsets.items(), key=lambda item: (item[0][0] or 0, item[0][1])))
    parts: list[bytes] = []
    while some := list(islice(rest, BUCKETS_PER_PART)):
        columns: dict[int | None, tuple[list[int], list[int]]] = {}
        for (partition_id, bucket_id), offset in some:
            buckets, values = columns.setdefault(partition_id, ([], []))
            buckets.append(bucket_id)
            values.append(offset)
        rows = [[partition_id, *lists] for partition_id, lists in columns.items()]
        parts.append(zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1))
    return parts


def decode_parts(path: str, parts: Iterable[bytes]) -> dict[tuple[int | None, int], int]:
    """Decode stored offsets; `CatalogDamagedError` if they cannot be read."""
    offsets: dict[tuple[int | None, int], int] = {}
    for value in parts:
        offsets |= guarded(path, _decode_part, value)
    return offsets


def _decode_part(value: bytes) -> dict[tuple[int | None, int], int]:
    try:
        rows = json.loads(zlib.decompress(value))
    except zlib.error as problem:
        raise ValueError(str(problem)) from None
    return {
        (partition_id, bucket_id): offset
        for partition_id, buckets, offsets in rows
        for bucket_id, offset in zip(buckets, offsets, strict=True)
    }


def load(entries: Iterable[Entry]) -> list[ProducerRecord]:
    """The producers in the values below a path."""
    values = {entry.path: entry.value for entry in entries}
    depth = PRODUCERS_PATH.count("/") + 2
    heads = [path for path in values if path.count("/") == depth]
    return [guarded(path, partial(_producer, path), values) for path in heads]


def _head(producer: ProducerRecord) -> bytes:
    return dump_object(
        {
            "number": producer.number,
            "epoch": producer.epoch,
            "owner": producer.owner,
            "columns": sorted(producer.column_ids),
            "all_columns": producer.all_columns,
            "exclusive": producer.exclusive,
            "ttl_ms": producer.ttl_ms,
            "checkpointed": producer.checkpointed,
            "checkpoint_id": producer.checkpoint_id,
            "stateful": producer.stateful,
            "lost": producer.lost,
            "fence_only": producer.fence_only,
            "parts": part_count(producer.baseline),
        }
    )


def _producer(path: str, values: Mapping[str, bytes]) -> ProducerRecord:
    head: dict[str, Any] = json.loads(values[path])
    *_, table_id, producer_id = path.split("/")
    parts = head["parts"]
    baseline = None
    if parts is not None:
        baseline = decode_parts(path, [values[f"{path}/offsets/{at}"] for at in range(parts)])
    return ProducerRecord(
        producer_id=producer_id,
        table_id=int(table_id),
        number=head["number"],
        epoch=head["epoch"],
        owner=head.get("owner"),
        column_ids=frozenset(head["columns"]),
        all_columns=head["all_columns"],
        exclusive=head["exclusive"],
        ttl_ms=head["ttl_ms"],
        checkpointed=head["checkpointed"],
        checkpoint_id=head["checkpoint_id"],
        stateful=head["stateful"],
        lost=head["lost"],
        baseline=baseline,
        fence_only=head.get("fence_only", False),
    )
