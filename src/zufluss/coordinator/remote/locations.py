"""The registry of remote locations in the metadata store, and the configuration that changes it.

The only code that knows these paths:

| path | value |
|---|---|
| `/remote/locations` | the registry (`remote/locations.py`), replaced only at the version that was read |
| `/remote/placement` | the position of the round-robin that chooses the location of new tables and partitions |
| `/configs/cluster` | JSON, key to text: options that were changed while the cluster ran, over the servers' own |

A change is one transaction: the options and the registry that they ask for become durable together,
or nothing does and what was in force stays so. Then this process and every tablet server learn it.
Changes are made between two changes of the catalog (`Catalog.exclusive`), so a table that is being
created gets its location from the registry before or after, never from neither.

A location gets the cluster's marker (`remote/marker.py`) before the registry has it. One that does
not answer at that time is marked by a probe that finds it well; no file goes there before.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from zufluss.cluster.remote import home
from zufluss.config.load import Configuration
from zufluss.config.option import Kind, Option
from zufluss.config.options import DATA_DIR, OPTIONS
from zufluss.config.table_options import TABLE_ZUFLUSS_REMOTE_PLACEMENT
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ConfigError
from zufluss.meta.api import Create, MetaStore, Op, Put
from zufluss.model.alter import AlterOp as ConfigOp
from zufluss.model.schema import dump_object
from zufluss.model.table import TableDescriptor, TableInfo
from zufluss.remote.errors import LocationUnavailableError, NotOursError
from zufluss.remote.files import Usage, summed
from zufluss.remote.health import LocationReport
from zufluss.remote.layout import CLUSTER, LAKE
from zufluss.remote.locations import (
    IMPLICIT_NAME,
    AdminState,
    AlterOp,
    Health,
    Location,
    Locations,
    altered,
)
from zufluss.remote.locations import reconciled as reconcile
from zufluss.remote.placement import Policy, SmoothRoundRobin, parse_policy
from zufluss.remote.storage import RemoteStorage

log = structlog.get_logger(__name__)

LOCATIONS_PATH: Final = "/remote/locations"
PLACEMENT_PATH: Final = "/remote/placement"
CONFIGS_PATH: Final = "/configs/cluster"

DYNAMIC_ORIGIN: Final = "changed in the running cluster"
"""The origin of an option that ALTER_CLUSTER_CONFIGS set."""

NO_LOCATIONS: Final = Locations(0, (), explicit=False)
"""Before the first start."""

SETTLE_SECONDS: Final = 5.0
"""How long a start or a change waits for a location to say whose it is."""

Uses = Callable[[], Mapping[int, Usage]]
"""Files and bytes that something refers to, by location."""


def _nothing() -> None:
    """Take over nothing."""


@dataclass(frozen=True, slots=True)
class Home:
    """The location that was chosen for a new table or partition."""

    location_id: int | None
    """Its id; None where there is no registry."""
    ops: tuple[Op, ...] = ()
    """What the transaction that creates it does beside."""
    take: Callable[[], None] = _nothing
    """Call it when that transaction is durable."""


class ConfigChange(NamedTuple):
    """One option to change."""

    key: str
    value: str | None
    op: int


class LocationRegistry:
    """Remote locations, durable. Open it with `LocationRegistry.open`, then `start` it."""

    def __init__(self, store: MetaStore, ledger: Ledger, conf: Configuration) -> None:
        self.conf = conf
        """The configuration in force, with what was changed while the cluster ran."""
        self.dynamic: dict[str, str] = {}
        """What was changed while the cluster ran."""
        self.uses: list[Uses] = []
        """Who refers to remote files: what they have counts as live."""
        self.uncounted: Callable[[], bool] = lambda: False
        """Whether somebody reads files that nobody has counted: they may lie anywhere."""
        self.reporters: dict[int, Callable[[], Sequence[LocationReport]]] = {}
        """What each server saw of the locations, by server id."""
        self.on_change: Callable[[Locations], Awaitable[None]] | None = None
        """Told of every new version, with full addresses."""
        self.storage: RemoteStorage
        """The remote storage of this process."""
        self.turn = asyncio.Lock()
        """Held by whoever changes the registry, or makes a file in a location count."""
        self._stored = NO_LOCATIONS
        self._store = store
        self._ledger = ledger
        self._static = conf
        self._versions: dict[str, int] = {}
        self._turn = SmoothRoundRobin({})

    @classmethod
    async def open(cls, store: MetaStore, ledger: Ledger, conf: Configuration) -> LocationRegistry:
        """Read what the store has; nothing is checked against the configuration yet."""
        registry = cls(store, ledger, conf)
        values = await registry._read(CONFIGS_PATH, PLACEMENT_PATH, LOCATIONS_PATH)
        try:
            if (configs := values.get(CONFIGS_PATH)) is not None:
                registry.dynamic = {str(k): str(v) for k, v in json.loads(configs).items()}
            if (placement := values.get(PLACEMENT_PATH)) is not None:
                registry._turn = SmoothRoundRobin.from_json(placement)
            if (locations := values.get(LOCATIONS_PATH)) is not None:
                registry._stored = Locations.from_json(locations)
        except (ValueError, AttributeError) as problem:
            raise records.CatalogDamagedError(
                f"the metadata below {CONFIGS_PATH} or /remote cannot be read: {problem!r}; "
                f"restore the metadata store from a backup"
            ) from problem
        registry.conf = registry._overlaid(registry.dynamic)
        return registry

    async def start(self, storage: Callable[[Configuration, Locations], RemoteStorage]) -> None:
        """Bring the registry up to the configuration, and open remote storage.

        `uses` must be complete: a configuration without a location that has files is refused.
        """
        before = self._before()
        after = reconcile(before, self.conf, {} if before is None else self.live_files())
        self.storage = storage(self.conf, after)
        self.storage.claim = self.claim
        after = after.with_marks(await self._settled(after), self.conf)
        if after is not before or LOCATIONS_PATH not in self._versions:
            await self._commit(self._put(LOCATIONS_PATH, after.to_json()))
            log.info("locations_changed", version=after.version, locations=_shown(after))
        self._stored = after
        if PLACEMENT_PATH not in self._versions:
            await self._commit(self._put(PLACEMENT_PATH, self._turn.to_json()))

    def _before(self) -> Locations | None:
        """The registry so far; None if there are no files yet.

        A cluster that is older than registries has its files beside the data, unless it was told
        another place: then that one has to come first.
        """
        if self._stored is NO_LOCATIONS:
            data = self.conf.get(DATA_DIR)
            if not (Path(data) / IMPLICIT_NAME / LAKE).is_dir():
                return None
            self._stored = reconcile(None, Configuration.of({DATA_DIR.key: data}), {})
        return self._stored

    @property
    def locations(self) -> Locations:
        """The registry, with full addresses."""
        return self._stored.resolved(self.conf)

    def live(self) -> dict[int, Usage]:
        """Files and bytes that something refers to, by location; one file where nobody knows."""
        found = summed(use() for use in self.uses)
        if self.uncounted():
            found = summed([found, {x.location_id: Usage(1, 0) for x in self._stored.live}])
        return found

    def live_files(self) -> dict[int, int]:
        """Files that something refers to, by location."""
        return {i: used.files for i, used in self.live().items()}

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
        """Raise `ConfigError` for a new placement that does not fit the locations there are.

        One that a table had before may name locations that were retired since.
        """
        key = TABLE_ZUFLUSS_REMOTE_PLACEMENT.key
        text = descriptor.properties.get(key)
        if text is not None and (before is None or before.properties.get(key) != text):
            parse_policy(text).check(self._stored)

    def choose(self, info: TableInfo) -> Home:
        """The location of a new table or partition, by the same round-robin after a restart."""
        policy = parse_policy(info.property(TABLE_ZUFLUSS_REMOTE_PLACEMENT))
        turn = SmoothRoundRobin.from_json(self._turn.to_json())
        location_id = turn.pick(self._weights(policy))

        def take() -> None:
            self._turn = turn

        return Home(location_id, (Put(PLACEMENT_PATH, turn.to_json()),), take)

    def _weights(self, policy: Policy) -> dict[int, int]:
        """The candidates for a new home: those that take files, as far as there are any."""
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
        wanted = tuple(changes)
        conf = self._overlaid(changed_configs(self.dynamic, wanted, self._static))
        marks = await self._marks(reconcile(self._stored, conf, self.live_files()))
        async with self.turn:
            before = self._stored
            dynamic = changed_configs(self.dynamic, wanted, self._static)
            conf = self._overlaid(dynamic)
            after = reconcile(before, conf, self.live_files()).with_marks(marks, conf)
            await self._commit(
                self._put(CONFIGS_PATH, dump_object(dynamic)), *self._registry_ops(after)
            )
            self.dynamic, self.conf = dynamic, conf
            self._take_over(after)
        log.info("cluster_configs_changed", changed=sorted(dynamic))
        await self._tell(before)

    async def alter(
        self,
        op: AlterOp,
        *,
        location_id: int | None = None,
        uri: str | None = None,
        weight: int | None = None,
        expected_version: int | None = None,
    ) -> Location:
        """Do what an operator wants with a location; the location as it is then."""

        def change() -> Locations:
            return altered(
                self._stored,
                op,
                conf=self.conf,
                location_id=location_id,
                uri=uri,
                weight=weight,
                live=self.live_files(),
                expected_version=expected_version,
            )

        marks = await self._marks(change())
        async with self.turn:
            before = self._stored
            after = change().with_marks(marks, self.conf)
            if after is not before:
                await self._commit(*self._registry_ops(after))
                self._take_over(after)
        await self._tell(before)
        changed = [x for x in after.locations if x not in before.locations]
        found = changed[-1].location_id if location_id is None else location_id
        return self.locations.get(found)

    # Markers

    async def claim(self, location_id: int) -> None:
        """See whose a location is; mark it if that was not possible before."""
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
        """The addresses that a change brings and that carry our marker, if we may have them.

        One that is not reached is settled later, but not if files were to be there already.
        """
        known = {(x.location_id, x.uri) for x in self.locations.live}
        new = [x for x in after.resolved(self.conf).live if (x.location_id, x.uri) not in known]
        problems = await asyncio.gather(*map(self._problem, new))
        for location, problem in zip(new, problems, strict=True):
            if isinstance(problem, NotOursError) or (problem and location.marked):
                raise ConfigError(f"{location} cannot be used: {problem.message}") from problem
        return {x.uri for x, problem in zip(new, problems, strict=True) if problem is None}

    async def _settled(self, at_start: Locations) -> set[str]:
        """The addresses that carry our marker; the others count as failed."""
        there = at_start.resolved(self.conf).live
        problems = await asyncio.gather(*map(self._problem, there))
        for location, problem in zip(there, problems, strict=True):
            if problem is not None:
                self.storage.failed(location.location_id, problem)
        return {x.uri for x, problem in zip(there, problems, strict=True) if problem is None}

    async def _problem(self, location: Location) -> LocationUnavailableError | None:
        """Why a location is not marked as ours, None if it is by now."""
        try:
            await asyncio.wait_for(self.storage.settle(location), SETTLE_SECONDS)
        except TimeoutError:
            reason = f"no answer within {SETTLE_SECONDS:g} s"
            return LocationUnavailableError(location.uri, CLUSTER, reason)
        except LocationUnavailableError as problem:
            log.warning("location_not_marked", location=str(location), error=problem.message)
            return problem
        return None

    def _registry_ops(self, after: Locations) -> list[Op]:
        """What makes a registry durable, if it is not that already."""
        same = after is self._stored
        return [] if same else [self._put(LOCATIONS_PATH, after.to_json())]

    def _take_over(self, after: Locations) -> None:
        self._stored = after
        self.storage.update(self.locations)

    async def _tell(self, before: Locations) -> None:
        """Tell the tablet servers of a registry that is not as before."""
        if self._stored is before:
            return
        log.info("locations_changed", version=self._stored.version, locations=_shown(self._stored))
        if self.on_change is not None:
            await self.on_change(self.locations)

    def _overlaid(self, dynamic: Mapping[str, str]) -> Configuration:
        return self._static.with_overrides(dynamic, origin=DYNAMIC_ORIGIN)

    async def _read(self, *paths: str) -> dict[str, bytes]:
        """The values of paths, as far as they have one; their versions are what we change."""
        values: dict[str, bytes] = {}
        for path in paths:
            found = await self._store.read(path)
            if found is not None:
                values[path], self._versions[path] = found.value, found.version
        return values

    def _put(self, path: str, value: bytes) -> Op:
        version = self._versions.get(path)
        return Create(path, value) if version is None else Put(path, value, version)

    async def _commit(self, *ops: Op) -> None:
        await self._ledger.commit(ops)
        await self._read(*(op.path for op in ops))


def changed_configs(
    dynamic: Mapping[str, str], changes: Iterable[ConfigChange], static: Configuration
) -> dict[str, str]:
    """The options after some changes; `ConfigError` when one is not allowed."""
    after = dict(dynamic)
    for change in changes:
        option = _dynamic_option(change.key)
        if change.op == ConfigOp.DELETE:
            after.pop(change.key, None)
            continue
        if change.value is None:
            raise ConfigError(f"{change.key} needs a value; to take one back, delete it (op 1)")
        if change.op == ConfigOp.SET:
            text = change.value.strip()
        else:
            text = _listed(option, after.get(change.key), change, static)
        option.parse(text)
        after[change.key] = text
    return after


def _listed(
    option: Option[Any], known: str | None, change: ConfigChange, static: Configuration
) -> str:
    """The text of a list with an item more, or without it."""
    if option.kind is not Kind.LIST or change.op not in (ConfigOp.APPEND, ConfigOp.SUBTRACT):
        raise ConfigError(
            f"operation {change.op} on {option.key} is not possible; allowed: SET (0), DELETE (1), "
            f"and for lists APPEND (2) and SUBTRACT (3)"
        )
    items = option.parse(known) if known is not None else static.get(option)
    given = option.parse(change.value or "")
    if change.op == ConfigOp.APPEND:
        return option.format((*items, *given))
    return option.format(tuple(item for item in items if item not in given))


def _dynamic_option(key: str) -> Option[Any]:
    option = OPTIONS.get(key)
    if option is None or not option.dynamic:
        allowed = [known.key for known in OPTIONS.values() if known.dynamic]
        why = "is unknown" if option is None else "takes effect at a start of the servers only"
        raise ConfigError(f"{key!r:.100} {why}; changeable at run time: {', '.join(allowed)}")
    return option


def _shown(locations: Locations) -> str:
    return ", ".join(
        f"{x.location_id} {x.uri or 'beside the data'} weight {x.weight} {AdminState(x.state).name}"
        for x in locations.locations
    )
