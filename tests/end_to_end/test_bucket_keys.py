"""pyfluss and our own hash put every key into the same bucket.

pyfluss chooses the bucket of each row; what it chose is read back bucket by bucket and compared
with `zufluss.record.keys.encoding` and `zufluss.record.keys.hash`. If these differed, our client
would spread the rows of one key over two buckets of a shared table.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import fluss
import numpy as np
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import (
    EARLIEST,
    append,
    arrow_scanner,
    connected,
    create,
    ids,
    in_time,
    poll_batches,
    read_arrow,
)
from tests.end_to_end.samples import SAMPLES, Sample
from zufluss.record.keys.encoding import KeyEncoder, bucket_encoding
from zufluss.testing.server import DevServer

BUCKETS = 16
SCALARS = [s for s in SAMPLES if not pa.types.is_nested(s.type)]
LAKES: dict[str, tuple[pa.DataType, ...]] = {
    "paimon": (pa.int32(), pa.int64(), pa.string(), pa.binary(), pa.date32(), pa.bool_()),
    "iceberg": (pa.int32(), pa.int64(), pa.string(), pa.binary(), pa.date32()),
}


def spread(kind: pa.DataType, values: pa.Array | None = None) -> pa.Array:
    """Four hundred different values of a type, and the given ones before them."""
    numbers = np.random.default_rng(7).integers(0, 2**31 - 1, 400).tolist()
    more = pa.array([_value(kind, n) for n in numbers], kind)
    return more if values is None else pa.concat_arrays([values.drop_null(), more])


def _value(kind: pa.DataType, n: int) -> Any:
    if pa.types.is_boolean(kind):
        return n % 2 == 0
    if pa.types.is_string(kind):
        return f"key {n} ü"
    if pa.types.is_fixed_size_binary(kind):
        return n.to_bytes(kind.byte_width, "big")
    if pa.types.is_binary(kind):
        return n.to_bytes(5, "little")
    if pa.types.is_time(kind):
        return n % 86_400
    if pa.types.is_decimal(kind):
        return Decimal(n % 10**6) / 4
    if pa.types.is_floating(kind):
        return n % 10**6 / 4
    return n % 2 ** (min(kind.bit_width, 32) - 1)


async def chosen_buckets(table: fluss.FlussTable, rows: int) -> dict[int, int]:
    """The bucket each row number was put into."""
    batches = await poll_batches(await arrow_scanner(table, columns=["n"]), rows)
    return {n: b.bucket.bucket_id for b in batches for n in b.batch.column(0).to_pylist()}


async def check(
    conn: fluss.FlussConnection,
    path: fluss.TablePath,
    keys: dict[str, pa.Array],
    lake: str | None = None,
) -> None:
    names = list(keys)
    count = len(next(iter(keys.values())))
    batch = pa.record_batch({**keys, "n": pa.array(range(count), pa.int64())})
    properties: dict[str, Any] = {} if lake is None else {"table.datalake.format": lake}
    table = await create(
        conn, path, batch.schema, bucket_count=BUCKETS, bucket_keys=names, properties=properties
    )
    await append(table, batch)
    ours = KeyEncoder(tuple(names), bucket_encoding(lake), lake).bucket_ids(batch, BUCKETS)
    assert await chosen_buckets(table, count) == dict(enumerate(ours.tolist()))


@pytest.mark.parametrize("sample", SCALARS, ids=lambda s: s.name)
async def test_a_key_of_any_scalar_type_lands_where_we_compute(
    conn: fluss.FlussConnection, path: fluss.TablePath, sample: Sample
) -> None:
    await check(conn, path, {"k": spread(sample.type, sample.row_array())})


async def test_a_key_of_several_columns_lands_where_we_compute(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    numbers = spread(pa.int32())
    keys = {"a": numbers, "b": spread(pa.string()), "c": spread(pa.int8())}
    await check(conn, path, keys)


@pytest.mark.parametrize(
    ("lake", "kind"), [(lake, kind) for lake, kinds in LAKES.items() for kind in kinds], ids=str
)
async def test_a_key_of_a_table_for_a_lake_lands_where_we_compute(
    conn: fluss.FlussConnection, path: fluss.TablePath, lake: str, kind: pa.DataType
) -> None:
    await check(conn, path, {"k": spread(kind)}, lake)


async def test_without_a_key_round_robin_reaches_every_bucket(
    conn: fluss.FlussConnection, path: fluss.TablePath, dev_server: DevServer
) -> None:
    await create(conn, path, bucket_count=4)
    async with connected(dev_server.bootstrap, writer_bucket_no_key_assigner="round_robin") as own:
        table = await in_time(own.get_table(path))
        await append(table, *(ids(i * 10, i * 10 + 10) for i in range(8)))
        counts = [(await read_arrow(table, {b: EARLIEST})).num_rows for b in range(4)]
    assert counts == [20, 20, 20, 20]


async def test_without_a_key_sticky_keeps_a_batch_together(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=4)
    await append(table, ids(0, 100))
    counts = [(await read_arrow(table, {b: EARLIEST})).num_rows for b in range(4)]
    assert sorted(counts) == [0, 0, 0, 100]
