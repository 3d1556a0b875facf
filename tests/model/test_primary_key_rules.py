"""What CREATE and ALTER TABLE ask of primary-key tables, as clients send them: in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from zufluss.config import Configuration
from zufluss.errors import ZuflussError
from zufluss.model.aggregate import AggFunction
from zufluss.model.alter import NewColumn, PropertyChange, TableChanges, alter_table
from zufluss.model.ddl import parse_type
from zufluss.model.table import TableDescriptor
from zufluss.model.validation import check_table, complete

NO_LAKE: Mapping[str, str] = {}
TYPES = {
    "k": "INT",
    "n": "BIGINT",
    "i": "INT",
    "s": "STRING",
    "f": "BOOLEAN",
    "t1": "TINYINT",
    "t2": "SMALLINT",
    "ts": "TIMESTAMP(6)",
    "tz": "TIMESTAMP_LTZ(6)",
    "raw": "BYTES",
    "fix": "BINARY(4)",
    "list": "ARRAY<INT>",
    "map": "MAP<INT, INT>",
    "row": "ROW<x INT>",
}


def request(
    primary_key: list[str] | None = None,
    *,
    auto: list[str] | None = None,
    partitions: tuple[str, ...] = (),
    buckets: tuple[str, ...] = (),
    **properties: str,
) -> bytes:
    """The JSON of a table; properties with `_` for `-` and `__` for `.`."""
    columns = [
        {"name": name, "data_type": parse_type(text).to_json()} for name, text in TYPES.items()
    ]
    schema: dict[str, Any] = {"version": 1, "columns": columns}
    if primary_key is not None:
        schema["primary_key"] = primary_key
    if auto is not None:
        schema["auto_increment_column"] = auto
    given = {f"table.{k.replace('__', '.').replace('_', '-')}": v for k, v in properties.items()}
    if primary_key is not None and properties.get("merge_engine", "").lower() == "aggregation":
        given["table.merge-engine.aggregation.default-function"] = "last_value"
    return json.dumps(
        {
            "schema": schema,
            "partition_key": partitions,
            "bucket_key": buckets,
            "bucket_count": 1,
            "properties": given,
            "custom_properties": {},
        }
    ).encode()


def made(source: bytes, conf: Mapping[str, str] = NO_LAKE) -> TableDescriptor:
    configuration = Configuration.of(dict(conf))
    descriptor = complete(TableDescriptor.from_json(source), configuration)
    check_table(descriptor, configuration, 1)
    return descriptor


def versioned(column: str, **more: str) -> dict[str, str]:
    return {"merge_engine": "versioned", "merge_engine__versioned__ver_column": column, **more}


REFUSED: list[tuple[bytes, int, str]] = [
    # the key
    (request([]), 15, "'primary_key' is empty; name its columns, or leave it out"),
    (request(["x"]), 15, "primary key column 'x' does not exist"),
    (request(["k", "k"]), 15, "given twice"),
    (request(["k", "list"]), 15, r"does not support types: \[ARRAY, MAP, ROW\]"),
    (request(["map"]), 15, r"does not support types: \[ARRAY, MAP, ROW\]"),
    (request(["row"]), 15, r"does not support types: \[ARRAY, MAP, ROW\]"),
    # partition and bucket key
    (request(["k"], partitions=("s",)), 15, "add it to the primary key"),
    (request(["k"], partitions=("k",)), 15, "partition keys only"),
    (request(["k"], buckets=("s",)), 15, "bucket key s is not in the primary key"),
    (request(["k", "s"], buckets=("k", "n")), 15, "bucket key n is not in the primary key"),
    (request(["k", "s"], partitions=("s",), buckets=("s",)), 15, "leave it out of the bucket key"),
    (request(["k", "s"], partitions=("s",), buckets=("k", "s")), 15, "leave it out"),
    # formats
    (request(["k"], log__format="INDEXED"), 39, "allowed: ARROW, COMPACTED"),
    (request(["k"], log__format="indexed", kv__format="indexed"), 39, "allowed: ARROW, COMPACTED"),
    (request(["k"], kv__format="ARROW"), 39, "allowed: COMPACTED, INDEXED"),
    (request(["k"], kv__format_version="0"), 39, "1 to 2"),
    (request(["k"], kv__format_version="3"), 39, "1 to 2"),
    # merge engines
    (request(["k"], merge_engine="last_row"), 39, "first_row, versioned, aggregation"),
    (request(merge_engine="first_row"), 39, "needs a primary key"),
    (request(merge_engine="aggregation"), 39, "needs a primary key"),
    (request(["k"], merge_engine="versioned"), 39, "must be set for versioned"),
    (request(["k"], **versioned("x")), 39, "'x' for versioned merge engine doesn't exist"),
    (request(["k"], **versioned("s")), 39, "INT, BIGINT, TIMESTAMP, TIMESTAMP_LTZ"),
    (request(["k"], **versioned("t2")), 39, "INT, BIGINT, TIMESTAMP, TIMESTAMP_LTZ"),
    (
        request(["k"], merge_engine="first_row", delete__behavior="ALLOW"),
        39,
        "'ignore' or 'disable'",
    ),
    (request(["k"], **versioned("n", delete__behavior="allow")), 39, "'ignore' or 'disable'"),
    (request(["k"], delete__behavior="REFUSE"), 39, "ALLOW, IGNORE, DISABLE"),
    (request(delete__behavior="DISABLE"), 39, "primary key tables"),
    (request(["k"], changelog__image="HALF"), 39, "FULL, WAL"),
    (request(["k"], merge_engine="aggregation", changelog__image="WAL"), 39, "to 'FULL'"),
    # auto-increment
    (request(auto=["n"]), 15, "needs a primary key"),
    (request(["k"], auto=["x"]), 15, "auto-increment column 'x' does not exist"),
    (request(["k"], auto=["k"]), 15, "cannot be in the primary key"),
    (request(["k"], auto=["n", "i"]), 15, "at most one"),
    (request(["k"], auto=["n", "n"]), 15, "at most one"),
    (request(["k"], auto=["s"]), 15, "must be INT or BIGINT"),
    (request(["k"], auto=["t2"]), 15, "must be INT or BIGINT"),
    (request(["k"], auto=["n"], auto_increment__cache_size="0"), 39, "1 to"),
    # statistics belong to log tables
    (request(["k"], statistics__columns="*"), 39, "primary-key table"),
]


@pytest.mark.parametrize(("source", "code", "message"), REFUSED)
def test_a_broken_rule_is_refused_with_its_code_and_the_way_out(
    source: bytes, code: int, message: str
) -> None:
    with pytest.raises(ZuflussError) as caught:
        made(source)
    assert caught.value.code == code, caught.value.message
    assert re.search(message, caught.value.message), caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        request(["k"], kv__format="INDEXED"),
        request(["k"], kv__format="INDEXED", log__format="COMPACTED"),
        request(["k"], log__format="COMPACTED"),
        request(["k", "s"], buckets=("s",)),
        request(["k", "s", "n"], partitions=("s",), buckets=("n",)),
        request(["k"], **versioned("ts")),
        request(["k"], **versioned("tz", delete__behavior="DISABLE")),
        request(["k"], **versioned("k")),
        request(["k"], merge_engine="aggregation", delete__behavior="ALLOW"),
        request(["k"], merge_engine="first_row", changelog__image="WAL"),
        request(["k"], auto=["n"], merge_engine="first_row"),
        request(["k"], auto=["i"], auto_increment__cache_size="1"),
    ],
)
def test_what_fluss_allows_is_allowed(source: bytes) -> None:
    assert made(source)


@pytest.mark.parametrize(
    ("lake", "column"),
    [
        ("iceberg", "f"),
        ("iceberg", "t1"),
        ("iceberg", "t2"),
        ("iceberg", "tz"),
        ("hudi", "raw"),
        ("hudi", "fix"),
    ],
)
def test_keys_that_the_lake_cannot_encode_are_refused(lake: str, column: str) -> None:
    """Whether the lake comes from the table or from the cluster; Java fails at the first write."""
    with_format = request([column], datalake__format=lake)
    for source, conf in ((with_format, NO_LAKE), (request([column]), {"datalake.format": lake})):
        with pytest.raises(ZuflussError, match=f"{lake} keys cannot be") as caught:
            made(source, conf)
        assert caught.value.code == 15


def test_key_columns_become_not_null_and_the_bucket_key_the_rest_of_the_primary_key() -> None:
    descriptor = made(request(["s", "k"], partitions=("s",)))
    nullable = {c.name for c in descriptor.schema.columns if c.data_type.nullable}
    assert nullable == set(TYPES) - {"k", "s"}
    assert descriptor.bucket_keys == ("k",)


@pytest.mark.parametrize(
    ("properties", "behaviour"),
    [
        ({}, None),
        ({"merge_engine": "first_row"}, "IGNORE"),
        (versioned("n"), "IGNORE"),
        ({"merge_engine": "AGGREGATION"}, "IGNORE"),
        ({"merge_engine": "aggregation", "delete__behavior": "allow"}, "allow"),
    ],
)
def test_deletes_are_ignored_by_default_with_a_merge_engine(
    properties: dict[str, str], behaviour: str | None
) -> None:
    assert made(request(["k"], **properties)).properties.get("table.delete.behavior") == behaviour


def test_a_key_format_version_is_set_for_primary_key_tables_alone() -> None:
    key = "table.kv.format-version"
    assert made(request(["k"])).properties[key] == "2"
    assert made(request(["k"], kv__format_version="1")).properties[key] == "1"
    assert key not in made(request()).properties


@pytest.mark.parametrize(
    "key",
    [
        "kv.format",
        "kv.format-version",
        "merge-engine",
        "merge-engine.versioned.ver-column",
        "delete.behavior",
        "changelog.image",
        "auto-increment.cache-size",
        "log.format",
    ],
)
def test_how_rows_are_stored_and_merged_cannot_be_altered(key: str) -> None:
    changes = TableChanges([PropertyChange(f"table.{key}", "1")])
    with pytest.raises(ZuflussError, match="cannot be altered") as caught:
        alter_table(made(request(["k"])), changes, Configuration.of({}))
    assert caught.value.code == 56


def test_an_added_column_neither_counts_nor_joins_the_key() -> None:
    before = made(request(["k"], auto=["n"]))
    changes = TableChanges(add_columns=[NewColumn("more", parse_type("BIGINT"))])
    schema = alter_table(before, changes, Configuration.of({})).schema
    assert (schema.primary_key, schema.auto_increment_column) == (("k",), ("n",))
    assert schema.column("more").data_type.nullable


def test_an_added_column_has_an_aggregation_function_only_with_that_engine() -> None:
    changes = TableChanges(
        add_columns=[NewColumn("more", parse_type("BIGINT"), agg_function=AggFunction("sum"))]
    )
    conf = Configuration.of({})
    assert alter_table(made(request(["k"], merge_engine="aggregation")), changes, conf)
    with pytest.raises(ZuflussError, match="merge-engine = aggregation") as caught:
        alter_table(made(request(["k"])), changes, conf)
    assert caught.value.code == 39
