"""Handlers of remote locations and of the configuration that changes while the cluster runs.

The handlers translate messages; `remote/locations.py` has the rules. A location is moved when
`remote/inventory.py` has found its files at the new address: that takes a while, so it is done
before the change and without holding up other changes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from zufluss.cluster.image import ClusterImage
from zufluss.config.load import DEFAULT_ORIGIN, DYNAMIC_ORIGIN
from zufluss.config.table_options import TABLE_ZUFLUSS_REMOTE_PLACEMENT
from zufluss.coordinator.configs import ConfigChange
from zufluss.coordinator.remote.inventory import GROUPS_AT_ONCE, GroupFiles, Inventory
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.remote.lost import Exclusive, LostLocations
from zufluss.errors import ConfigError, ErrorCode, ZuflussError, error
from zufluss.remote.files import Usage
from zufluss.remote.locations import AdminState, AlterOp, Location, location_to_proto
from zufluss.remote.placement import parse_policy
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

INITIAL_SOURCE: Final = "INITIAL_SERVER_CONFIG"
"""How the protocol calls a value that was there when the server started."""
DYNAMIC_SOURCE: Final = "DYNAMIC_SERVER_CONFIG"
"""How the protocol calls a value that was changed while the cluster ran."""
PINNED_SHOWN: Final = 100
"""Names of pinned tables in an answer at most."""

MOVES_MAX: Final = 5
"""How often the copy of a location that moves is checked, while its files change."""
INSPECTION_SECONDS: Final = 2.0
"""How long an inspection runs before it answers with its findings so far."""
INSPECTION_BYTES: Final = 1 << 20
"""The size of an answer to an inspection after which no more is added."""
READS: Final = 1
"""The depth of an inspection that reads documents."""
CHECKS: Final = 2
"""The depth of an inspection that looks for each file."""


class LocationService:
    """Handlers of the APIs of remote locations and cluster configurations."""

    def __init__(
        self,
        registry: LocationRegistry,
        inventory: Inventory,
        image: ClusterImage,
        exclusive: Exclusive,
        lost: LostLocations,
        check_movable: Callable[[int], None],
    ) -> None:
        """`check_movable` raises `ConfigError` for a location that cannot be moved at present."""
        self._registry = registry
        self._inventory = inventory
        self._image = image
        self._exclusive = exclusive
        self._lost = lost
        self._check_movable = check_movable

    async def list_locations(
        self, request: m.ListLocationsRequest, ctx: RequestContext
    ) -> m.ListLocationsResponse:
        """LIST_LOCATIONS (30010): the registry, the files in use, and what each server saw."""
        registry = self._registry.locations
        live = self._registry.live()
        pinned = self._pinned(x.location_id for x in registry.live)
        response = m.ListLocationsResponse(version=registry.version)
        for location in registry.locations:
            used = live.get(location.location_id, Usage(0, 0))
            response.locations.add(
                location=location_to_proto(location),
                live_files=used.files,
                live_bytes=used.bytes,
                servers=[
                    m.PbLocationServer(server_id=server_id, report=report.to_proto())
                    for server_id, report in self._registry.reports(location.location_id)
                ],
                pinned=pinned.get(location.location_id),
            )
        return response

    def _pinned(self, location_ids: Iterable[int]) -> dict[int, m.PbPinnedTables]:
        """The tables whose files can lie in no other location, by location."""
        ids = list(location_ids)
        names: dict[int, list[str]] = {}
        for entry in self._image.tables():
            placement = entry.info.descriptor.properties.get(TABLE_ZUFLUSS_REMOTE_PLACEMENT.key)
            if placement is None:
                continue
            policy = parse_policy(placement)
            for location_id in set(policy.ids).intersection(ids):
                if policy.binds_to(location_id, self._registry.locations):
                    names.setdefault(location_id, []).append(str(entry.info.path))
        return {
            location_id: m.PbPinnedTables(count=len(tables), names=sorted(tables)[:PINNED_SHOWN])
            for location_id, tables in names.items()
        }

    async def alter_location(
        self, request: m.AlterLocationRequest, ctx: RequestContext
    ) -> m.AlterLocationResponse:
        """ALTER_LOCATION (30011): answered when all present servers know the change."""
        if request.op not in list(AlterOp):
            allowed = ", ".join(f"{op.value} {op.name}" for op in AlterOp)
            raise ConfigError(
                f"operation {request.op} on a location is unknown; allowed: {allowed}"
            )
        expected = request.HasField("expected_version")
        alter = partial(
            self._registry.alter,
            AlterOp(request.op),
            location_id=request.location_id if request.HasField("location_id") else None,
            uri=request.uri if request.HasField("uri") else None,
            weight=request.weight if request.HasField("weight") else None,
            expected_version=request.expected_version if expected else None,
            force=request.force,
        )
        if request.force:
            await self._check_force(request)
        location = await self._altered(alter, request)
        if location.state is AdminState.LOST:
            self._lost.begin(location.location_id)
        return m.AlterLocationResponse(
            version=self._registry.locations.version,
            location=location_to_proto(location),
            pinned=self._pinned([location.location_id]).get(location.location_id),
        )

    async def _check_force(self, request: m.AlterLocationRequest) -> None:
        if request.op != AlterOp.RETIRE:
            raise ConfigError("only a retirement can be forced; drop `force`")
        if request.location_id not in self._registry.locations.lost:
            await self._registry.check_destroyed(request.location_id)

    async def _altered(
        self, alter: Callable[..., Awaitable[Location | None]], request: m.AlterLocationRequest
    ) -> Location:
        """The location after a change; one that moves after all its files were found there."""
        moved, uri = request.location_id, request.uri

        def ready() -> bool:
            return request.op != AlterOp.MOVE or not self._inventory.unchecked(moved, uri)

        async def checked() -> Location | None:
            if request.op == AlterOp.MOVE:
                self._check_movable(moved)  # in turn: registrations begin sessions
            return await alter(ready=ready)

        for _ in range(MOVES_MAX):
            location = await self._exclusive(checked)
            if location is not None:
                return location
            await self._inventory.check_copy(moved, uri)
        raise error(
            ErrorCode.STORAGE_EXCEPTION,
            f"location {moved} got or lost files each time its copy was checked; give it weight 0, "
            "copy its files again, and try again",
        )

    async def inspect_location(
        self, request: m.InspectLocationRequest, ctx: RequestContext
    ) -> m.InspectLocationResponse:
        """INSPECT_LOCATION (30013): live files, as many groups as fit into a moment."""
        location_id = self._registry.get(request.location_id).location_id
        uri = request.uri if request.HasField("uri") else None
        if uri is not None and not request.HasField("after"):
            await self._registry.check_address(location_id, uri)
        objects = self._inventory.objects(location_id, uri)
        groups = self._inventory.groups(location_id)
        begun = bisect_right([group.key for group in groups], request.after)
        response = m.InspectLocationResponse(done=begun, total=len(groups))
        end = asyncio.get_running_loop().time() + INSPECTION_SECONDS
        size = 0
        while response.done < len(groups) and size < INSPECTION_BYTES:
            some = groups[response.done : response.done + GROUPS_AT_ONCE]
            if request.depth >= CHECKS:
                found = await self._inventory.check_some(some, location_id, uri)
            elif request.depth >= READS:
                reads = (self._inventory.read(group, location_id, objects) for group in some)
                found = list(await asyncio.gather(*reads))
            else:
                found = [GroupFiles(group, {}) for group in some]
            messages = list(map(_files_to_proto, found))
            response.groups.extend(messages)
            response.done += len(some)
            size += sum(message.ByteSize() for message in messages)
            if asyncio.get_running_loop().time() >= end:
                break
        if response.done < len(groups):
            response.next = groups[response.done - 1].key
        return response

    async def probe_location(
        self, request: m.ProbeLocationRequest, ctx: RequestContext
    ) -> m.ProbeLocationResponse:
        """PROBE_LOCATION (30012): the coordinator probes one location, or all at once."""
        known = self._registry.locations
        if request.HasField("location_id"):
            ids = [self._registry.get(request.location_id).location_id]
        else:
            ids = [location.location_id for location in known.live]
        return m.ProbeLocationResponse(probes=await asyncio.gather(*map(self._probe, ids)))

    async def _probe(self, location_id: int) -> m.PbProbe:
        try:
            latency_ms = await self._registry.storage.probe(location_id)
        except ZuflussError as problem:
            return m.PbProbe(location_id=location_id, latency_ms=0, error=problem.message)
        return m.PbProbe(location_id=location_id, latency_ms=latency_ms)

    async def alter_cluster_configs(
        self, request: m.AlterClusterConfigsRequest, ctx: RequestContext
    ) -> m.AlterClusterConfigsResponse:
        """ALTER_CLUSTER_CONFIGS (1046): all changes or none."""
        changes = [
            ConfigChange(
                change.config_key,
                change.config_value if change.HasField("config_value") else None,
                change.op_type,
            )
            for change in request.alter_configs
        ]
        await self._exclusive(partial(self._registry.alter_configs, changes))
        return m.AlterClusterConfigsResponse()

    async def describe_cluster_configs(
        self, request: m.DescribeClusterConfigsRequest, ctx: RequestContext
    ) -> m.DescribeClusterConfigsResponse:
        """DESCRIBE_CLUSTER_CONFIGS (1045): options that are set, with secrets hidden."""
        rows = [
            m.PbDescribeConfig(
                config_key=row.key,
                config_value=row.value,
                config_source=DYNAMIC_SOURCE if row.origin == DYNAMIC_ORIGIN else INITIAL_SOURCE,
            )
            for row in self._registry.conf.effective()
            if row.origin != DEFAULT_ORIGIN
        ]
        return m.DescribeClusterConfigsResponse(configs=rows)


def _files_to_proto(files: GroupFiles) -> m.PbLocationFiles:
    group = files.group
    return m.PbLocationFiles(
        kind=group.kind,
        database_name=group.owner.database,
        table_name=group.owner.table,
        partition_name=group.owner.partition,
        bucket_id=None if group.bucket is None else group.bucket.bucket_id,
        files=group.usage.files,
        bytes=group.usage.bytes,
        start_offsets=[start for start, _ in files.ranges],
        end_offsets=[end for _, end in files.ranges],
        snapshot_ids=files.snapshot_ids,
        problems=[m.PbFileProblem(path=p.path, reason=p.reason) for p in files.problems],
    )
