"""Record batches that are wrong in one way each, and the code a server must refuse them with.

`good()` is a small batch of the everyday table. Every entry of `BAD` changes one thing about it:
in the header (with the CRC made right again, so that only that thing is wrong), in the Arrow
message, in the columns, or in how many bytes there are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pyarrow as pa

from tests.end_to_end.helpers import ids
from zufluss.record.header import build_batch, seal

CORRUPT, NO_SCHEMA = 14, 9
ROWS = 7
SCHEMA_ID = 1

_AT = {
    "length": (8, "<i"),
    "magic": (12, "<B"),
    "crc": (21, "<I"),
    "schema_id": (25, "<h"),
    "attributes": (27, "<B"),
    "last_offset_delta": (28, "<i"),
    "writer_id": (32, "<q"),
    "record_count": (44, "<i"),
}
"""Where the fields of a magic 0 header stand."""


def rows() -> pa.RecordBatch:
    """The rows of a good batch."""
    return ids(100, 100 + ROWS)


def wrapped(body: bytes, count: int = ROWS, schema_id: int = SCHEMA_ID) -> bytes:
    """Any body in a right header."""
    return bytes(build_batch(schema_id, body, count))


def message(batch: pa.RecordBatch | None = None, compression: str | None = None) -> bytes:
    """The Arrow message of a batch."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.BufferOutputStream() as sink:
        with pa.ipc.new_stream(sink, (batch or rows()).schema, options=options) as writer:
            writer.write_batch(batch or rows())
        stream = pa.ipc.MessageReader.open_stream(sink.getvalue())
    stream.read_next_message()  # the schema
    return stream.read_next_message().serialize().to_pybytes()


def good() -> bytes:
    """A batch the server takes."""
    return wrapped(message())


def with_field(name: str, value: int, *, sealed: bool = True) -> bytes:
    """The good batch with another value in its header."""
    batch = bytearray(good())
    at, fmt = _AT[name]
    struct.pack_into(fmt, batch, at, value)
    if sealed:
        seal(batch, 0)
    return bytes(batch)


def with_message(change: Callable[[bytearray], None], base: bytes | None = None) -> bytes:
    """The good batch with its Arrow message changed, in a right header."""
    data = bytearray(message() if base is None else base)
    change(data)
    return wrapped(bytes(data))


def replace(old: tuple[int, int], new: tuple[int, int]) -> Callable[[bytearray], None]:
    """Change a pair of numbers in the metadata: a field node or a buffer's place."""

    def change(data: bytearray) -> None:
        at = data.index(struct.pack("<qq", *old))
        struct.pack_into("<qq", data, at, *new)

    return change


def put(at: int, fmt: str, value: int) -> Callable[[bytearray], None]:
    """Write a number at a place of the message."""
    return lambda data: struct.pack_into(fmt, data, at, value)


def body_at(data: bytes) -> int:
    """Where the body of an Arrow message begins."""
    return 8 + struct.unpack_from("<i", data, 4)[0]


def buffers() -> list[tuple[int, int]]:
    """Offset and length of the good message's buffers that are not empty: ids, offsets, text."""
    text = sum(len(f"row {100 + i}") for i in range(ROWS))
    offsets_at = 8 * ROWS
    text_at = offsets_at + 4 * (ROWS + 1)
    found = [(0, 8 * ROWS), (offsets_at, 4 * (ROWS + 1)), (text_at, text)]
    data = message()
    if any(struct.pack("<qq", *pair) not in data for pair in found):
        raise AssertionError("pyarrow lays a batch out in another way than these tests know")
    return found


def _offsets(*values: int) -> bytes:
    data = bytearray(message())
    struct.pack_into(f"<{len(values)}i", data, body_at(data) + buffers()[1][0], *values)
    return wrapped(bytes(data))


def _compressed(change: Callable[[bytearray, int], None], codec: str = "zstd") -> bytes:
    data = bytearray(message(compression=codec))
    change(data, body_at(data))
    return wrapped(bytes(data))


def _schema_message() -> bytes:
    return rows().schema.serialize().to_pybytes()


def _headers() -> dict[str, tuple[int, bytes]]:
    cases: dict[str, tuple[int, bytes]] = {}
    size = len(good())
    for value in (0, -1, 35, size - 13, size - 11, size, 2**31 - 1, -(2**31)):
        cases[f"length {value}"] = (CORRUPT, with_field("length", value, sealed=False))
    for value in (1, 2, 3, 127, 255):
        cases[f"magic {value}"] = (CORRUPT, with_field("magic", value, sealed=False))
    cases["crc 0"] = (CORRUPT, with_field("crc", 0, sealed=False))
    for value in (0, -1, 2, 99, 32_767, -(2**15)):
        cases[f"schema id {value}"] = (NO_SCHEMA, with_field("schema_id", value))
    for value in (0, 2, 3, 255):
        cases[f"attributes {value}"] = (CORRUPT, with_field("attributes", value))
    for value in (ROWS - 2, ROWS, -1, 0, 10**9, 2**31 - 1, -(2**31)):
        cases[f"last offset delta {value}"] = (CORRUPT, with_field("last_offset_delta", value))
    for value in (0, 1, ROWS + 1, -1, 2**31 - 1, -(2**31)):
        cases[f"record count {value}"] = (CORRUPT, with_field("record_count", value))
    cases["a writer without a sequence"] = (CORRUPT, with_field("writer_id", 5))
    cases["a negative writer"] = (CORRUPT, with_field("writer_id", -2))
    return cases


def _sizes() -> dict[str, tuple[int, bytes]]:
    batch = good()
    flipped = bytearray(batch)
    flipped[-1] ^= 1
    return {
        "nothing": (CORRUPT, b""),
        "one byte": (CORRUPT, b"\x00"),
        "half a header": (CORRUPT, batch[:24]),
        "a header and no body": (CORRUPT, batch[:48]),
        "all but the last byte": (CORRUPT, batch[:-1]),
        "a byte too many": (CORRUPT, batch + b"\x00"),
        "half a batch after a good one": (CORRUPT, batch + batch[:100]),
        "a bad batch after a good one": (CORRUPT, batch + bytes(flipped)),
        "a good batch after a bad one": (CORRUPT, bytes(flipped) + batch),
        "a bit flipped": (CORRUPT, bytes(flipped)),
        "zeros": (CORRUPT, bytes(200)),
        "ones": (CORRUPT, b"\xff" * 200),
        "text": (CORRUPT, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 4),
    }


def _messages() -> dict[str, tuple[int, bytes]]:
    (ids_at, ids_size), (offsets_at, offsets_size), (text_at, text_size) = buffers()
    node = (ROWS, 0)
    bad = {
        "no continuation marker": put(0, "<i", 0),
        "metadata length 0": put(4, "<i", 0),
        "metadata length negative": put(4, "<i", -8),
        "metadata length absurd": put(4, "<i", 2**31 - 8),
        "metadata length odd": put(4, "<i", 13),
        "metadata root outside": put(8, "<i", 2**30),
        "metadata root negative": put(8, "<i", -4),
        "a buffer longer than the body": replace((ids_at, ids_size), (ids_at, 10**12)),
        "a buffer before the body": replace((offsets_at, offsets_size), (-64, offsets_size)),
        "a buffer after the body": replace((text_at, text_size), (2**40, text_size)),
        "a buffer of negative length": replace((text_at, text_size), (text_at, -1)),
        "a buffer at the end of numbers": replace((text_at, text_size), (2**63 - 8, text_size)),
        "a buffer too short for its rows": replace((ids_at, ids_size), (ids_at, 8)),
        "offsets too short for their rows": replace((offsets_at, offsets_size), (offsets_at, 8)),
        "two columns in one buffer": replace((offsets_at, offsets_size), (0, offsets_size)),
        "a node with more rows": replace(node, (ROWS + 1, 0)),
        "a node with fewer rows": replace(node, (ROWS - 1, 0)),
        "a node with negative rows": replace(node, (-1, 0)),
        "a node with absurd rows": replace(node, (2**62, 0)),
        "nulls without a validity buffer": replace(node, (ROWS, 3)),
        "negative nulls": replace(node, (ROWS, -1)),
        "more nulls than rows": replace(node, (ROWS, ROWS + 1)),
    }
    cases = {name: (CORRUPT, with_message(change)) for name, change in bad.items()}
    cases["a schema instead of rows"] = (CORRUPT, wrapped(_schema_message()))
    cases["rows and then more"] = (CORRUPT, wrapped(message() + message()))
    cases["random bytes"] = (CORRUPT, wrapped(bytes(range(256))))
    cases["no message"] = (CORRUPT, wrapped(b""))
    cases["a message cut"] = (CORRUPT, wrapped(message()[:-64]))
    return cases


def _contents() -> dict[str, tuple[int, bytes]]:
    text_size = buffers()[2][1]
    offsets = [8 * i for i in range(ROWS)]
    binary = pa.array([b"\xff\xfe"] * ROWS, pa.binary())
    not_text = pa.record_batch([rows().column(0), binary.view(pa.string())], ["id", "text"])
    return {
        "offsets that fall": (CORRUPT, _offsets(0, 30, 10)),
        "offsets below zero": (CORRUPT, _offsets(-8)),
        "offsets after the text": (CORRUPT, _offsets(*offsets, text_size + 1)),
        "offsets absurd": (CORRUPT, _offsets(*offsets, 2**31 - 1)),
        "text that is no UTF-8": (CORRUPT, wrapped(message(not_text))),
    }


def _columns() -> dict[str, tuple[int, bytes]]:
    number, text = rows().columns
    others = {
        "a column missing": {"id": number},
        "a column too many": {"id": number, "text": text, "more": number},
        "columns swapped": {"text": text, "id": number},
        "smaller numbers": {"id": number.cast(pa.int32()), "text": text},
        "numbers for text": {"id": number, "text": number},
        "a list for text": {"id": number, "text": pa.array([["a"]] * ROWS)},
        "a row for text": {"id": number, "text": pa.array([{"a": 1}] * ROWS)},
        "a dictionary for text": {"id": number, "text": text.dictionary_encode()},
    }
    found = {n: (CORRUPT, wrapped(_message_of(c))) for n, c in others.items()}
    empty = rows().slice(0, 0)
    found["no rows"] = (CORRUPT, wrapped(message(empty), 0))
    return found


def _message_of(columns: dict[str, pa.Array]) -> bytes:
    batch = pa.record_batch(columns)
    if any(pa.types.is_dictionary(f.type) for f in batch.schema):
        return batch.serialize().to_pybytes()
    return message(batch)


def _compressions() -> dict[str, tuple[int, bytes]]:
    def set_size(size: int) -> Callable[[bytearray, int], None]:
        return lambda data, body: struct.pack_into("<q", data, body, size)

    def garbage(data: bytearray, body: int) -> None:
        data[body + 8 : body + 24] = b"\xaa" * 16

    def zero_distance(data: bytearray, body: int) -> None:
        """Make the first LZ4 match of the ids (eight bytes back) one that goes nowhere."""
        at = data.index(struct.pack("<H", 8), body + 8 + 11)
        data[at : at + 2] = b"\x00\x00"

    return {
        "an LZ4 match that liblz4 takes and pyfluss does not": (
            CORRUPT,
            _compressed(zero_distance, "lz4"),
        ),
        "a compressed buffer that claims a terabyte": (CORRUPT, _compressed(set_size(2**40))),
        "a compressed buffer that claims too little": (CORRUPT, _compressed(set_size(3))),
        "a compressed buffer that claims less than nothing": (CORRUPT, _compressed(set_size(-2))),
        "a compressed buffer that claims a little more": (
            CORRUPT,
            _compressed(set_size(8 * ROWS + 8)),
        ),
        "compressed garbage": (CORRUPT, _compressed(garbage)),
    }


BAD: dict[str, tuple[int, bytes]] = {
    **_headers(),
    **_sizes(),
    **_messages(),
    **_contents(),
    **_columns(),
    **_compressions(),
}
"""Code and bytes by what is wrong."""
