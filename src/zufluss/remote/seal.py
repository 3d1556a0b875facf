"""A checksum inside a JSON document, so that readers notice a flipped digit.

| last field of the document | value |
|---|---|
| `zufluss_crc32c` | CRC-32C of the bytes of the document without this field |

Documents that Fluss wrote have no checksum and are accepted. If the damage is in the name of the
field itself, nothing is checked, but then the rest is intact.
"""

from __future__ import annotations

import re
from typing import Final

from crc32c import crc32c

_FIELD: Final = b',"zufluss_crc32c":'
_SEAL: Final = re.compile(_FIELD + rb"([0-9]{1,10})}")


def sealed(document: bytes) -> bytes:
    """Return a JSON object with its checksum added."""
    return document[:-1] + _FIELD + b"%d}" % crc32c(document)


def check_seal(data: bytes) -> None:
    """Raise ValueError if the checksum of a document does not match."""
    at = data.rfind(_FIELD)
    if at < 0:
        return
    seal = _SEAL.fullmatch(data, at)
    if seal is None or int(seal[1]) != crc32c(b"}", crc32c(memoryview(data)[:at])):
        raise ValueError("its checksum does not match")
