"""The registry of remote locations in the metadata store, and the configuration that changes it.

The only code that knows these paths:

| path | value |
|---|---|
| `/remote/locations` | the registry (`remote/locations.py`), replaced only at the version that was read |
| `/remote/placement` | the position of the round-robin that chooses the location of new tables and partitions |
| `/configs/cluster` | JSON, key to text: options that were changed while the cluster ran, over the servers' own |

A change is one transaction: the options and the registry that follows from them become durable
together. Then this process and every tablet server use them. Changes are made between two changes
of the catalog (`Catalog.exclusive`), so a table that is being created gets its location either from
the old registry or from the new one.

A location gets the marker of the cluster (`remote/marker.py`) before it is in the registry. A
change that would activate a location, or give it another address, is refused unless the location
works: a small object is written, read and deleted there. Only a start accepts a location that does
not answer: it is marked later, by the first successful probe, and gets no files until then.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.remote import home
from zufluss.config.load import Configuration, LiveConfiguration, with_dynamic
from zufluss.config.options import DATA_DIR
from zufluss.config.table_options import TABLE_ZUFLUSS_REMOTE_PLACEMENT
from zufluss.config.without_effect import OPTIONS_WITHOUT_EFFECT
from zufluss.coordinator import records
from zufluss.coordinator.configs import ConfigChange, changed_configs
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ConfigError
from zufluss.meta.api import Create, MetaStore, Op, Put
from zufluss.model.schema import dump_object
from zufluss.model.table import TableDescriptor, TableInfo
from zufluss.remote.errors import LocationUnavailableError, RemoteStorageError
from zufluss.remote.files import Usage, summed
from zufluss.remote.health import HealthReport
from zufluss.remote.layout import CLUSTER, LAKE
from zufluss.remote.locations import (
    IMPLICIT_NAME,
    AdminState,
    AlterOp,
    Health,
    Location,
    Locations,
    ids_text,
)
from zufluss.remote.placement import STATE_FILE, Policy, SmoothRoundRobin, parse_policy
from zufluss.remote.registry import alter, reconcile
from zufluss.remote.storage import RemoteStorage
from zufluss.remote.uri import parse_location

log = structlog.get_logger(__name__)

LOCATIONS_PATH: Final = "/remote/locations"
PLACEMENT_PATH: Final = "/remote/placement"
CONFIGS_PATH: Final = "/configs/cluster"

NO_LOCATIONS: Final = Locations(0, (), explicit=False)
"""The registry before the first start."""

SETTLE_SECONDS: Final = 5.0
"""How long a start or a change waits for the marker of a location."""

LiveUsage = Callable[[int | None], Mapping[int, Usage]]
"""Files and bytes that something refers to, by location. The argument is the location of files that
are older than the registry, None if there is none."""


@dataclass(frozen=True, slots=True)
class Home:
    """The location that was chosen for a new table or partition."""

    location_id: int
    """The id of the location."""
    ops: tuple[Op, ...]
    """Operations for the transaction that creates the table or partition."""
    take: Callable[[], None]
    """Call it when that transaction is durable."""


class _StoredRegistry(NamedTuple):
    """The state of the registry as the metadata store has it."""

    dynamic: dict[str, str]
    """Options that were changed while the cluster ran."""
    placement: SmoothRoundRobin
    """The position of the round-robin for new tables and partitions."""
    locations: Locations
    """The registry; `NO_LOCATIONS` before the first start."""
    versions: dict[str, int]
    """The versions of the paths that have a value."""


class LocationRegistry:
    """Remote locations, durable. Open it with `LocationRegistry.open`."""

    def __init__(
        self,
        store: MetaStore,
        ledger: Ledger,
        conf: LiveConfiguration,
        stored: _StoredRegistry,
        configured: Locations,
        *,
        live_usage: LiveUsage,
        has_uncounted: Callable[[], bool],
        on_change: Callable[[Locations], Awaitable[None]],
        on_configs: Callable[[DynamicConfigs], Awaitable[None]],
        turn: asyncio.Lock,
    ) -> None:
        conf.change(stored.dynamic)
        self.conf = conf
        """The configuration in force, with what was changed while the cluster ran."""
        self.dynamic = stored.dynamic
        """Options that were changed while the cluster ran."""
        self.configs_for_tablets = _for_tablets(stored.versions, stored.dynamic)
        """These options as tablet servers get them."""
        self.turn = turn
        """Held while the registry is changed or a file in a location is committed."""
        self._store = store
        self._ledger = ledger
        self._static = conf.started_with
        self._live_usage = live_usage
        self._has_uncounted = has_uncounted
        self._on_change = on_change
        self._on_configs = on_configs
        self._reporters: dict[int, Callable[[], Sequence[HealthReport]]] = {}
        self._versions = stored.versions
        self._placement = stored.placement
        self._stored = stored.locations
        self.storage = RemoteStorage(
            self.conf,
            configured,
            state_file=Path(self.conf.get(DATA_DIR)) / STATE_FILE,
            cluster_id=ledger.cluster_id,
            claim=self.claim,
        )
        """The remote storage of this process."""

    @classmethod
    async def open(
        cls,
        store: MetaStore,
        ledger: Ledger,
        conf: LiveConfiguration,
        *,
        live_usage: LiveUsage,
        has_uncounted: Callable[[], bool],
        on_change: Callable[[Locations], Awaitable[None]],
        on_configs: Callable[[DynamicConfigs], Awaitable[None]],
        turn: asyncio.Lock,
    ) -> LocationRegistry:
        """Load the registry, and bring it up to the configuration.

        `ConfigError` for a configuration without a location that has files. `live_usage` counts the
        files; `has_uncounted` says whether files in use are not counted yet, so that they may be in
        any location. `on_change` gets every new version, with full addresses, `on_configs` the
        options that were changed in the running cluster.
        """
        stored = await _load(store, conf)
        now, before = with_dynamic(conf.started_with, stored.dynamic), stored.locations
        if before is NO_LOCATIONS:
            configured = reconcile(None, now, {})
        else:
            files = _files(_live(before, live_usage, has_uncounted))
            configured = reconcile(before, now, files)
        registry = cls(
            store,
            ledger,
            conf,
            stored,
            configured,
            live_usage=live_usage,
            has_uncounted=has_uncounted,
            on_change=on_change,
            on_configs=on_configs,
            turn=turn,
        )
        await registry._adopt(configured)
        return registry

    async def _adopt(self, configured: Locations) -> None:
        """Make the registry durable as it is configured, with the markers that were found."""
        after = configured.with_marks(await self._settled(configured), self.conf)
        if after is not self._stored or LOCATIONS_PATH not in self._versions:
            await self._commit(self._put(LOCATIONS_PATH, after.to_json()))
            log.info("locations_changed", version=after.version, locations=_shown(after))
        self._stored = after
        if PLACEMENT_PATH not in self._versions:
            await self._commit(self._put(PLACEMENT_PATH, self._placement.to_json()))

    @property
    def locations(self) -> Locations:
        """The registry, with full addresses."""
        return self._stored.resolved(self.conf)

    def live(self) -> dict[int, Usage]:
        """Files and bytes in use by location; one file for each if some were not counted."""
        return _live(self._stored, self._live_usage, self._has_uncounted)

    def live_files(self) -> dict[int, int]:
        """Number of files in use by location."""
        return _files(self.live())

    # Reports of servers

    def add_reports(self, server_id: int, reports: Callable[[], Sequence[HealthReport]]) -> None:
        """Ask `reports` from now on for what a server saw of the locations."""
        self._reporters[server_id] = reports

    def remove_reports(self, server_id: int) -> None:
        """Forget what a server saw of the locations."""
        self._reporters.pop(server_id, None)

    def reports(self, location_id: int) -> list[tuple[int, HealthReport]]:
        """What each server saw of a location, by server id."""
        return [
            (server_id, report)
            for server_id, reports in sorted(self._reporters.items())
            for report in reports()
            if report.location_id == location_id
        ]

    # Tables and partitions

    def uri(self, location_id: int | None) -> str:
        """The address of a table's or partition's location."""
        return self.home(location_id).uri

    def home(self, location_id: int | None) -> Location:
        """The location of a table or partition, see `cluster/remote.py`."""
        return home(self.locations, location_id)

    def check_placement(
        self, descriptor: TableDescriptor, before: TableDescriptor | None = None
    ) -> None:
        """`ConfigError` for a new placement that does not fit the present locations.

        A placement that the table had before may name locations that were retired since.
        """
        key = TABLE_ZUFLUSS_REMOTE_PLACEMENT.key
        text = descriptor.properties.get(key)
        if text is not None and (before is None or before.properties.get(key) != text):
            parse_policy(text).check(self._stored)

    def choose(self, info: TableInfo) -> Home:
        """Choose the location of a new table or partition, by a round-robin that is durable."""
        policy = parse_policy(info.property(TABLE_ZUFLUSS_REMOTE_PLACEMENT))
        after = SmoothRoundRobin.from_json(self._placement.to_json())
        location_id = after.pick(self._weights(policy))

        def take() -> None:
            self._placement = after

        return Home(location_id, (Put(PLACEMENT_PATH, after.to_json()),), take)

    def _weights(self, policy: Policy) -> dict[int, int]:
        """The weights of the locations to choose from: those that take files, if any."""
        chosen = [x for x in self._stored.live if policy.allows(x.location_id)]
        taking = [x for x in chosen if x.takes_files]
        down = {r.location_id for r in self.storage.reports() if r.health is Health.DOWN}
        working = [x for x in taking if x.location_id not in down] or taking
        if working:
            return {x.location_id: x.weight for x in working}
        return {x.location_id: 1 for x in chosen or self._stored.live}

    # Changes

    async def alter_configs(self, changes: Iterable[ConfigChange]) -> None:
        """Change options while the cluster runs; all of them or none."""
        requested = tuple(changes)
        conf = with_dynamic(self._static, changed_configs(self.dynamic, requested, self._static))
        marks = await self._marks(reconcile(self._stored, conf, self.live_files()))
        async with self.turn:
            before = self._stored
            dynamic = changed_configs(self.dynamic, requested, self._static)
            conf = with_dynamic(self._static, dynamic)
            after = reconcile(before, conf, self.live_files()).with_marks(marks, conf)
            await self._commit(
                self._put(CONFIGS_PATH, dump_object(dynamic)), *self._registry_ops(after)
            )
            self.dynamic = dynamic
            self.configs_for_tablets = _for_tablets(self._versions, dynamic)
            self.conf.change(dynamic)
            self._take_over(after)
        log.info("cluster_configs_changed", changed=sorted(dynamic))
        for key in dict.fromkeys(change.key for change in requested):
            if (option := OPTIONS_WITHOUT_EFFECT.get(key)) and key in dynamic:
                log.warning("config_without_effect", key=key, reason=option.help)
        await self._tell(before)
        await self._on_configs(self.configs_for_tablets)

    async def alter(
        self,
        op: AlterOp,
        *,
        location_id: int | None = None,
        uri: str | None = None,
        weight: int | None = None,
        expected_version: int | None = None,
        force: bool = False,
        ready: Callable[[], bool] = lambda: True,
    ) -> Location | None:
        """Add, change or retire a location; returns the location after that.

        None, without a change, unless `ready` says so just before the change.
        """

        def change() -> Locations:
            return alter(
                self._stored,
                op,
                conf=self.conf,
                location_id=location_id,
                uri=uri,
                weight=weight,
                live=self.live_files(),
                expected_version=expected_version,
                force=force,
            )

        marks = await self._marks(change())
        async with self.turn:
            before = self._stored
            after = change().with_marks(marks, self.conf)
            if not ready():
                return None
            if after is not before:
                await self._commit(*self._registry_ops(after))
                self._take_over(after)
        await self._tell(before)
        changed = [x for x in after.locations if x not in before.locations]
        return self.locations.get(changed[-1].location_id if location_id is None else location_id)

    async def check_destroyed(self, location_id: int) -> None:
        """Raise `ConfigError` if a location answers with its marker: then it can be drained."""
        location = self.get(location_id)
        if await self._problem(location, self._has_marker) is None:
            raise ConfigError(
                f"{location} works, so nothing in it is lost; drain it, which moves its files, and "
                "then retire it. If only a part of its files is left, take its address away first"
            )

    async def _has_marker(self, location: Location) -> None:
        await self.storage.check(location.location_id)

    # Markers

    async def claim(self, location_id: int) -> None:
        """Check the marker of a location; mark it if that was not possible before."""
        location = self.locations.get(location_id)
        await self.storage.settle(location)
        if not location.marked:
            await asyncio.shield(self._note_mark(location.uri))

    async def _note_mark(self, uri: str) -> None:
        async with self.turn:
            after = self._stored.with_marks({uri}, self.conf)
            if after is not self._stored:
                await self._commit(*self._registry_ops(after))
                self._stored = after

    async def _marks(self, after: Locations) -> set[str]:
        """The addresses that a change brings into use; they carry the marker of this cluster.

        `ConfigError` if one of them belongs to another cluster or does not work.
        """
        known = {(x.location_id, x.uri) for x in self.locations.live}
        active = {x.location_id for x in self.locations.live if x.state is AdminState.ACTIVE}
        new: list[Location] = []
        trials: list[Awaitable[RemoteStorageError | None]] = []
        for location in after.resolved(self.conf).live:
            is_known = (location.location_id, location.uri) in known
            activated = location.state is AdminState.ACTIVE and location.location_id not in active
            if is_known and not activated:
                continue
            new.append(location)
            draining = location.state is not AdminState.ACTIVE
            trial = self.storage.settle if draining else self.storage.try_out
            trials.append(self._problem(location, trial))
        for location, problem in zip(new, await asyncio.gather(*trials), strict=True):
            if problem is not None:
                raise _unusable(location, problem)
        return {location.uri for location in new}

    async def check_address(self, location_id: int, uri: str) -> None:
        """Raise `ConfigError` unless another address of a location has its marker."""
        address = parse_location(uri, "the address of a location").text
        location = replace(self.get(location_id), uri=address, marked=True)
        problem = await self._problem(location, self.storage.settle)
        if problem is not None:
            raise _unusable(location, problem)

    def get(self, location_id: int) -> Location:
        """A location that is not retired; `ConfigError` if there is none with this id."""
        for location in self.locations.live:
            if location.location_id == location_id:
                return location
        raise ConfigError(
            f"there is no location {location_id}, or it is retired; there are "
            f"{ids_text(self.locations.live)}"
        )

    async def _settled(self, at_start: Locations) -> set[str]:
        """The addresses that carry the marker of this cluster; the others are noted as failed."""
        there = at_start.resolved(self.conf).live
        settle = self.storage.settle
        problems = await asyncio.gather(*(self._problem(x, settle) for x in there))
        for location, problem in zip(there, problems, strict=True):
            if isinstance(problem, LocationUnavailableError):
                self.storage.failed(location.location_id, problem)
        return {x.uri for x, problem in zip(there, problems, strict=True) if problem is None}

    async def _problem(
        self, location: Location, trial: Callable[[Location], Awaitable[None]]
    ) -> RemoteStorageError | None:
        """Mark a location, and perhaps try it out; returns why that failed, or None."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await trial(location)
        except TimeoutError:
            reason = f"no answer within {SETTLE_SECONDS:g} s"
            return LocationUnavailableError(location.uri, CLUSTER, reason)
        except RemoteStorageError as problem:
            log.warning("location_not_marked", location=str(location), error=problem.message)
            return problem
        return None

    def _registry_ops(self, after: Locations) -> list[Op]:
        """The operations that store a registry; none if it is stored already."""
        same = after is self._stored
        return [] if same else [self._put(LOCATIONS_PATH, after.to_json())]

    def _take_over(self, after: Locations) -> None:
        self._stored = after
        self.storage.update(self.locations)

    async def _tell(self, before: Locations) -> None:
        """Send the registry to tablet servers if it has changed."""
        if self._stored is before:
            return
        log.info("locations_changed", version=self._stored.version, locations=_shown(self._stored))
        await self._on_change(self.locations)

    def _put(self, path: str, value: bytes) -> Op:
        version = self._versions.get(path)
        return Create(path, value) if version is None else Put(path, value, version)

    async def _commit(self, *ops: Op) -> None:
        await self._ledger.commit(ops)
        for op in ops:
            if (stored := await self._store.read(op.path)) is not None:
                self._versions[op.path] = stored.version


def _unusable(location: Location, problem: RemoteStorageError) -> ConfigError:
    return ConfigError(f"{location} cannot be used, nothing was changed: {problem.message}")


def _for_tablets(versions: Mapping[str, int], dynamic: Mapping[str, str]) -> DynamicConfigs:
    return DynamicConfigs.for_tablets(versions.get(CONFIGS_PATH, 0), dynamic)


def _live(
    locations: Locations, live_usage: LiveUsage, has_uncounted: Callable[[], bool]
) -> dict[int, Usage]:
    live = locations.live
    counted = live_usage(live[0].location_id if live else None)
    uncounted = {x.location_id: Usage(1, 0) for x in live} if has_uncounted() else {}
    return summed([counted, uncounted])


def _files(usage: Mapping[int, Usage]) -> dict[int, int]:
    return {location_id: used.files for location_id, used in usage.items()}


async def _load(store: MetaStore, conf: Configuration) -> _StoredRegistry:
    """Read the state of the registry; `CatalogDamagedError` if it cannot be read."""
    paths = CONFIGS_PATH, PLACEMENT_PATH, LOCATIONS_PATH
    values: dict[str, bytes] = {}
    versions: dict[str, int] = {}
    for path in paths:
        if (stored := await store.read(path)) is not None:
            values[path], versions[path] = stored.value, stored.version
    placement, locations = values.get(PLACEMENT_PATH), values.get(LOCATIONS_PATH)
    try:
        return _StoredRegistry(
            {str(k): str(v) for k, v in json.loads(values.get(CONFIGS_PATH, b"{}")).items()},
            SmoothRoundRobin.from_json(placement) if placement else SmoothRoundRobin({}),
            Locations.from_json(locations) if locations else _older_files(conf),
            versions,
        )
    except (ValueError, AttributeError) as problem:
        raise records.CatalogDamagedError(
            f"the metadata below {CONFIGS_PATH} or /remote cannot be read: {problem!r}; "
            f"restore the metadata store from a backup"
        ) from problem


def _older_files(conf: Configuration) -> Locations:
    """The location of files that are older than registries; `NO_LOCATIONS` without such files.

    They lie beside the data. If another place is configured now, this one has to come first.
    """
    data = conf.get(DATA_DIR)
    if (Path(data) / IMPLICIT_NAME / LAKE).is_dir():
        return reconcile(None, Configuration.of({DATA_DIR.key: data}), {})
    return NO_LOCATIONS


def _shown(locations: Locations) -> str:
    return ", ".join(
        f"{x.location_id} {x.uri or 'beside the data'} weight {x.weight} {AdminState(x.state).name}"
        for x in locations.locations
    )
