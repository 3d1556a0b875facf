"""The lake table that fits a table, against what Apache Fluss makes and against outside changes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.types import IntegerType, LongType, StringType

from tests.lake.iceberg.tables import committer, lake_table, table_info
from tests.model.model_strategies import TYPES
from tests.paths import FIXTURES
from zufluss.lake.base import LakeTableError
from zufluss.lake.iceberg import schema as s
from zufluss.lake.iceberg.rules import validate
from zufluss.model import types as t
from zufluss.model.table import TableInfo

FIXTURES = FIXTURES / "iceberg-by-fluss"
FLUSS_COLUMNS = (
    "id BIGINT, a INT, b INT, c DOUBLE, d DOUBLE, e STRING, f STRING, g BIGINT, h BOOLEAN, i STRING"
)
PROPERTIES = {
    "table.replication.factor": "1",
    "table.datalake.enabled": "true",
    "table.datalake.format": "iceberg",
    "table.datalake.freshness": "2min",
}
EVERY_TYPE = """
    a BOOLEAN, b TINYINT, c SMALLINT, d INT NOT NULL, e BIGINT, f FLOAT, g DOUBLE, h CHAR(3),
    i STRING, j BINARY(4), k BYTES, l DECIMAL(20, 5), m DATE, n TIME(0), o TIME(9),
    p TIMESTAMP(0), q TIMESTAMP(9), r TIMESTAMP_LTZ(3), u ARRAY<INT NOT NULL>,
    v MAP<STRING, ARRAY<BIGINT>>, w ROW<x INT, y ROW<z STRING NOT NULL, zz MAP<INT, DATE>>>
"""


def fluss_table(primary_key: bool) -> TableInfo:
    """The table of which Apache Fluss made the fixture."""
    extra = {"table.kv.format-version": "2"} if primary_key else {}
    return table_info(
        FLUSS_COLUMNS, primary_key=["id"] if primary_key else (), properties=PROPERTIES | extra
    )


def plain(metadata: TableMetadata, *names: str) -> dict[str, Any]:
    """Parts of table metadata as JSON."""
    return {name: json.loads(metadata.model_dump_json())[name] for name in names}


@pytest.mark.parametrize("name", ["log-table", "primary-key-table"])
def test_a_lake_table_is_laid_out_as_apache_fluss_does_it(tmp_path: Path, name: str) -> None:
    theirs = TableMetadataUtil.parse_raw((FIXTURES / f"{name}.metadata.json").read_text())
    table = fluss_table(name == "primary-key-table")
    committer(tmp_path, table)
    ours = lake_table(tmp_path, table).metadata
    parts = (
        *("format-version", "last-column-id", "current-schema-id", "schemas"),
        *("default-spec-id", "partition-specs", "last-partition-id"),
        *("default-sort-order-id", "sort-orders"),
    )
    assert plain(ours, *parts) == plain(theirs, *parts)
    assert theirs.properties.items() <= ours.properties.items()


def test_every_type_has_ids_from_one_and_keeps_them_in_the_lake(tmp_path: Path) -> None:
    table = table_info(EVERY_TYPE)
    committer(tmp_path, table)
    wanted = s.iceberg_schema(table)
    assert lake_table(tmp_path, table).schema() == wanted
    ids = sorted(wanted._lazy_id_to_name)
    assert ids == list(range(1, len(ids) + 1))
    assert [wanted.find_field(i).name for i in range(1, len(wanted.fields) + 1)] == [
        *table.schema.names,
        *("__bucket", "__offset", "__timestamp"),
    ]


def test_comments_become_docs_and_not_null_becomes_required() -> None:
    made = s.iceberg_schema(table_info("a INT NOT NULL COMMENT 'the first', b STRING"))
    assert [(f.doc, f.required) for f in made.fields[:2]] == [("the first", True), (None, False)]


def test_files_carry_the_field_ids() -> None:
    made = s.arrow_schema(s.iceberg_schema(table_info(EVERY_TYPE)))
    assert made.field("a").metadata[b"PARQUET:field_id"] == b"1"
    assert not made.field("__offset").nullable
    row = made.field("w").type
    assert all(b"PARQUET:field_id" in row.field(i).metadata for i in range(row.num_fields))
    assert made.field("q").type == pa.timestamp("us")


@settings(max_examples=100)
@given(TYPES)
def test_a_type_is_the_same_in_the_lake_whatever_its_field_ids(data_type: t.DataType) -> None:
    there = s.iceberg_type(data_type, count(1).__next__)
    assert there == s.iceberg_type(data_type, count(1).__next__)
    assert s.same_type(there, s.iceberg_type(data_type, count(1000).__next__))


@settings(max_examples=60)
@given(TYPES, TYPES)
def test_types_are_the_same_exactly_if_their_lake_types_are(a: t.DataType, b: t.DataType) -> None:
    one, two = (s.iceberg_type(found, count(9).__next__) for found in (a, b))
    renumbered = s.iceberg_type(b, count(500).__next__)
    assert s.same_type(one, renumbered) == (one == two)


def test_the_partition_spec_is_the_keys_then_the_bucket() -> None:
    table = table_info(
        "id BIGINT, day DATE, region STRING",
        primary_key=["id", "day", "region"],
        bucket_keys=["id"],
        partition_keys=["day", "region"],
    )
    spec = s.partition_spec(table, s.iceberg_schema(table))
    assert [(f.name, str(f.transform)) for f in spec.fields] == [
        ("day", "identity"),
        ("region", "identity"),
        ("id_bucket", "bucket[4]"),
    ]
    assert s.partition_values(table, "1970-01-11$EMEA", 3) == (10, "EMEA", 3)


def test_several_bucket_keys_are_partitioned_by_the_bucket_number() -> None:
    table = table_info("a INT, b INT", primary_key=["a", "b"], bucket_keys=["a", "b"])
    (field,) = s.partition_spec(table, s.iceberg_schema(table)).fields
    assert (field.name, str(field.transform)) == ("__bucket", "identity")


def test_properties_of_the_table_go_along_but_not_how_to_reach_the_catalog() -> None:
    table = table_info(
        properties={"table.datalake.freshness": "1s", "table.datalake.iceberg.s3.secret": "x"},
        custom={"iceberg.write.parquet.compression-codec": "snappy", "owner": "me"}
        | {"iceberg.zufluss.table-id": "99", "iceberg.format-version": "3"},
    )
    found = s.table_properties(table)
    assert found["write.parquet.compression-codec"] == "snappy"
    assert (found["fluss.owner"], found["fluss.table.datalake.freshness"]) == ("me", "1s")
    assert found["zufluss.table-id"] == "7"
    assert "format-version" not in found
    assert not any("secret" in key for key in found)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (table_info("__offset BIGINT"), "'__offset' of table shop.orders has the name of a system"),
        (
            table_info("a INT, p TIMESTAMP(3)", partition_keys=["p"]),
            "partition key 'p' of table shop.orders is TIMESTAMP",
        ),
        (
            table_info("k TIMESTAMP_LTZ(7), a INT", primary_key=["k"]),
            r"primary key column 'k' of table shop.orders is TIMESTAMP_LTZ\(7\) .* of 6 or less",
        ),
        (
            table_info("a INT, k TIME(9)", primary_key=["a", "k"]),
            r"primary key column 'k' of table shop.orders is TIME\(9\) .* of 6 or less",
        ),
        (
            table_info("k DOUBLE, a INT", primary_key=["k"]),
            "primary key column 'k' of table shop.orders is DOUBLE .* take DECIMAL",
        ),
    ],
)
def test_a_table_that_iceberg_cannot_hold_is_refused(table: TableInfo, says: str) -> None:
    with pytest.raises(LakeTableError, match=says):
        validate(table)


def with_column(table: TableInfo, name: str, data_type: t.DataType) -> TableInfo:
    """The table after ALTER TABLE ADD COLUMN."""
    schema = table.schema.add_column(name, data_type, "new")
    return replace(table, descriptor=replace(table.descriptor, schema=schema))


def test_a_column_added_to_the_table_is_added_before_the_system_columns(tmp_path: Path) -> None:
    table = table_info()
    committer(tmp_path, table)
    row = t.RowType(fields=(t.RowField("x", t.ScalarType(root=t.Root.INTEGER)),))
    wider = with_column(with_column(table, "extra", row), "more", t.ScalarType(root=t.Root.DATE))
    committer(tmp_path, wider)
    found = lake_table(tmp_path, wider).schema()
    assert [f.name for f in found.fields] == [
        *("id", "name", "extra", "more", "__bucket", "__offset", "__timestamp")
    ]
    assert [found.find_field(n).field_id for n in ("id", "name", "__timestamp")] == [1, 2, 5]
    assert sorted(found.find_field(n).field_id for n in ("extra", "extra.x", "more")) == [6, 7, 8]
    assert found.find_field("extra").doc == "new"


def test_preparing_a_table_that_fits_changes_nothing(tmp_path: Path) -> None:
    table = table_info(EVERY_TYPE)
    committer(tmp_path, table)
    before = lake_table(tmp_path, table).metadata_location
    committer(tmp_path, table)
    assert lake_table(tmp_path, table).metadata_location == before


def test_properties_follow_an_altered_table(tmp_path: Path) -> None:
    table = table_info(properties={"table.datalake.freshness": "1s"}, custom={"owner": "me"})
    committer(tmp_path, table)
    lake_table(tmp_path, table).transaction().set_properties(mine="kept").commit_transaction()
    changed = replace(table.descriptor, custom_properties={}, properties={"table.x": "2"})
    committer(tmp_path, replace(table, descriptor=changed))
    found = lake_table(tmp_path, table).properties
    assert {k: v for k, v in found.items() if k.startswith("fluss.")} == {"fluss.table.x": "2"}
    assert found["mine"] == "kept"


def test_an_optional_column_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    table = table_info()
    committer(tmp_path, table)
    with lake_table(tmp_path, table).update_schema() as update:
        update.add_column("theirs", StringType())
    committer(tmp_path, table)
    assert "theirs" in [f.name for f in lake_table(tmp_path, table).schema().fields]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda u: u.delete_column("name"), "column 'name' .* was dropped or renamed"),
        (lambda u: u.rename_column("name", "nom"), "column 'name' .* was dropped or renamed"),
        (lambda u: u.update_column("n", LongType()), "column 'n' .* is long instead of int"),
        (lambda u: u.add_column("t", IntegerType(), required=True), "'t' .* added as required"),
        (lambda u: u.delete_column("__timestamp"), "'__timestamp' .* was dropped"),
    ],
)
def test_a_change_from_outside_that_does_not_fit_names_column_and_way_out(
    tmp_path: Path, change: Any, says: str
) -> None:
    table = table_info("id BIGINT, name STRING, n INT")
    committer(tmp_path, table)
    with lake_table(tmp_path, table).update_schema(allow_incompatible_changes=True) as update:
        change(update)
    with pytest.raises(LakeTableError, match=f"{says}.*drop and re-create the table"):
        committer(tmp_path, table)


def test_a_partition_spec_changed_from_outside_is_refused(tmp_path: Path) -> None:
    table = table_info()
    committer(tmp_path, table)
    with lake_table(tmp_path, table).update_spec() as update:
        update.add_identity("name")
    with pytest.raises(LakeTableError, match="partition spec was changed from outside"):
        committer(tmp_path, table)


def test_a_schema_survives_its_json() -> None:
    made = s.iceberg_schema(table_info(EVERY_TYPE, primary_key=["d"]))
    assert IcebergSchema.model_validate_json(made.model_dump_json()) == made
