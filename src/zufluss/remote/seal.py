"""A checksum inside a JSON document, so that a flipped digit is noticed.

| last field of the document | value |
|---|---|
| `zufluss_crc32c` | of the document without this field, byte by byte |

Documents of others have none and are taken as they are. When the name of the field itself is hit,
nothing is checked, and nothing else was hit.
"""

from __future__ import annotations

import re
from typing import Final

from crc32c import crc32c

_FIELD: Final = b',"zufluss_crc32c":'
_SEAL: Final = re.compile(_FIELD + rb"([0-9]{1,10})}")


def sealed(document: bytes) -> bytes:
    """A JSON object with its checksum."""
    return document[:-1] + _FIELD + b"%d}" % crc32c(document)


def check_seal(data: bytes) -> None:
    """ValueError if a document has a checksum that is not its own."""
    at = data.rfind(_FIELD)
    if at < 0:
        return
    found = _SEAL.fullmatch(data, at)
    if found is None or int(found[1]) != crc32c(b"}", crc32c(memoryview(data)[:at])):
        raise ValueError("its checksum is another one")
