"""Limits of one micro-batch: those of Spark, in records of the log.

Records of the log are counted, deletes included, before any filter. A limit in bytes is converted
to records by the size of the first ones. Buckets share a limit equally (`shares`).

Spark 4.1 has no limits for sources in Python, and does not tell them of `Trigger.AvailableNow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyspark

from zufluss.client.connection import AsyncConnection
from zufluss.client.read.log_scan import AsyncLogScan
from zufluss.errors import ConfigError
from zufluss.model.table import TableBucket, TableInfo
from zufluss.spark import source_options as o
from zufluss.spark.source_options import SourceOptions


def _limits() -> Any:
    """The module with the limits of Spark; None in Spark 4.1."""
    try:
        from pyspark.sql.streaming import datasource
    except ImportError:
        return None
    return datasource


datasource = _limits()
AvailableNow: Any = object if datasource is None else datasource.SupportsTriggerAvailableNow
"""Spark's base class of readers that know `Trigger.AvailableNow`; `object` in Spark 4.1."""

SAMPLE_RECORDS: Final = 1_000
"""The number of records that the mean size of a record is taken from."""

Offsets = Mapping[TableBucket, int]


def read_limits(options: SourceOptions) -> Any:
    """The limit of the options as a limit of Spark; None in Spark 4.1."""
    rows, size = options.get(o.MAX_ROWS_PER_TRIGGER), options.get(o.MAX_BYTES_PER_TRIGGER)
    if rows is not None and size is not None:
        raise ConfigError(
            f"table {options.path}: give {o.MAX_ROWS_PER_TRIGGER.key} or "
            f"{o.MAX_BYTES_PER_TRIGGER.key}, not both"
        )
    if datasource is None:
        _check_no_limit(options)
        return None
    if rows is not None:
        return datasource.ReadMaxRows(rows)
    return datasource.ReadAllAvailable() if size is None else datasource.ReadMaxBytes(size)


def _check_no_limit(options: SourceOptions) -> None:
    for option in (o.MAX_ROWS_PER_TRIGGER, o.MAX_BYTES_PER_TRIGGER):
        if options.get(option) is not None:
            raise ConfigError(
                f"table {options.path}: option {option.key} needs Spark 4.2 or newer, and this is "
                f"{pyspark.__version__}; leave it out, and each batch reads all that there is"
            )


def limit_of(limit: Any) -> tuple[int | None, int | None]:
    """The records and the bytes that a limit of Spark allows; None for no limit."""
    return getattr(limit, "max_rows", None), getattr(limit, "max_bytes", None)


async def limited(
    connection: AsyncConnection,
    info: TableInfo,
    begin: Offsets,
    ends: Offsets,
    names: Mapping[int, str],
    limit: tuple[int | None, int | None],
) -> dict[TableBucket, int]:
    """The end of a batch that starts at `begin`, at most `ends`."""
    rows, size = limit
    if size is not None:
        record = await _record_bytes(connection, info, begin, ends, names)
        rows = max(1, int(size / record))
    ordered = sorted(begin, key=lambda bucket: (bucket.partition_id or 0, bucket.bucket_id))
    waiting = {bucket: max(0, ends[bucket] - begin[bucket]) for bucket in ordered}
    return {bucket: begin[bucket] + share for bucket, share in shares(waiting, rows).items()}


def shares(waiting: Mapping[TableBucket, int], rows: int | None) -> dict[TableBucket, int]:
    """The rows that each bucket gets of a limit: an equal share, or all of its rows if fewer.

    So a bucket that grows faster than the limit does not keep others waiting. If there are fewer
    rows than buckets, the buckets with most to read come first.

    >>> shares({"a": 90, "b": 10, "c": 1}, 15)
    {'a': 7, 'b': 7, 'c': 1}
    """
    if rows is None or sum(waiting.values()) <= rows:
        return dict(waiting)
    granted = dict.fromkeys(waiting, 0)
    smallest = sorted((b for b in waiting if waiting[b]), key=lambda bucket: waiting[bucket])
    for nth, bucket in enumerate(smallest):
        granted[bucket] = min(waiting[bucket], rows // (len(smallest) - nth))
        rows -= granted[bucket]
    return granted


async def _record_bytes(
    connection: AsyncConnection,
    info: TableInfo,
    begin: Offsets,
    ends: Offsets,
    names: Mapping[int, str],
) -> float:
    """The mean size of the first records of the fullest bucket, in bytes."""
    bucket = max(begin, key=lambda bucket: ends[bucket] - begin[bucket], default=None)
    if bucket is None or ends[bucket] <= begin[bucket]:
        return 1.0
    id_ = bucket.partition_id
    scan = AsyncLogScan(
        connection,
        info,
        start={bucket: begin[bucket]},
        stop={bucket: min(ends[bucket], begin[bucket] + SAMPLE_RECORDS)},
        partitions=None if id_ is None else (names[id_],),
        buckets=(bucket.bucket_id,),
        changelog=info.has_primary_key,
    )
    sample = await scan.to_arrow()
    size, rows = int(sample.nbytes), int(sample.num_rows)
    return max(1.0, size / max(1, rows))
