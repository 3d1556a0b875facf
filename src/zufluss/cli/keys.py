"""Keys as users write them on the command line.

| a key                | written as                                                       |
|----------------------|------------------------------------------------------------------|
| of one column        | `7`, or `id=7`                                                   |
| of several columns   | `4711,1` in the order of the key, or `customer=4711,order=1`     |
| a comma in a value   | in double quotes: `'"Ulm, Bahnhof",1'`                           |

A key of one column is taken literally, with its commas and quotes. Values are written as in JSON
output: dates and times in ISO 8601, binary in base64.
"""

from __future__ import annotations

import base64
import binascii
import csv
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as pat


def keys_batch(texts: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    """Parse keys to a batch of `schema`, which has the key columns; raises `ValueError`."""
    rows = [_split(text, schema.names) for text in texts]
    columns = [
        _column(field, [row[i] for row in rows]) for i, field in enumerate(schema)
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def key_text(row: dict[str, object]) -> str:
    """A key as text for messages."""
    return ", ".join(f"{name}={value}" for name, value in row.items())


def _split(text: str, names: Sequence[str]) -> list[str]:
    """Split a key into the values of the key columns."""
    if len(names) == 1:
        return [text.removeprefix(f"{names[0]}=")]
    parts = next(csv.reader([text], skipinitialspace=True), [])
    named = [part.partition("=") for part in parts]
    if len(parts) == len(names) and {name.strip() for name, _, _ in named} == set(names):
        values = {name.strip(): value for name, _, value in named}
        return [values[name] for name in names]
    if len(parts) == len(names):
        return parts
    raise ValueError(
        f"key {text!r} has {len(parts)} values; the key is {', '.join(names)}: write "
        f"{','.join(f'{name}=…' for name in names)}, or the values in this order"
    )


def _column(field: pa.Field, texts: list[str]) -> pa.Array:
    try:
        if pat.is_binary(field.type) or pat.is_fixed_size_binary(field.type):
            return pa.array([base64.b64decode(text, validate=True) for text in texts], field.type)
        return pa.array(texts, pa.string()).cast(field.type)
    except (pa.ArrowException, binascii.Error) as problem:
        raise ValueError(f"key column {field.name} ({field.type}): {problem}") from None
