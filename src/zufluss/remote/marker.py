"""The marker of a location: one object in its root that names the cluster which owns the location.

To the sweep of one cluster the files of another look like garbage, and a file system that is not
mounted looks like a directory without files. The object `.zufluss-cluster` excludes both:

| field | value |
|---|---|
| `version` | 1 |
| `cluster_id` | the cluster that writes and deletes here |

The coordinator writes the marker when the cluster first uses a location, and never again: if it is
missing later, the files are missing too. Every process reads it before it writes or deletes
anything.
"""

from __future__ import annotations

import json
from typing import Any, Final

from zufluss.model.schema import dump_object
from zufluss.remote.errors import (
    ForeignLocationError,
    LocationUnavailableError,
    NotOursError,
    ObjectExistsError,
    ObjectMissingError,
    RemoteStorageError,
)
from zufluss.remote.layout import CLUSTER
from zufluss.remote.objects import Objects

VERSION: Final = 1
BYTES_MAX: Final = 4096


def to_json(cluster_id: str) -> bytes:
    """Return the bytes of a cluster's marker."""
    return dump_object({"version": VERSION, "cluster_id": cluster_id})


async def check(objects: Objects, cluster_id: str) -> None:
    """Raise `NotOursError` unless the location has the marker of this cluster."""
    try:
        owner = _owner(await objects.get(CLUSTER, limit=BYTES_MAX))
    except LocationUnavailableError:
        raise
    except ObjectMissingError as problem:
        text = to_json(cluster_id).decode()
        reason = (
            "the marker of the cluster is missing, so this may be a file system that is not "
            f"mounted; mount it, or, if the files are there, write {text} into this object"
        )
        raise NotOursError(objects.uri.text, CLUSTER, reason) from problem
    except (RemoteStorageError, ValueError, TypeError, KeyError, RecursionError) as problem:
        reason = f"the marker of the cluster cannot be read: {problem!r:.300}"
        raise NotOursError(objects.uri.text, CLUSTER, reason) from problem
    if owner != cluster_id:
        reason = (
            f"the location belongs to cluster {owner}, this is cluster {cluster_id}; use an "
            f"address that no other cluster has, or, if cluster {owner} is gone for good, delete "
            "this object"
        )
        raise ForeignLocationError(objects.uri.text, CLUSTER, reason)


async def claim(objects: Objects, cluster_id: str) -> None:
    """Write the marker of a location that this cluster never used, unless another cluster has.

    The marker is read before and after: not every store supports creation of absent objects only.
    """
    try:
        await check(objects, cluster_id)
    except ForeignLocationError:
        raise
    except LocationUnavailableError:  # the first object creates a missing directory
        await _write(objects, cluster_id)
        await check(objects, cluster_id)


async def _write(objects: Objects, cluster_id: str) -> None:
    try:
        await objects.put(CLUSTER, to_json(cluster_id), if_absent=True)
    except ObjectExistsError:
        return
    except LocationUnavailableError:
        raise
    except RemoteStorageError as problem:
        reason = f"the marker of the cluster cannot be written: {problem.message}"
        raise NotOursError(objects.uri.text, CLUSTER, reason) from problem


def _owner(data: bytes) -> str:
    """Return the id of the cluster that a marker names."""
    value: Any = json.loads(data)
    if value["version"] != VERSION or not isinstance(value["cluster_id"], str):
        raise ValueError(f"version {value['version']!r:.50} is not {VERSION}")
    return str(value["cluster_id"])
