"""Our reader of lake snapshots agrees with pyiceberg's, and gives the table's own types."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.lake.iceberg.tables import catalog_properties, committer, lake_table, table_info
from tests.lake.iceberg.test_writer import (
    EVERY_TYPE,
    apply,
    commit,
    cut,
    every_type,
    log_rows,
    open_writer,
    with_system,
)
from zufluss.lake.base import CommitterContext, LakeTableError
from zufluss.lake.iceberg import reader as module
from zufluss.lake.iceberg import writer
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.lake.iceberg.reader import IcebergReader
from zufluss.model.expression import Expression, col
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableInfo
from zufluss.model.types import STRING


def reader(directory: Path, table: TableInfo) -> IcebergReader:
    return IcebergReader(CommitterContext(table, catalog_properties(directory)))


def read(found: IcebergReader, snapshot: int, columns: list[str], **options: Any) -> pa.Table:
    batches = list(found.read(found.plan(snapshot, **options), columns))
    return pa.Table.from_batches(batches) if batches else pa.table({})


def append(made: IcebergCommitter, rows: list[dict[str, Any]], **options: Any) -> int:
    out = open_writer(made, **options)
    out.append(log_rows(made.table, rows))
    return commit(made, out.complete())


def test_every_type_comes_back_as_the_table_has_it(tmp_path: Path) -> None:
    table = table_info(EVERY_TYPE)
    made = committer(tmp_path, table)
    out = open_writer(made)
    rows = every_type(table.schema.arrow)
    out.append(with_system(rows))
    snapshot = commit(made, out.complete())
    found = read(reader(tmp_path, table), snapshot, list(table.schema.names))
    assert found.schema == table.schema.arrow
    assert repr(found.to_pylist()) == repr(cut(rows.to_pylist()))


def test_system_columns_and_any_order_can_be_asked_for(tmp_path: Path) -> None:
    table = table_info(bucket_keys=["id"])
    made = committer(tmp_path, table)
    snapshot = append(made, [{"id": 5, "name": "a"}])
    found = read(reader(tmp_path, table), snapshot, ["__timestamp", "name", "__bucket", "__offset"])
    assert found.column_names == ["__timestamp", "name", "__bucket", "__offset"]
    assert found.schema.field("__timestamp").type == pa.timestamp("ms", "UTC")
    assert found["__offset"].to_pylist() == [0]
    with pytest.raises(LakeTableError, match="no column 'nope'"):
        read(reader(tmp_path, table), snapshot, ["nope"])


def test_deleted_positions_are_dropped_over_many_row_groups_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ROW_GROUP_ROWS", 7)
    monkeypatch.setattr(module, "BATCH_ROWS", 5)
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    apply(made, [("+I", {"id": i, "name": f"a{i}"}) for i in range(60)])
    apply(made, [("+U", {"id": i, "name": f"b{i}"}) for i in range(0, 60, 3)], 60)
    apply(made, [("-D", {"id": i, "name": ""}) for i in range(0, 60, 2)], 80)
    snapshot = made.newest()
    assert snapshot is not None
    found = read(reader(tmp_path, table), snapshot.snapshot_id, ["id", "name"])
    theirs = lake_table(tmp_path, table).scan().to_arrow().select(["id", "name"])
    assert found.sort_by("id").to_pylist() == theirs.sort_by("id").to_pylist()
    assert found.num_rows == 30


def test_an_older_snapshot_is_still_what_it_was(tmp_path: Path) -> None:
    table = table_info(primary_key=["id"])
    made = committer(tmp_path, table)
    apply(made, [("+I", {"id": 1, "name": "a"})])
    first = made.newest()
    assert first is not None
    found = reader(tmp_path, table)
    apply(made, [("+U", {"id": 1, "name": "b"})], 1)
    second = made.newest()
    assert second is not None
    assert read(found, first.snapshot_id, ["name"])["name"].to_pylist() == ["a"]
    assert read(found, second.snapshot_id, ["name"])["name"].to_pylist() == ["b"]
    with pytest.raises(LakeTableError, match="no snapshot 5"):
        found.plan(5)


def test_a_column_that_files_or_the_lake_do_not_have_yet_is_null(tmp_path: Path) -> None:
    table = table_info(bucket_keys=["id"])
    made = committer(tmp_path, table)
    snapshot = append(made, [{"id": 1, "name": "a"}])
    columns = (*table.schema.columns, Column("more", STRING, id=2))
    schema = Schema(columns)
    wider = replace(table, descriptor=replace(table.descriptor, schema=schema), schema_id=2)
    unknown = read(reader(tmp_path, wider), snapshot, ["more", "id"])
    assert unknown.to_pylist() == [{"more": None, "id": 1}]
    assert read(reader(tmp_path, wider), snapshot, ["more"]).to_pylist() == [{"more": None}]
    made = committer(tmp_path, wider)
    snapshot = append(made, [{"id": 2, "name": "b", "more": "c"}])
    found = read(reader(tmp_path, wider), snapshot, ["id", "more"], filter=col("more").is_null())
    rows = sorted(found.to_pylist(), key=lambda row: row["id"])
    assert {"id": 1, "more": None} in rows


FILTERS: list[Expression] = [
    col("n") == 5,
    col("n") > 25,
    (col("n") <= 3) | (col("s") == "k17"),
    (col("n") < 0) & col("s").starts_with("k"),
    col("s").starts_with("k1"),
    col("s").contains("7"),
    ~col("s").starts_with("k"),
    col("n").isin([1, 22, 999]),
    ~col("n").isin([1]),
    col("n") != 5,
    col("s").is_null(),
    col("s").is_not_null() & (col("d") >= dt.date(2024, 1, 20)),
    col("t") < dt.datetime(2024, 1, 1, 5),
    col("f") > 25.5,
    col("m").isin([]),
    (col("m") == 7) | col("b"),
    col("x") > dt.time(0, 0, 20),
]


@pytest.mark.parametrize("filter", FILTERS, ids=range(len(FILTERS)))
def test_pruning_never_loses_a_row_that_matches(tmp_path: Path, filter: Expression) -> None:
    table = table_info(
        "n INT, s STRING, d DATE, t TIMESTAMP(3), f DOUBLE, m DECIMAL(9, 2), b BOOLEAN, x TIME(6)"
    )
    made = committer(tmp_path, table)
    rows = [
        {
            "n": i, "s": None if i == 13 else f"k{i}", "d": dt.date(2024, 1, 1 + i),
            "t": dt.datetime(2024, 1, 1, i % 24), "f": float(i), "m": i, "b": i == 29,
            "x": dt.time(0, 0, i),
        }
        for i in range(30)
    ]  # fmt: skip
    snapshot = 0
    for start in range(0, 30, 5):
        snapshot = append(made, rows[start : start + 5])
    found = reader(tmp_path, table)
    arrow = filter.to_arrow(table.schema)
    everything = read(found, snapshot, list(table.schema.names)).filter(arrow)
    pruned = read(found, snapshot, list(table.schema.names), filter=filter)
    left = pruned.filter(arrow) if pruned.num_columns else pruned
    assert left.num_rows == everything.num_rows
    if everything.num_rows:
        assert sorted(left["n"].to_pylist()) == sorted(everything["n"].to_pylist())


def test_files_are_pruned_by_bounds_and_by_partition(tmp_path: Path) -> None:
    table = table_info("id BIGINT, day STRING", partition_keys=["day"])
    made = committer(tmp_path, table)
    for day in ("mon", "tue", "wed"):
        ids = {"mon": 1, "tue": 100, "wed": 200}
        snapshot = append(made, [{"id": ids[day], "day": day}], partition=day)
    found = reader(tmp_path, table)
    assert len(found.plan(snapshot).files) == 3
    assert len(found.plan(snapshot, filter=col("id") > 50).files) == 2
    assert len(found.plan(snapshot, filter=col("day") == "tue").files) == 1
    chosen = read(found, snapshot, ["day"], partitions=["mon", "wed", "none"])
    assert sorted(chosen["day"].to_pylist()) == ["mon", "wed"]
    assert found.plan(snapshot, partitions=[]).files == ()


def test_there_is_no_reader_without_a_lake_table_of_this_very_table(tmp_path: Path) -> None:
    table = table_info()
    with pytest.raises(LakeTableError, match="no lake table"):
        reader(tmp_path, table)
    committer(tmp_path, table)
    with pytest.raises(LakeTableError, match="table id 8"):
        reader(tmp_path, replace(table, table_id=8))


def test_a_reader_that_is_closed_early_stops_its_threads(tmp_path: Path) -> None:
    table = table_info(bucket_keys=["id"])
    made = committer(tmp_path, table)
    for i in range(8):
        snapshot = append(made, [{"id": i, "name": "a"}])
    found = reader(tmp_path, table)
    batches = found.read(found.plan(snapshot), ["id"])
    assert pc.count(next(batches)["id"]).as_py() == 1
    batches.close()
