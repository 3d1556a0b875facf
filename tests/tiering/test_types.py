"""Every type and every key through the lake, and columns that are added meanwhile."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tests.end_to_end.samples import ALL_TYPES, all_types_batch
from tests.tiering.support import Driver, append, create_table, delete, upsert
from tests.tiering.tiered_cluster import Tiered, cut, lake_table, own_columns, rows_of, seen_by_all
from zufluss.errors import InvalidTableError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema

EVERY_PRECISION = ", ".join(
    f"{name.lower()}{digits} {name}({digits})"
    for name in ("TIME", "TIMESTAMP", "TIMESTAMP_LTZ")
    for digits in range(10)
)
MORE_TYPES = (
    f"fixed CHAR(3), tiny DECIMAL(1, 0), small DECIMAL(18, 18), large DECIMAL(38, 0), "
    f"strict ROW<a INT NOT NULL, b ARRAY<STRING NOT NULL>>, {EVERY_PRECISION}"
)
DEEP_ENDS = (dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59))
"""The first and the last moment of the calendar, for types that reach so far."""
NANOSECONDS_ENDS = (-(2**63) // 10**6 * 10**6 + 10**6, 2**63 // 10**6 * 10**6 - 1)
ODD = 1_234_567_890_123_456_789
"""A moment of which every digit counts, in nanoseconds."""


def moments(data_type: pa.DataType, digits: int) -> list[Any]:
    """Values of a time column: none, the beginning, the ends, and one with all its digits."""
    step = 10 ** (9 - digits)
    if pa.types.is_time(data_type):
        day = 86_400 * 10**9
        return _scaled([0, day - step, ODD % day // step * step], data_type)
    if data_type.unit == "ns":
        low, high = NANOSECONDS_ENDS
        ends = [low // step * step, high // step * step]
        return _scaled([0, -step, ODD // step * step, *ends], data_type)
    ends = pa.array(DEEP_ENDS, pa.timestamp(data_type.unit)).cast(pa.int64()).to_pylist()
    return [*_scaled([0, -step, ODD // step * step], data_type), *ends]


def _scaled(nanoseconds: list[int], data_type: pa.DataType) -> list[int]:
    per = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[data_type.unit]
    return [value // per for value in nanoseconds]


def times(name: str, digits: int) -> list[Any]:
    """Values of a type of times."""
    return moments(Schema.of(f"t {name}({digits})").arrow.field("t").type, digits)


def more_types(rows: int = 16) -> pa.Table:
    """Rows of `MORE_TYPES`: every column runs through its values, one of them NULL."""
    schema = Schema.of(MORE_TYPES).arrow
    values: dict[str, list[Any]] = {
        "fixed": ["abc", "äöü", ""],
        "tiny": [Decimal(9), Decimal(-9), Decimal(0)],
        "small": [Decimal("0." + "9" * 18), Decimal("-1E-18")],
        "large": [Decimal("9" * 38), Decimal("-" + "9" * 38)],
        "strict": [{"a": 1, "b": ["x", ""]}, {"a": -1, "b": None}, {"a": 0, "b": []}],
    }
    columns = []
    for field in schema:
        if field.name not in values:
            values[field.name] = moments(field.type, int(field.name[-1]))
        some = pa.array([*values[field.name], None], field.type)
        columns.append(some.take(pa.array([i % len(some) for i in range(rows)])))
    return pa.Table.from_arrays(columns, schema=schema)


SETS = {
    "samples": (Schema.of(ALL_TYPES), pa.Table.from_batches([all_types_batch()])),
    "precisions": (Schema.of(MORE_TYPES), more_types()),
}
PYICEBERG_LOSES_NULLS = ("array_row", "deep")
"""Arrays of rows: pyiceberg 0.12 reads a NULL among them as an empty one."""
KEY_TYPES: dict[str, list[Any]] = {
    "INT": [-(2**31), 2**31 - 1, 0],
    "BIGINT": [-(2**63), 2**63 - 1, 0],
    "CHAR(3)": ["abc", "äöü", "a"],
    "STRING": [" ", "a", "zufluß → 水", "x" * 5000],
    "BINARY(4)": [b"\x00" * 4, b"\xff" * 4, b"abcd"],
    "BYTES": [b"\x00", b"\x00\x00", bytes(range(256))],
    "DECIMAL(9, 2)": [Decimal("0.00"), Decimal("-9999999.99"), Decimal("9999999.99")],
    "DECIMAL(38, 10)": [Decimal("9" * 28 + "." + "9" * 10), Decimal("-1E-10"), Decimal("0")],
    "DATE": [dt.date(1970, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1969, 12, 31)],
    **{f"TIME({n})": times("TIME", n) for n in (0, 1, 3, 6)},
    **{f"TIMESTAMP({n})": times("TIMESTAMP", n) for n in (0, 1, 3, 5, 6)},
}
"""Types a whole key can be of; Iceberg has no buckets of the others, nor of empty values."""
MORE_KEY_TYPES: dict[str, list[Any]] = {
    "BOOLEAN": [True, False],
    "TINYINT": [-128, 127, 0],
    "SMALLINT": [-(2**15), 2**15 - 1, 0],
    **{f"TIMESTAMP_LTZ({n})": times("TIMESTAMP_LTZ", n) for n in (0, 1, 3, 5, 6)},
}
"""Types that can be in a key beside the bucket key."""
NO_KEYS = ("TIME(7)", "TIME(9)", "TIMESTAMP(7)", "TIMESTAMP(9)", "FLOAT", "DOUBLE")
"""Two keys could become one in the lake, or Iceberg forbids them."""


def with_id(schema: Schema, primary_key: bool) -> Schema:
    """The same columns after an id, which may be the primary key."""
    columns = [Column(column.name, column.data_type) for column in schema.columns]
    id_column = Column("id", parse_type("INT NOT NULL"))
    return Schema.of([id_column, *columns], ["id"] if primary_key else [])


@pytest.mark.slow
@pytest.mark.parametrize("primary_key", [False, True], ids=["log", "primary key"])
@pytest.mark.parametrize("which", SETS)
def test_values_of_every_type_come_through_the_lake(
    cluster: Tiered, which: str, primary_key: bool
) -> None:
    schema, rows = SETS[which]
    name = f"types_{which}_{primary_key}"
    path = create_table(cluster.connection, name, with_id(schema, primary_key), bucket_count=2)
    written = rows.add_column(0, "id", pa.array(range(rows.num_rows), pa.int32()))
    write = upsert if primary_key else append
    write(cluster.connection, path, written)
    cluster.caught_up(path)
    lake = cluster.lake(path)
    names = written.column_names
    assert own_columns(lake) == names
    wanted = cut(written, primary_key)
    assert seen_by_all(lake, names, readers=("duckdb", "polars")) == rows_of(wanted, names)
    sound = [name for name in names if name not in PYICEBERG_LOSES_NULLS]
    assert seen_by_all(lake, sound, readers=("pyiceberg",)) == rows_of(wanted, sound)


@pytest.mark.slow
def test_keys_of_every_type_are_found_again_in_the_lake(cluster: Tiered) -> None:
    made = {}
    for number, (data_type, keys) in enumerate(KEY_TYPES.items()):
        schema = f"k {data_type}, v INT, PRIMARY KEY (k)"
        path = create_table(cluster.connection, f"key_{number}", schema, bucket_count=2)
        made[path] = column(cluster, path, "k", keys)
        upsert(cluster.connection, path, pa.table({"k": made[path], "v": numbers(made[path])}))
    cluster.caught_up(*made)
    for path, keys in made.items():
        upsert(cluster.connection, path, {"k": keys[1:], "v": numbers(keys[1:], -100)})
        delete(cluster.connection, path, pa.table({"k": keys[:1]}))
    cluster.caught_up(*made)
    for path, keys in made.items():
        wanted = cut(pa.table({"k": keys[1:], "v": numbers(keys[1:], -100)}), primary_key=True)
        assert seen_by_all(cluster.lake(path), ["k", "v"]) == rows_of(wanted, ["k", "v"]), path


def column(cluster: Tiered, path: str, name: str, values: list[Any]) -> pa.Array:
    """Values in the type of a column."""
    return pa.array(values, cluster.admin.table_info(path).schema.arrow.field(name).type)


def numbers(values: pa.Array, start: int = 0) -> pa.Array:
    """A number for each value."""
    return pa.array(range(start, start + len(values)), pa.int32())


@pytest.mark.slow
def test_a_key_of_all_types_at_once_is_found_again_in_the_lake(cluster: Tiered) -> None:
    types = KEY_TYPES | MORE_KEY_TYPES
    names = [f"k{number}" for number in range(len(types))]
    columns = ", ".join(f"{n} {t}" for n, t in zip(names, types, strict=True))
    schema = f"{columns}, v INT, PRIMARY KEY ({', '.join(names)})"
    path = create_table(
        cluster.connection,
        "key_of_all",
        schema,
        bucket_count=2,
        bucket_keys=["k0"],
        properties={"table.kv.format-version": "2"},
    )
    chosen = {
        n: [keys[i * 7 // 5 % len(keys)] for i in range(12)]
        for n, keys in zip(names, types.values(), strict=True)
    }
    rows = pa.table({n: column(cluster, path, n, values) for n, values in chosen.items()})
    rows = rows.append_column("v", numbers(rows["k0"]))
    upsert(cluster.connection, path, rows)
    cluster.caught_up(path)
    delete(cluster.connection, path, rows.slice(0, 6).select(names))
    cluster.caught_up(path)
    found = seen_by_all(cluster.lake(path), [*names, "v"])
    assert found == rows_of(cut(rows.slice(6), primary_key=True), [*names, "v"])


@pytest.mark.parametrize("data_type", NO_KEYS)
def test_keys_that_the_lake_cannot_tell_apart_or_have_are_refused(
    driver: Driver, data_type: str
) -> None:
    schema = f"k {data_type}, v INT, PRIMARY KEY (k)"
    with pytest.raises(InvalidTableError, match=r"primary key column 'k' of table fluss.too_fine"):
        create_table(driver.connection, "too_fine", schema, bucket_count=1)


# -- columns added --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("primary_key", [False, True], ids=["log", "primary key"])
def test_a_column_added_mid_stream_is_in_the_lake_for_all_rows_that_have_it(
    cluster: Tiered, primary_key: bool
) -> None:
    schema = with_id(Schema.of("name STRING"), primary_key)
    path = create_table(cluster.connection, f"grows_{primary_key}", schema, bucket_count=2)
    table = cluster.connection.table(path)
    wanted = []
    with table.upsert() if primary_key else table.append() as old:
        for step in range(5):
            base = 1000 * step
            old.write({"id": [*range(base, base + 100)], "name": ["old"] * 100})
            old.flush()
            cluster.admin.alter_table(path, add_columns=f"extra{step} ARRAY<BIGINT>")
            new = {"id": [*range(base + 500, base + 600)], "name": ["new"] * 100}
            new |= {f"extra{n}": [[base, n, None]] * 100 for n in range(step + 1)}
            (upsert if primary_key else append)(cluster.connection, path, new)
            old.write({"id": [*range(base + 100, base + 200)], "name": ["old"] * 100})
            old.flush()
            wanted += [(i, "old", *[None] * 5) for i in range(base, base + 200)]
            extras = [[base, n, None] if n <= step else None for n in range(5)]
            wanted += [(i, "new", *extras) for i in range(base + 500, base + 600)]
    cluster.caught_up(path)
    lake = cluster.lake(path)
    columns = own_columns(lake)
    assert columns == ["id", "name", *(f"extra{n}" for n in range(5))]
    assert seen_by_all(lake, columns) == sorted(tuple(map(repr, row)) for row in wanted)


@pytest.mark.parametrize("primary_key", [False, True], ids=["log", "primary key"])
@pytest.mark.parametrize("step", ["recover", "plan", "job", "validate", "lake-commit", "finish"])
def test_a_column_added_in_mid_round_is_there_before_its_rows(
    driver: Driver, step: str, primary_key: bool
) -> None:
    schema = with_id(Schema.of("name STRING"), primary_key)
    path = create_table(driver.connection, "widened", schema, bucket_count=1)
    write = upsert if primary_key else append
    write(driver.connection, path, {"id": [1, 2], "name": ["a", "b"]})

    def widen(name: str) -> None:
        if name == step:
            driver.admin.alter_table(path, add_columns="extra BIGINT")
            write(driver.connection, path, {"id": [2, 3], "name": ["c", "d"], "extra": [7, 8]})

    early = step in ("recover", "plan")
    assert driver.round(widen).records == 2 + early * (3 if primary_key else 2)
    driver.round()
    info = driver.admin.table_info(path)
    wanted = [(1, "a", None), (2, "c", 7), (3, "d", 8)]
    wanted += [] if primary_key else [(2, "b", None)]
    found = seen_by_all(lake_table(info), ["id", "name", "extra"])
    assert found == sorted(tuple(map(repr, row)) for row in wanted)
