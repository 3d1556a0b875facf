"""Partitions: names, specs, their checks, and the text form of partition values.

A partition is named by the values of the table's partition keys joined with `$` in the order of
the keys (`2024-01-15$EMEA`); a spec is the same as {key: value}. Every value is text that obeys
the rules of names, which is why the text forms below avoid `.` and `:`.

| key type             | text                                                                    |
|----------------------|-------------------------------------------------------------------------|
| CHAR STRING          | as it is                                                                |
| BOOLEAN              | true, false                                                             |
| integers             | decimal                                                                 |
| BYTES BINARY         | lower-case hex                                                          |
| FLOAT DOUBLE         | shortest decimal, no exponent, `.` as `_` (1, 12_5); NaN, Inf, -Inf     |
| DATE                 | yyyy-MM-dd                                                              |
| TIME                 | HH-mm-ss_SSS                                                            |
| TIMESTAMP(_LTZ)      | yyyy-MM-dd-HH-mm-ss_, then SSS if there are milliseconds, then six more |
|                      | digits if there are nanoseconds of the millisecond; UTC                 |

Partitions by time are in `auto_partition.py`.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from zufluss.errors import InvalidPartitionError, TableNotPartitionedError
from zufluss.model.table import TableInfo
from zufluss.model.types import DataType, Root

if TYPE_CHECKING:
    import pyarrow as pa

PartitionSpec = Mapping[str, str]
"""The values of the partition keys by key."""

NAME_LENGTH_MAX = 200
"""Longest name of a database, table or partition value."""
RESERVED_PREFIX = "__"
"""Names given by users do not start with it."""
SEPARATOR = "$"
"""Joins the values in a partition's name."""
PARTITION_KEY_ROOTS = frozenset(Root) - {Root.DECIMAL, Root.ARRAY, Root.MAP, Root.ROW}
"""Types a partition key may have."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def plain(name: str) -> str:
    """A name of a request in a message: shortened, and without control characters."""
    return repr(name)[1:-1][:220]


def name_problem(name: str, *, reserved: bool = True) -> str | None:
    """Why a name of a database, table or partition value is not allowed, None if it is.

    The reasons are in the words of Fluss, which clients compare.
    """
    if not name:
        return "the empty string is not allowed"
    if name in (".", ".."):
        return f"'{name}' is not allowed"
    if len(name) > NAME_LENGTH_MAX:
        return (
            f"the length of {name!r:.220} is longer than the max allowed length {NAME_LENGTH_MAX}"
        )
    if _NAME.fullmatch(name) is None:
        return (
            f"{name!r} contains one or more characters other than ASCII alphanumerics, '_' and '-'"
        )
    if reserved and name.startswith(RESERVED_PREFIX):
        return (
            f"'{RESERVED_PREFIX}' is not allowed as prefix, since it is reserved for internal "
            "databases/internal tables/internal partitions in Fluss server"
        )
    return None


def partition_name(keys: Sequence[str], spec: PartitionSpec) -> str:
    """The name of a partition: the values of its spec in the order of the keys."""
    return SEPARATOR.join(spec[key] for key in keys)


def qualified_name(spec: PartitionSpec) -> str:
    """The form of a spec in messages: `year=2026/month=11`."""
    return "/".join(f"{plain(key)}={plain(value)}" for key, value in spec.items())


def spec_of(keys: Sequence[str], name: str) -> dict[str, str]:
    """The spec of a partition's name."""
    values = name.split(SEPARATOR)
    if len(values) != len(keys):
        raise InvalidPartitionError(
            f"partition name {name!r:.200} has {len(values)} values; the partition keys are "
            f"{', '.join(keys)}, so give {len(keys)} joined with '{SEPARATOR}'"
        )
    return dict(zip(keys, values, strict=True))


def check_partitioned(info: TableInfo) -> None:
    """Raise 37 for a table without partition keys."""
    if not info.is_partitioned:
        raise TableNotPartitionedError(
            f"Table '{info.path}' is not a partitioned table. Create it with partition keys"
        )


def check_spec(info: TableInfo, spec: PartitionSpec, *, create: bool) -> str:
    """The name of the partition of a full spec; raises 37 or 43. Time is not checked here."""
    check_partitioned(info)
    keys = info.partition_keys
    if set(spec) != set(keys):
        missing = next((key for key in keys if key not in spec), keys[0])
        given = ", ".join(f"{plain(key)}={plain(value)}" for key, value in spec.items())
        what = (
            f"PartitionSpec PartitionSpec{{{{{given}}}}} does not contain partition key "
            f"'{missing}' "
            if len(spec) == len(keys)
            else "PartitionSpec size is not equal to partition keys size "
        )
        raise InvalidPartitionError(
            f"{what}for partitioned table {info.path}. Give a value for exactly {', '.join(keys)}"
        )
    for key in keys:
        problem = name_problem(spec[key], reserved=create)
        if problem is not None:
            raise InvalidPartitionError(
                f"The partition value {plain(spec[key])} is invalid: {problem}. It is that of the "
                f"partition key {key!r}"
            )
    return partition_name(keys, spec)


def check_partial_spec(info: TableInfo, spec: PartitionSpec) -> None:
    """Raise 37 or 43 unless the spec names partition keys only."""
    check_partitioned(info)
    unknown = [key for key in spec if key not in info.partition_keys]
    if unknown:
        raise InvalidPartitionError(
            f"table don't contains this partitionKey: {', '.join(unknown)}. The partition keys of "
            f"table {info.path} are {', '.join(info.partition_keys)}"
        )


def partition_values(
    batch: pa.RecordBatch, keys: Sequence[str], types: Mapping[str, DataType] | None = None
) -> pa.Array:
    """The partition name of every row, as a dictionary array whose values are the names.

    Texts are made once per distinct value. `types` are the column types, by default those of the
    Arrow types. Raises 43 for NULL.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from zufluss.model.arrow_types import from_arrow

    texts: list[pa.Array] = []
    for key in keys:
        column = batch.column(batch.schema.get_field_index(key))
        if column.null_count:
            raise InvalidPartitionError(
                f"column {key!r} has {column.null_count} NULLs; a partition key needs a value"
            )
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        data_type = types[key] if types else from_arrow(column.type)
        names = pa.array(value_texts(encoded.dictionary, data_type), pa.utf8())
        texts.append(names.take(encoded.indices))
    joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, SEPARATOR)
    return joined.dictionary_encode()


def value_texts(values: pa.Array, data_type: DataType) -> list[str]:
    """The texts of distinct partition values of a column."""
    import pyarrow as pa

    root = data_type.root
    if root not in PARTITION_KEY_ROOTS:
        raise InvalidPartitionError(f"a partition key cannot be of type {data_type}")
    if root is Root.FLOAT:
        values = values.cast(pa.float32())
    if root in (Root.TIME, Root.TIMESTAMP, Root.TIMESTAMP_LTZ):
        unit = _NANOS[values.type.unit]
        integers = values.cast(pa.int32() if values.type.bit_width == 32 else pa.int64())
        render = _time_text if root is Root.TIME else _timestamp_text
        return [render(value * unit) for value in integers.to_pylist()]
    texts = _TEXT.get(root, str)
    if root is Root.FLOAT:
        return [_float_text(value) for value in values.to_numpy(zero_copy_only=False)]
    return [texts(value) for value in values.to_pylist()]


def _float_text(value: float) -> str:
    """Shortest decimal that reads back as the value, `1` for 1.0; also of a numpy float32."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    text = format(Decimal(str(value)), "f")
    whole, _, fraction = text.partition(".")
    return f"{whole}_{fraction}" if fraction.strip("0") else whole


def _time_text(nanos: int) -> str:
    seconds, millis = divmod(nanos // 1_000_000, 1000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}-{minute:02}-{second:02}_{millis:03}"


def _timestamp_text(nanos: int) -> str:
    seconds, fraction = divmod(nanos, 1_000_000_000)
    try:
        moment = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidPartitionError(
            f"timestamp {seconds} s since 1970 is outside the years 1 to 9999"
        ) from None
    millis, rest = divmod(fraction, 1_000_000)
    tail = f"{millis:03}{rest:06}" if rest else f"{millis:03}" if millis else ""
    return f"{moment.year:04}{moment:-%m-%d-%H-%M-%S_}{tail}"


def _date_text(value: dt.date) -> str:
    return value.isoformat()


_NANOS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_TEXT: dict[Root, Callable[..., str]] = {
    Root.BOOLEAN: lambda value: "true" if value else "false",
    Root.BYTES: bytes.hex,
    Root.BINARY: bytes.hex,
    Root.DOUBLE: _float_text,
    Root.DATE: _date_text,
}
