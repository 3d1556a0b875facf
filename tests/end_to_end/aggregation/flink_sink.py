"""The calls of Flink's aggregation sink, in its order: it undoes its own writes when it starts again.

Fluss's sink (`UndoRecoveryOperator` of fluss-flink) has no part on the server. It makes these calls:

| when | calls |
|---|---|
| a start without state | LIST_OFFSETS of all buckets, REGISTER_PRODUCER_OFFSETS (the first one wins), GET_PRODUCER_OFFSETS |
| every start | LIST_PARTITION_INFOS, LIST_OFFSETS; FETCH_LOG from the baseline to these ends; PUT_KV with `agg_mode` 1 |
| a row | PUT_KV with `agg_mode` 0; the answer's `log_end_offset` is the bucket's next baseline |
| a checkpoint | none; the baseline of each bucket is the state |
| the first checkpoint after a start with state, and the end of the input | DELETE_PRODUCER_OFFSETS |

An undo looks at the first change of each key: it deletes the key of an insert, and puts back the
row of a `-U` or `-D`. A bucket without baseline is undone from its beginning.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.end_to_end.kv import (
    PUT_VERSION,
    Codec,
    kv_batch,
    put_request,
    raw_changelog,
    record,
    values_of,
)
from tests.end_to_end.raw import RawClient, table_path
from tests.record.rows.plain_rows import compacted_field
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

CREATED, ALREADY_EXISTS = 0, 1
Bucket = tuple[int | None, int]
"""Partition id and bucket id."""
State = Mapping[Bucket, int]
"""The baseline of each bucket, as a checkpoint has it."""
Values = tuple[Any, ...]


class SinkTable(NamedTuple):
    """A table of the tests, and a connection to its server."""

    raw: RawClient
    database: str
    name: str
    table_id: int
    schema: Schema
    bucket_count: int
    partition_key: str | None

    @classmethod
    def create(
        cls,
        raw: RawClient,
        name: str,
        schema: Schema,
        *,
        bucket_count: int = 1,
        partition_key: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> SinkTable:
        """Create an aggregation table."""
        database = "fluss"
        partition_keys = () if partition_key is None else (partition_key,)
        options = {"table.replication.factor": "1", "table.merge-engine": "aggregation"}
        descriptor = TableDescriptor(
            schema,
            partition_keys=partition_keys,
            bucket_keys=tuple(k for k in schema.primary_key if k not in partition_keys),
            bucket_count=bucket_count,
            properties=options | dict(properties or {}),
        )
        request = m.CreateTableRequest(
            table_path=table_path(database, name),
            table_json=descriptor.to_json(),
            ignore_if_exists=False,
        )
        raw.call(ApiKey.CREATE_TABLE, request)
        table_id = raw.table_id(database, name)
        return cls(raw, database, name, table_id, schema, bucket_count, partition_key)

    def add_partition(self, value: str) -> int:
        """Create a partition; its id."""
        spec = m.PbPartitionSpec(
            partition_key_values=[m.PbKeyValue(key=self.partition_key, value=value)]
        )
        request = m.CreatePartitionRequest(
            table_path=table_path(self.database, self.name),
            partition_spec=spec,
            ignore_if_not_exists=False,
        )
        self.raw.call(ApiKey.CREATE_PARTITION, request)
        return self.partitions()[value]

    def key(self, row: Values) -> bytes:
        """The stored key of a row: the key columns but for the partition key."""
        names = [name for name in self.schema.primary_key if name != self.partition_key]
        columns = [self.schema.names.index(name) for name in names]
        fields = [compacted_field(row[i], self.schema.columns[i].data_type) for i in columns]
        return b"".join(fields)

    def put(self, row: Values) -> bytes:
        """The record that puts a row."""
        return record(self.key(row), Codec(self.schema).row(row))

    def delete(self, row: Values) -> bytes:
        """The record that deletes the key of a row."""
        return record(self.key(row), None)

    def partitions(self) -> dict[str, int]:
        """Ids of the partitions by value."""
        request = m.ListPartitionInfosRequest(table_path=table_path(self.database, self.name))
        answer = self.raw.call(ApiKey.LIST_PARTITION_INFOS, request)
        return {
            info.partition_spec.partition_key_values[0].value: info.partition_id
            for info in answer.partitions_info
        }

    def buckets(self) -> list[Bucket]:
        """All buckets of all partitions that there are now."""
        partitions: Sequence[int | None] = (
            sorted(self.partitions().values()) if self.partition_key else [None]
        )
        return [(p, b) for p in partitions for b in range(self.bucket_count)]

    def end_offsets(self) -> dict[Bucket, int]:
        """The latest offsets of all buckets."""
        return {(p, b): self.raw.end_offset(self.table_id, b, p) for p, b in self.buckets()}

    def changes(self, bucket: Bucket, start: int = 0) -> list[tuple[int, str, Values]]:
        """Offset, kind and row of a bucket's changes from an offset on."""
        partition_id, bucket_id = bucket
        found = raw_changelog(self.raw, self.table_id, self.schema, bucket_id, start, partition_id)
        return [change for change in found if change[0] >= start]

    def rows(self, bucket: Bucket, *keys: Values) -> list[Values | None]:
        """The rows of keys; None where there is none."""
        partition_id, bucket_id = bucket
        coded = [self.key(key) for key in keys]
        found = values_of(self.raw, self.table_id, coded, bucket_id, partition_id)
        return [Codec(self.schema).value(value) for value in found]


@dataclass
class FlinkSink:
    """One attempt of a job with one sink task."""

    table: SinkTable
    producer_id: str
    state: State | None = None
    """The checkpoint that the attempt is restored from."""
    columns: Sequence[int] = ()
    """Positions of the columns that the sink writes; empty for all."""
    baseline: dict[Bucket, int] = field(default_factory=dict)
    """The offset after the last acknowledged write of each bucket."""
    registered: int | None = None
    """The answer to REGISTER_PRODUCER_OFFSETS."""
    _sequences: dict[Bucket, int] = field(default_factory=dict)

    def start(self, until: Callable[[int], bool] = lambda undone: False) -> FlinkSink:
        """Undo what came after the baseline; ends early when `until` is true of the undone keys."""
        recovered = self._registered() if self.state is None else dict(self.state)
        ends = self.table.end_offsets()
        self.baseline = {bucket: offset for bucket, offset in recovered.items() if offset}
        undone = 0
        writer_id = self._new_writer()
        for bucket, end in ends.items():
            start = recovered.get(bucket, 0)
            assert start <= end, f"the baseline {start} of {bucket} is beyond its end {end}"
            for undo in self._undo(bucket, start, end):
                self._put(bucket, [undo], writer_id, MergeMode.OVERWRITE)
                undone += 1
                if until(undone):
                    return self
        self._sequences.clear()
        self._writer_id = self._new_writer()
        return self

    def _registered(self) -> dict[Bucket, int]:
        """Register the present offsets, unless there are some; the offsets that are registered."""
        ends = self.table.end_offsets()
        table = m.PbProducerTableOffsets(
            table_id=self.table.table_id,
            bucket_offsets=[
                m.PbBucketOffset(partition_id=p, bucket_id=b, log_end_offset=offset)
                for (p, b), offset in ends.items()
            ],
        )
        request = m.RegisterProducerOffsetsRequest(
            producer_id=self.producer_id, table_offsets=[table] if ends else []
        )
        call = self.table.raw.call
        self.registered = call(ApiKey.REGISTER_PRODUCER_OFFSETS, request).result
        found = registered_offsets(self.table, self.producer_id)
        assert found is not None
        return found

    def _undo(self, bucket: Bucket, start: int, end: int) -> Iterator[bytes]:
        if start == end:
            return
        seen: set[bytes] = set()
        found = self.table.changes(bucket, start)
        assert found, "the sink of 0.9.1 waits for a record at the end for an hour"
        assert found[-1][0] >= end - 1
        for offset, kind, row in found:
            key = self.table.key(row)
            if offset >= end or kind == "+U" or key in seen:
                continue
            seen.add(key)
            yield self.table.delete(row) if kind == "+I" else self.table.put(self._written(row))

    def _written(self, row: Values) -> Values:
        """A row as the sink sends it: NULL in the columns that it does not write."""
        return tuple(
            v if not self.columns or i in self.columns else None for i, v in enumerate(row)
        )

    def write(self, bucket: Bucket, *rows: Values) -> None:
        """Write rows in one batch."""
        records = [self.table.put(self._written(row)) for row in rows]
        self.baseline[bucket] = self._put(bucket, records, self._writer_id, MergeMode.AGGREGATE)

    def checkpoint(self) -> State:
        """Take a checkpoint; if the attempt was restored, the producer's offsets end."""
        if self.state is not None:
            self.finish()
        return dict(self.baseline)

    def finish(self) -> None:
        """The end of the input."""
        request = m.DeleteProducerOffsetsRequest(producer_id=self.producer_id)
        self.table.raw.call(ApiKey.DELETE_PRODUCER_OFFSETS, request)

    def _new_writer(self) -> int:
        path = table_path(self.table.database, self.table.name)
        request = m.InitWriterRequest(table_path=[path])
        return int(self.table.raw.call(ApiKey.INIT_WRITER, request).writer_id)

    def _put(
        self, bucket: Bucket, records: Sequence[bytes], writer_id: int, mode: MergeMode
    ) -> int:
        """Put records as one batch; the end offset that the answer has."""
        partition_id, bucket_id = bucket
        sequence = self._sequences.get(bucket, 0)
        self._sequences[bucket] = sequence + 1
        batch = kv_batch(records, writer_id=writer_id, sequence=sequence)
        request = put_request(
            self.table.table_id, batch, bucket_id, targets=self.columns, partition_id=partition_id
        )
        request.agg_mode = mode
        (entry,) = self.table.raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
        assert not entry.error_code, entry.error_message
        return int(entry.log_end_offset)


def registered_offsets(table: SinkTable, producer_id: str) -> dict[Bucket, int] | None:
    """The offsets that are registered for a table; None if none are."""
    request = m.GetProducerOffsetsRequest(producer_id=producer_id)
    answer = table.raw.call(ApiKey.GET_PRODUCER_OFFSETS, request)
    if not answer.HasField("producer_id"):
        return None
    return {
        (each.partition_id if each.HasField("partition_id") else None, each.bucket_id): (
            each.log_end_offset
        )
        for of_table in answer.table_offsets
        if of_table.table_id == table.table_id
        for each in of_table.bucket_offsets
    }
