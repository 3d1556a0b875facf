"""Whose location it is: one object in its root, so that no cluster deletes the files of another.

To the sweep of one cluster the files of another look like garbage, and a file system that is not
mounted looks like a directory whose files were all deleted. The object `.zufluss-cluster` tells
both apart from the truth:

| field | value |
|---|---|
| `version` | 1 |
| `cluster_id` | the cluster that writes and deletes here |

The coordinator writes it when the cluster first uses a location, and never again: a marker that is
missing later means that the files are not there either. Every process reads it before it writes or
deletes anything.
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
    """The bytes of a cluster's marker."""
    return dump_object({"version": VERSION, "cluster_id": cluster_id})


async def check(objects: Objects, cluster_id: str) -> None:
    """Raise `NotOursError` unless the location carries the marker of this cluster."""
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
    """Mark a location that this cluster never used, unless somebody else has.

    It is read before and after: not every store heeds that an object must be absent.
    """
    try:
        await check(objects, cluster_id)
    except ForeignLocationError:
        raise
    except LocationUnavailableError:  # a directory is made by the first object in it
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
    """The cluster that a marker names."""
    value: Any = json.loads(data)
    if value["version"] != VERSION or not isinstance(value["cluster_id"], str):
        raise ValueError(f"version {value['version']!r:.50} is not {VERSION}")
    return str(value["cluster_id"])
