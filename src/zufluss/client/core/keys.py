"""Which keys a primary-key table can be asked for: whole ones, or prefixes of them.

`record/keys/encoding.py` describes the bytes of a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.config import table_options as t
from zufluss.errors import InvalidTableError
from zufluss.model.table import TableInfo

if TYPE_CHECKING:
    from zufluss.record.keys.encoding import KeyEncoder


def prefix_columns(info: TableInfo) -> tuple[str, ...]:
    """The columns of a prefix lookup: the partition columns and the bucket key.

    Raises `InvalidTableError` for a table whose keys cannot be found by a prefix.
    """
    from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

    key, bucket = info.descriptor.physical_primary_key, info.bucket_keys
    if bucket == key or key[: len(bucket)] != bucket:
        raise InvalidTableError(
            f"table {info.path} has no prefix lookup: its bucket key ({', '.join(bucket)}) must be "
            f"the first part of its primary key ({', '.join(key)}), and not all of it. Use lookup "
            "with whole keys, or create the table with such a bucket key"
        )
    if KeyEncoder.of_stored_key(info).encoding != "compacted":
        raise InvalidTableError(
            f"table {info.path} has no prefix lookup: with table.datalake.format "
            f"{info.property(t.TABLE_DATALAKE_FORMAT)} and table.kv.format-version 1 a part of a "
            "key is not a prefix of it. Use lookup with whole keys"
        )
    return (*info.partition_keys, *bucket)


def prefix_encoder(info: TableInfo) -> KeyEncoder:
    """The encoder of the bytes that the keys of a prefix lookup begin with."""
    from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

    return KeyEncoder(info.bucket_keys, "compacted", KeyEncoder.of_stored_key(info).lake)


def check_primary_key(info: TableInfo, what: str, instead: str) -> None:
    """Raise `InvalidTableError` if a log table is asked for `what`; `instead` is the proposal."""
    if not info.has_primary_key:
        raise InvalidTableError(
            f"table {info.path} has no primary key, so there is no {what}; use {instead}"
        )
