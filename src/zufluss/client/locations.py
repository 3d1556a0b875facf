"""Remote locations and the cluster's configuration, as an administrator sees them.

`AsyncAdmin.locations`, `alter_location`, `probe_locations` and `cluster_configs` return these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from zufluss.config.values import INT32_MAX, INT64_MAX
from zufluss.errors import ConfigError
from zufluss.model.table import PhysicalTablePath
from zufluss.remote.files import FileProblem
from zufluss.remote.locations import AdminState, AlterOp, Health
from zufluss.wire import messages as m


class InspectionDepth(IntEnum):
    """How closely the live files of a location are looked at."""

    COUNTS = 0
    """The numbers that the coordinator has in memory."""
    DOCUMENTS = 1
    """Lists of files are read."""
    FILES = 2
    """Each file is looked for in the location."""


OPERATIONS = {
    "add": AlterOp.ADD,
    "drain": AlterOp.DRAIN,
    "activate": AlterOp.ACTIVATE,
    "retire": AlterOp.RETIRE,
    "set-weight": AlterOp.SET_WEIGHT,
    "move": AlterOp.MOVE,
}
"""The operations on a location, by name."""


@dataclass(frozen=True, slots=True)
class LocationReport:
    """One server's report about a location, since the server started."""

    server_id: int
    """The server's id."""
    health: Health
    """Whether the location works."""
    placed_files: int
    """Files that the server wrote there."""
    placed_bytes: int
    """Bytes of these files."""
    errors: int
    """Failed requests."""
    latency_ms: float
    """Moving average of the time that writing a file took."""
    effective_weight: float
    """The location's present share of new files."""
    last_error: str | None
    """The newest failure; None if there was none."""


@dataclass(frozen=True, slots=True)
class RemoteLocation:
    """A place for remote files."""

    location_id: int
    """The id used by manifests and `table.zufluss.remote.placement`."""
    uri: str
    """The location's address."""
    weight: int
    """The location's share of new files; 0 means none."""
    state: AdminState
    """The state that the operator set."""
    live_files: int = 0
    """Files that are referred to."""
    live_bytes: int = 0
    """Bytes of these files, as far as they are known."""
    servers: tuple[LocationReport, ...] = ()
    """The reports of the servers."""
    pinned_tables: tuple[str, ...] = ()
    """Tables whose placement allows no other location that takes files, at most 100 of them. While
    the location drains, their files stay."""
    pinned_count: int = 0
    """The number of all such tables."""

    @property
    def health(self) -> Health:
        """The worst health that a server reports."""
        return max((seen.health for seen in self.servers), default=Health.ACTIVE)


@dataclass(frozen=True, slots=True)
class RemoteLocations:
    """The registry of locations."""

    version: int
    """Grows with each change; `expected_version` of `alter_location` compares it."""
    locations: tuple[RemoteLocation, ...]
    """The locations by id, retired ones included."""

    def get(self, location_id: int) -> RemoteLocation:
        """Return a location by its id; raises `ConfigError` if there is none."""
        for location in self.locations:
            if location.location_id == location_id:
                return location
        known = ", ".join(str(location.location_id) for location in self.locations)
        raise ConfigError(f"there is no location {location_id}; there are {known}")


@dataclass(frozen=True, slots=True)
class LocationProbe:
    """The result of writing, reading and deleting a small object."""

    location_id: int
    """The location's id."""
    latency_ms: float | None
    """Time for all three operations; None if one failed."""
    error: str | None
    """The failure; None if the location works."""


@dataclass(frozen=True, slots=True)
class LocationFiles:
    """Live files in a location: of one kind, of one bucket, table or partition."""

    kind: str
    """`log`, `kv`, `lake` (offsets of the lake), or `dropped` (leases hold a dropped table)."""
    table: PhysicalTablePath
    """The table or partition."""
    bucket_id: int | None
    """The bucket; None for files of a whole table or partition."""
    files: int
    """Number of files."""
    bytes: int
    """Their size, without lists of files, whose sizes are not recorded."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Ranges of log offsets, each end exclusive; only if documents were read."""
    snapshot_ids: tuple[int, ...] = ()
    """Key-value snapshots that need these files; only if documents were read."""
    problems: tuple[FileProblem, ...] = ()
    """Files that are not as they should be."""


@dataclass(frozen=True, slots=True)
class UnusedFile:
    """A file in a location that nothing refers to."""

    location_id: int
    """The location's id."""
    path: str
    """Path below the root of the location."""
    size: int
    """Bytes."""
    modified_ms: int
    """Time of the last change, epoch milliseconds by the location's clock."""
    reason: str
    """Why nobody needs the file."""


@dataclass(frozen=True, slots=True)
class LocationSweep:
    """The result of a sweep for files that nothing refers to."""

    files: int
    """Number of such files."""
    bytes: int
    """Their size."""
    unused: tuple[UnusedFile, ...]
    """The first thousand of them."""
    failures: tuple[str, ...]
    """Listings and documents that could not be read; files there were left alone."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """An option that was set for the cluster."""

    key: str
    """The option's key."""
    value: str
    """The option's value; secrets are hidden."""
    source: str
    """`INITIAL_SERVER_CONFIG`, or `DYNAMIC_SERVER_CONFIG` if it was changed at run time."""


def alter_request(
    operation: str,
    location_id: int | None,
    uri: str | None,
    weight: int | None,
    expected_version: int | None,
    force: bool = False,
) -> m.AlterLocationRequest:
    """The ALTER_LOCATION request; raises `ConfigError` for an unknown operation."""
    op = OPERATIONS.get(operation)
    if op is None:
        raise ConfigError(
            f"{operation!r:.80} is not an operation on a location; allowed: {', '.join(OPERATIONS)}"
        )
    return m.AlterLocationRequest(
        op=op,
        location_id=_number("the id of a location", location_id),
        uri=uri,
        weight=_number("the weight of a location", weight),
        expected_version=_number("a version of the registry", expected_version, INT64_MAX),
        force=True if force else None,
    )


def probe_request(location_id: int | None) -> m.ProbeLocationRequest:
    """The PROBE_LOCATION request."""
    return m.ProbeLocationRequest(location_id=_number("the id of a location", location_id))


def inspect_request(
    location_id: int, depth: InspectionDepth, uri: str | None
) -> m.InspectLocationRequest:
    """The first INSPECT_LOCATION request."""
    number = _number("the id of a location", location_id)
    return m.InspectLocationRequest(location_id=number, depth=depth, uri=uri)


def sweep_request(location_id: int | None, dry_run: bool) -> m.SweepLocationsRequest:
    """The first SWEEP_LOCATIONS request."""
    number = _number("the id of a location", location_id)
    return m.SweepLocationsRequest(location_id=number, dry_run=dry_run)


def sweep_of(response: m.SweepLocationsResponse) -> LocationSweep:
    """The result of a sweep in an answer."""
    return LocationSweep(
        response.files,
        response.bytes,
        tuple(
            UnusedFile(each.location_id, each.path, each.size, each.modified_ms, each.reason)
            for each in response.garbage
        ),
        tuple(response.failures),
    )


def files_of(response: m.InspectLocationResponse) -> list[LocationFiles]:
    """The live files in an answer."""
    return [
        LocationFiles(
            each.kind,
            PhysicalTablePath(
                each.database_name,
                each.table_name,
                each.partition_name if each.HasField("partition_name") else None,
            ),
            each.bucket_id if each.HasField("bucket_id") else None,
            each.files,
            each.bytes,
            tuple(zip(each.start_offsets, each.end_offsets, strict=True)),
            tuple(each.snapshot_ids),
            tuple(FileProblem(problem.path, problem.reason) for problem in each.problems),
        )
        for each in response.groups
    ]


def _number(what: str, value: int | None, largest: int = INT32_MAX) -> int | None:
    """Return a number that the wire can carry, else raise `ConfigError`."""
    if value is None or (isinstance(value, int) and 0 <= value <= largest):
        return value
    raise ConfigError(f"{what} cannot be {value!r:.80}; allowed: whole numbers from 0 to {largest}")


def locations_of(response: m.ListLocationsResponse) -> RemoteLocations:
    """The registry of locations in an answer."""
    locations = [
        _location(
            message.location,
            message.pinned,
            message.live_files,
            message.live_bytes,
            message.servers,
        )
        for message in response.locations
    ]
    return RemoteLocations(response.version, tuple(locations))


def altered_location(response: m.AlterLocationResponse) -> RemoteLocation:
    """The changed location in an answer, without file counts and reports."""
    return _location(response.location, response.pinned, 0, 0, ())


def probes_of(response: m.ProbeLocationResponse) -> list[LocationProbe]:
    """The probes in an answer."""
    return [
        LocationProbe(each.location_id, None, each.error)
        if each.HasField("error")
        else LocationProbe(each.location_id, each.latency_ms, None)
        for each in response.probes
    ]


def configs_of(response: m.DescribeClusterConfigsResponse) -> list[ClusterConfig]:
    """The options in an answer, sorted by key."""
    configs = [
        ClusterConfig(c.config_key, c.config_value, c.config_source) for c in response.configs
    ]
    return sorted(configs, key=lambda config: config.key)


def _location(
    message: m.PbLocation,
    pinned: m.PbPinnedTables,
    files: int,
    size: int,
    servers: Iterable[m.PbLocationServer],
) -> RemoteLocation:
    return RemoteLocation(
        message.location_id,
        message.uri,
        message.weight,
        AdminState(message.state),
        files,
        size,
        tuple(_report(each.server_id, each.report) for each in servers),
        tuple(pinned.names),
        pinned.count,
    )


def _report(server_id: int, report: m.PbLocationReport) -> LocationReport:
    return LocationReport(
        server_id,
        Health(report.health),
        report.placed_files,
        report.placed_bytes,
        report.errors,
        report.latency_ms,
        report.effective_weight,
        report.last_error if report.HasField("last_error") else None,
    )
