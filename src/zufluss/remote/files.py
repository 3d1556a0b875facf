"""A file in remote storage, as manifests refer to it: never by its full address.

The location is an id of the registry, so moving a location rewrites no manifest, and the checksum
is ours, so a store that hands back other bytes is noticed (A7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class RemoteFile(NamedTuple):
    """One immutable file."""

    location_id: int
    """Where it lies."""
    path: str
    """Its path below the root of the location."""
    size: int
    """Its length in bytes."""
    crc32c: int
    """The CRC-32C of its bytes."""


class Usage(NamedTuple):
    """What a manifest or snapshot has in one location."""

    files: int
    bytes: int

    def plus(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(self.files + other.files, self.bytes + other.bytes)


NOTHING = Usage(0, 0)


def usage(files: Iterable[RemoteFile]) -> dict[int, Usage]:
    """Files and bytes by location."""
    found: dict[int, Usage] = {}
    for file in files:
        before = found.get(file.location_id, NOTHING)
        found[file.location_id] = before.plus(Usage(1, file.size))
    return found


def summed(parts: Iterable[Mapping[int, Usage]]) -> dict[int, Usage]:
    """Several usages by location together."""
    total: dict[int, Usage] = {}
    for part in parts:
        for location_id, used in part.items():
            total[location_id] = total.get(location_id, NOTHING).plus(used)
    return total


def number(value: Any) -> int:
    """A whole number of a document, not negative, of 64 bits; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is not a whole number from 0 on")
    return value


def text(value: Any) -> str:
    """A text of a document; ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.100} is not a text")
    return value


def file_of(source: Mapping[str, Any], location_id: int | None = None) -> RemoteFile:
    """The file in a document; its location there unless it is given."""
    path = text(source["path"])
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path {path!r:.200} does not lie below a location")
    where = number(source["location_id"]) if location_id is None else location_id
    return RemoteFile(where, path, number(source["size"]), number(source["crc32c"]))
