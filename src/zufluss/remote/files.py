"""A file in remote storage, as manifests and snapshots refer to it, and sums over such files.

A file is named by the id of its location and the path below its root, so moving a location rewrites
no manifest. The checksum is computed by the writer, so readers notice a store that returns other
bytes (A7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class RemoteFile(NamedTuple):
    """One immutable file in remote storage."""

    location_id: int
    """Id of the location."""
    path: str
    """Path below the root of the location."""
    size: int
    """Length in bytes."""
    crc32c: int
    """CRC-32C of the bytes."""


class FileProblem(NamedTuple):
    """A live file that is missing, cut or cannot be read."""

    path: str
    """Path below the root of the location; empty for a problem of all files of a bucket."""
    reason: str
    """How the file differs from what it should be, or why it cannot be read."""


class Usage(NamedTuple):
    """Number and bytes of files in one location."""

    files: int
    bytes: int

    def plus(self, other: Usage) -> Usage:
        """Return the sum of both."""
        return Usage(self.files + other.files, self.bytes + other.bytes)


NOTHING = Usage(0, 0)


def usage(files: Iterable[RemoteFile]) -> dict[int, Usage]:
    """Return files and bytes by location."""
    total: dict[int, Usage] = {}
    for file in files:
        before = total.get(file.location_id, NOTHING)
        total[file.location_id] = before.plus(Usage(1, file.size))
    return total


def summed(parts: Iterable[Mapping[int, Usage]]) -> dict[int, Usage]:
    """Return the sum of several usages by location."""
    total: dict[int, Usage] = {}
    for part in parts:
        for location_id, used in part.items():
            total[location_id] = total.get(location_id, NOTHING).plus(used)
    return total


def number(value: Any) -> int:
    """Return a field of a document that is a whole number from 0 to 2^63 − 1, else ValueError."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is not a whole number from 0 on")
    return value


def text(value: Any) -> str:
    """Return a field of a document that is a text, else raise ValueError."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.100} is not a text")
    return value


def file_of(source: Mapping[str, Any], location_id: int | None = None) -> RemoteFile:
    """Return the file that a document describes; `location_id` replaces that of the document."""
    path = text(source["path"])
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path {path!r:.200} does not lie below a location")
    where = number(source["location_id"]) if location_id is None else location_id
    return RemoteFile(where, path, number(source["size"]), number(source["crc32c"]))
