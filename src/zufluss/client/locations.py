"""Remote locations and the cluster's configuration, as an administrator sees them.

What `AsyncAdmin.locations`, `alter_location`, `probe_locations` and `cluster_configs` give, and how
it is read from the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zufluss.errors import ConfigError
from zufluss.remote.locations import AdminState, AlterOp, Health
from zufluss.wire import messages as m

OPERATIONS = {
    "add": AlterOp.ADD,
    "drain": AlterOp.DRAIN,
    "activate": AlterOp.ACTIVATE,
    "retire": AlterOp.RETIRE,
    "set-weight": AlterOp.SET_WEIGHT,
    "move": AlterOp.MOVE,
}
"""What an operator can do with a location, by name."""


@dataclass(frozen=True, slots=True)
class LocationSeen:
    """What one server saw of a location since it started."""

    server_id: int
    """The server."""
    health: Health
    """Whether it works."""
    placed_files: int
    """Files put there."""
    placed_bytes: int
    """Their bytes."""
    errors: int
    """Requests that it failed."""
    latency_ms: float
    """Moving average of what putting a file took."""
    effective_weight: float
    """Its share of new files at present."""
    last_error: str | None
    """The newest failure."""


@dataclass(frozen=True, slots=True)
class RemoteLocation:
    """A place for remote files."""

    location_id: int
    """What manifests and `table.zufluss.remote.placement` call it."""
    uri: str
    """Its address."""
    weight: int
    """Its share of new files; 0 takes none."""
    state: AdminState
    """What the operator wants of it."""
    live_files: int = 0
    """Files there that something refers to."""
    live_bytes: int = 0
    """Their bytes, as far as they are known."""
    servers: tuple[LocationSeen, ...] = ()
    """What each server saw of it."""

    @property
    def health(self) -> Health:
        """The worst that a server saw."""
        return max((seen.health for seen in self.servers), default=Health.ACTIVE)


@dataclass(frozen=True, slots=True)
class RemoteLocations:
    """The registry of locations."""

    version: int
    """Grows with each change; give it as `expected_version` to change what you looked at."""
    locations: tuple[RemoteLocation, ...]
    """By id, retired ones included."""


@dataclass(frozen=True, slots=True)
class LocationProbe:
    """How a location answered when a small object was written, read and deleted."""

    location_id: int
    """The location."""
    latency_ms: float | None
    """How long it took; None if it failed."""
    error: str | None
    """Why it failed; None if it works."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """An option of the cluster that somebody set."""

    key: str
    """Its key."""
    value: str
    """Its value, a secret hidden."""
    source: str
    """`INITIAL_SERVER_CONFIG`, or `DYNAMIC_SERVER_CONFIG` if it was changed at run time."""


def alter_request(
    operation: str,
    location_id: int | None,
    uri: str | None,
    weight: int | None,
    expected_version: int | None,
) -> m.AlterLocationRequest:
    """ALTER_LOCATION; `ConfigError` for an operation that there is not."""
    op = OPERATIONS.get(operation)
    if op is None:
        raise ConfigError(
            f"{operation!r:.80} is nothing that can be done with a location; allowed: "
            f"{', '.join(OPERATIONS)}"
        )
    return m.AlterLocationRequest(
        op=op,
        location_id=location_id,
        uri=uri,
        weight=weight,
        expected_version=expected_version,
    )


def locations_of(response: m.ListLocationsResponse) -> RemoteLocations:
    """The registry in an answer."""
    found = [
        _location(each.location, each.live_files, each.live_bytes, each.servers)
        for each in response.locations
    ]
    return RemoteLocations(response.version, tuple(found))


def altered_location(response: m.AlterLocationResponse) -> RemoteLocation:
    """The location in the answer to a change; what lies there is not asked."""
    return _location(response.location, 0, 0, ())


def probes_of(response: m.ProbeLocationResponse) -> list[LocationProbe]:
    """The probes in an answer."""
    return [
        LocationProbe(each.location_id, None, each.error)
        if each.HasField("error")
        else LocationProbe(each.location_id, each.latency_ms, None)
        for each in response.probes
    ]


def configs_of(response: m.DescribeClusterConfigsResponse) -> list[ClusterConfig]:
    """The options in an answer, by key."""
    found = [ClusterConfig(c.config_key, c.config_value, c.config_source) for c in response.configs]
    return sorted(found, key=lambda config: config.key)


def _location(
    message: m.PbLocation, files: int, size: int, servers: Iterable[m.PbLocationServer]
) -> RemoteLocation:
    return RemoteLocation(
        message.location_id,
        message.uri,
        message.weight,
        AdminState(message.state),
        files,
        size,
        tuple(_seen(each.server_id, each.report) for each in servers),
    )


def _seen(server_id: int, report: m.PbLocationReport) -> LocationSeen:
    return LocationSeen(
        server_id,
        Health(report.health),
        report.placed_files,
        report.placed_bytes,
        report.errors,
        report.latency_ms,
        report.effective_weight,
        report.last_error if report.HasField("last_error") else None,
    )
