"""Descriptors and paths: their JSON equals what a real server stored."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.model_strategies import schemas
from tests.paths import FIXTURES
from zufluss.config import Configuration
from zufluss.config.table_options import TABLE_LOG_TTL, TABLE_STATISTICS_COLUMNS
from zufluss.errors import ConfigError, InvalidDatabaseError, InvalidTableError
from zufluss.model.aggregate import AggFunction
from zufluss.model.schema import Schema
from zufluss.model.table import (
    DatabaseDescriptor,
    PhysicalTablePath,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.model.validation import check_table, complete

FIXTURES = FIXTURES / "tables"
NAMES = sorted(path.name.removesuffix(".request.json") for path in FIXTURES.glob("*.request.json"))
DEFAULT_FUNCTION = "table.merge-engine.aggregation.default-function"
SCHEMA = Schema.of("a INT, b STRING")


def test_the_fixtures_are_there() -> None:
    assert len(NAMES) == 14


@pytest.mark.parametrize("name", sorted({*NAMES} - {"agg", "rich"}))
def test_a_request_is_completed_to_what_a_real_server_stored(name: str) -> None:
    request = TableDescriptor.from_json((FIXTURES / f"{name}.request.json").read_bytes())
    stored = complete(request, Configuration.of({}))
    check_table(stored, Configuration.of({}), live_servers=1)
    assert json.loads(stored.to_json()) == json.loads(
        (FIXTURES / f"{name}.stored.json").read_bytes()
    )


@pytest.mark.parametrize("name", ["agg", "rich"])
def test_a_request_without_some_functions_needs_a_default_and_gets_it_stored(name: str) -> None:
    """Fluss takes last_value_ignore_nulls without a word; here it has to be asked for."""
    request = TableDescriptor.from_json((FIXTURES / f"{name}.request.json").read_bytes())
    conf = Configuration.of({})
    with pytest.raises(ConfigError, match=f"set {DEFAULT_FUNCTION} for all columns"):
        check_table(complete(request, conf), conf, live_servers=1)
    default = {DEFAULT_FUNCTION: "last_value_ignore_nulls"}
    asked = replace(request, properties={**request.properties, **default})
    stored = complete(asked, conf)
    check_table(stored, conf, live_servers=1)
    fluss = TableDescriptor.from_json((FIXTURES / f"{name}.stored.json").read_bytes())
    assert stored.properties == {**fluss.properties, **default}
    for ours, theirs in zip(stored.schema.columns, fluss.schema.columns, strict=True):
        if theirs.agg_function is None and theirs.name not in fluss.schema.primary_key:
            theirs = replace(theirs, agg_function=AggFunction("last_value_ignore_nulls"))
        assert ours == theirs


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json")), ids=lambda p: p.name)
def test_the_json_of_a_descriptor_has_the_bytes_of_the_real_server(path: Path) -> None:
    assert TableDescriptor.from_json(path.read_bytes()).to_json() == path.read_bytes().strip()


TEXT = st.text(max_size=8)


@given(
    schemas(),
    st.none() | TEXT,
    st.none() | st.integers(1, 4096),
    st.dictionaries(TEXT, TEXT, max_size=3),
    st.dictionaries(TEXT, TEXT, max_size=3),
)
@settings(max_examples=60)
def test_a_descriptor_survives_json(
    schema: Schema, comment: str | None, count: int | None, properties: Any, custom: Any
) -> None:
    descriptor = TableDescriptor(
        schema, comment, schema.names[:1], schema.names[1:2], count, properties, custom
    )
    assert TableDescriptor.from_json(descriptor.to_json()) == descriptor


def _json(**changes: object) -> bytes:
    whole = json.loads(TableDescriptor(SCHEMA, bucket_count=1).to_json()) | changes
    return json.dumps({key: value for key, value in whole.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (_json(schema=None), "no 'schema'"),
        (_json(properties=None), "no 'properties'"),
        (_json(custom_properties=None), "no 'custom_properties'"),
        (_json(partition_key=None), "no 'partition_key'"),
        (_json(bucket_key=None), "'bucket_count' needs 'bucket_key'"),
        (_json(bucket_count="many"), "'many' is not a number"),
        (_json(bucket_count=True), "True is not a number"),
        (_json(partition_key="a"), "list of column names"),
        (_json(properties=[1]), "object of texts"),
        (_json(properties={"a": {}}), "value must be text"),
        (b"nonsense", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_a_malformed_descriptor_is_refused_with_the_reason(source: bytes, message: str) -> None:
    with pytest.raises(InvalidTableError, match=message):
        TableDescriptor.from_json(source)


def test_half_a_character_is_refused_before_it_cannot_be_stored() -> None:
    source = json.dumps({**json.loads(TableDescriptor(SCHEMA).to_json()), "comment": "\ud800"})
    with pytest.raises(InvalidTableError, match="surrogates"):
        TableDescriptor.from_json(source)
    with pytest.raises(InvalidDatabaseError, match="surrogates"):
        DatabaseDescriptor.from_json(r'{"version": 1, "comment": "\udc00"}')


def test_thousands_of_names_are_compared_in_no_time() -> None:
    """A descriptor of a megabyte must not hold the server up: no name is compared with all."""
    fields = [{"name": f"f{i}", "field_type": {"type": "INTEGER"}} for i in range(20_000)]
    column = {"name": "a", "data_type": {"type": "ROW", "fields": fields}}
    began = time.process_time()
    Schema.from_json({"version": 1, "columns": [column]})
    columns = [{"name": f"c{i}", "data_type": {"type": "INTEGER"}} for i in range(20_000)]
    with pytest.raises(InvalidTableError, match="column c7 is given twice"):
        Schema.from_json({"version": 1, "columns": [*columns, columns[7]]})
    assert time.process_time() - began < 5


def test_reading_tolerates_unknown_keys_and_scalar_property_values() -> None:
    read = TableDescriptor.from_json(_json(future=[1], properties={"a": 1, "b": True}))
    assert read.properties == {"a": "1", "b": "true"}


def test_bucket_count_and_key_may_be_absent_in_a_request() -> None:
    read = TableDescriptor.from_json(_json(bucket_count=None, bucket_key=None))
    assert (read.bucket_count, read.bucket_keys) == (None, ())


def test_a_bucket_is_named_in_messages_with_ids_only_where_names_are_unknown() -> None:
    path = TablePath("db", "t")
    assert TableBucket(1, None, 3).named(path) == "db.t, bucket 3"
    assert TableBucket(1, 2, 3).named(path, "2026") == "db.t, partition 2026, bucket 3"
    assert TableBucket(1, 2, 3).named(path) == "db.t, partition id 2, bucket 3"
    assert TableBucket(1, 2, 3).named(PhysicalTablePath("db", "t", "p")) == (
        "db.t, partition p, bucket 3"
    )
    assert TableBucket(1, None, 3).named(None) == "table id 1 (unknown here), bucket 3"


def test_paths_have_a_text_form() -> None:
    assert TablePath.parse("db.t") == TablePath("db", "t")
    assert TablePath.parse("t", "fluss") == TablePath("fluss", "t")
    assert str(TablePath("db", "t")) == "db.t"
    assert str(PhysicalTablePath("db", "t", "p")) == "db.t(p=p)"
    assert PhysicalTablePath("db", "t").path == TablePath("db", "t")
    assert str(TableBucket(1, 2, 3)) == "table 1, partition 2, bucket 3"
    for text in ("", "t", "a.b.c", ".t", "d."):
        with pytest.raises(InvalidTableError):
            TablePath.parse(text)


def test_a_database_descriptor_survives_json_and_may_be_empty() -> None:
    descriptor = DatabaseDescriptor("c", {"a": "b"})
    assert DatabaseDescriptor.from_json(descriptor.to_json()) == descriptor
    assert json.loads(DatabaseDescriptor().to_json()) == {"version": 1, "custom_properties": {}}
    assert DatabaseDescriptor.from_json(b"") == DatabaseDescriptor()
    with pytest.raises(InvalidDatabaseError):
        DatabaseDescriptor.from_json(b"[]")


def test_a_table_info_answers_for_its_descriptor() -> None:
    descriptor = TableDescriptor(
        SCHEMA, bucket_count=3, properties={"table.log.ttl": "3d", "table.log.format": "indexed"}
    )
    info = TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0)
    assert (info.bucket_count, info.log_format, info.is_partitioned) == (3, "INDEXED", False)
    assert info.property(TABLE_LOG_TTL) == 3 * 86_400_000
    assert info.property(TABLE_STATISTICS_COLUMNS) is None
    assert info.has_primary_key is False


def test_the_physical_primary_key_leaves_partition_keys_out() -> None:
    schema = Schema.of("a INT, b STRING, c INT", primary_key=["a", "b", "c"])
    descriptor = TableDescriptor(schema, partition_keys=("b",), bucket_keys=("a", "c"))
    assert descriptor.physical_primary_key == ("a", "c")
    assert descriptor.has_default_bucket_key
