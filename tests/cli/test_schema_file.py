"""Table descriptors from column lists and schema files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zufluss.cli.schema_file import descriptor_of_file, descriptor_of_text
from zufluss.errors import InvalidTableError

ARROW = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])


def test_a_column_list_may_have_a_primary_key() -> None:
    descriptor = descriptor_of_text("id BIGINT, name STRING, PRIMARY KEY (id)")
    assert descriptor.schema.names == ("id", "name")
    assert descriptor.schema.primary_key == ("id",)


def test_the_short_form_has_everything_a_table_has(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "columns:\n  - id BIGINT\n  - day STRING COMMENT 'UTC'\n"
        "primary_key: [id, day]\npartition_by: day\nbucket_key: [id]\nbuckets: 4\n"
        "comment: orders\n"
        "properties: {table.log.ttl: 1d, table.auto-partition.enabled: true}\n"
        "custom_properties: {owner: me}\n"
    )
    descriptor = descriptor_of_file(path)
    assert descriptor.schema.column("day").comment == "UTC"
    assert descriptor.schema.primary_key == ("id", "day")
    assert descriptor.partition_keys == ("day",)
    assert descriptor.bucket_keys == ("id",)
    assert descriptor.bucket_count == 4
    assert descriptor.comment == "orders"
    assert descriptor.properties == {
        "table.log.ttl": "1d",
        "table.auto-partition.enabled": "true",
    }
    assert descriptor.custom_properties == {"owner": "me"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["descriptor", "describe --output json"])
def test_json_is_a_descriptor_or_what_describe_prints(tmp_path: Path, wrapped: bool) -> None:
    descriptor = descriptor_of_text("id INT NOT NULL, tags ARRAY<STRING>")
    document = json.loads(descriptor.to_json())
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"id": 3, "descriptor": document} if wrapped else document))
    assert descriptor_of_file(path) == descriptor


def test_parquet_and_arrow_files_give_their_columns(tmp_path: Path) -> None:
    pq.write_table(ARROW.empty_table(), tmp_path / "t.parquet")
    with pa.ipc.new_file(tmp_path / "f.arrow", ARROW), pa.ipc.new_stream(tmp_path / "s.ipc", ARROW):
        pass
    for name in ("t.parquet", "f.arrow", "s.ipc"):
        schema = descriptor_of_file(tmp_path / name).schema
        assert str(schema) == "id BIGINT NOT NULL, name STRING", name


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("t.yaml", "columns: [id INT]\nbuckts: 4\n", "unknown buckts; allowed: columns"),
        ("t.yaml", "comment: x\n", "no 'columns'"),
        ("t.yaml", "- id INT\n", "must hold a map"),
        ("t.yaml", "a: [\n", "cannot be read"),
        ("t.json", "{", "cannot be read"),
        ("t.yaml", "columns: [id INT]\nproperties: [a]\n", "'properties' must be a map"),
        ("t.txt", "id INT", "is not a schema file; allowed"),
    ],
)
def test_a_bad_schema_file_says_what_is_wrong(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidTableError, match=problem):
        descriptor_of_file(tmp_path / name)
