"""The state file of a bucket: up to which log offset its cold tier holds the changelog.

`state.json` in the bucket's directory, replaced as a whole:

| field | value |
|---|---|
| `version` | 1 |
| `flushed_offset` | every change below this log offset is in the cold tier |
| `row_count` | rows as of that offset |
| `meta` | an object of the owner's |
| `crc32c` | of the other fields as JSON with sorted names and no spaces |

The flush thread writes the file after the cold tier is durable; recovery replays the changelog from
`flushed_offset`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

from zufluss.errors import LogStorageError
from zufluss.log.files import Files

STATE_FILE = "state.json"
"""Name of the state file in a bucket's directory."""

STATE_VERSION = 1
"""Version of the state file's layout."""


class KvState(NamedTuple):
    """What the cold tier of a bucket holds."""

    flushed_offset: int = 0
    """Every change below this log offset is in the cold tier."""
    row_count: int = 0
    """Rows as of that offset."""
    meta: dict[str, Any] = {}  # noqa: RUF012
    """Values that the owner of the bucket stores with the state."""


def read_state(directory: Path) -> KvState:
    """Read the state file of a bucket. A bucket without one is empty.

    Raises `LogStorageError` if the file is damaged or of another version.
    """
    path = directory / STATE_FILE
    try:
        content = json.loads(path.read_bytes())
        crc = content.pop("crc32c")
        whole = crc == crc32c(_canonical(content)) and content.pop("version") == STATE_VERSION
    except FileNotFoundError:
        return KvState()
    except (ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise LogStorageError(
            f"{path} is damaged or of another version: expected version {STATE_VERSION} with a "
            "matching checksum. Restore it from a backup, or remove the directory to rebuild the "
            "state from a changelog that is still complete"
        )
    return KvState(**content)


def write_state(files: Files, directory: Path, state: KvState) -> None:
    """Replace the state file of a bucket; the new one is durable on return."""
    content = {"version": STATE_VERSION, **state._asdict()}
    content["crc32c"] = crc32c(_canonical(content))
    fresh = directory / f"{STATE_FILE}.new"
    files.put(fresh, json.dumps(content).encode(), sync=True)
    files.rename(fresh, directory / STATE_FILE)
    files.sync_directory(directory)


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
