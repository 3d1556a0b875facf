"""The registry of locations: small ids for the places of remote files.

Manifests name a location by its id, so an address can change without rewriting them, and an id is
never used for another place. The coordinator owns the registry and changes it by compare-and-set on
its version (`registry.py`); every server has a copy.

Without any configured address there is one location beside the coordinator's data. It is stored
with an empty address, so that the data directory can be moved; `resolved` fills the address in.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.errors import CorruptRecordError, ErrorCode, ZuflussError
from zufluss.model.schema import dump_object
from zufluss.remote.files import number, text
from zufluss.remote.uri import LocationUri, parse_location
from zufluss.wire import messages as m

T = TypeVar("T")

IMPLICIT: Final = ""
"""The stored address of the location beside the coordinator's data."""

IMPLICIT_NAME: Final = "remote"
"""Name of that location in the data directory."""


class AdminState(IntEnum):
    """The state of a location that the operator chose."""

    ACTIVE = 0
    """The location takes new files."""
    DRAINING = 1
    """The location takes no new files; its files can be read."""
    RETIRED = 2
    """The location has no files in use; its id stays reserved."""
    LOST = 3
    """The location was destroyed. Nobody reads it; the references to its files are being removed,
    and then it is retired."""


class Health(IntEnum):
    """The health of a location, as one server sees it (`health.py`)."""

    ACTIVE = 0
    SUSPECT = 1
    """A request failed; gets new files only if no location is ACTIVE."""
    DOWN = 2
    """Requests fail; gets no new files until probes succeed."""


class AlterOp(IntEnum):
    """The operations of an operator on a location."""

    ADD = 0
    DRAIN = 1
    ACTIVATE = 2
    RETIRE = 3
    SET_WEIGHT = 4
    MOVE = 5


class UnknownLocationError(ZuflussError, LookupError, code=ErrorCode.STORAGE_EXCEPTION):
    """The registry does not have a location; a newer version may have it."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place for remote files."""

    location_id: int
    """Never used for another place."""
    uri: str
    """Address, normalised by `uri.py`, or `IMPLICIT`."""
    weight: int = 1
    """Share of new files; a location with 0 gets none."""
    state: AdminState = AdminState.ACTIVE
    """State that the operator chose."""
    configured: str | None = None
    """The configured address of this location; None if an operator added it."""
    configured_weight: int | None = None
    """The configured weight when the registry last followed the configuration."""
    marked: bool = field(default=False, compare=False)
    """The cluster's marker was written (`marker.py`); known to the coordinator only."""

    @property
    def takes_files(self) -> bool:
        """Whether new files may be placed here, regardless of health."""
        return self.state is AdminState.ACTIVE and self.weight > 0

    @property
    def is_gone(self) -> bool:
        """Whether servers have stopped to read and write the location: it is retired or lost."""
        return self.state in (AdminState.RETIRED, AdminState.LOST)

    def __str__(self) -> str:
        return f"location {self.location_id} ({self.uri or 'beside the data'})"


@dataclass(frozen=True, slots=True)
class Locations:
    """One version of the registry."""

    version: int
    """Grows by one with each change."""
    locations: tuple[Location, ...]
    """All locations in the order of ids, retired ones included."""
    explicit: bool
    """An address was configured or added, so clients on other machines can read files."""
    adaptive: bool = False
    """Weights depend on latency and errors too."""
    moved_version: int = 0
    """The version in which a location last got another address; known to the coordinator only."""

    def get(self, location_id: int) -> Location:
        """Return a location by id; raises `UnknownLocationError`."""
        for location in self.locations:
            if location.location_id == location_id:
                return location
        raise UnknownLocationError(
            f"location {location_id} is not in version {self.version} of the registry, which has "
            f"{ids_text(self.locations)}"
        )

    @property
    def first(self) -> Location:
        """The first location that is in use: files without location id are here."""
        for location in self.live:
            return location
        raise UnknownLocationError(f"version {self.version} of the registry has no location yet")

    @property
    def live(self) -> tuple[Location, ...]:
        """All locations in use: neither retired nor lost."""
        return tuple(x for x in self.locations if not x.is_gone)

    @property
    def lost(self) -> frozenset[int]:
        """The ids of locations that were destroyed, while documents still refer to them."""
        return frozenset(x.location_id for x in self.locations if x.state is AdminState.LOST)

    def resolved(self, conf: Configuration) -> Locations:
        """Return the registry with the full address of the location beside the data."""
        if all(location.uri for location in self.locations):
            return self
        uri = implicit_uri(conf)
        return replace(
            self,
            locations=tuple(x if x.uri else replace(x, uri=uri.text) for x in self.locations),
        )

    def with_marks(self, uris: Container[str], conf: Configuration) -> Locations:
        """Return the registry, in the same version, with these full addresses marked."""
        beside = implicit_uri(conf).text
        new = [x for x in self.live if not x.marked and (x.uri or beside) in uris]
        if not new:
            return self
        return replace(
            self,
            locations=tuple(replace(x, marked=True) if x in new else x for x in self.locations),
        )

    def to_json(self) -> bytes:
        """Return the bytes for the metadata store."""
        return dump_object(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> Locations:
        """Parse the bytes of a registry; raises `CorruptRecordError` if they are damaged."""
        try:
            source = json.loads(data)
            return cls(
                number(source["version"]),
                tuple(map(_location, source["locations"])),
                bool(source["explicit"]),
                bool(source["adaptive"]),
                number(source.get("moved_version", 0)),  # older versions stored none
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptRecordError(f"the registry of locations is damaged: {e!r:.300}") from e

    def to_proto(self) -> m.PbLocations:
        """Return the message for other servers; every address must be resolved."""
        return m.PbLocations(
            version=self.version,
            locations=map(location_to_proto, self.locations),
            explicit=self.explicit,
            adaptive=self.adaptive,
        )

    @classmethod
    def from_proto(cls, message: m.PbLocations) -> Locations:
        """Return the registry of a message, which has no configured addresses and weights."""
        return cls(
            message.version,
            tuple(map(location_from_proto, message.locations)),
            message.explicit,
            message.adaptive,
        )


def location_to_proto(location: Location) -> m.PbLocation:
    """Return the message of a location; its address must be resolved."""
    if location.uri == IMPLICIT:
        raise ValueError(f"location {location.location_id} has no address for a message")
    return m.PbLocation(
        location_id=location.location_id,
        uri=location.uri,
        weight=location.weight,
        state=location.state,
    )


def location_from_proto(message: m.PbLocation) -> Location:
    """Return the location of a message."""
    return Location(message.location_id, message.uri, message.weight, AdminState(message.state))


def _location(source: Mapping[str, Any]) -> Location:
    configured, weight = source["configured"], source["configured_weight"]
    return Location(
        number(source["location_id"]),
        text(source["uri"]),
        number(source["weight"]),
        AdminState(source["state"]),
        None if configured is None else text(configured),
        None if weight is None else number(weight),
        bool(source["marked"]),
    )


def implicit_uri(conf: Configuration) -> LocationUri:
    """Return the address of the location beside the data."""
    return parse_location(str(Path(conf[o.DATA_DIR]) / IMPLICIT_NAME), o.DATA_DIR.key)


def ids_text(locations: Iterable[Location]) -> str:
    """Return the ids of locations for a message."""
    return ", ".join(str(x.location_id) for x in locations) or "none"
