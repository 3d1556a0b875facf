"""Checks of what users pass to scans: wrong types and absurd values get an error that helps.

The errors are `ValueError`s too. Nothing was sent when they are raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from zufluss.client.core.catalog import Partition
from zufluss.errors import InvalidScanRequestError
from zufluss.model.expression import Expression
from zufluss.model.filter_text import parse_filter
from zufluss.model.predicate import InvalidPredicateError
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket

INT64_MAX: Final = (1 << 63) - 1


def columns_of(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names of columns; None for all."""
    if columns is None:
        return None
    names = _listed("columns", columns, "a list of names of columns, such as ['id', 'name']")
    for name in names:
        if not isinstance(name, str):
            raise _wrong("columns", name, "names of columns, which are texts")
    return names


def filter_of(filter: Expression | str | None, schema: Schema) -> Expression | None:
    """The filter of a scan, which may be a text; None without a filter."""
    if isinstance(filter, str):
        return parse_filter(filter, schema)
    if filter is None or isinstance(filter, Expression):
        return filter
    raise InvalidPredicateError(
        f"filter is {filter!r:.100} of type {type(filter).__name__}; write it like "
        '"id > 5 AND name LIKE \'x%\'", or as zufluss.col("id") > 5'
    )


def limit_of(limit: int | None, name: str = "limit") -> int | None:
    """The most rows of a scan; None for all."""
    if limit is None:
        return None
    if not _is_int(limit) or not 0 <= limit <= INT64_MAX:
        raise _wrong(name, limit, f"a number of rows from 0 to {INT64_MAX}, or None for all")
    return limit


def partitions_of(partitions: Iterable[Partition] | None) -> tuple[Partition, ...] | None:
    """The partitions of a scan; None for all."""
    if partitions is None:
        return None
    allowed = "a list of partitions, such as ['2026-01-31'] or [{'day': '2026-01-31'}]"
    if isinstance(partitions, Mapping):
        raise _wrong("partitions", partitions, allowed)
    chosen: tuple[Partition, ...] = _listed("partitions", partitions, allowed)
    for partition in chosen:
        if not isinstance(partition, (str, Mapping)):
            raise _wrong("partitions", partition, allowed)
    return chosen


def buckets_of(buckets: Iterable[int] | None) -> tuple[int, ...] | None:
    """The numbers of the buckets of a scan; None for all."""
    if buckets is None:
        return None
    numbers = _listed("buckets", buckets, "a list of numbers of buckets, such as [0, 1]")
    for number in numbers:
        if not _is_int(number):
            raise _wrong("buckets", number, "numbers of buckets")
    return numbers


def check_offsets(name: str, offsets: object) -> None:
    """Check offsets by bucket; other positions are checked where they are used."""
    if not isinstance(offsets, Mapping):
        return
    for bucket, offset in offsets.items():
        if not _is_int(bucket) and not isinstance(bucket, TableBucket):
            raise _wrong(name, bucket, "numbers of buckets or TableBuckets as keys")
        if not _is_int(offset) or not 0 <= offset <= INT64_MAX:
            raise _wrong(f"{name}[{bucket!r}]", offset, f"an offset from 0 to {INT64_MAX}")


def check_at(offsets: object) -> None:
    """Check the offsets of `at`."""
    if offsets is not None and not isinstance(offsets, Mapping):
        raise _wrong("at", offsets, "offsets by bucket, such as the log_offsets of a scanner")
    check_offsets("at", offsets)


def _listed(name: str, values: Iterable[Any], allowed: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _wrong(name, values, allowed)
    return tuple(values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, value: object, allowed: str) -> InvalidScanRequestError:
    return InvalidScanRequestError(f"{name} is {value!r:.100}; give {allowed}")
