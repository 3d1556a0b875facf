"""The live files of a location: which files should be there, and whether they are.

The files are counted in groups, which the coordinator knows without I/O:

| kind | a group | its documents |
|---|---|---|
| `log` | the segments of a bucket, and the manifest | the manifest |
| `kv` | the files of the kept snapshots of a bucket | their `_METADATA` |
| `lake` | the offsets files of a table | none |
| `dropped` | everything of a dropped table or partition that leases still hold | none |

A document may lie in another location than the files that it lists. To check a group, its documents
are read, its directory in the location is listed, and names and sizes are compared. A file that is
missing because the group changed meanwhile is no problem: the group is checked again.

A location moves only to an address where every live file was found (`check_copy`). What was found
is remembered, so an operator can check a large copy first, in many small requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from zufluss.cluster.image import ClusterImage
from zufluss.cluster.remote import SnapshotHandle
from zufluss.coordinator.bucket_remotes import BucketRecord, BucketRemotes
from zufluss.coordinator.records import OffsetsFile
from zufluss.coordinator.remote.checks import bucket_directory
from zufluss.coordinator.remote.cleaner import directories
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.coordinator.remote.kv_snapshots import KvSnapshots
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.errors import ConfigError, ErrorCode, ZuflussError, error
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote import layout
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.files import NOTHING, FileProblem, RemoteFile, Usage
from zufluss.remote.manifest import MANIFEST_BYTES_MAX, LogManifest
from zufluss.remote.objects import Objects
from zufluss.remote.snapshot import METADATA_BYTES_MAX, KvSnapshot

DROPPED: Final = "dropped"
"""The kind of files that only leases hold."""
GROUPS_AT_ONCE: Final = 8
"""Groups that are read or checked concurrently."""
CHECKS_MAX: Final = 5
"""How often a group is checked again because it changed meanwhile."""
COPIES_KNOWN_MAX: Final = 4
"""Copies of locations whose checked groups are remembered."""
SHOWN_MAX: Final = 5
"""Missing files that the refusal of a move names."""


class LiveGroup(NamedTuple):
    """Live files of one kind that belong together, in one location."""

    key: str
    """Identifies the group in its location, and orders groups."""
    kind: str
    """`log`, `kv`, `lake` or `dropped`."""
    owner: PhysicalTablePath
    """The table or partition."""
    bucket: TableBucket | None
    """None for files of a whole table."""
    directories: tuple[str, ...]
    """Where the files lie below the root."""
    usage: Usage
    """Number and bytes; the sizes of documents and offsets files are not counted."""
    version: Hashable
    """Differs when the files differ."""


class GroupFiles(NamedTuple):
    """The files of a group, as its documents list them."""

    group: LiveGroup
    sizes: dict[str, int | None]
    """Sizes by path; None where no document has the size."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Log offsets in the location; each end is exclusive."""
    snapshot_ids: tuple[int, ...] = ()
    """Snapshots with files in the location."""
    problems: tuple[FileProblem, ...] = ()
    """Documents that cannot be read, and files that are not as they should be."""


class Inventory:
    """The live files of all locations."""

    def __init__(
        self,
        image: ClusterImage,
        remotes: BucketRemotes,
        snapshots: KvSnapshots,
        lake_files: Callable[[int], Iterable[OffsetsFile]],
        held: HeldDrops,
        registry: LocationRegistry,
    ) -> None:
        """`lake_files` returns the offsets files of a table, by its id."""
        self._image = image
        self._remotes = remotes
        self._snapshots = snapshots
        self._lake_files = lake_files
        self._held = held
        self._registry = registry
        self._storage = registry.storage
        self._copies: OrderedDict[tuple[int, str], dict[str, Hashable]] = OrderedDict()

    # -- groups -------------------------------------------------------------------------------

    def groups(self, location_id: int) -> list[LiveGroup]:
        """The groups with files in a location, in the order of their keys; no I/O."""
        groups = [
            group
            for bucket, record in self._remotes.items()
            for group in self._of_bucket(location_id, bucket, record)
        ]
        groups += self._of_lakes(location_id)
        groups += self._of_drops(location_id)
        return sorted(groups, key=lambda group: group.key)

    def _of_bucket(
        self, location_id: int, bucket: TableBucket, record: BucketRecord
    ) -> Iterable[LiveGroup]:
        manifest = record.manifest
        if manifest is not None:
            documents = int(manifest.location_id == location_id)
            used = manifest.usage.get(location_id, NOTHING).plus(Usage(documents, 0))
            if used.files:
                yield self._bucket_group(layout.LOG, bucket, used, manifest.path)
        documents = sum(s.metadata_location == location_id for s in record.snapshots)
        used = record.kv_usage.get(location_id, NOTHING).plus(Usage(documents, 0))
        if used.files:
            yield self._bucket_group(layout.KV, bucket, used, record.snapshots)

    def _bucket_group(
        self, kind: str, bucket: TableBucket, used: Usage, version: Hashable
    ) -> LiveGroup:
        directory = bucket_directory(self._image, kind, bucket)
        table = self._image.table_by_id(bucket.table_id)
        assert table is not None, "a bucket with a directory has a table"
        partition_id = bucket.partition_id
        partition = None if partition_id is None else self._image.partition_by_id(partition_id)
        owner = PhysicalTablePath(*table.info.path, None if partition is None else partition.name)
        number = -1 if partition_id is None else partition_id
        key = f"{kind}/{bucket.table_id:020d}/{number:020d}/{bucket.bucket_id:010d}"
        return LiveGroup(key, kind, owner, bucket, (directory,), used, version)

    def _of_lakes(self, location_id: int) -> Iterable[LiveGroup]:
        first = self._registry.locations.first.location_id
        for entry in self._image.tables():
            files = self._lake_files(entry.info.table_id)
            paths = frozenset(f.path for f in files if (f.location_id or first) == location_id)
            if paths:
                owner = PhysicalTablePath(*entry.info.path)
                directory = layout.table_directory(
                    layout.LAKE, entry.info.path, entry.info.table_id
                )
                key = f"{layout.LAKE}/{entry.info.table_id:020d}"
                used = Usage(len(paths), 0)
                yield LiveGroup(key, layout.LAKE, owner, None, (directory,), used, paths)

    def _of_drops(self, location_id: int) -> Iterable[LiveGroup]:
        for note, drop in self._held.drops():
            used = self._held.usage_of(note)
            if used is not None and location_id not in used:
                continue
            here = NOTHING if used is None else used[location_id]
            below = tuple(directories(drop))
            yield LiveGroup(f"{DROPPED}/{note}", DROPPED, drop.owner, None, below, here, note)

    # -- reading ------------------------------------------------------------------------------

    def objects(self, location_id: int, uri: str | None) -> Objects:
        """The objects of a location, or of another address for it."""
        location = self._registry.locations.get(location_id)
        if uri is None:
            return self._storage.objects(location_id)
        return self._storage.objects_at(location, uri)

    async def read(self, group: LiveGroup, location_id: int, objects: Objects) -> GroupFiles:
        """Read the documents of a group; those in the location itself from `objects`."""
        try:
            if group.kind == layout.LOG:
                return await self._read_log(group, location_id, objects)
            if group.kind == layout.KV:
                return await self._read_kv(group, location_id, objects)
            if group.kind == layout.LAKE:
                assert isinstance(group.version, frozenset), "the paths of offsets files"
                return GroupFiles(group, dict.fromkeys(group.version))
            there = self._storage.objects(location_id)
            return GroupFiles(group, dict(await _listed(there, group.directories)))
        except ZuflussError as problem:
            ranges = self._log_range(group) if group.kind == layout.LOG else ()
            return GroupFiles(group, {}, ranges, problems=(FileProblem("", problem.message),))

    def _log_range(self, group: LiveGroup) -> tuple[tuple[int, int], ...]:
        """All remote offsets of a bucket, where its manifest cannot be read."""
        assert group.bucket is not None, "a log belongs to a bucket"
        record = self._remotes.get(group.bucket).manifest
        return () if record is None else ((record.start_offset, record.end_offset),)

    async def _read_log(self, group: LiveGroup, location_id: int, objects: Objects) -> GroupFiles:
        assert group.bucket is not None, "a log belongs to a bucket"
        record = self._remotes.get(group.bucket).manifest
        if record is None:
            return GroupFiles(group, {})
        where = record.location_id, record.path
        data = await self._document(*where, MANIFEST_BYTES_MAX, location_id, objects)
        manifest = await asyncio.to_thread(LogManifest.from_json, data)
        here = [s for s in manifest.segments if s.location_id == location_id]
        sizes = _sizes(file for segment in here for file in segment.files)
        if record.location_id == location_id:
            sizes[record.path] = None
        return GroupFiles(group, sizes, _merged((s.start_offset, s.end_offset) for s in here))

    async def _read_kv(self, group: LiveGroup, location_id: int, objects: Objects) -> GroupFiles:
        assert group.bucket is not None, "a snapshot belongs to a bucket"
        sizes: dict[str, int | None] = {}
        ids: list[int] = []
        problems: list[FileProblem] = []
        for handle in self._remotes.get(group.bucket).snapshots:
            try:
                snapshot = await self._snapshot(group.bucket, handle, location_id, objects)
            except ZuflussError as problem:
                problems.append(FileProblem(handle.metadata_path, problem.message))
                ids.append(handle.snapshot_id)
                continue
            here = _sizes(file for file in snapshot.objects if file.location_id == location_id)
            if handle.metadata_location == location_id:
                here[handle.metadata_path] = None
            ids += [handle.snapshot_id] if here else []
            sizes |= here
        return GroupFiles(group, sizes, (), tuple(ids), tuple(problems))

    async def _snapshot(
        self, bucket: TableBucket, handle: SnapshotHandle, location_id: int, objects: Objects
    ) -> KvSnapshot:
        if handle.metadata_location != location_id:
            return await self._snapshots.read(bucket, handle)
        data = await objects.get(handle.metadata_path, limit=METADATA_BYTES_MAX)
        return await asyncio.to_thread(KvSnapshot.from_json, data)

    async def _document(
        self, at: int, path: str, limit: int, location_id: int, objects: Objects
    ) -> bytes:
        if at == location_id:
            return await objects.get(path, limit=limit)
        return await self._storage.read_at(at, path, limit=limit)

    # -- checking -----------------------------------------------------------------------------

    async def check(self, group: LiveGroup, location_id: int, objects: Objects) -> GroupFiles:
        """Read a group and look for each of its files; problems name those not as they should be.

        Raises `LocationUnavailableError` if the location does not answer.
        """
        for _ in range(CHECKS_MAX):
            files = await self.read(group, location_id, objects)
            found = dict(await _listed(objects, group.directories))
            problems = [*files.problems, *_differences(files.sizes, found)]
            now = self._current(group, location_id)
            if now is None:
                return GroupFiles(group._replace(usage=NOTHING), {})
            if not problems or now.version == group.version:
                size = sum(found.get(path, 0) for path in files.sizes)
                used = Usage(len(files.sizes), size)
                return files._replace(group=group._replace(usage=used), problems=tuple(problems))
            group = now
        raise error(
            ErrorCode.STORAGE_EXCEPTION,
            f"the {group.kind} files of {group.bucket or group.owner} changed while they were "
            "checked; try again",
        )

    def _current(self, group: LiveGroup, location_id: int) -> LiveGroup | None:
        """The group as it is now; None if it has no files in the location any more."""
        if group.kind in (layout.LOG, layout.KV):
            assert group.bucket is not None, "such files belong to a bucket"
            if self._image.leader(group.bucket) is None:
                return None
            record = self._remotes.get(group.bucket)
            groups = self._of_bucket(location_id, group.bucket, record)
        elif group.kind == layout.LAKE:
            groups = self._of_lakes(location_id)
        else:
            groups = self._of_drops(location_id)
        return next((now for now in groups if now.key == group.key), None)

    async def check_some(
        self, groups: Sequence[LiveGroup], location_id: int, uri: str | None
    ) -> list[GroupFiles]:
        """Check groups, at the address `uri` if it is given; remembers those that are whole."""
        objects = self.objects(location_id, uri)
        checked: list[GroupFiles] = []
        for at in range(0, len(groups), GROUPS_AT_ONCE):
            some = groups[at : at + GROUPS_AT_ONCE]
            checked += await asyncio.gather(*(self.check(g, location_id, objects) for g in some))
        if uri is not None:
            known = self._known_copy(location_id, objects.uri.text)
            known |= {f.group.key: f.group.version for f in checked if not f.problems}
        return checked

    # -- copies -------------------------------------------------------------------------------

    def _known_copy(self, location_id: int, uri: str) -> dict[str, Hashable]:
        known = self._copies.setdefault((location_id, uri), {})
        self._copies.move_to_end((location_id, uri))
        while len(self._copies) > COPIES_KNOWN_MAX:
            self._copies.popitem(last=False)
        return known

    def unchecked(self, location_id: int, uri: str) -> list[LiveGroup]:
        """The groups of a location that were not found whole at an address; no I/O."""
        known = self._known_copy(location_id, self.objects(location_id, uri).uri.text)
        return [g for g in self.groups(location_id) if known.get(g.key) != g.version]

    async def check_copy(self, location_id: int, uri: str) -> None:
        """Raise `ConfigError` unless every live file of a location is at an address, too."""
        problems: list[tuple[LiveGroup, FileProblem]] = []
        try:
            for files in await self.check_some(self.unchecked(location_id, uri), location_id, uri):
                problems += [(files.group, problem) for problem in files.problems]
        except LocationUnavailableError as problem:
            raise ConfigError(
                f"the copy of location {location_id} at {uri}: {problem}"
            ) from problem
        if problems:
            named = "; ".join(
                f"{p.path or group.directories[0]} of {group.owner}: {p.reason}"
                for group, p in problems[:SHOWN_MAX]
            )
            more = f"; and {len(problems) - SHOWN_MAX} more" if len(problems) > SHOWN_MAX else ""
            raise ConfigError(
                f"location {location_id} cannot move to {uri}, nothing was changed: {len(problems)}"
                f" of its files are not there as they should be ({named}{more}); copy them, too"
            )


def _sizes(files: Iterable[RemoteFile]) -> dict[str, int | None]:
    return {file.path: file.size for file in files}


async def _listed(objects: Objects, below: Iterable[str]) -> list[tuple[str, int]]:
    return [
        (each.path, each.size)
        for directory in below
        async for page in objects.list(directory)
        for each in page
    ]


def _differences(expected: dict[str, int | None], found: dict[str, int]) -> list[FileProblem]:
    problems: list[FileProblem] = []
    for path, size in sorted(expected.items()):
        if path not in found:
            problems.append(FileProblem(path, "it is missing"))
        elif size not in (None, found[path]):
            problems.append(FileProblem(path, f"it has {found[path]} bytes instead of {size}"))
    return problems


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that follow each other."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return tuple(merged)
