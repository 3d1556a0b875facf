"""Remote storage as a server uses it: many locations, one place to put a file and to get it back.

`upload` puts files that belong together into one location, chosen by weight and health. If that
fails, the next one gets them all, under the same names; what the failed one may already have is
left there and deleted by nobody but the sweep, because a request without an answer may still
arrive. Only files of an upload that returned are referred to, so there is never a file in two
places that both count.

Where the round-robin is, is written beside the server's data after every upload, so that restarts
change no shares. That file is not synced: after a power failure a few files go to another location
than they would have, which harms nobody.

Nothing is written or deleted in a location that does not carry the cluster's marker (`marker.py`).
It is read before the first request of the process, and again by probes; in a directory each time,
since a file system can be taken away.

`start` runs the prober, without which a location that failed is not used again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.errors import CorruptRecordError, ZuflussError
from zufluss.remote import marker
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    RemoteStorageError,
)
from zufluss.remote.files import RemoteFile
from zufluss.remote.health import LocationHealth, LocationReport, best_pace
from zufluss.remote.layout import PROBE
from zufluss.remote.locations import AdminState, Health, Location, Locations
from zufluss.remote.objects import Objects, checksum
from zufluss.remote.placement import Policy, SmoothRoundRobin, Spread
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import FILE, parse_location

log = structlog.get_logger("zufluss.remote")

T = TypeVar("T")

STATE_FILE: Final = Path(".remote") / "placement.json"
"""Where the round-robin is, below a server's data directory."""

SCALE: Final = 1000
"""Weights are multiplied by this before adaptive ones take their part, so that it is whole."""

PROBE_BYTES: Final = 64
PROBES_LEFT_MAX: Final = 1000
"""Objects of failed probes that are remembered, to be deleted by the next good one."""


class Upload(NamedTuple):
    """A file to be put into remote storage."""

    path: str
    """Its path below the root of whichever location it gets."""
    source: Path | bytes
    """A local file, or the content."""


class NoLocationError(LocationUnavailableError):
    """No location took the files; the upload is to be tried again later."""


class _PassedOverError(LocationUnavailableError):
    """A location is not to get the files after all; nothing that counts against it."""


@dataclass(slots=True)
class _Placed:
    files: int = 0
    bytes: int = 0


class _Opened(NamedTuple):
    uri: str
    objects: Objects
    sending: asyncio.Semaphore
    """Of the location's own, so that one that hangs does not keep files from the others."""
    leftovers: deque[str]
    """What probes that failed may have left there."""


class RemoteStorage:
    """All locations of a cluster, as one process sees them; one event loop uses it."""

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
        """`claim` is how a probe settles whose a location is; without it probes only look."""
        self.cluster_id = cluster_id
        """Whose locations these are; None asks for no markers, before a server has joined."""
        self.locations = locations.resolved(conf)
        self._conf = conf
        self._claim = claim
        self._clock = clock
        self._state_file = state_file
        self._saving = threading.Lock()
        self._picker = _stored(state_file)
        self._state = self._picker.to_json()
        """What `_save` writes, made where nobody picks meanwhile."""
        self._opened: dict[int, _Opened] = {}
        self._ours: set[int] = set()
        """Locations whose marker was seen."""
        self._health: dict[int, LocationHealth] = {}
        self._placed: defaultdict[int, _Placed] = defaultdict(_Placed)
        self._prober: asyncio.Task[None] | None = None
        self._probing: set[int] = set()

    # -- Locations ----------------------------------------------------------------------------

    def update(self, locations: Locations) -> None:
        """Take over a newer registry; an older one is ignored, since orders may overtake."""
        if locations.version <= self.locations.version:
            return
        before = {x.location_id: x.uri for x in self.locations.locations}
        self.locations = locations.resolved(self._conf)
        for location in self.locations.locations:
            if before.get(location.location_id) != location.uri:
                self._opened.pop(location.location_id, None)
                self._ours.discard(location.location_id)
                self._health.pop(location.location_id, None)
        self._picker.keep(x.location_id for x in self.locations.live)

    def objects(self, location_id: int) -> Objects:
        """The objects of a location; retired ones can be read, too."""
        return self._open(location_id).objects

    def _open(self, location_id: int) -> _Opened:
        location = self.locations.get(location_id)
        opened = self._opened.get(location_id)
        if opened is None or opened.uri != location.uri:
            opened = self._opened[location_id] = _Opened(
                location.uri,
                self._objects_at(location),
                asyncio.Semaphore(self._conf[o.REMOTE_LOG_DATA_TRANSFER_THREAD_NUM]),
                deque(maxlen=PROBES_LEFT_MAX),
            )
        return opened

    def _objects_at(self, location: Location) -> Objects:
        uri = parse_location(location.uri, f"location {location.location_id}")
        timeout_ms = self._conf[o.ZUFLUSS_REMOTE_REQUEST_TIMEOUT]
        return Objects(uri, store_properties(self._conf, uri), timeout_ms=timeout_ms)

    def uri(self, location_id: int) -> str:
        """The address of a location."""
        return self.locations.get(location_id).uri

    def full_path(self, file: RemoteFile) -> str:
        """The address of a file, as clients get it."""
        return self.objects(file.location_id).full_path(file.path)

    # -- Markers ------------------------------------------------------------------------------

    async def settle(self, location: Location) -> None:
        """See whose a location is, and mark it if it never was; it may be one to be added."""
        if self.cluster_id is not None:
            settle = marker.check if location.marked else marker.claim
            await settle(self._objects_at(location), self.cluster_id)

    async def check(self, location_id: int) -> None:
        """Read the marker of a location now; `NotOursError` unless it is this cluster's."""
        with self._observed(location_id):
            await self._check_marker(location_id)

    async def _check_marker(self, location_id: int) -> None:
        if self.cluster_id is not None:
            self._ours.discard(location_id)
            await marker.check(self.objects(location_id), self.cluster_id)
            self._ours.add(location_id)

    async def _ensure_ours(self, location_id: int) -> None:
        is_directory = self.objects(location_id).uri.scheme == FILE
        if is_directory or location_id not in self._ours:
            await self._check_marker(location_id)

    # -- Uploads ------------------------------------------------------------------------------

    async def upload(
        self, units: Sequence[Upload], policy: Policy, home: int | None = None
    ) -> list[RemoteFile]:
        """Put files that belong together into one location, and say where they are.

        `home` is where the files of a table go whose policy keeps them together.
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
                    self.failed(location_id, error)
                log.warning("upload_failed_over", location=location_id, error=error.message)
            else:
                self._state = self._picker.to_json()
                await asyncio.to_thread(self._save)
                return files

    async def _upload_to(self, location_id: int, units: Sequence[Upload]) -> list[RemoteFile]:
        await self._ensure_ours(location_id)
        opened = self._open(location_id)
        sent = await _all_or_first_error([self._send(location_id, opened, x) for x in units])
        location = self.locations.get(location_id)
        if location.uri != opened.uri or location.state is AdminState.RETIRED:
            raise _PassedOverError(opened.uri, "", "it was moved or retired during the upload")
        placed, health = self._placed[location_id], self._health_of(location_id)
        for size, _, latency_ms in sent:
            placed.files += 1
            placed.bytes += size
            health.succeeded(latency_ms, size)
        return [
            RemoteFile(location_id, unit.path, size, checksum)
            for unit, (size, checksum, _) in zip(units, sent, strict=True)
        ]

    async def _send(self, location_id: int, to: _Opened, unit: Upload) -> tuple[int, int, float]:
        async with to.sending:
            if self.health(location_id) is Health.DOWN:
                raise _PassedOverError(to.uri, unit.path, "it went down while this waited")
            begun = self._clock()
            if isinstance(unit.source, Path):
                size, checksum = await to.objects.put_file(unit.path, unit.source)
            else:
                size = len(unit.source)
                checksum = await to.objects.put(unit.path, unit.source)
            return size, checksum, 1000 * (self._clock() - begun)

    def _pick(self, policy: Policy, home: int | None, tried: Iterable[int]) -> int | None:
        """The location for new files, the healthiest ones first; None if there is none left."""
        usable = {
            x.location_id: self._health_of(x.location_id).state
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
        best = best_pace(map(self._health_of, location_ids))
        return {x: max(1, round(SCALE * self._effective_weight(x, best))) for x in location_ids}

    def _effective_weight(self, location_id: int, best: float | None) -> float:
        location = self.locations.get(location_id)
        if not location.takes_files:
            return 0.0
        adaptive = self.locations.adaptive
        return location.weight * (self._health_of(location_id).factor(best) if adaptive else 1.0)

    def _no_location(
        self, policy: Policy, failures: dict[int, LocationUnavailableError]
    ) -> NoLocationError:
        seen = [self._why_not(x, policy, failures) for x in self.locations.live]
        return NoLocationError(
            "remote storage", "", f"no location took the files ({'; '.join(seen)}); try again later"
        )

    def _why_not(
        self, location: Location, policy: Policy, failures: dict[int, LocationUnavailableError]
    ) -> str:
        health = self._health_of(location.location_id)
        error = failures.get(location.location_id)
        if error is not None:
            return f"{location.location_id} failed: {error.message}"
        if not policy.allows(location.location_id):
            return f"{location.location_id} is not in {policy}"
        if not location.takes_files:
            return f"{location.location_id} is {location.state.name}, weight {location.weight}"
        return f"{location.location_id} is {health.state.name}: {health.last_error}"

    def _save(self) -> None:
        """Write where the round-robin is; a failure costs an even spread, never an upload."""
        if self._state_file is None:
            return
        with self._saving:
            try:
                self._state_file.parent.mkdir(parents=True, exist_ok=True)
                partial = self._state_file.with_suffix(".partial")
                partial.write_bytes(self._state)
                partial.replace(self._state_file)
            except OSError as error:
                log.warning("placement_not_saved", file=str(self._state_file), error=str(error))

    # -- Reads and deletes --------------------------------------------------------------------

    async def read(self, file: RemoteFile, *, limit: int) -> bytes:
        """The bytes of a file, checked; `limit` is the largest that is read."""
        objects = self.objects(file.location_id)
        with self._observed(file.location_id):
            data = await objects.get(file.path, limit=limit)
        self._check(file, len(data), await checksum(data))
        return data

    async def read_at(self, location_id: int, path: str, *, limit: int) -> bytes:
        """The bytes of a document whose checksum nobody knows."""
        objects = self.objects(location_id)
        with self._observed(location_id):
            return await objects.get(path, limit=limit)

    async def download(self, file: RemoteFile, target: Path) -> None:
        """Write a file to `target`, whole and checked, or not at all."""
        partial = target.with_name(f"{target.name}.{uuid.uuid4()}.partial")
        objects = self.objects(file.location_id)
        try:
            with self._observed(file.location_id):
                size, checksum = await objects.get_file(file.path, partial)
            self._check(file, size, checksum)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    async def delete(self, files: Iterable[RemoteFile]) -> None:
        """Delete files in all their locations; those that are gone are fine.

        Every location is tried before the first failure is raised.
        """
        paths: defaultdict[int, list[str]] = defaultdict(list)
        for file in files:
            paths[file.location_id].append(file.path)
        outcomes = await asyncio.gather(
            *(self._delete(x, found) for x, found in paths.items()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _delete(self, location_id: int, paths: Sequence[str]) -> None:
        with self._observed(location_id):
            await self._ensure_ours(location_id)
            await self.objects(location_id).delete(paths)

    @contextmanager
    def _observed(self, location_id: int) -> Iterator[None]:
        """For a request: a failure of the location counts for its health."""
        try:
            yield
        except LocationUnavailableError as error:
            self.failed(location_id, error)
            raise

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
        """Whether a location works, as far as this process saw."""
        return self._health_of(location_id).state

    def reports(self) -> list[LocationReport]:
        """What this process saw of each location that is not retired."""
        used = [x.location_id for x in self.locations.live if x.takes_files]
        best = best_pace(x for x in map(self._health_of, used) if x.state is Health.ACTIVE)
        return [self._report(x.location_id, best) for x in self.locations.live]

    async def probe(self, location_id: int) -> float:
        """Write, read and delete a small object, now; milliseconds, or the error."""
        health = self._health_of(location_id)
        begun = self._clock()
        try:
            with self._observed(location_id):
                await self._probe(location_id)
        except RemoteStorageError:
            health.probed(False, self._now())
            raise
        before = health.state
        health.probed(True, self._now())
        self._log_change(location_id, before, None)
        return 1000 * (self._clock() - begun)

    def start(self) -> None:
        """Probe locations that failed, until `stop`."""
        self._prober = asyncio.get_running_loop().create_task(self._probe_again_and_again())

    async def stop(self) -> None:
        """End the prober."""
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
            self._prober = None

    async def probe_due(self) -> None:
        """Probe the locations whose time has come."""
        await asyncio.gather(*map(self._probe_quietly, self._due()))

    def _due(self) -> list[int]:
        now, ids = self._now(), [x.location_id for x in self.locations.live]
        return [x for x in ids if x not in self._probing and self._health_of(x).probe_due(now)]

    async def _probe_again_and_again(self) -> None:
        """Each location by itself: one that hangs does not delay the return of others."""
        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(self._conf[o.ZUFLUSS_REMOTE_PROBE_INTERVAL] / 1000)
                for location_id in self._due():
                    probes.create_task(self._probe_quietly(location_id))

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

    async def _write_and_read(self, at: _Opened) -> None:
        path, data = f"{PROBE}/{uuid.uuid4()}", os.urandom(PROBE_BYTES)
        garbage = [path, *at.leftovers]
        at.leftovers.clear()
        try:
            await at.objects.put(path, data)
            found = await at.objects.get(path, limit=PROBE_BYTES)
            await at.objects.delete(garbage)
        except BaseException:
            at.leftovers.extend(garbage)
            raise
        if found != data:
            raise ObjectCorruptError(at.uri, path, "a probe came back changed")

    def _health_of(self, location_id: int) -> LocationHealth:
        found = self._health.get(location_id)
        if found is None:
            found = self._health[location_id] = LocationHealth(
                down_after=self._conf[o.ZUFLUSS_REMOTE_DOWN_AFTER],
                probe_interval_ms=self._conf[o.ZUFLUSS_REMOTE_PROBE_INTERVAL],
            )
        return found

    def failed(self, location_id: int, error: LocationUnavailableError) -> None:
        """Count a failure of a location for its health."""
        health = self._health_of(location_id)
        before = health.state
        health.failed(error, self._now())
        self._log_change(location_id, before, error)

    def _log_change(
        self, location_id: int, before: Health, error: LocationUnavailableError | None
    ) -> None:
        state = self._health_of(location_id).state
        if state is not before:
            reason = None if error is None else error.message
            log.warning("location_health", location=location_id, state=state.name, error=reason)

    def _report(self, location_id: int, best: float | None) -> LocationReport:
        health, placed = self._health_of(location_id), self._placed[location_id]
        down = health.state is Health.DOWN
        return LocationReport(
            location_id,
            health.state,
            placed.files,
            placed.bytes,
            health.errors,
            health.latency_ms,
            0.0 if down else self._effective_weight(location_id, best),
            health.last_error,
        )

    def _now(self) -> float:
        return 1000 * self._clock()


async def _all_or_first_error(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers; after the first failure the others are ended before it is raised."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _stored(state_file: Path | None) -> SmoothRoundRobin:
    """Where the round-robin was; a damaged file costs an even spread, not the start."""
    if state_file is None or not state_file.exists():
        return SmoothRoundRobin()
    try:
        return SmoothRoundRobin.from_json(state_file.read_bytes())
    except (CorruptRecordError, OSError) as error:
        log.warning("placement_lost", file=str(state_file), error=str(error))
        return SmoothRoundRobin()
