"""How a primary-key table encodes its keys.

The key of a row in the store is its *physical* primary key: the primary key without the partition
columns, which the partition stands for already. Its encoding must be the same in every client of a
table, because the server compares bytes. It depends on the lake the table is tiered to and on
`table.kv.format-version` (a table without it is of version 1):

| lake | version | bucket key | encoding of the stored key |
|---|---|---|---|
| none, lance, hudi | any | any | compacted |
| paimon, iceberg | 1 | any | the lake's |
| paimon, iceberg | 2 | the physical primary key | the lake's |
| paimon, iceberg | 2 | part of it | compacted |

The bucket is always the hash of the bucket key in the lake's encoding (`KeyEncoder.of_bucket_key`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.config import table_options as t
from zufluss.errors import InvalidTableError
from zufluss.model.table import TableInfo

if TYPE_CHECKING:
    from zufluss.record.keys.encoding import Encoding, KeyEncoder


def stored_key_encoder(info: TableInfo) -> KeyEncoder:
    """The encoder of the keys a table's store has."""
    from zufluss.record.keys.encoding import (  # loads the compiled kernels
        KeyEncoder,
        bucket_encoding,
    )

    lake = info.property(t.TABLE_DATALAKE_FORMAT)
    version = info.property(t.TABLE_KV_FORMAT_VERSION) or 1
    encoding: Encoding = "compacted"
    if lake in ("paimon", "iceberg") and (version == 1 or info.descriptor.has_default_bucket_key):
        encoding = bucket_encoding(lake)
    return KeyEncoder(info.descriptor.physical_primary_key, encoding, lake)


def prefix_columns(info: TableInfo) -> tuple[str, ...]:
    """The columns of a prefix lookup: the partition columns and the bucket key.

    Raises `InvalidTableError` for a table whose keys cannot be found by a prefix.
    """
    key, bucket = info.descriptor.physical_primary_key, info.bucket_keys
    if bucket == key or key[: len(bucket)] != bucket:
        raise InvalidTableError(
            f"table {info.path} has no prefix lookup: its bucket key ({', '.join(bucket)}) must be "
            f"the first part of its primary key ({', '.join(key)}), and not all of it. Use lookup "
            "with whole keys, or create the table with such a bucket key"
        )
    if stored_key_encoder(info).encoding != "compacted":
        raise InvalidTableError(
            f"table {info.path} has no prefix lookup: with table.datalake.format "
            f"{info.property(t.TABLE_DATALAKE_FORMAT)} and table.kv.format-version 1 a part of a "
            "key is no prefix of it. Use lookup with whole keys"
        )
    return (*info.partition_keys, *bucket)


def prefix_encoder(info: TableInfo) -> KeyEncoder:
    """The encoder of the bytes that the keys of a prefix lookup begin with."""
    from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

    return KeyEncoder(info.bucket_keys, "compacted", stored_key_encoder(info).lake)


def check_primary_key(info: TableInfo, what: str, instead: str) -> None:
    """Raise `InvalidTableError` for a log table: `what` is not for it, `instead` is."""
    if not info.has_primary_key:
        raise InvalidTableError(
            f"table {info.path} has no primary key, so there is no {what}; use {instead}"
        )
