"""KV batches that are wrong in one way each, and the code a server must refuse them with.

`good()` puts one row of `SCHEMA`. Every entry of `BAD` changes one thing about it: in the header
(with the CRC made right again where it covers that), in how records lie in the batch, in the key,
or in the row with its nested values.
"""

from __future__ import annotations

import struct
from typing import Any

from tests.end_to_end.kv import Codec, kv_batch, record, seal_kv
from tests.record.rows.plain_rows import varint
from zufluss.model.schema import Schema

CORRUPT, NO_SCHEMA = 14, 9

SCHEMA = Schema.of(
    "id BIGINT NOT NULL, text STRING, n INT, tags ARRAY<STRING>, m MAP<INT, STRING>, "
    "r ROW<x INT, s STRING>",
    primary_key=["id"],
)
CODEC = Codec(SCHEMA)
ROW: tuple[Any, ...] = (5, "text", 7, ["longer than seven", None, "b"], [(1, "one")], (1, "s"))
KEY = CODEC.key(ROW)
RESIDENT: tuple[Any, ...] = (1, "stays", 1, ["a"], None, None)
"""The row that is there before and must be there after."""

_AT = {
    "length": (0, "<i"),
    "magic": (4, "<B"),
    "crc": (5, "<I"),
    "schema_id": (9, "<h"),
    "attributes": (11, "<B"),
    "writer_id": (12, "<q"),
    "sequence": (20, "<i"),
    "count": (24, "<i"),
}
_FREE = ("length", "magic", "crc")
"""Fields the CRC does not cover."""
_FIRST_RECORD = 28


def good() -> bytes:
    """A batch the server takes."""
    return kv_batch([CODEC.put(ROW)])


def with_field(name: str, value: int) -> bytes:
    """The good batch with one header field changed."""
    batch = bytearray(good())
    at, fmt = _AT[name]
    struct.pack_into(fmt, batch, at, value)
    return bytes(batch) if name in _FREE else seal_kv(batch)


def with_row(row: bytes, key: bytes = KEY) -> bytes:
    """A batch with these bytes as row."""
    return kv_batch([record(key, row)])


def replaced(old: bytes, new: bytes) -> bytes:
    """The good row with its only `old` made `new`."""
    row = CODEC.row(ROW)
    if row.count(old) != 1:
        raise AssertionError(f"{old.hex()} is {row.count(old)} times in {row.hex()}")
    return with_row(row.replace(old, new))


def _headers() -> dict[str, tuple[int, bytes]]:
    size = len(good())
    values = {
        "length": (0, -1, 23, 24, size - 5, size - 3, size, 2**31 - 1, -(2**31)),
        "magic": (1, 2, 127, 255),
        "crc": (0,),
        "attributes": (1, 2, 255),
        "count": (0, 2, -1, 2**31 - 1, -(2**31)),
    }
    cases = {
        f"{name} {value}": (CORRUPT, with_field(name, value))
        for name, numbers in values.items()
        for value in numbers
    }
    for value in (0, -1, 2, 99, 32_767, -(2**15)):
        cases[f"schema id {value}"] = (NO_SCHEMA, with_field("schema_id", value))
    return cases


def _sizes() -> dict[str, tuple[int, bytes]]:
    batch = good()
    flipped = bytearray(batch)
    flipped[-1] ^= 1
    bad = {
        "nothing": b"",
        "one byte": b"\x00",
        "half a header": batch[:14],
        "a header and no records": batch[:_FIRST_RECORD],
        "all but the last byte": batch[:-1],
        "a byte too many": batch + b"\x00",
        "half a batch after a good one": batch + batch[:40],
        "a bad batch after a good one": batch + bytes(flipped),
        "a good batch after a bad one": bytes(flipped) + batch,
        "a bit flipped": bytes(flipped),
        "zeros": bytes(200),
        "ones": b"\xff" * 200,
        "text": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 4,
    }
    return {name: (CORRUPT, data) for name, data in bad.items()}


def _with_record_length(length: int) -> bytes:
    return kv_batch([struct.pack("<i", length) + CODEC.put(ROW)[4:]])


def _records() -> dict[str, tuple[int, bytes]]:
    row, size = CODEC.row(ROW), len(CODEC.put(ROW)) - 4
    bad = {
        **{f"record length {n}": _with_record_length(n)
           for n in (0, -1, 1, size - 1, size + 1, 2**31 - 1, -(2**31))},
        "a key length past the record": kv_batch([_record(varint(10_000, 32) + KEY + row)]),
        "a key length of eleven bytes": kv_batch([_record(b"\x80" * 10 + b"\x01" + KEY + row)]),
        "a key length of six bytes": kv_batch([_record(b"\x81\x80\x80\x80\x80\x00" + KEY + row)]),
        "a key length beyond 32 bits": kv_batch([_record(b"\xff\xff\xff\xff\x7f" + KEY + row)]),
        "a negative key length": kv_batch([_record(b"\xff\xff\xff\xff\x0f" + KEY + row)]),
        "a key length that does not end": kv_batch([_record(b"\x80\x80")]),
        "a second record cut": kv_batch([CODEC.put(ROW), CODEC.put(ROW)[:-3]]),
        "a bad record after a good one": kv_batch([CODEC.put(RESIDENT), record(KEY, b"\x00")]),
    }  # fmt: skip
    return {name: (CORRUPT, data) for name, data in bad.items()}


def _record(body: bytes) -> bytes:
    return struct.pack("<i", len(body)) + body


def _keys() -> dict[str, tuple[int, bytes]]:
    row = CODEC.row(ROW)
    wrong = {
        "an empty key": b"",
        "the key of another row": CODEC.key(RESIDENT),
        "a key with a byte too many": KEY + b"\x00",
        "a key in more bytes than it needs": b"\x85\x00",
        "a key of eleven bytes": b"\x80" * 10 + b"\x01",
        "a key of the wrong type": b"\x045text",
    }
    cases = {name: (CORRUPT, kv_batch([record(key, row)])) for name, key in wrong.items()}
    deletes = {
        "a delete without a key": b"",
        "a delete with a byte too many": b"\x01\x01",
        "a delete of a key that does not end": b"\x81",
        "a delete of a key of eleven bytes": b"\x81" + b"\x80" * 9 + b"\x01",
    }
    cases |= {name: (CORRUPT, kv_batch([record(key, None)])) for name, key in deletes.items()}
    null_key = bytearray(CODEC.row(ROW))
    null_key[0] |= 1
    del null_key[1]
    cases["NULL in the key column"] = (CORRUPT, with_row(bytes(null_key)))
    cases["NULL in the key column and no key"] = (CORRUPT, with_row(bytes(null_key), b""))
    return cases


def _rows() -> dict[str, tuple[int, bytes]]:
    row = CODEC.row(ROW)
    bad = {
        "null bits and nothing else": with_row(b"\x00"),
        "a row that ends after its key": with_row(row[:2]),
        "a row that ends in a text": with_row(row[:5]),
        "a row cut by a byte": with_row(row[:-1]),
        "a row with a byte too many": with_row(row + b"\x00"),
        "a BIGINT of eleven bytes": replaced(
            b"\x00\x05", b"\x00" + b"\x85" + b"\x80" * 9 + b"\x00"
        ),
        "an INT of six bytes": replaced(b"text\x07", b"text\x87\x80\x80\x80\x80\x00"),
        "an INT of five bytes beyond 32 bits": replaced(b"text\x07", b"text\x87\x80\x80\x80\x7f"),
        "a text longer than its row": replaced(b"\x04text", b"\x7ftext"),
        "a text of absurd length": replaced(b"\x04text", b"\xff\xff\xff\xff\x07text"),
        "a text of negative length": replaced(b"\x04text", b"\xff\xff\xff\xff\x0ftext"),
        "text that is no UTF-8": replaced(b"\x04text", b"\x04te\xff\xfe"),
    }
    return {name: (CORRUPT, data) for name, data in bad.items()}


def _nested() -> dict[str, tuple[int, bytes]]:
    count = struct.pack("<i", 3) + b"\x02"
    slot = struct.pack("<ii", 17, 32)
    inline = b"b" + bytes(6) + b"\x81"
    size = struct.pack("<ii", 16, 1)
    bad = {
        "an array with an absurd count": replaced(count, struct.pack("<i", 2**31 - 1) + b"\x02"),
        "an array with a negative count": replaced(count, struct.pack("<i", -1) + b"\x02"),
        "an array with more elements than bytes": replaced(count, struct.pack("<i", 9) + b"\x02"),
        "an element that begins outside": replaced(slot, struct.pack("<ii", 17, 10_000)),
        "an element that begins before its array": replaced(slot, struct.pack("<ii", 17, -8)),
        "an element that ends outside": replaced(slot, struct.pack("<ii", 1_000, 32)),
        "an element of negative length": replaced(slot, struct.pack("<ii", -17, 32)),
        "an inline element of more than seven bytes": replaced(inline, inline[:7] + b"\x89"),
        "an element that is no UTF-8": replaced(b"longer than", b"longer\xffthan"),
        "a map whose keys end outside": replaced(size, struct.pack("<ii", 10_000, 1)),
        "a map of negative size": replaced(size, struct.pack("<ii", -16, 1)),
        "a map whose values begin in its keys": replaced(size, struct.pack("<ii", 4, 1)),
        "a row in the row that is cut": replaced(b"\x04\x00\x01\x01s", b"\x02\x00\x01"),
        "a row in the row with a byte too many": replaced(b"\x04\x00\x01\x01s",
                                                         b"\x05\x00\x01\x01s\x00"),
        "a row in the row that is too long": replaced(b"\x04\x00\x01\x01s", b"\x7f\x00\x01\x01s"),
    }  # fmt: skip
    return {name: (CORRUPT, data) for name, data in bad.items()}


BAD: dict[str, tuple[int, bytes]] = {
    **_headers(),
    **_sizes(),
    **_records(),
    **_keys(),
    **_rows(),
    **_nested(),
}
"""Code and bytes by what is wrong."""
