"""Whose data a directory holds: one tablet server of one cluster.

What the coordinator does not assign is deleted from the disk, since it belongs to dropped tables.
So a server that met another cluster's coordinator, or started under another id, would delete
everything it has. `identity.json` in the data directory remembers both, and a mismatch is refused
before anything is touched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zufluss.errors import ConfigError
from zufluss.log.files import Files
from zufluss.log.manager import log_directories

FILE = "identity.json"
EPOCH_FILE = "server-epoch"
"""The server epoch of the last registration from this directory, as decimal text."""


def claim(files: Files, data_dir: Path, cluster_id: str, server_id: int) -> None:
    """Bind the directory to a server of a cluster, or refuse when it belongs to another."""
    path = data_dir / FILE
    ours = {"cluster_id": cluster_id, "server_id": server_id}
    if not path.exists():
        if log_directories(data_dir):
            raise ConfigError(
                f"data.dir {data_dir} holds logs but no {FILE} that says whose they are; "
                "restore the file, or use an empty directory"
            )
        unfinished = path.with_suffix(".new")
        files.put(unfinished, json.dumps(ours).encode(), sync=True)
        files.rename(unfinished, path)
        files.sync_directory(data_dir)
        return
    known = _read(path)
    if known != ours:
        raise ConfigError(
            f"data.dir {data_dir} belongs to tablet server {known.get('server_id')} of cluster "
            f"{known.get('cluster_id')}, this is server {server_id} of cluster {cluster_id}; "
            "correct data.dir, tablet-server.id or zufluss.coordinator.address"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_bytes())
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise ConfigError(
            f"{path} is damaged, so nobody knows whose logs these are; restore it, or write "
            '{"cluster_id": …, "server_id": …} into it if you know both'
        )
    return known


def read_epoch(data_dir: Path) -> int | None:
    """Return the epoch of the last registration from this directory; None if it is not known.

    Its process has ended: whoever reads this holds the lock of the directory.
    """
    try:
        return int((data_dir / EPOCH_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def write_epoch(files: Files, data_dir: Path, server_epoch: int) -> None:
    """Remember the epoch of a registration, for the next process."""
    files.put(data_dir / EPOCH_FILE, b"%d" % server_epoch)
