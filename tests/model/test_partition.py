"""Partition names, specs, value texts, and partitions by time."""

from __future__ import annotations

import datetime as dt
import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.errors import InvalidPartitionError, TableNotPartitionedError, ZuflussError
from zufluss.model.auto_partition import (
    AutoPartition,
    auto_partitions,
    check_create_partition,
    expired_partitions,
    time_format,
    time_zone,
)
from zufluss.model.ddl import parse_type
from zufluss.model.partition import (
    check_partial_spec,
    check_spec,
    partition_name,
    partition_values,
    spec_of,
    value_texts,
)
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.model.types import DataType


def ms(*moment: int) -> int:
    return int(dt.datetime(*moment, tzinfo=dt.UTC).timestamp() * 1000)  # type: ignore[misc,arg-type]


def info(*keys: str, **properties: object) -> TableInfo:
    named = {
        f"table.auto-partition.{k.replace('_', '-')}": str(v).lower() if v is True else str(v)
        for k, v in properties.items()
    }
    named.setdefault("table.auto-partition.time-zone", "UTC")
    schema = Schema.of("d STRING, r STRING, v INT")
    descriptor = TableDescriptor(schema, partition_keys=keys, bucket_count=1, properties=named)
    return TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0)


def value_text(value: object, data_type: DataType) -> str:
    return value_texts(pa.array([value], data_type.to_arrow()), data_type)[0]


NOW = ms(2024, 2, 29, 23, 30)

VALUES = st.from_regex(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,10}", fullmatch=True)


@given(st.lists(VALUES, min_size=1, max_size=4))
@settings(max_examples=50)
def test_a_name_and_its_spec_are_the_same_thing(values: list[str]) -> None:
    keys = [f"k{i}" for i in range(len(values))]
    spec = dict(zip(keys, values, strict=True))
    assert spec_of(keys, partition_name(keys, spec)) == spec
    shuffled = dict(reversed(spec.items()))
    assert partition_name(keys, shuffled) == partition_name(keys, spec)


def test_a_name_has_its_values_in_the_order_of_the_keys() -> None:
    assert check_spec(info("d", "r"), {"r": "EMEA", "d": "2024-01-15"}, create=True) == (
        "2024-01-15$EMEA"
    )
    with pytest.raises(InvalidPartitionError, match="has 1 values; the partition keys are d, r"):
        spec_of(("d", "r"), "x")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"d": "1", "r": "2"},
        {"x": "1"},
        {"d": ""},
        {"d": "a b"},
        {"d": "a$b"},
        {"d": "x" * 201},
        {"d": "__x"},
    ],
)
def test_a_bad_spec_is_refused_with_43(spec: dict[str, str]) -> None:
    with pytest.raises(InvalidPartitionError) as caught:
        check_spec(info("d"), spec, create=True)
    assert caught.value.code.value == 43


def test_a_reserved_partition_can_be_named_except_to_create_it() -> None:
    assert check_spec(info("d"), {"d": "__historical__"}, create=False) == "__historical__"


def test_a_table_without_partitions_answers_37() -> None:
    for check in (
        lambda: check_spec(info(), {"d": "1"}, create=True),
        lambda: check_partial_spec(info(), {}),
        lambda: check_create_partition(info(), {"d": "1"}, NOW),
    ):
        with pytest.raises(TableNotPartitionedError):
            check()


def test_a_partial_spec_has_keys_of_the_table() -> None:
    table = info("d", "r")
    check_partial_spec(table, {"r": "x"})
    check_partial_spec(table, {})
    with pytest.raises(
        InvalidPartitionError, match=r"don't contains this partitionKey: v.*are d, r"
    ):
        check_partial_spec(table, {"v": "1"})


@pytest.mark.parametrize(
    ("type_text", "value", "text"),
    [
        ("STRING", "EMEA", "EMEA"),
        ("CHAR(2)", "DE", "DE"),
        ("BOOLEAN", True, "true"),
        ("BOOLEAN", False, "false"),
        ("TINYINT", -1, "-1"),
        ("BIGINT", 2**40, "1099511627776"),
        ("BYTES", b"\x00\xff\x1a", "00ff1a"),
        ("BINARY(2)", b"\xab\xcd", "abcd"),
        ("DATE", dt.date(2024, 1, 5), "2024-01-05"),
        ("DATE", dt.date(1, 1, 1), "0001-01-01"),
        ("TIME(0)", dt.time(1, 2, 3), "01-02-03_000"),
        ("TIME(3)", dt.time(1, 2, 3, 4000), "01-02-03_004"),
        ("TIME(6)", dt.time(23, 59, 59, 999_999), "23-59-59_999"),
        ("TIMESTAMP(0)", dt.datetime(2024, 1, 5, 1, 2, 3), "2024-01-05-01-02-03_"),
        ("TIMESTAMP(3)", dt.datetime(2024, 1, 5, 1, 2, 3, 4000), "2024-01-05-01-02-03_004"),
        ("TIMESTAMP(6)", dt.datetime(2024, 1, 5, 1, 2, 3, 4), "2024-01-05-01-02-03_000004000"),
        ("TIMESTAMP(6)", dt.datetime(1969, 12, 31, 23, 59, 59, 999_000), "1969-12-31-23-59-59_999"),
        ("FLOAT", 0.1, "0_1"),
        ("FLOAT", 1.0, "1"),
        ("DOUBLE", -12.5, "-12_5"),
        ("DOUBLE", 1e22, "10000000000000000000000"),
        ("DOUBLE", 1e-7, "0_0000001"),
        ("DOUBLE", float("nan"), "NaN"),
        ("DOUBLE", float("inf"), "Inf"),
        ("FLOAT", float("-inf"), "-Inf"),
    ],
)
def test_each_type_has_its_text_as_partition_value(
    type_text: str, value: object, text: str
) -> None:
    assert value_text(value, parse_type(type_text)) == text


def test_a_local_timestamp_has_the_text_of_its_utc_time() -> None:
    zone = dt.timezone(dt.timedelta(hours=2))
    moment = dt.datetime(2024, 1, 5, 1, tzinfo=zone)
    assert value_text(moment, parse_type("TIMESTAMP_LTZ(3)")) == "2024-01-04-23-00-00_"


def test_a_decimal_is_no_partition_value() -> None:
    with pytest.raises(InvalidPartitionError):
        value_text(1, parse_type("DECIMAL(5, 2)"))


def test_every_row_of_a_batch_gets_the_name_of_its_partition() -> None:
    batch = pa.record_batch({"d": [1, 2, 1], "r": pa.array(["x", "y", "x"]).dictionary_encode()})
    names = partition_values(batch, ["d", "r"])
    assert names.to_pylist() == ["1$x", "2$y", "1$x"]
    assert names.dictionary.to_pylist() == ["1$x", "2$y"]
    assert partition_values(batch, ["d"]).to_pylist() == ["1", "2", "1"]


def test_a_null_has_no_partition() -> None:
    with pytest.raises(InvalidPartitionError, match="has 1 NULLs"):
        partition_values(pa.record_batch({"d": ["a", None]}), ["d"])


@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("HOUR", ["2024022923", "2024030100"]),
        ("DAY", ["20240229", "20240301"]),
        ("MONTH", ["202402", "202403"]),
        ("QUARTER", ["20241", "20242"]),
        ("YEAR", ["2024", "2025"]),
    ],
)
def test_the_current_period_and_the_next_are_created_ahead(unit: str, names: list[str]) -> None:
    assert auto_partitions(info("d", enabled=True, time_unit=unit), NOW) == names


def test_periods_begin_in_the_time_zone_of_the_table() -> None:
    table = info("d", enabled=True, time_zone="Asia/Tokyo", num_precreate=1)
    assert auto_partitions(table, NOW) == ["20240301"]
    table = info("d", enabled=True, time_zone="GMT-10:30", num_precreate=1, time_unit="HOUR")
    assert auto_partitions(table, NOW) == ["2024022913"]


def test_hours_are_hours_of_the_world_when_the_clock_is_turned_back() -> None:
    table = info("d", enabled=True, time_zone="Europe/Berlin", time_unit="HOUR", num_precreate=3)
    before = ms(2024, 10, 27, 0, 0)  # 02:00 local, then 02:00 again, then 03:00
    assert auto_partitions(table, before) == ["2024102702", "2024102703"]


def test_nothing_is_created_when_switched_off_or_with_several_keys() -> None:
    assert auto_partitions(info("d"), NOW) == []
    assert auto_partitions(info("d", enabled=True, num_precreate=0), NOW) == []
    assert auto_partitions(info("d", "r", enabled=True, key="d"), NOW) == []
    assert auto_partitions(info(), NOW) == []


def test_partitions_older_than_the_retention_expire() -> None:
    table = info("d", enabled=True, num_retention=2)
    names = ["20240226", "20240227", "20240229", "20240301", "__historical__", "old", "2024022"]
    assert expired_partitions(table, names, NOW) == ["20240226"]
    assert expired_partitions(info("d", enabled=True, num_retention=0), names, NOW) == [
        "20240226",
        "20240227",
    ]
    assert expired_partitions(info("d", enabled=True, num_retention=-1), names, NOW) == []
    assert expired_partitions(info("d", num_retention=2), names, NOW) == []
    assert expired_partitions(info("d", enabled=True, num_retention=10**9), names, NOW) == []


def test_with_several_keys_retention_looks_at_the_time_key_alone() -> None:
    table = info("r", "d", enabled=True, key="d", num_retention=1)
    names = ["a$20240227", "b$20240227", "a$20240228", "20200101$20240229"]
    assert expired_partitions(table, names, NOW) == ["a$20240227", "b$20240227"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("20240221", "is out-of-date. The earliest retained partition is '20240222'"),
        (
            "2024-02-29",
            "does not match the expected format 'yyyyMMdd' for auto-partition time unit 'DAY'",
        ),
        ("20240230", "format"),
        ("2024022x", "format"),
        ("202402291", "format"),
    ],
)
def test_a_partition_that_expired_or_has_no_time_cannot_be_created(
    value: str, message: str
) -> None:
    with pytest.raises(InvalidPartitionError, match=message) as caught:
        check_create_partition(info("d", enabled=True), {"d": value}, NOW)
    assert caught.value.code.value == 43


def test_a_partition_within_the_retention_or_in_the_future_can_be_created() -> None:
    for value in ("20240222", "20240229", "29991231"):
        assert check_create_partition(info("d", enabled=True), {"d": value}, NOW) == value
    assert check_create_partition(info("d"), {"d": "anything"}, NOW) == "anything"
    keep_all = info("d", enabled=True, num_retention=-1)
    assert check_create_partition(keep_all, {"d": "19990101"}, NOW) == "19990101"


def test_an_explicit_format_binds_values_even_without_auto_partitioning() -> None:
    table = info("d", time_format="yyyy-MM-dd")
    assert check_create_partition(table, {"d": "1999-01-01"}, NOW) == "1999-01-01"
    with pytest.raises(InvalidPartitionError):
        check_create_partition(table, {"d": "19990101"}, NOW)


@pytest.mark.parametrize(
    ("pattern", "unit", "text"),
    [
        ("yyyy-MM-dd", "DAY", "2024-02-29"),
        ("uuuu_LL", "MONTH", "2024_02"),
        ("yyyy'Q'Q", "QUARTER", "2024Q1"),
        ("yyyyMMdd'T'HH", "HOUR", "20240229T23"),
        ("'y'yyyy", "YEAR", "y2024"),
    ],
)
def test_a_format_of_ones_own_renders_and_accepts(pattern: str, unit: str, text: str) -> None:
    compiled = time_format(pattern, unit)
    assert compiled.render(dt.datetime(2024, 2, 29, 23)) == text
    assert compiled.accepts(text)
    assert not compiled.accepts(text + "0")
    assert not compiled.accepts(text[:-1])


@given(
    st.sampled_from(["HOUR", "DAY", "MONTH", "QUARTER", "YEAR"]),
    st.integers(0, ms(2090, 1, 1)),
    st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kolkata", "America/New_York"]),
)
@settings(max_examples=100)
def test_the_texts_of_periods_are_ordered_like_time(unit: str, now: int, zone: str) -> None:
    auto = AutoPartition.of(info("d", enabled=True, time_unit=unit, time_zone=zone).descriptor)
    texts = [auto.period(now, offset) for offset in range(-20, 21)]
    assert all(text is not None and auto.format.accepts(text) for text in texts)
    assert texts == sorted(texts)  # type: ignore[type-var]
    if unit != "HOUR":  # an hour repeats when the clock is turned back
        assert len(set(texts)) == len(texts)


def test_time_zones_are_names_or_offsets() -> None:
    assert time_zone(None) is None
    assert time_zone("utc") is dt.UTC
    assert time_zone("+05:30") == dt.timezone(dt.timedelta(hours=5, minutes=30))
    for bad in ("", "Nowhere", "America", "+99", "a\0b"):
        with pytest.raises(ZuflussError, match=re.escape("table.auto-partition.time-zone")):
            time_zone(bad)


def test_without_a_time_zone_the_system_clock_decides() -> None:
    table = info("d", enabled=True, num_precreate=1)
    properties = {**table.descriptor.properties}
    del properties["table.auto-partition.time-zone"]
    local = dt.datetime.fromtimestamp(NOW // 1000)
    descriptor = TableDescriptor(
        table.schema, partition_keys=("d",), bucket_count=1, properties=properties
    )
    assert AutoPartition.of(descriptor).period(NOW, 0) == f"{local:%Y%m%d}"
