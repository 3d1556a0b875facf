"""Every rule of CREATE TABLE, with its code and a message that helps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zufluss.config import Configuration
from zufluss.errors import ZuflussError
from zufluss.model.aggregate import AggFunction
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableDescriptor, TablePath
from zufluss.model.validation import (
    check_database_name,
    check_table,
    check_table_name,
    check_table_path,
    complete,
)

COLUMNS = (
    "k INT, s STRING, d DATE, n DECIMAL(5, 2), arr ARRAY<INT>, ts TIMESTAMP(3), "
    "z TIMESTAMP_LTZ(3), b BOOLEAN, raw BYTES, i8 TINYINT, i16 SMALLINT"
)


def table(
    properties: dict[str, str] | None = None,
    key: tuple[str, ...] = (),
    columns: str = COLUMNS,
    **rest: Any,
) -> TableDescriptor:
    short = {f"table.{k}": v for k, v in (properties or {}).items()}
    return TableDescriptor(Schema.of(columns, key), properties=short, **rest)


def made(
    descriptor: TableDescriptor, conf: dict[str, str] | None = None, live: int = 1
) -> TableDescriptor:
    configuration = Configuration.of(conf or {})
    completed = complete(descriptor, configuration)
    check_table(completed, configuration, live)
    return completed


def refused(descriptor: TableDescriptor, conf: dict[str, str] | None = None) -> tuple[int, str]:
    with pytest.raises(ZuflussError) as caught:
        made(descriptor, conf)
    return caught.value.code.value, caught.value.message


PK = ("k",)
AUTO = {"auto-partition.enabled": "true"}

REFUSALS: list[tuple[TableDescriptor, int, str]] = [
    # properties
    (TableDescriptor(Schema.of("a INT"), properties={"owner": "me"}), 39, "custom properties"),
    (table({"log.tll": "3d"}), 39, "Did you mean table.log.ttl"),
    (table({"log.format": "CSV"}), 39, "allowed: ARROW, INDEXED, COMPACTED"),
    (table({"replication.factor": "0"}), 39, "must be greater than 0"),
    (table({"log.arrow.compression.zstd.level": "23"}), 39, "between 1 and 22"),
    (table({"kv.format-version": "3"}, PK), 39, "1 to 2"),
    (table({"log.tiered.local-segments": "0"}), 39, "local-segments"),
    (table({"log.ttl": "1d", "log.local-ttl": "2d"}), 39, "longer than table.log.ttl"),
    (table({"log.format": "INDEXED"}, PK), 39, "allowed: ARROW, COMPACTED"),
    (table({"log.format": "INDEXED", "kv.format": "INDEXED"}, PK), 39, "ARROW, COMPACTED"),
    (
        table(custom_properties={"iceberg.write.data.path": "file:///lake/t/../other"}),
        39,
        "catalog decides where files of a table lie",
    ),
    (
        table(custom_properties={"iceberg.write.metadata.path": "s3://b/t"}),
        39,
        "leave the property",
    ),
    (table(custom_properties={"iceberg.s3.endpoint": "http://a"}), 39, "for the cluster to say"),
    (table(custom_properties={"iceberg.py-io-impl": "a.B"}), 39, "for the cluster to say"),
    (
        table(custom_properties={"iceberg.write.py-location-provider.impl": "a.B"}),
        39,
        "for the cluster to say",
    ),
    (table(custom_properties={"iceberg.write.object-storage.path": "x"}), 39, "leave the property"),
    # buckets and keys
    (table(bucket_count=0), 15, "bucket_count 0 is not allowed; give 1 to 4096"),
    (table(bucket_count=-1), 15, "bucket_count -1"),
    (table(bucket_count=4097), 49, "max.bucket.num"),
    (table(bucket_keys=("x",)), 15, "column 'x' does not exist"),
    (table(bucket_keys=("k", "k")), 15, "bucket key k is given twice"),
    (table(bucket_keys=("arr",)), 15, r"types: \[ARRAY, MAP, ROW\]\.$"),
    (table(bucket_keys=("s",), partition_keys=("s",)), 15, "leave it out of the bucket key"),
    (table(None, PK, bucket_keys=("s",)), 15, "not in the primary key"),
    (table(None, ("arr",)), 15, "Primary key column 'arr'"),
    (table(None, PK, partition_keys=("s",)), 15, "add it to the primary key"),
    (table(None, ("s",), partition_keys=("s",)), 15, "partition keys only"),
    # partition keys
    (table(partition_keys=("x",)), 15, "column 'x' does not exist"),
    (table(partition_keys=("n",)), 15, "supported partition key type are"),
    (table(partition_keys=("arr",)), 15, "supported partition key type are"),
    (table(partition_keys=("s", "s")), 15, "partition key s is given twice"),
    # columns
    (TableDescriptor(Schema(())), 15, "no columns"),
    (table(columns="a INT, __offset INT"), 15, "__offset cannot be used as column names"),
    (table(columns="_commit_timestamp INT"), 15, "use other names"),
    # merge engines
    (table({"merge-engine": "newest"}, PK), 39, "allowed: first_row, versioned, aggregation"),
    (table({"merge-engine": "first_row"}), 39, "needs a primary key"),
    (table({"merge-engine": "versioned"}, PK), 39, "ver-column"),
    (
        table({"merge-engine": "versioned", "merge-engine.versioned.ver-column": "x"}, PK),
        39,
        "doesn't exist in schema",
    ),
    (
        table({"merge-engine": "versioned", "merge-engine.versioned.ver-column": "s"}, PK),
        39,
        r"one type of \[INT, BIGINT, TIMESTAMP, TIMESTAMP_LTZ\]",
    ),
    (
        table({"merge-engine": "first_row", "delete.behavior": "allow"}, PK),
        39,
        "'ignore' or 'disable'",
    ),
    (table({"delete.behavior": "IGNORE"}), 39, "primary key tables"),
    (table({"merge-engine": "aggregation", "changelog.image": "WAL"}, PK), 39, "FULL"),
    # statistics
    (table({"statistics.columns": "*"}, PK), 39, "remove it from this primary-key table"),
    (table({"statistics.columns": " , "}), 39, "names no column"),
    (table({"statistics.columns": "k,x"}), 39, "'x', which is not a column"),
    (table({"statistics.columns": "raw"}), 39, "no statistics of BYTES"),
    # auto-partition
    (table(AUTO), 39, "only supported for partitioned table"),
    (table({**AUTO, "auto-partition.time-unit": "WEEK"}, partition_keys=("s",)), 39, "HOUR"),
    (table(AUTO, partition_keys=("s", "k")), 15, "set one auto partition key"),
    (
        table({**AUTO, "auto-partition.key": "k"}, partition_keys=("s",)),
        15,
        r"not in key list \[s\]",
    ),
    (
        table(
            {**AUTO, "auto-partition.key": "s", "auto-partition.num-precreate": "1"},
            partition_keys=("s", "k"),
        ),
        15,
        "multiple partition keys",
    ),
    (
        table({**AUTO, "auto-partition.num-precreate": "100000"}, partition_keys=("s",)),
        15,
        "more than 1000",
    ),
    (table({"auto-partition.time-format": "yyyy"}, partition_keys=("s",)), 15, "yyyyMMdd"),
    (table({"auto-partition.time-format": "yyyyMMd"}, partition_keys=("s",)), 15, "fixed width"),
    (table({"auto-partition.time-format": "ddMMyyyy"}, partition_keys=("s",)), 15, "this order"),
    (
        table({"auto-partition.time-format": "yyyy/MM/dd"}, partition_keys=("s",)),
        15,
        "ASCII alphanumerics",
    ),
    (table({"auto-partition.time-format": "yyyyMMdd'x"}, partition_keys=("s",)), 15, "order"),
    (table({"auto-partition.time-zone": "Mars/Base"}, partition_keys=("s",)), 39, "Europe/Berlin"),
    (table({"auto-partition.time-zone": "../etc"}), 39, "not a time zone"),
    (table(AUTO, partition_keys=("d",)), 15, "yyyy-MM-dd"),
    # lake
    (
        table({"datalake.enabled": "true"}),
        15,
        "doesn't enable datalake tables. Set datalake.format",
    ),
    (table({"datalake.historical-partition.enabled": "true"}), 39, "a primary key"),
]


@pytest.mark.parametrize(("descriptor", "code", "message"), REFUSALS)
def test_a_broken_rule_is_refused_with_its_code_and_the_way_out(
    descriptor: TableDescriptor, code: int, message: str
) -> None:
    found, text = refused(descriptor)
    assert found == code, text
    assert re.search(message, text), text


PARTITIONS = (
    "Currently, partitioned table supported partition key type are [CHAR, STRING, BOOLEAN, BINARY, "
    "BYTES, TINYINT, SMALLINT, INTEGER, DATE, TIME_WITHOUT_TIME_ZONE, BIGINT, FLOAT, DOUBLE, "
    "TIMESTAMP_WITHOUT_TIME_ZONE, TIMESTAMP_WITH_LOCAL_TIME_ZONE], but got partition key 'r' with "
    "data type ROW<`a` INT>."
)
SEVERAL = {"partition_keys": ("s", "d")}


@pytest.mark.parametrize(
    ("descriptor", "whole"),
    [
        (
            table(None, ("k", "arr"), partition_keys=("arr",)),
            "Primary key column 'arr' has unsupported data type ARRAY<INT> NOT NULL. Currently, "
            "primary key column does not support types: [ARRAY, MAP, ROW].",
        ),
        (
            table(columns="k INT, m MAP<STRING, STRING>", bucket_keys=("m",)),
            "Bucket key column 'm' has unsupported data type MAP<STRING NOT NULL, STRING>. "
            "Currently, bucket key column does not support types: [ARRAY, MAP, ROW].",
        ),
        (table(columns="k INT, r ROW<a INT>", partition_keys=("r",)), PARTITIONS),
        (
            table({"log.arrow.compression.zstd.level": "0"}),
            "Invalid ZSTD compression level: 0. Expected a value between 1 and 22.",
        ),
        (
            table(AUTO, **SEVERAL),
            "Currently, auto partitioned table must set one auto partition key when it has "
            "multiple partition keys. Please set table property 'table.auto-partition.key'.",
        ),
        (
            table(
                {**AUTO, "auto-partition.key": "s", "auto-partition.num-precreate": "2"}, **SEVERAL
            ),
            "For a partitioned table with multiple partition keys, auto pre-create is unsupported "
            "and this value must be set to 0, but is 2",
        ),
    ],
)
def test_refusals_that_connectors_compare_as_a_whole_are_fluss_s_own(
    descriptor: TableDescriptor, whole: str
) -> None:
    """FlinkComplexTypeITCase and FlinkCatalogITCase do."""
    assert refused(descriptor)[1] == whole


def test_more_replicas_than_live_servers_are_refused() -> None:
    with pytest.raises(
        ZuflussError, match="Replication factor: 2 larger than available tablet servers: 1"
    ) as caught:
        made(table({"replication.factor": "2"}), live=1)
    assert caught.value.code.value == 17


def test_a_second_replica_needs_the_shared_log_however_many_servers_there_are() -> None:
    """Without it nothing copies a bucket, and nobody could take it over."""
    conf = {"zufluss.log.durability": "remote"}
    shared = made(table({"replication.factor": "3"}), conf, live=3)
    assert shared.properties["table.replication.factor"] == "3"
    with pytest.raises(ZuflussError, match="4 larger than available tablet servers: 3"):
        made(table({"replication.factor": "4"}), conf, live=3)
    expected = "Replication factor: 2 larger than 1: .* Set table.replication.factor, or .* to 1"
    with pytest.raises(ZuflussError, match=expected) as caught:
        made(table({"replication.factor": "2"}), live=3)
    assert caught.value.code.value == 17


@pytest.mark.parametrize(
    ("lake", "column", "fine"),
    [
        ("iceberg", "b", False),
        ("iceberg", "i8", False),
        ("iceberg", "i16", False),
        ("iceberg", "z", False),
        ("iceberg", "ts", True),
        ("iceberg", "k", True),
        ("hudi", "raw", False),
        ("hudi", "b", True),
        ("paimon", "b", True),
        ("lance", "raw", True),
    ],
)
def test_keys_the_lake_cannot_encode_are_refused_at_create(
    lake: str, column: str, fine: bool
) -> None:
    conf = {"datalake.format": lake}
    for descriptor in (table(None, (column,)), table(bucket_keys=(column,))):
        if fine:
            assert made(descriptor, conf).properties["table.datalake.format"] == lake
        else:
            assert refused(descriptor, conf)[0] == 15


def test_iceberg_takes_one_key_column_but_a_longer_primary_key_with_one_bucket_key() -> None:
    conf = {"datalake.format": "iceberg"}
    assert refused(table(None, ("k", "s")), conf)[0] == 15
    assert made(table(None, ("k", "s"), bucket_keys=("k",)), conf)
    assert refused(table({"kv.format-version": "1"}, ("k", "s"), bucket_keys=("k",)), conf)[0] == 15


def test_a_lake_table_must_name_the_lake_of_the_cluster() -> None:
    descriptor = table({"datalake.enabled": "true", "datalake.format": "paimon"})
    assert refused(descriptor, {"datalake.format": "iceberg"})[0] == 39
    assert made(descriptor, {"datalake.format": "paimon"})


def test_new_tables_are_only_prepared_for_a_lake_that_is_not_open_yet() -> None:
    closed = {"datalake.format": "iceberg", "datalake.enabled": "false"}
    assert made(table(), closed).properties["table.datalake.format"] == "iceberg"
    code, text = refused(table({"datalake.enabled": "true"}), closed)
    assert (code, text.endswith("Set datalake.enabled = true on the servers")) == (15, True)
    assert made(table({"datalake.enabled": "true"}), closed | {"datalake.enabled": "true"})


def test_defaults_come_from_the_configuration() -> None:
    conf = {"default.bucket.number": "5", "default.replication.factor": "2"}
    completed = complete(table(None, PK), Configuration.of(conf))
    assert completed.bucket_count == 5
    assert completed.bucket_keys == ("k",)
    assert completed.properties == {
        "table.replication.factor": "2",
        "table.kv.format-version": "2",
        "table.kv.standby-replica.enabled": "true",
    }


def test_what_is_given_is_stored_as_it_is_written() -> None:
    given = {"merge-engine": "FIRST_ROW", "log.format": "arrow", "kv.format-version": "1"}
    properties = made(table(given, PK)).properties
    assert properties["table.merge-engine"] == "FIRST_ROW"
    assert properties["table.log.format"] == "arrow"
    assert properties["table.kv.format-version"] == "1"
    assert properties["table.delete.behavior"] == "IGNORE"


def test_with_several_partition_keys_nothing_is_created_ahead() -> None:
    descriptor = table({**AUTO, "auto-partition.key": "s"}, partition_keys=("s", "k"))
    assert made(descriptor).properties["table.auto-partition.num-precreate"] == "0"


def test_the_bucket_key_of_a_partitioned_primary_key_table_leaves_the_partition_key_out() -> None:
    assert made(table(None, ("k", "s"), partition_keys=("s",))).bucket_keys == ("k",)


@pytest.mark.parametrize(
    ("function", "type_text", "fine"),
    [
        (AggFunction("sum"), "BIGINT", True),
        (AggFunction("sum"), "STRING", False),
        (AggFunction("max"), "BOOLEAN", False),
        (AggFunction("bool_or"), "BOOLEAN", True),
        (AggFunction("rbm32"), "BYTES", True),
        (AggFunction("rbm64"), "STRING", False),
        (AggFunction("last_value"), "ARRAY<INT>", True),
        (AggFunction("listagg", (("delimiter", ";"),)), "STRING", True),
        (AggFunction("listagg", (("delimiter", ""),)), "STRING", False),
        (AggFunction("listagg", (("limit", "3"),)), "STRING", True),
        (AggFunction("listagg", (("limit", "-3"),)), "STRING", False),
        (AggFunction("sum", (("delimiter", ";"),)), "INT", False),
    ],
)
def test_an_aggregation_function_must_fit_its_column(
    function: AggFunction, type_text: str, fine: bool
) -> None:
    columns = (
        Column("k", parse_type("INT")),
        Column("v", parse_type(type_text), None, -1, function),
    )
    descriptor = TableDescriptor(
        Schema(columns, ("k",)), properties={"table.merge-engine": "aggregation"}
    )
    if fine:
        assert made(descriptor)
    else:
        assert refused(descriptor)[0] == 39


def test_aggregation_functions_need_the_aggregation_engine() -> None:
    columns = (
        Column("k", parse_type("INT")),
        Column("v", parse_type("INT"), None, -1, AggFunction("sum")),
    )
    code, message = refused(TableDescriptor(Schema(columns, ("k",))))
    assert code == 39
    assert "table.merge-engine = aggregation" in message


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 200, "_a", "-"])
def test_good_names_are_accepted(name: str) -> None:
    check_database_name(name)
    check_table_name(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 201, "a b", "a.b", ".", "..", "ä", "__x", "a/b", "a$b", "a\n"]
)
def test_bad_names_are_refused_with_16_for_databases_and_15_for_tables(name: str) -> None:
    with pytest.raises(ZuflussError) as caught:
        check_database_name(name)
    assert caught.value.code.value == 16
    with pytest.raises(ZuflussError) as caught:
        check_table_path(TablePath("db", name))
    assert caught.value.code.value == 15
