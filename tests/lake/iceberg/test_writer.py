"""What a writer leaves in the lake, as pyiceberg's own scan reads it."""

from __future__ import annotations

import datetime as dt
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lake.changes import Change, changelog
from tests.lake.iceberg.tables import committer, lake_table, table_info
from zufluss.lake.base import LakeTableError, WriterContext
from zufluss.lake.fold import Folder
from zufluss.lake.iceberg import deletes, writer
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.lake.iceberg.files import local_path
from zufluss.lake.iceberg.handle import IcebergWriteResult
from zufluss.lake.iceberg.writer import IcebergWriter, create_writer
from zufluss.model.table import TableBucket, TableInfo


def context(made: IcebergCommitter, bucket: int = 0, partition: str | None = None) -> WriterContext:
    table = made.table
    return WriterContext(
        table=table,
        handle=made.writer_handle(),
        bucket=TableBucket(table.table_id, None if partition is None else 1, bucket),
        partition=partition,
        start_offset=0,
        stop_offset=100,
        tiering_epoch=2,
        round_id="r",
        attempt=os.urandom(4).hex(),
    )


def commit(made: IcebergCommitter, result: IcebergWriteResult) -> int:
    newest = made.newest()
    committable = made.to_committable([result])
    return made.commit(committable, {}, newest.snapshot_id if newest else None).snapshot_id


def log_rows(table: TableInfo, rows: list[dict[str, Any]], first: int = 0) -> pa.RecordBatch:
    about = [
        {
            "__bucket": 0,
            "__offset": first + i,
            "__timestamp": dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        }
        for i in range(len(rows))
    ]
    fields = [
        pa.field("__offset", pa.int64(), False),
        pa.field("__timestamp", pa.timestamp("ms", "UTC"), False),
        pa.field("__bucket", pa.int32(), False),
    ]
    whole = [row | more for row, more in zip(rows, about, strict=True)]
    return pa.RecordBatch.from_pylist(whole, schema=pa.schema([*table.schema.arrow, *fields]))


def open_writer(made: IcebergCommitter, **options: Any) -> IcebergWriter:
    made.prepare_table()
    return create_writer(context(made, **options))


def test_many_small_batches_become_one_row_group(tmp_path: Path) -> None:
    table = table_info(bucket_keys=["id"])
    made = committer(tmp_path, table)
    out = open_writer(made)
    for i in range(50):
        out.append(log_rows(table, [{"id": i, "name": f"n{i}"}], i))
    result = out.complete()
    assert [file.records for file in result.files] == [50]
    path = local_path(result.files[0].path)
    assert path is not None
    assert path.stat().st_size == result.files[0].size
    assert len(result.files[0].split_offsets) == 1
    commit(made, result)
    found = lake_table(tmp_path, table).scan().to_arrow()
    assert found["id"].to_pylist() == list(range(50))
    assert found["__offset"].to_pylist() == list(range(50))


def test_row_groups_and_files_end_at_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ROW_GROUP_ROWS", 7)
    custom = {"iceberg.write.target-file-size-bytes": "1500"}
    table = table_info(bucket_keys=["id"], custom=custom)
    made = committer(tmp_path, table)
    out = open_writer(made)
    out.append(log_rows(table, [{"id": i, "name": os.urandom(30).hex()} for i in range(40)]))
    result = out.complete()
    assert len(result.files) > 1
    assert sum(file.records for file in result.files) == 40
    assert max(file.records for file in result.files) % 7 == 0
    commit(made, result)
    assert lake_table(tmp_path, table).scan().to_arrow()["id"].to_pylist() == list(range(40))


def test_file_names_tell_who_wrote_them_and_lie_below_the_partition(tmp_path: Path) -> None:
    table = table_info(
        "id BIGINT, day DATE, at STRING", partition_keys=["day", "at"], bucket_keys=["id"]
    )
    made = committer(tmp_path, table)
    out = open_writer(made, bucket=2, partition="2024-02-29$a_b")
    out.append(log_rows(table, [{"id": 1, "day": dt.date(2024, 2, 29), "at": "a_b"}]))
    path = out.complete().files[0].path
    assert "/data/day=2024-02-29/at=a_b/id_bucket=2/7-2-2-0-100-" in path
    assert path.endswith("-0.parquet")


def test_an_aborted_writer_leaves_no_file(tmp_path: Path) -> None:
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    apply(made, [("+I", {"id": 1, "name": "a"})])
    before = data_files(tmp_path)
    out = open_writer(made)
    folder = Folder(table, 0)
    folder.add(changelog(table, [("+U", {"id": 1, "name": "b"})]))
    out.apply(*folder.finish()[:2])
    assert len(data_files(tmp_path)) == len(before) + 2
    out.abort()
    assert data_files(tmp_path) == before


def test_nothing_written_is_no_file(tmp_path: Path) -> None:
    made = committer(tmp_path, table_info(bucket_keys=["id"]))
    assert open_writer(made).complete().files == ()


def test_a_column_the_lake_does_not_have_is_refused_and_not_left_out(tmp_path: Path) -> None:
    made = committer(tmp_path, table_info(bucket_keys=["id"]))
    wider = table_info("id BIGINT, name STRING, more INT", bucket_keys=["id"])
    with pytest.raises(LakeTableError, match="no column 'more'"):
        create_writer(replace(context(made), table=wider))


def test_a_size_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    custom = {"iceberg.write.target-file-size-bytes": "1 GB"}
    made = committer(tmp_path, table_info(bucket_keys=["id"], custom=custom))
    with pytest.raises(LakeTableError, match=r"write.target-file-size-bytes .* '1 GB'"):
        open_writer(made)


def data_files(directory: Path) -> set[Path]:
    return set(directory.rglob("*.parquet"))


EVERY_TYPE = """
  a BOOLEAN, b TINYINT, c SMALLINT, d INT, e BIGINT, f FLOAT, g DOUBLE, h CHAR(3), i STRING,
  j BINARY(2), k BYTES, l DECIMAL(5, 2), m DECIMAL(15, 3), n DECIMAL(38, 10), o DATE, p TIME(0),
  q TIME(9), r TIMESTAMP(0), s TIMESTAMP(9), t TIMESTAMP_LTZ(3), u TIMESTAMP_LTZ(9),
  v ARRAY<TIMESTAMP(9)>, w MAP<STRING, TIMESTAMP(9)>,
  x ROW<y TINYINT, z ARRAY<ROW<t TIMESTAMP_LTZ(9)>>>
"""


def every_type(schema: pa.Schema) -> pa.RecordBatch:
    """Three rows of every type: values, values before 1970, NULLs."""
    ns, before = 1_700_000_000_123_456_789, -1_001
    values: dict[str, list[Any]] = {
        "a": [True, False], "b": [1, -128], "c": [2, -32768], "d": [3, -(2**31)],
        "e": [4, -(2**63)], "f": [1.5, float("nan")], "g": [2.5, -0.0], "h": ["abc", ""],
        "i": ["text" * 9, "ä"], "j": [b"ab", b"\0\0"], "k": [b"x" * 40, b""],
        "l": [Decimal("1.25"), Decimal("-999.99")], "m": [Decimal("2.125"), Decimal("-1.000")],
        "n": [Decimal("3.5"), Decimal("-3.0000000001")],
        "o": [dt.date(2024, 2, 29), dt.date(1, 1, 1)],
        "p": [dt.time(1, 2, 3), dt.time(0)], "q": [dt.time(1, 2, 3, 4), dt.time(0)],
        "r": [dt.datetime(2024, 1, 1), dt.datetime(1900, 1, 1)], "s": [ns, before],
        "t": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(1900, 1, 1, tzinfo=dt.UTC)],
        "u": [ns, before], "v": [[ns, None], [before]], "w": [[("k", ns)], [("l", None)]],
        "x": [{"y": 1, "z": [{"t": ns}, None]}, {"y": None, "z": []}],
    }  # fmt: skip
    columns = [pa.array([*values[f.name], None], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def cut(value: Any) -> Any:
    """A value as it comes out of Arrow, nanoseconds cut to microseconds downwards."""
    if isinstance(value, dict):
        return {key: cut(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cut(item) for item in value)
    nanos = getattr(value, "nanosecond", None)
    return value if nanos is None else value - type(value - value)(nanos, "ns")


def with_system(batch: pa.RecordBatch) -> pa.RecordBatch:
    count = batch.num_rows
    about: Mapping[str, pa.Array] = {
        "__bucket": pa.array([0] * count, pa.int32()),
        "__offset": pa.array(range(count), pa.int64()),
        "__timestamp": pa.array([5] * count).cast(pa.timestamp("ms", "UTC")),
    }
    columns = [*batch.columns, *about.values()]
    return pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, *about])


def test_every_type_is_read_back_by_pyiceberg(tmp_path: Path) -> None:
    table = table_info(EVERY_TYPE)
    made = committer(tmp_path, table)
    out = open_writer(made)
    rows = every_type(table.schema.arrow)
    doubled = pa.Table.from_batches([with_system(rows), with_system(rows)]).combine_chunks()
    out.append(doubled.to_batches()[0].slice(2, 3))  # a slice, so that offsets are not zero
    commit(made, out.complete())
    found = lake_table(tmp_path, table).scan().to_arrow().to_pylist()
    wanted = cut(doubled.slice(2, 3).to_pylist())
    for got, want in zip(found, wanted, strict=True):
        assert repr(got) == repr(_lake_shape(want, got))


def _lake_shape(want: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Wanted values in the Python types that microseconds have in Arrow."""
    return {name: _plain(want[name]) for name in got}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if hasattr(value, "to_pydatetime"):
        return value.to_pydatetime()
    return value


def test_bounds_are_those_of_the_values_and_prune(tmp_path: Path) -> None:
    table = table_info(bucket_keys=["id"])
    made = committer(tmp_path, table)
    for low in (0, 100):
        out = open_writer(made)
        rows = [{"id": low + i, "name": f"{'ü' * 20}{low + i}"} for i in range(10)]
        out.append(log_rows(table, [*rows, {"id": None, "name": None}]))
        result = out.complete()
        commit(made, result)
        file = result.files[0]
        assert int.from_bytes(file.lower_bounds[1], "little") == low
        assert int.from_bytes(file.upper_bounds[1], "little") == low + 9
        assert file.lower_bounds[2].decode() == "ü" * 16
        assert file.upper_bounds[2].decode() == "ü" * 15 + "ý"
        assert file.null_counts == {1: 1, 2: 1, 3: 0, 4: 0, 5: 0}
        assert file.value_counts[1] == 11
    scan = lake_table(tmp_path, table).scan(row_filter="__offset >= 0 and name >= 'v'")
    assert len(list(scan.plan_files())) == 2
    assert list(lake_table(tmp_path, table).scan(row_filter="name < 'u'").plan_files()) == []


def apply(made: IcebergCommitter, changes: list[Change], first: int = 0) -> IcebergWriteResult:
    """One round of a primary-key table, committed."""
    folder = Folder(made.table, 0)
    folder.add(changelog(made.table, changes, first))
    left = folder.finish()
    out = open_writer(made)
    out.apply(left.upserts, left.deletes)
    result = out.complete()
    commit(made, result)
    return result


KEYS: dict[str, list[Any]] = {
    "BIGINT": list(range(60)),
    "STRING": [f"k{i}" for i in range(60)] + ["long" * 10 + str(i) for i in range(9)],
    "DECIMAL(20, 2)": [Decimal(f"{i}.25") for i in range(60)],
    "BYTES": [bytes([i, 255]) for i in range(60)],
    "DATE": [dt.date(1960, 1, 1) + dt.timedelta(days=997 * i) for i in range(60)],
    "TIMESTAMP(3)": [dt.datetime(1969, 1, 1) + dt.timedelta(hours=997 * i) for i in range(60)],
}


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize(("kind", "second"), [*((k, "") for k in KEYS), ("STRING", ", j")])
def test_rounds_of_changes_leave_what_a_dict_holds(
    tmp_path: Path, kind: str, second: str, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "_cache", deletes.FileCache(1 << 20 if cached else 0))
    key = ["k", "j"] if second else ["k"]
    table = table_info(f"k {kind}, j INT NOT NULL, v BIGINT", primary_key=key)
    made = committer(tmp_path, table)
    draw = random.Random(kind + second)
    model: dict[Any, dict[str, Any]] = {}
    offset = 0
    for _ in range(8):
        changes: list[Change] = []
        for _ in range(draw.randrange(1, 60)):
            row = {"k": draw.choice(KEYS[kind]), "j": draw.choice([1, 2]), "v": draw.randrange(99)}
            name = tuple(row[column] for column in key)
            change = draw.choice(["+U", "+U", "-D"])
            changes.append((change, row))
            model.pop(name, None)
            if change == "+U":
                model[name] = row
        result = apply(made, changes, offset)
        offset += len(changes)
        for file in result.files:
            assert (file.referenced_data_file is not None) == (file.kind == "position-deletes")
        found = lake_table(tmp_path, table).scan().to_arrow().select(["k", "j", "v"])
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, model.values()))


def test_deleting_and_inserting_again_never_leaves_two_rows(tmp_path: Path) -> None:
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    for i in range(4):
        apply(made, [("+I", {"id": 1, "name": f"a{i}"}), ("+I", {"id": 2, "name": "b"})])
        apply(made, [("-D", {"id": 1, "name": f"a{i}"})])
    apply(made, [("+I", {"id": 1, "name": "z"})])
    found = lake_table(tmp_path, table).scan().to_arrow().select(["id", "name"]).to_pylist()
    assert sorted(row["name"] for row in found) == ["b", "z"]


def test_a_position_is_deleted_once_and_dead_files_are_left_alone(tmp_path: Path) -> None:
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    apply(made, [("+I", {"id": i, "name": "a"}) for i in range(3)])
    first = apply(made, [("-D", {"id": i, "name": "a"}) for i in range(3)])
    again = apply(made, [("-D", {"id": i, "name": "a"}) for i in range(3)])
    assert [file.records for file in first.files] == [3]
    assert again.files == ()


def test_delete_files_name_one_data_file_and_ascending_positions(tmp_path: Path) -> None:
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    base = apply(made, [("+I", {"id": i, "name": "a"}) for i in range(9)]).files[0]
    result = apply(made, [("-D", {"id": i, "name": "a"}) for i in (7, 2, 4)])
    path = local_path(result.files[0].path)
    assert path is not None
    assert pq.read_table(path).to_pylist() == [
        {"file_path": base.path, "pos": position} for position in (2, 4, 7)
    ]
    assert result.files[0].lower_bounds[2147483546] == base.path.encode()
    assert result.files[0].upper_bounds[2147483546] == base.path.encode()


def test_files_whose_bounds_exclude_all_keys_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    far = apply(made, [("+I", {"id": i, "name": "a"}) for i in range(1000, 1009)]).files[0]
    apply(made, [("+I", {"id": i, "name": "a"}) for i in range(9)])
    path = local_path(far.path)
    assert path is not None
    path.unlink()
    monkeypatch.setattr(deletes, "_cache", deletes.FileCache(1 << 20))
    assert len(apply(made, [("-D", {"id": 3, "name": "a"})]).files) == 1


def test_the_cache_keeps_to_its_bytes_and_drops_what_was_not_used() -> None:
    cache = deletes.FileCache(100)
    table = pa.table({"a": pa.array(range(5), pa.int64())})  # 40 bytes
    reads: list[str] = []

    def read(name: str) -> pa.Table:
        reads.append(name)
        return table

    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name,), lambda name=name: read(name))
    assert reads == ["a", "b", "c", "b"]
