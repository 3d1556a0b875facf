"""Small lake tables for tests: infos, committers on a SQLite catalog, files written by hand."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table

from zufluss.lake.base import CommitterContext
from zufluss.lake.iceberg import schema as s
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.lake.iceberg.handle import (
    DATA,
    POSITION_DELETES,
    FileWritten,
    IcebergWriteResult,
    PartitionValues,
    WriterHandle,
)
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath

COLUMNS = "id BIGINT, name STRING"


def catalog_properties(directory: Path) -> dict[str, str]:
    """An embedded catalog in a directory."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/lake/catalog.db",
        "warehouse": f"file://{directory}/lake/warehouse",
    }


def table_info(
    columns: str = COLUMNS,
    *,
    primary_key: Sequence[str] = (),
    bucket_keys: Sequence[str] = (),
    partition_keys: Sequence[str] = (),
    buckets: int = 4,
    table_id: int = 7,
    created: int = 1000,
    path: str = "shop.orders",
    properties: Mapping[str, str] | None = None,
    custom: Mapping[str, str] | None = None,
) -> TableInfo:
    """A table as a server would describe it."""
    descriptor = TableDescriptor(
        Schema.of(columns, primary_key),
        partition_keys=tuple(partition_keys),
        bucket_keys=tuple(bucket_keys or primary_key[:1]),
        bucket_count=buckets,
        properties=dict(properties or {}),
        custom_properties=dict(custom or {}),
    )
    return TableInfo(TablePath.parse(path), table_id, 1, descriptor, created, created)


def committer(directory: Path, table: TableInfo) -> IcebergCommitter:
    """A committer of the table, its lake table made."""
    made = IcebergCommitter(CommitterContext(table, catalog_properties(directory)))
    made.prepare_table()
    return made


def lake_table(directory: Path, table: TableInfo) -> Table:
    """The lake table as pyiceberg loads it."""
    return load(catalog_properties(directory)).load_table(tuple(table.path))


def rows(ids: Sequence[int], bucket: int = 0, first_offset: int = 0) -> pa.Table:
    """Rows of the default columns with system columns."""
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array([f"n{i}" for i in ids]),
            "__bucket": pa.array([bucket] * len(ids), pa.int32()),
            "__offset": pa.array(range(first_offset, first_offset + len(ids)), pa.int64()),
            "__timestamp": pa.array([1_000_000] * len(ids), pa.timestamp("us", "UTC")),
        }
    )


def _write(path: str, data: pa.Table) -> pq.FileMetaData:
    local = Path(path.removeprefix("file://"))
    local.parent.mkdir(parents=True, exist_ok=True)
    collected: list[pq.FileMetaData] = []
    pq.write_table(data, local, metadata_collector=collected)
    return collected[0]


def _stats(footer: pq.FileMetaData, schema: IcebergSchema) -> dict[str, Any]:
    """The statistics of a data file as pyiceberg finds them."""
    found = data_file_statistics_from_parquet_metadata(
        parquet_metadata=footer,
        stats_columns=compute_statistics_plan(schema, {}),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    ).to_serialized_dict()
    return {
        "records": footer.num_rows,
        "null_counts": found["null_value_counts"],
        "nan_counts": found["nan_value_counts"],
        "split_offsets": tuple(found["split_offsets"]),
        **{n: found[n] for n in ("column_sizes", "value_counts", "lower_bounds", "upper_bounds")},
    }


def write_data(handle: WriterHandle, data: pa.Table, partition: PartitionValues) -> FileWritten:
    """A data file with these rows."""
    schema = IcebergSchema.model_validate_json(handle.schema)
    path = f"{handle.data_location}/{uuid.uuid4()}.parquet"
    target = s.arrow_schema(schema)
    full = pa.table(
        {
            f.name: data[f.name] if f.name in data.column_names else pa.nulls(len(data), f.type)
            for f in target
        }
    ).cast(target)
    stats = _stats(_write(path, full), schema)
    size = Path(path.removeprefix("file://")).stat().st_size
    return FileWritten(kind=DATA, path=path, size=size, partition=partition, **stats)


def write_deletes(
    handle: WriterHandle, target: str, positions: Sequence[int], partition: PartitionValues
) -> FileWritten:
    """A position delete file about one data file."""
    fields = [("file_path", pa.string(), "2147483546"), ("pos", pa.int64(), "2147483545")]
    schema = pa.schema(
        [pa.field(n, t, False, metadata={"PARQUET:field_id": i}) for n, t, i in fields]
    )
    path = f"{handle.data_location}/{uuid.uuid4()}-deletes.parquet"
    _write(path, pa.table([[target] * len(positions), list(positions)], schema=schema))
    return FileWritten(
        kind=POSITION_DELETES,
        path=path,
        size=Path(path.removeprefix("file://")).stat().st_size,
        records=len(positions),
        partition=partition,
        referenced_data_file=target,
    )


def write_round(made: IcebergCommitter, ids: Sequence[int], bucket: int = 0) -> IcebergWriteResult:
    """The result of a task that appended rows to a bucket."""
    handle = WriterHandle.from_bytes(made.writer_handle())
    file = write_data(handle, rows(ids, bucket), (bucket,))
    return IcebergWriteResult((file,), handle.base_snapshot_id)


def commit_ids(made: IcebergCommitter, ids: Sequence[int], **properties: Any) -> int:
    """Commit rows on top of the newest snapshot of ours; its id."""
    newest = made.newest()
    committable = made.to_committable([write_round(made, ids)])
    done = made.commit(committable, properties, newest.snapshot_id if newest else None)
    return done.snapshot_id


def ids_in_lake(directory: Path, table: TableInfo, snapshot_id: int | None = None) -> list[int]:
    """The ids that pyiceberg's own reader finds, sorted."""
    scan = lake_table(directory, table).scan(snapshot_id=snapshot_id, selected_fields=("id",))
    return sorted(scan.to_arrow()["id"].to_pylist())
