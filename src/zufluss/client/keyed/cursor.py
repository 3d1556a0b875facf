"""Cursors of scans of primary-key tables: where a run stands, as a text for another process.

A cursor lists the pieces of the table that are still to be read. A piece is a bucket, or a range of
its keys, at one offset of the changelog, behind the last key that was handed out. So a run that
begins with the cursor returns exactly the rows that the other run did not.

The text is `zkc1.` and then, in URL-safe base 64 without padding:

| field | size | value |
|---|---|---|
| checksum | 4, big-endian | CRC-32C of the rest |
| document | | JSON, compressed by zlib |

| key of the document | value |
|---|---|
| `table` | the id of the table |
| `pieces` | a list of `[partition id, partition name, bucket, offset, after, until, pin]` |

The offset is null for a bucket that was not pinned yet: it shows the moment at which it is. `after`
is the last key that was read and `until` the last one to read, as hexadecimal text, null for none.
The pin is the id of a state that a server may still hold; without it the state is opened again at
the offset. Columns and filter are not part of a cursor.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from zufluss.client.core.offsets import BucketPlace
from zufluss.errors import InvalidScanRequestError
from zufluss.model.table import TableBucket, TableInfo

PREFIX: Final = "zkc1."
"""The version of the form, in front of every cursor."""
CURSOR_BYTES_MAX: Final = 16 << 20
"""The largest document of a cursor."""


class ScanPiece(NamedTuple):
    """A bucket, or a range of its keys, that is still to be read."""

    place: BucketPlace
    """The bucket."""
    log_offset: int | None
    """The offset of the state; None if the bucket is not pinned yet."""
    after: bytes | None = None
    """The last key that was read; None before the first."""
    until: bytes | None = None
    """The last key of the range, inclusive; None for the end of the bucket."""
    pin_id: bytes | None = None
    """The id of the pin on the server; None without a pin."""


def encode_cursor(info: TableInfo, pieces: Sequence[ScanPiece]) -> str:
    """The text of a cursor."""
    document = {"table": info.table_id, "pieces": [_row(piece) for piece in pieces]}
    data = zlib.compress(json.dumps(document, separators=(",", ":")).encode())
    sealed = crc32c(data).to_bytes(4, "big") + data
    return PREFIX + _text(sealed)


def decode_cursor(info: TableInfo, text: str) -> list[ScanPiece]:
    """The pieces of a cursor; `InvalidScanRequestError` if it is damaged or of another table."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        raise InvalidScanRequestError(
            f"{text!r:.80} is not a cursor of a scan; those of this version begin with {PREFIX!r}"
        )
    try:
        body = text.removeprefix(PREFIX)
        sealed = base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True)
        data = sealed[4:]
        if _text(sealed) != body:  # unused bits of the last character
            raise ValueError("its last character does not fit")
        if len(sealed) < 5 or crc32c(data) != int.from_bytes(sealed[:4], "big"):
            raise ValueError("its checksum does not match")
        unpacker = zlib.decompressobj()
        document = json.loads(unpacker.decompress(data, CURSOR_BYTES_MAX))
        table_id = document["table"]
        pieces = [_piece(table_id, row) for row in document["pieces"]]
    except (ValueError, TypeError, KeyError, binascii.Error, zlib.error, RecursionError) as e:
        raise InvalidScanRequestError(
            f"the cursor {text!r:.40}… is damaged ({e!s:.100}); store and pass on all of its text, "
            "or begin the scan anew"
        ) from e
    if table_id != info.table_id:
        raise InvalidScanRequestError(
            f"the cursor belongs to the table with id {table_id}, {info.path} has {info.table_id}; "
            "pass it to the table that it was made for. A table that was dropped and created again "
            "is another one"
        )
    return pieces


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).decode().rstrip("=")


def _row(piece: ScanPiece) -> list[Any]:
    bucket, partition = piece.place
    keys = (piece.after, piece.until, piece.pin_id)
    texts = [None if key is None else key.hex() for key in keys]
    return [bucket.partition_id, partition, bucket.bucket_id, piece.log_offset, *texts]


def _piece(table_id: int, row: Sequence[Any]) -> ScanPiece:
    partition_id, partition, bucket_id, log_offset, *texts = row
    bucket = TableBucket(int(table_id), partition_id, int(bucket_id))
    keys = [None if text is None else bytes.fromhex(text) for text in texts]
    after, until, pin_id = keys
    return ScanPiece(BucketPlace(bucket, partition), log_offset, after, until, pin_id)
