"""Where rows go: the id of their partition, and the bucket of each.

A partition that does not exist is created if the connection allows that. Rows of tables with bucket
keys are hashed; others go to one bucket after the other, a batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from zufluss.client.core.buckets import BucketAssigner, assigner_of
from zufluss.client.core.catalog import list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.errors import PartitionNotExistError, TableNotExistError
from zufluss.model.partition import spec_of
from zufluss.model.table import TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_to_proto

THREAD_ROWS_MIN: Final = 4_096
"""Batches of fewer rows are hashed and split on the event loop, not in a thread."""


class Router:
    """Finds the partition and the buckets of a writer's rows. Belongs to the event loop."""

    def __init__(self, connection: ClusterConnection, info: TableInfo, seed: int | None) -> None:
        """`seed` decides which bucket comes first for rows without a bucket key."""
        self._connection = connection
        self._options = connection.options
        self._info = info
        self._seed = seed
        self._assigners: dict[str | None, BucketAssigner] = {}

    def assigner(self, partition: str | None) -> BucketAssigner:
        """Assigns the rows of a partition to buckets; each partition has its own."""
        assigner = self._assigners.get(partition)
        if assigner is None:
            assigner = self._assigners[partition] = self.new_assigner()
        return assigner

    def new_assigner(self) -> BucketAssigner:
        """An assigner that shares nothing with others."""
        return assigner_of(self._info, self._options, self._seed)

    def pieces(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Cut rows into even pieces whose parts for the buckets have about the size of a batch.

        Fewer rows are returned uncut.
        """
        buckets = self._info.bucket_count if self._info.bucket_keys else 1
        count = min(round(rows.nbytes / (self._options.batch_bytes * buckets)), rows.num_rows)
        if count <= 1:
            yield rows
            return
        step = -(-rows.num_rows // count)
        for start in range(0, rows.num_rows, step):
            yield rows.slice(start, step)

    async def assign(
        self, assigner: BucketAssigner, rows: pa.RecordBatch
    ) -> Iterable[tuple[int, pa.RecordBatch]]:
        """Assign rows to buckets; large batches in a thread, so that sending continues."""
        if not self._info.bucket_keys or rows.num_rows < THREAD_ROWS_MIN:
            return assigner.assign(rows)
        return await self._connection.in_thread(lambda: list(assigner.assign(rows)))

    async def partition_id(self, name: str | None, *, create: bool) -> int | None:
        """The id of a partition, which `create` allows to create; None without partitions.

        Raises `PartitionNotExistError`, and `TableNotExistError` if the table was dropped.
        """
        if name is None:
            return None
        partition = self._connection.metadata.partitions.get((self._info.table_id, name))
        if partition is not None:
            return partition.partition_id
        if create and self._options.create_partitions and not await self._exists(name):
            await self._create_partition(name)
        try:
            return (await self._connection.partition(self._info, name)).partition_id
        except PartitionNotExistError as e:
            now = self._connection.metadata.tables.get(self._info.path)
            if now is not None and now.table_id != self._info.table_id:
                raise TableNotExistError(
                    f"table {self._info.path} was dropped and created again; open it anew"
                ) from e
            raise PartitionNotExistError(
                f"table {self._info.path} has no partition {name!r}; create it, or allow "
                "client.writer.dynamic-create-partition.enabled"
            ) from e

    async def _exists(self, name: str) -> bool:
        """Whether the partition exists; metadata may lag behind the coordinator."""
        spec = spec_of(self._info.partition_keys, name)
        partitions = await list_partitions(self._connection, self._info.path, spec)
        return any(partition.name == name for partition in partitions)

    async def _create_partition(self, name: str) -> None:
        request = m.CreatePartitionRequest(
            table_path=path_to_proto(self._info.path), ignore_if_not_exists=True
        )
        for key, value in spec_of(self._info.partition_keys, name).items():
            request.partition_spec.partition_key_values.add(key=key, value=value)
        await self._connection.call_coordinator(ApiKey.CREATE_PARTITION, request)
