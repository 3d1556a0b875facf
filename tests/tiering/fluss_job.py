"""Fluss's Flink tiering job, as its calls and files: what 0.9.1 and its main branch send and write.

The calls are those of its enumerator (heartbeats), its split generator (GET_LAKE_SNAPSHOT, end
offsets) and its committer (PREPARE, COMMIT), with the fields that these set and no others: no
epochs, no timeout. The files are those of its writer: rows with all changes in them, deletes by
position for rows of the same file, and equality deletes that repeat all columns. Nothing of
`zufluss.lake` takes part.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

import zufluss
from tests.tiering.tiered_cluster import lake_table
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.tables import path_to_proto

COMMIT_USER = "__fluss_lake_tiering"
_POSITIONS = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
    ]
)


class MissingSnapshotError(Exception):
    """The lake had a snapshot that the cluster did not know: reported, and the round given up."""


@dataclass
class FlussRound:
    """A table that the coordinator handed out, and what the job has read of it."""

    held: m.PbHeartbeatReqForTable
    """The table as every heartbeat names it."""
    info: TableInfo
    """The table."""
    ends: dict[TableBucket, int]
    """The log end offsets of the buckets with news."""
    rows: dict[int, list[dict[str, Any]]]
    """By bucket, changes in log order, with `_change_type` and the system columns."""
    snapshot_id: int | None = None
    """The snapshot in the lake, once there is one."""


class FlussJob:
    """The job, step by step."""

    def __init__(self, connection: zufluss.Connection) -> None:
        self.connection = connection

    def round(self) -> FlussRound:
        """A whole round of the next table."""
        taken = self.take()
        offsets_path = self.prepare(taken)
        self.commit_to_lake(taken, offsets_path)
        self.commit_to_server(taken, offsets_path)
        self.finish(taken)
        return taken

    def take(self) -> FlussRound:
        """Ask for a table until there is one, and read what is new."""
        while True:
            answer = self._call(ApiKey.LAKE_TIERING_HEARTBEAT, request_table=True)
            if answer.HasField("tiering_table"):
                break
        given = answer.tiering_table
        held = m.PbHeartbeatReqForTable(
            table_id=given.table_id,
            coordinator_epoch=answer.coordinator_epoch,
            tiering_epoch=given.tiering_epoch,
        )
        path = f"{given.table_path.database_name}.{given.table_path.table_name}"
        info = self.connection.admin.table_info(path)
        known = self.connection.admin.lake_snapshot(path)
        starts = {} if known is None else known.offsets
        ends = {
            bucket: end
            for bucket, end in self.connection.admin.list_all_offsets(path).items()
            if starts.get(bucket, 0) < end
        }
        return FlussRound(held, info, ends, self._read(info, starts, ends))

    def beat(self, held: FlussRound) -> int:
        """A heartbeat in the middle of a round; the error code for the table."""
        [answer] = self._call(
            ApiKey.LAKE_TIERING_HEARTBEAT, tiering_tables=[held.held]
        ).tiering_table_resp
        return int(answer.error.error_code)

    def prepare(self, taken: FlussRound) -> str:
        """The offsets of the round into a file, unless the lake is ahead of the cluster."""
        self._report_missing(taken)
        table = m.PbTableOffsets(
            table_id=taken.info.table_id, table_path=path_to_proto(taken.info.path)
        )
        for bucket, end in taken.ends.items():
            table.bucket_offsets.add(bucket_id=bucket.bucket_id, log_end_offset=end)
        [answer] = self._call(
            ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT, bucket_offsets=[table]
        ).prepare_lake_table_resp
        assert not answer.error_code, answer.error_message
        return str(answer.lake_table_offsets_path)

    def commit_to_lake(self, taken: FlussRound, offsets_path: str) -> None:
        """One snapshot with the files of all buckets; not fenced, as theirs is not."""
        lake = lake_table(taken.info)
        _check_layout(lake, taken.info)
        added = [file for b, rows in taken.rows.items() for file in _written(lake, b, rows)]
        summary = {"fluss-offsets": offsets_path, "commit-user": COMMIT_USER}
        with lake.transaction() as change:
            deletes = any(file.content != DataFileContent.DATA for file in added)
            operation = Operation.OVERWRITE if deletes else Operation.APPEND
            delta = _RowDelta(operation, change, lake.io, snapshot_properties=summary)
            with delta as snapshot:
                for file in added:
                    snapshot.add(file)
            taken.snapshot_id = delta.snapshot_id

    def commit_to_server(self, taken: FlussRound, offsets_path: str) -> None:
        """Both forms of the commit in one request, as the job sends them."""
        assert taken.snapshot_id is not None
        info = m.PbLakeTableSnapshotInfo(
            table_id=taken.info.table_id, snapshot_id=taken.snapshot_id
        )
        for bucket, end in taken.ends.items():
            info.buckets_req.add(bucket_id=bucket.bucket_id, log_end_offset=end)
        self._commit(taken, taken.snapshot_id, offsets_path, offsets_path, [info])

    def finish(self, taken: FlussRound) -> None:
        """Report the table as finished."""
        [answer] = self._call(
            ApiKey.LAKE_TIERING_HEARTBEAT, finished_tables=[taken.held]
        ).finished_table_resp
        assert not answer.error.error_code, answer.error.error_message

    def fail(self, taken: FlussRound) -> None:
        """Report the table as failed."""
        self._call(ApiKey.LAKE_TIERING_HEARTBEAT, failed_tables=[taken.held])

    def _report_missing(self, taken: FlussRound) -> None:
        known = self.connection.admin.lake_snapshot(str(taken.info.path))
        lake = lake_table(taken.info)
        ours = [
            s
            for s in lake.metadata.snapshots
            if s.summary is not None and s.summary["commit-user"] == COMMIT_USER
        ]
        if not ours:
            return
        if known is not None:
            at = lake.snapshot_by_id(known.snapshot_id)
            assert at is not None, "the job throws: the known snapshot is gone"
            if (ours[-1].sequence_number or 0) <= (at.sequence_number or 0):
                return
        newest = ours[-1]
        assert newest.summary is not None
        path = newest.summary["fluss-offsets"]
        assert path is not None
        self._commit(taken, newest.snapshot_id, path, None, [], earliest=-1)
        raise MissingSnapshotError

    def _commit(
        self,
        taken: FlussRound,
        snapshot_id: int,
        tiered: str,
        readable: str | None,
        old: Iterable[m.PbLakeTableSnapshotInfo],
        earliest: int | None = None,
    ) -> None:
        metadata = m.PbLakeTableSnapshotMetadata(
            table_id=taken.info.table_id,
            snapshot_id=snapshot_id,
            tiered_bucket_offsets_file_path=tiered,
            readable_bucket_offsets_file_path=readable,
            earliest_snapshot_id_to_keep=earliest,
        )
        [answer] = self._call(
            ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT,
            lake_table_snapshot_metadata=[metadata],
            tables_req=list(old),
        ).table_resp
        assert not answer.error_code, answer.error_message

    def _read(
        self, info: TableInfo, starts: Mapping[TableBucket, int], ends: Mapping[TableBucket, int]
    ) -> dict[int, list[dict[str, Any]]]:
        table = self.connection.table(str(info.path))
        out: dict[int, list[dict[str, Any]]] = {}
        for bucket, end in ends.items():
            number = bucket.bucket_id
            if info.has_primary_key:
                read = table.changelog(buckets=[number]).to_arrow()
                names = {"_log_offset": "__offset", "_commit_timestamp": "__timestamp"}
                read = read.rename_columns([names.get(n, n) for n in read.column_names])
            else:
                read = table.scan(buckets=[number], with_offsets=True).to_arrow()
            new = [
                {**row, "__bucket": number}
                for row in read.to_pylist()
                if starts.get(bucket, 0) <= row["__offset"] < end
            ]
            out[number] = sorted(new, key=lambda row: row["__offset"])
        return out

    def _call(self, key: ApiKey, **fields: Any) -> Any:
        return self.connection.call_coordinator(key, APIS[key].request(**fields))


def _check_layout(lake: Table, info: TableInfo) -> None:
    """What the job's writer of the main branch refuses: other columns, another partition spec."""
    names = [*info.schema.names, "__bucket", "__offset", "__timestamp"]
    assert [field.name for field in lake.schema().fields] == names
    required = [not column.data_type.nullable for column in info.schema.columns]
    assert [field.required for field in lake.schema().fields] == [*required, True, True, True]
    [field] = lake.spec().fields
    source = lake.schema().find_column_name(field.source_id)
    keys = info.bucket_keys
    expected = (keys[0], f"bucket[{info.bucket_count}]") if keys else ("__bucket", "identity")
    assert (source, str(field.transform)) == expected


def _written(lake: Table, bucket: int, rows: list[dict[str, Any]]) -> Iterable[DataFile]:
    """The files of one bucket, as Iceberg's delta writer has them."""
    target = schema_to_pyarrow(lake.schema(), include_field_ids=True)
    keys = sorted(lake.schema().identifier_field_names())
    data: list[dict[str, Any]] = []
    at: dict[tuple[Any, ...], int] = {}
    positions: list[int] = []
    by_key: list[dict[str, Any]] = []
    for row in rows:
        key = tuple(row[name] for name in keys)
        if row.get("_change_type", "+I") in ("+I", "+U", "+A"):
            if keys and key in at:
                positions.append(at.pop(key))
            at[key] = len(data)
            data.append(row)
        elif key in at:
            positions.append(at.pop(key))
        else:
            by_key.append(row)
    path = None
    if data:
        file = _file(lake, _table(data, target), bucket, DataFileContent.DATA)
        path = file.file_path
        yield file
    if by_key:
        ids = sorted(lake.schema().identifier_field_ids)
        yield _file(lake, _table(by_key, target), bucket, DataFileContent.EQUALITY_DELETES, ids)
    if positions:
        columns = [[path] * len(positions), sorted(positions)]
        table = pa.table(columns, schema=_POSITIONS)
        yield _file(lake, table, bucket, DataFileContent.POSITION_DELETES)


def _table(rows: list[dict[str, Any]], target: pa.Schema) -> pa.Table:
    columns = [pa.array([row.get(field.name) for row in rows]) for field in target]
    return pa.table(columns, names=target.names).cast(target)


def _file(
    lake: Table, table: pa.Table, bucket: int, content: DataFileContent, ids: Any = None
) -> DataFile:
    place = f"{lake.location()}/data/{uuid.uuid4()}.parquet"
    local = Path(place.removeprefix("file://"))
    local.parent.mkdir(parents=True, exist_ok=True)
    footers: list[pq.FileMetaData] = []
    pq.write_table(table, local, compression="gzip", metadata_collector=footers)
    statistics: dict[str, Any] = {}
    if content is not DataFileContent.POSITION_DELETES:
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=footers[0],
            stats_columns=compute_statistics_plan(lake.schema(), {}),
            parquet_column_mapping=parquet_path_to_id_mapping(lake.schema()),
        ).to_serialized_dict()
    file = DataFile.from_args(
        **{
            **statistics,
            "content": content,
            "file_path": place,
            "file_format": FileFormat.PARQUET,
            "partition": Record(bucket),
            "record_count": table.num_rows,
            "file_size_in_bytes": local.stat().st_size,
            "equality_ids": ids,
            "sort_order_id": None,
        }
    )
    file.spec_id = lake.spec().spec_id
    return file


def delete_by_key(lake: Table, bucket: int, keys: list[dict[str, Any]]) -> None:
    """A snapshot of another engine, which deletes rows by key and knows nothing of tiering."""
    names = lake.schema().identifier_field_names()
    columns = [
        f for f in schema_to_pyarrow(lake.schema(), include_field_ids=True) if f.name in names
    ]
    ids = sorted(lake.schema().identifier_field_ids)
    table = _table(keys, pa.schema(columns))
    file = _file(lake, table, bucket, DataFileContent.EQUALITY_DELETES, ids)
    with lake.transaction() as change, _RowDelta(Operation.OVERWRITE, change, lake.io) as snapshot:
        snapshot.add(file)


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _RowDelta(_FastAppendFiles):
    """A commit of rows and delete files together, which pyiceberg lacks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deletes: list[DataFile] = []

    def add(self, file: DataFile) -> None:
        if file.content == DataFileContent.DATA:
            self.append_data_file(file)
        else:
            self._deletes.append(file)

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        if not self._deletes:
            return manifests
        metadata = self._transaction.table_metadata
        path = f"{metadata.location}/metadata/{uuid.uuid4()}-deletes.avro"
        with _DeleteManifestWriter(
            spec=metadata.spec(),
            schema=metadata.schema(),
            output_file=self._io.new_output(path),
            snapshot_id=self._snapshot_id,
            avro_compression="null",
        ) as writer:
            for file in self._deletes:
                writer.add(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self._snapshot_id,
                        sequence_number=None,
                        file_sequence_number=None,
                        data_file=file,
                    )
                )
        return [writer.to_manifest_file(), *manifests]

    def _summary(self, snapshot_properties: dict[str, str]) -> Any:  # type: ignore[override]
        summary = super()._summary(snapshot_properties)
        kinds = [file.content for file in self._deletes]
        by_key = kinds.count(DataFileContent.EQUALITY_DELETES)
        before = int(summary["total-equality-deletes"] or 0)
        summary["total-equality-deletes"] = str(before + by_key)
        return summary
