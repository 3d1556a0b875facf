"""The bucket key of Hudi tables: a Java hash of the values as Java writes them.

Hudi turns the key of a record into a list of texts and takes `List<String>.hashCode()`. The same
bucket needs the same texts, so this module writes numbers, decimals and times as Java's `toString`
does. The hash of a column is computed once per distinct value; lists are then hashed for all rows
at once. Keys of several columns must be separable for Hudi: values with a comma, and the words that
it uses for NULL and the empty text, are refused.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import InvalidTableError
from zufluss.model.arrow_types import from_arrow
from zufluss.model.types import DataType, Root
from zufluss.record.rows.binary import Value
from zufluss.record.rows.values import values_of

_EPOCH = dt.datetime(1970, 1, 1)
_PLACEHOLDERS = ("__null__", "__empty__")
_NO_TEXT = (Root.BYTES, Root.BINARY, Root.ARRAY, Root.MAP, Root.ROW)


def hudi_codes(arrays: Sequence[pa.Array], columns: Sequence[str]) -> npt.NDArray[np.uint32]:
    """Return `List<String>.hashCode()` of every row."""
    codes = np.ones(len(arrays[0]), np.uint32)
    for array, name in zip(arrays, columns, strict=True):
        distinct = array.dictionary_encode()
        data_type = from_arrow(array.type)
        hashes = [
            string_hash(_element(value, data_type, name, len(arrays) > 1))
            for value in values_of(distinct.dictionary, data_type)
        ]
        rows = np.array(hashes, np.uint32)[distinct.indices.to_numpy()]
        codes = codes * np.uint32(31) + rows
    return codes


def string_hash(text: str) -> int:
    """Return Java's `String.hashCode`, as an unsigned number."""
    code = 0
    units = text.encode("utf-16-le")
    for i in range(0, len(units), 2):
        code = (code * 31 + units[i] + (units[i + 1] << 8)) & 0xFFFFFFFF
    return code


def java_text(value: Value, data_type: DataType) -> str:
    """Return a value as Java's `String.valueOf` writes it."""
    match data_type.root:
        case Root.BOOLEAN:
            return "true" if value else "false"
        case Root.FLOAT:
            return _floating(np.float32(value))
        case Root.DOUBLE:
            return _floating(np.float64(value))
        case Root.DECIMAL:
            return f"{value:f}"
        case Root.TIMESTAMP:
            return _local_date_time(value)
        case Root.TIMESTAMP_LTZ:
            return _instant(value)
        case _:
            return str(value)


def _element(value: Value, data_type: DataType, name: str, composite: bool) -> str:
    if data_type.root in _NO_TEXT:
        raise InvalidTableError(f"key column {name!r}: hudi has no buckets of {data_type}")
    text = java_text(value, data_type)
    if composite and ("," in text or text in _PLACEHOLDERS):
        raise InvalidTableError(
            f"key column {name!r} has the value {text!r:.80}; in a key of several columns hudi "
            f"allows neither commas nor {' and '.join(_PLACEHOLDERS)}"
        )
    return text


def _floating(value: np.floating[Any]) -> str:
    """Return the shortest digits, with an exponent from 10^7 up and below 10^-3."""
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        return np.format_float_positional(value, unique=True, trim="0")
    digits, exponent = np.format_float_scientific(value, unique=True, trim="0").split("e")
    return f"{digits}E{int(exponent)}"


def _local_date_time(nanoseconds: int) -> str:
    seconds, nano = divmod(nanoseconds, 1_000_000_000)
    moment = _moment(seconds)
    text = moment.isoformat(timespec="minutes")
    if moment.second == 0 and nano == 0:
        return text
    return f"{text}:{moment.second:02}{_fraction(nano)}"


def _instant(nanoseconds: int) -> str:
    seconds, nano = divmod(nanoseconds, 1_000_000_000)
    return f"{_moment(seconds).isoformat(timespec='seconds')}{_fraction(nano)}Z"


def _moment(seconds: int) -> dt.datetime:
    try:
        return _EPOCH + dt.timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidTableError(
            f"a timestamp of {seconds} s lies outside the years 1 to 9999; hudi keys end there"
        ) from None


def _fraction(nano: int) -> str:
    """Return the fraction of a second: nothing, or 3, 6 or 9 digits."""
    if nano == 0:
        return ""
    digits = f"{nano:09}"
    while digits.endswith("000"):
        digits = digits[:-3]
    return f".{digits}"
