"""The file of a metadata dump: everything that a metadata store has, as JSON lines.

| line | object |
|---|---|
| first | `dump`: the version of this layout, 1; `cluster_id`; `catalog_format`: that of `coordinator/records.py`; `entries`: their number |
| of a path | `path`, and its value: `text` where it is UTF-8, else `base64`; sorted by path |
| last | `sha256`: of all bytes before this line, in hex |

Values are kept as they are, epochs and counters included. Versions are not: every store gives its
own. A file that was cut, joined or edited does not fit its last line, and is refused whole.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from zufluss.errors import ErrorCode, ZuflussError
from zufluss.meta.api import VALUE_BYTES_MAX, check_path

VERSION: Final = 1


class DumpDamagedError(ZuflussError, code=ErrorCode.CORRUPT_MESSAGE):
    """A file is no dump, is not whole, or is of another version of zufluss."""


@dataclass(frozen=True, slots=True)
class Dump:
    """What a metadata store had."""

    cluster_id: str
    """The cluster."""
    catalog_format: str
    """The layout of the paths and values."""
    values: Mapping[str, bytes]
    """The value of each path, sorted by path."""

    @property
    def digest(self) -> str:
        """Tells this dump from every other one."""
        return hashlib.sha256(_body(self)).hexdigest()


def encode(dump: Dump) -> bytes:
    """The file of a dump."""
    body = _body(dump)
    return body + _line({"sha256": hashlib.sha256(body).hexdigest()})


def decode(file: bytes) -> Dump:
    """The dump of a file; `DumpDamagedError` unless it is whole."""
    begin = file.rfind(b"\n", 0, -1) + 1
    body, last = file[:begin], _object(file[begin:], "the last line")
    if not file.endswith(b"\n") or not body or "sha256" not in last:
        raise DumpDamagedError(
            "the file does not end with the line of its checksum: it is no dump, or was cut; "
            "make another dump"
        )
    digest = hashlib.sha256(body).hexdigest()
    if last["sha256"] != digest:
        raise DumpDamagedError(
            f"the checksum of the file is {digest}, its last line says {last['sha256']!r:.80}: it "
            "was changed or damaged; make another dump"
        )
    first, *lines = body.splitlines()
    header = _object(first, "line 1")
    if header.get("dump") != VERSION:
        raise DumpDamagedError(
            f"the dump has layout {header.get('dump')!r:.20}, this zufluss reads {VERSION}: use "
            "the zufluss that wrote it"
        )
    values = dict(_entry(number, line) for number, line in enumerate(lines, 2))
    if len(values) != header.get("entries") or len(values) != len(lines):
        raise DumpDamagedError(
            f"the dump has {len(values)} different paths in {len(lines)} lines, its first line "
            f"says {header.get('entries')!r:.20}; make another dump"
        )
    return Dump(str(header.get("cluster_id")), str(header.get("catalog_format")), values)


def _body(dump: Dump) -> bytes:
    header = {
        "dump": VERSION,
        "cluster_id": dump.cluster_id,
        "catalog_format": dump.catalog_format,
        "entries": len(dump.values),
    }
    return b"".join([_line(header), *_lines(dump.values.items())])


def _lines(values: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    for path, value in values:
        try:
            yield _line({"path": path, "text": value.decode()})
        except UnicodeDecodeError:
            yield _line({"path": path, "base64": base64.b64encode(value).decode()})


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=True).encode() + b"\n"


def _object(line: bytes, which: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise DumpDamagedError(f"{which} of the dump is no JSON object; make another dump")
    return fields


def _entry(number: int, line: bytes) -> tuple[str, bytes]:
    fields = _object(line, f"line {number}")
    try:
        path = check_path(fields["path"])
        if "text" in fields:
            value: bytes = fields["text"].encode()
        else:
            value = base64.b64decode(fields["base64"], validate=True)
    except (KeyError, AttributeError, TypeError, ValueError, binascii.Error) as problem:
        raise DumpDamagedError(
            f"line {number} of the dump has no path with a value ({problem!r:.100})"
        ) from None
    if len(value) > VALUE_BYTES_MAX:
        raise DumpDamagedError(
            f"the value of {path} in line {number} of the dump has {len(value)} bytes, at most "
            f"{VALUE_BYTES_MAX} are allowed"
        )
    return path, value
