"""Remote storage as a server uses it: files are placed in one of many locations and read back.

`upload` puts files that belong together into one location, chosen by weight and health. If that
location fails, all of them go to the next one, under the same paths. Files that the failed location
may have got already stay there until the sweep deletes them, because a request without an answer
may still be carried out. Only files of an upload that returned are referred to, so no file counts
in two locations.

Nothing is written or deleted in a location without the cluster's marker (`marker.py`). The marker
is read before the first request of the process, and by probes; in a directory before each write,
since a file system can be unmounted.

`start` runs the prober, without which a location that failed is not used again.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import structlog

from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.errors import ZuflussError
from zufluss.periodic import repeat
from zufluss.remote import marker
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectMissingError,
    RemoteStorageError,
)
from zufluss.remote.files import RemoteFile
from zufluss.remote.health import HealthReport, LocationHealths, best_pace
from zufluss.remote.layout import PROBE
from zufluss.remote.locations import Health, Location, Locations
from zufluss.remote.objects import Objects, checksum
from zufluss.remote.placement import Policy, Spread, StoredRoundRobin
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import FILE, parse_location
from zufluss.tasks import together

T = TypeVar("T")

log = structlog.get_logger("zufluss.remote")


SCALE: Final = 1000
"""Factor of weights, so that adaptive ones, which are fractions, become whole numbers."""

PROBE_BYTES: Final = 64
PROBES_LEFT_MAX: Final = 1000
"""Objects of failed probes that are remembered, for the next successful probe to delete."""


class Upload(NamedTuple):
    """A file to be uploaded."""

    path: str
    """Path below the root of the location."""
    source: Path | bytes
    """A local file, or the content."""


class NoLocationError(LocationUnavailableError):
    """No location took the files; try the upload again later."""


class _PassedOverError(LocationUnavailableError):
    """A location is skipped during an upload, without a failure of its own."""


@dataclass(slots=True)
class _UploadCount:
    files: int = 0
    bytes: int = 0


class _OpenLocation(NamedTuple):
    uri: str
    objects: Objects
    sending: asyncio.Semaphore
    """Limits uploads of this location; one that hangs does not delay those of others."""
    leftovers: deque[str]
    """Paths that failed probes may have written."""


class RemoteStorage:
    """All locations of a cluster, used by one event loop."""

    def __init__(
        self,
        conf: Configuration,
        locations: Locations,
        *,
        state_file: Path | None,
        cluster_id: str | None = None,
        claim: Callable[[int], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`claim` marks a location during a probe; without it, probes only read the marker."""
        self.cluster_id = cluster_id
        """Id of the cluster; None before a server has joined: no markers are required then."""
        self.locations = locations.resolved(conf)
        self._conf = conf
        self._claim = claim
        self._clock = clock
        self._picker = StoredRoundRobin(state_file)
        self._open_locations: dict[int, _OpenLocation] = {}
        self._wal_objects: dict[int, tuple[str, Objects]] = {}
        """The objects of `wal_objects` and the addresses they were opened for."""
        self._marked: set[int] = set()
        """Locations whose marker was seen."""
        self._healths = LocationHealths(conf, clock)
        self._uploads: defaultdict[int, _UploadCount] = defaultdict(_UploadCount)
        self._prober: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._probing: set[int] = set()

    # -- Locations ----------------------------------------------------------------------------

    def update(self, locations: Locations) -> None:
        """Take over a registry unless it is older: registries may arrive out of order."""
        if locations.version <= self.locations.version:
            return
        before = {x.location_id: x.uri for x in self.locations.locations}
        self.locations = locations.resolved(self._conf)
        for location in self.locations.locations:
            if before.get(location.location_id) != location.uri:
                self._open_locations.pop(location.location_id, None)
                self._marked.discard(location.location_id)
                self._healths.forget(location.location_id)
        self._picker.keep(x.location_id for x in self.locations.live)

    def objects(self, location_id: int) -> Objects:
        """Return the objects of a location, which may be retired."""
        return self._open(location_id).objects

    def wal_objects(self, location_id: int) -> Objects:
        """Return the objects of a location as the shared log uses them.

        Their requests have connections and threads of their own: acknowledgements wait for them,
        and uploads may take long. S3 requests are signed without a digest of their bodies, because
        all that the shared log writes has checksums.
        """
        location = self.locations.get(location_id)
        uri, objects = self._wal_objects.get(location_id, ("", None))
        if objects is None or uri != location.uri:
            objects = self._objects_at(location, sign_payload=False)
            self._wal_objects[location_id] = location.uri, objects
        return objects

    def _open(self, location_id: int) -> _OpenLocation:
        location = self.locations.get(location_id)
        opened = self._open_locations.get(location_id)
        if opened is None or opened.uri != location.uri:
            opened = self._open_locations[location_id] = self._opened(location)
        return opened

    def _opened(self, location: Location) -> _OpenLocation:
        return _OpenLocation(
            location.uri,
            self._objects_at(location),
            asyncio.Semaphore(self._conf[o.REMOTE_LOG_DATA_TRANSFER_THREAD_NUM]),
            deque(maxlen=PROBES_LEFT_MAX),
        )

    def _objects_at(self, location: Location, *, sign_payload: bool = True) -> Objects:
        uri = parse_location(location.uri, f"location {location.location_id}")
        timeout_ms = self._conf[o.ZUFLUSS_REMOTE_REQUEST_TIMEOUT]
        properties = store_properties(self._conf, uri)
        return Objects(uri, properties, timeout_ms=timeout_ms, sign_payload=sign_payload)

    def objects_at(self, location: Location, address: str) -> Objects:
        """Return the objects at another address of a location, such as a copy of its files."""
        return self._objects_at(replace(location, uri=address))

    def uri(self, location_id: int) -> str:
        """Return the address of a location."""
        return self.locations.get(location_id).uri

    def full_path(self, file: RemoteFile) -> str:
        """Return the address of a file for clients."""
        return self.objects(file.location_id).full_path(file.path)

    # -- Markers ------------------------------------------------------------------------------

    async def settle(self, location: Location) -> None:
        """Check the marker of a location, or write it if the location was never marked.

        The location need not be in the registry yet.
        """
        if self.cluster_id is not None:
            settle = marker.check if location.marked else marker.claim
            await settle(self._objects_at(location), self.cluster_id)

    async def try_out(self, location: Location) -> None:
        """Settle a location, then write, read and delete a small object there.

        The location need not be in the registry yet.
        """
        await self.settle(location)
        await self._write_and_read(self._opened(location))

    async def check(self, location_id: int) -> None:
        """Read the marker of a location; raises `NotOursError` unless it is this cluster's."""
        with self._healths.observed(location_id):
            await self._check_marker(location_id)

    async def _check_marker(self, location_id: int) -> None:
        if self.cluster_id is not None:
            self._marked.discard(location_id)
            await marker.check(self.objects(location_id), self.cluster_id)
            self._marked.add(location_id)

    async def ensure_marked(self, location_id: int) -> None:
        """Raise `NotOursError` unless a location is this cluster's, before something is written.

        A directory is looked at each time, since a file system can be unmounted.
        """
        is_directory = self.objects(location_id).uri.scheme == FILE
        if is_directory or location_id not in self._marked:
            await self._check_marker(location_id)

    # -- Uploads ------------------------------------------------------------------------------

    async def upload(
        self, units: Sequence[Upload], policy: Policy, home: int | None = None
    ) -> list[RemoteFile]:
        """Upload files that belong together to one location, and return where they are.

        `home` is the location of a table whose policy keeps its files together. Raises
        `NoLocationError` if no location takes the files.
        """
        failures: dict[int, LocationUnavailableError] = {}
        while True:
            location_id = self._pick(policy, home, failures)
            if location_id is None:
                raise self._no_location(policy, failures)
            try:
                files = await self._upload_to(location_id, units)
            except LocationUnavailableError as error:
                failures[location_id] = error
                if not isinstance(error, _PassedOverError):
                    self._healths.failed(location_id, error)
                log.warning("upload_failed_over", location=location_id, error=error.message)
            else:
                self._picker.mark()
                await asyncio.to_thread(self._picker.save)
                return files

    async def _upload_to(self, location_id: int, units: Sequence[Upload]) -> list[RemoteFile]:
        await self.ensure_marked(location_id)
        opened = self._open(location_id)
        sent = await together(self._send(location_id, opened, x) for x in units)
        location = self.locations.get(location_id)
        if location.uri != opened.uri or location.is_gone:
            raise _PassedOverError(
                opened.uri, "", "the location was moved or retired during the upload"
            )
        uploads, health = self._uploads[location_id], self._healths.of(location_id)
        for size, _, latency_ms in sent:
            uploads.files += 1
            uploads.bytes += size
            health.succeeded(latency_ms, size)
        return [
            RemoteFile(location_id, unit.path, size, checksum)
            for unit, (size, checksum, _) in zip(units, sent, strict=True)
        ]

    async def _send(
        self, location_id: int, to: _OpenLocation, unit: Upload
    ) -> tuple[int, int, float]:
        async with to.sending:
            if self.health(location_id) is Health.DOWN:
                raise _PassedOverError(
                    to.uri, unit.path, "the location went down while the upload waited"
                )
            begun = self._clock()
            if isinstance(unit.source, Path):
                size, checksum = await to.objects.put_file(unit.path, unit.source)
            else:
                size = len(unit.source)
                checksum = await to.objects.put(unit.path, unit.source)
            return size, checksum, 1000 * (self._clock() - begun)

    def _pick(self, policy: Policy, home: int | None, tried: Iterable[int]) -> int | None:
        """Return the location for new files, an ACTIVE one if possible; None if none is left."""
        usable = {
            x.location_id: self._healths.of(x.location_id).state
            for x in self.locations.locations
            if x.takes_files and policy.allows(x.location_id) and x.location_id not in tried
        }
        at_home = home is not None and usable.get(home, Health.DOWN) is not Health.DOWN
        if at_home and policy.spread is Spread.PARTITION:
            return home
        for state in (Health.ACTIVE, Health.SUSPECT):
            weights = self._weights([x for x, seen in usable.items() if seen is state])
            if weights:
                return self._picker.pick(weights)
        return None

    def _weights(self, location_ids: Sequence[int]) -> dict[int, int]:
        best = best_pace(map(self._healths.of, location_ids))
        return {x: max(1, round(SCALE * self._effective_weight(x, best))) for x in location_ids}

    def _effective_weight(self, location_id: int, best: float | None) -> float:
        location = self.locations.get(location_id)
        if not location.takes_files:
            return 0.0
        adaptive = self.locations.adaptive
        return location.weight * (self._healths.of(location_id).factor(best) if adaptive else 1.0)

    def _no_location(
        self, policy: Policy, failures: dict[int, LocationUnavailableError]
    ) -> NoLocationError:
        reasons = [self._why_not(x, policy, failures) for x in self.locations.live]
        return NoLocationError(
            "remote storage",
            "",
            f"no location took the files ({'; '.join(reasons)}); try again later",
        )

    def _why_not(
        self, location: Location, policy: Policy, failures: dict[int, LocationUnavailableError]
    ) -> str:
        health = self._healths.of(location.location_id)
        error = failures.get(location.location_id)
        if error is not None:
            return f"{location.location_id} failed: {error.message}"
        if not policy.allows(location.location_id):
            return f"{location.location_id} is not in {policy}"
        if not location.takes_files:
            return f"{location.location_id} is {location.state.name}, weight {location.weight}"
        return f"{location.location_id} is {health.state.name}: {health.last_error}"

    # -- Reads and deletes --------------------------------------------------------------------

    async def sure(self, location_id: int, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` returns; `ObjectMissingError` only from a location that is there.

        A directory whose file system was unmounted has nothing, and what it had is not lost.
        """
        try:
            return await read()
        except ObjectMissingError:
            await self.ensure_marked(location_id)
            return await read()

    async def read(self, file: RemoteFile, *, limit: int) -> bytes:
        """Return the checked bytes of a file of at most `limit` bytes."""
        objects = self.objects(file.location_id)
        with self._healths.observed(file.location_id):
            data = await self.sure(file.location_id, lambda: objects.get(file.path, limit=limit))
        self._check(file, len(data), await checksum(data))
        return data

    async def read_at(self, location_id: int, path: str, *, limit: int) -> bytes:
        """Return the bytes of an object whose checksum is unknown."""
        objects = self.objects(location_id)
        with self._healths.observed(location_id):
            return await self.sure(location_id, lambda: objects.get(path, limit=limit))

    async def download(self, file: RemoteFile, target: Path) -> None:
        """Download a file to `target`, whole and checked, or not at all."""
        partial = target.with_name(f"{target.name}.{uuid.uuid4()}.partial")
        objects = self.objects(file.location_id)
        try:
            with self._healths.observed(file.location_id):
                size, checksum = await self.sure(
                    file.location_id, lambda: objects.get_file(file.path, partial)
                )
            self._check(file, size, checksum)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    async def delete(self, files: Iterable[RemoteFile]) -> None:
        """Delete files in all their locations; missing files are ignored.

        All locations are tried before the first failure is raised.
        """
        paths: defaultdict[int, list[str]] = defaultdict(list)
        for file in files:
            paths[file.location_id].append(file.path)
        outcomes = await asyncio.gather(
            *(self._delete(location_id, names) for location_id, names in paths.items()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _delete(self, location_id: int, paths: Sequence[str]) -> None:
        with self._healths.observed(location_id):
            await self.ensure_marked(location_id)
            await self.objects(location_id).delete(paths)

    def _check(self, file: RemoteFile, size: int, checksum: int) -> None:
        if (size, checksum) != (file.size, file.crc32c):
            raise ObjectCorruptError(
                self.uri(file.location_id),
                file.path,
                f"{size} bytes with checksum {checksum:08x}, not the {file.size} bytes with "
                f"{file.crc32c:08x} that were written",
            )

    # -- Health -------------------------------------------------------------------------------

    def health(self, location_id: int) -> Health:
        """Return the health of a location, as this process sees it."""
        return self._healths.of(location_id).state

    def failed(self, location_id: int, error: LocationUnavailableError) -> None:
        """Count a failure of a location that another part of the server saw."""
        self._healths.failed(location_id, error)

    def reports(self) -> list[HealthReport]:
        """Return a report of each location that is not retired."""
        used = [x.location_id for x in self.locations.live if x.takes_files]
        best = best_pace(x for x in map(self._healths.of, used) if x.state is Health.ACTIVE)
        return [self._report(x.location_id, best) for x in self.locations.live]

    async def probe(self, location_id: int) -> float:
        """Write, read and delete a small object; return the milliseconds that took."""
        begun = self._clock()
        try:
            with self._healths.observed(location_id):
                await self._probe(location_id)
        except RemoteStorageError:
            self._healths.probed(location_id, False)
            raise
        self._healths.probed(location_id, True)
        return 1000 * (self._clock() - begun)

    def start(self) -> None:
        """Start a task that probes failed locations until `stop`."""
        seconds = self._conf[o.ZUFLUSS_REMOTE_PROBE_INTERVAL] / 1000
        work = repeat(seconds, self._begin_probes, "location_probes_not_begun")
        self._prober = asyncio.get_running_loop().create_task(work)

    async def stop(self) -> None:
        """End the task of `start`, and the probes under way."""
        if self._prober is not None:
            tasks = [self._prober, *self._probes]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._prober = None

    async def probe_due(self) -> None:
        """Probe the locations whose probe is due."""
        await asyncio.gather(*map(self._probe_quietly, self._due()))

    def _due(self) -> list[int]:
        ids = [x.location_id for x in self.locations.live]
        return [x for x in ids if x not in self._probing and self._healths.probe_due(x)]

    def _begin_probes(self) -> None:
        """Probe due locations concurrently: one that hangs does not delay others."""
        for location_id in self._due():
            probe = asyncio.get_running_loop().create_task(self._probe_quietly(location_id))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _probe_quietly(self, location_id: int) -> None:
        self._probing.add(location_id)
        try:
            await self.probe(location_id)
        except ZuflussError as error:
            log.info("location_probe_failed", location=location_id, error=error.message)
        except Exception:
            log.exception("location_probe_failed", location=location_id)
        finally:
            self._probing.discard(location_id)

    async def _probe(self, location_id: int) -> None:
        if self._claim is not None:
            await self._claim(location_id)
        await self._check_marker(location_id)
        await self._write_and_read(self._open(location_id))

    async def _write_and_read(self, at: _OpenLocation) -> None:
        path, data = f"{PROBE}/{uuid.uuid4()}", os.urandom(PROBE_BYTES)
        garbage = [path, *at.leftovers]
        at.leftovers.clear()
        try:
            await at.objects.put(path, data)
            answer = await at.objects.get(path, limit=PROBE_BYTES)
            await at.objects.delete(garbage)
        except BaseException:
            at.leftovers.extend(garbage)
            raise
        if answer != data:
            raise ObjectCorruptError(at.uri, path, "a probe read other bytes than it wrote")

    def _report(self, location_id: int, best: float | None) -> HealthReport:
        health, uploads = self._healths.of(location_id), self._uploads[location_id]
        down = health.state is Health.DOWN
        return HealthReport(
            location_id,
            health.state,
            uploads.files,
            uploads.bytes,
            health.errors,
            health.latency_ms,
            0.0 if down else self._effective_weight(location_id, best),
            health.last_error,
        )
