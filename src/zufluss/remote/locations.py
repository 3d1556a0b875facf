"""The registry of locations: small ids for the places where remote files lie.

Manifests name a location by its id, so an address can change without touching them, and an id is
never given to another place. The coordinator owns the registry and changes it by compare-and-set
on its version; every server has a copy.

The registry follows the configuration, and operators change it too. Each location remembers what
the configuration last said of it, so that a restart with the same configuration changes nothing
that an operator did:

| the configuration | the registry |
|---|---|
| names an address that no location has | a new location |
| gives another weight than before | that weight |
| no longer names one that it named before | retired; refused while it has files |
| says what it said before | nothing changes |

What an operator added is the operator's: the configuration never removes it. Without any
configured address there is one location beside the coordinator's data, stored with an empty address
so that the data directory can be moved; `resolved` fills it in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar

from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.errors import ConfigError, CorruptRecordError, ErrorCode, ZuflussError
from zufluss.model.schema import dump_object
from zufluss.remote.files import number, text
from zufluss.remote.uri import FILE, LocationUri, parse_location
from zufluss.wire import messages as m

T = TypeVar("T")

IMPLICIT: Final = ""
"""The stored address of the location beside the coordinator's data."""

IMPLICIT_NAME: Final = "remote"
"""Its name in the data directory."""

WEIGHT_MAX: Final = 2**31 - 1
LINKS_SECONDS: Final = 1.0
"""How long to wait for what a directory is really called."""
LOCATIONS_MAX: Final = 1024
"""Locations that a registry holds, retired ones included."""


class AdminState(IntEnum):
    """What the operator wants of a location."""

    ACTIVE = 0
    """It takes files."""
    DRAINING = 1
    """It takes no new files; those it has are read."""
    RETIRED = 2
    """It has no files that count; its id stays taken."""


class Health(IntEnum):
    """What one server sees of a location."""

    ACTIVE = 0
    SUSPECT = 1
    """A request failed; used for new files only if nothing better is there."""
    DOWN = 2
    """Requests fail; no new files until it answers probes again."""


class AlterOp(IntEnum):
    """What an operator does with a location."""

    ADD = 0
    DRAIN = 1
    ACTIVATE = 2
    RETIRE = 3
    SET_WEIGHT = 4
    MOVE = 5


class UnknownLocationError(ZuflussError, LookupError):
    """A file lies in a location that the registry does not have; a newer registry may."""

    code = ErrorCode.STORAGE_EXCEPTION


@dataclass(frozen=True, slots=True)
class Location:
    """A place for remote files."""

    location_id: int
    """Never given to another place."""
    uri: str
    """Its address in the one spelling of `uri.py`, or `IMPLICIT`."""
    weight: int = 1
    """Its share of new files; 0 takes none."""
    state: AdminState = AdminState.ACTIVE
    """What the operator wants of it."""
    configured: str | None = None
    """The address in the configuration that it stands for; None if an operator added it."""
    configured_weight: int | None = None
    """The weight that the configuration last gave it."""
    marked: bool = field(default=False, compare=False)
    """The cluster's marker was written there (`marker.py`); the coordinator's own note."""

    @property
    def takes_files(self) -> bool:
        """Whether new files may go there, its health aside."""
        return self.state is AdminState.ACTIVE and self.weight > 0

    def __str__(self) -> str:
        return f"location {self.location_id} ({self.uri or 'beside the data'})"


@dataclass(frozen=True, slots=True)
class Locations:
    """The registry, as one version of it."""

    version: int
    """Grows with each change."""
    locations: tuple[Location, ...]
    """By id, retired ones included."""
    explicit: bool
    """Somebody named an address, so clients on other machines may read there."""
    adaptive: bool = False
    """New files follow latency and errors, too."""

    def get(self, location_id: int) -> Location:
        """The location of an id."""
        for location in self.locations:
            if location.location_id == location_id:
                return location
        raise UnknownLocationError(
            f"location {location_id} is not in version {self.version} of the registry, which has "
            f"{_ids(self.locations)}"
        )

    @property
    def first(self) -> Location:
        """Where things lie whose record is older than the registry; never a retired one."""
        for location in self.live:
            return location
        raise UnknownLocationError(f"version {self.version} of the registry has no location yet")

    @property
    def live(self) -> tuple[Location, ...]:
        """All that are not retired."""
        return tuple(x for x in self.locations if x.state is not AdminState.RETIRED)

    def resolved(self, conf: Configuration) -> Locations:
        """With the full address of the location beside the data of the coordinator of `conf`."""
        if all(location.uri for location in self.locations):
            return self
        uri = implicit_uri(conf)
        return replace(
            self,
            locations=tuple(x if x.uri else replace(x, uri=uri.text) for x in self.locations),
        )

    def with_marks(self, uris: Container[str], conf: Configuration) -> Locations:
        """With a note that the markers at these full addresses were written; the same version."""
        beside = implicit_uri(conf).text
        new = [x for x in self.live if not x.marked and (x.uri or beside) in uris]
        if not new:
            return self
        return replace(
            self,
            locations=tuple(replace(x, marked=True) if x in new else x for x in self.locations),
        )

    def to_json(self) -> bytes:
        """As the metadata store has it."""
        return dump_object(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> Locations:
        """What the bytes of a registry say; `CorruptRecordError` if they are none."""
        try:
            source = json.loads(data)
            return cls(
                number(source["version"]),
                tuple(map(_location, source["locations"])),
                bool(source["explicit"]),
                bool(source["adaptive"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptRecordError(f"the registry of locations is damaged: {e!r:.300}") from e

    def to_proto(self) -> m.PbLocations:
        """As servers tell each other; every address must be resolved."""
        return m.PbLocations(
            version=self.version,
            locations=map(location_to_proto, self.locations),
            explicit=self.explicit,
            adaptive=self.adaptive,
        )

    @classmethod
    def from_proto(cls, message: m.PbLocations) -> Locations:
        """As another server told it; what the configuration said does not travel."""
        return cls(
            message.version,
            tuple(map(location_from_proto, message.locations)),
            message.explicit,
            message.adaptive,
        )


def location_to_proto(location: Location) -> m.PbLocation:
    """A location on the wire; its address must be resolved."""
    if location.uri == IMPLICIT:
        raise ValueError(f"location {location.location_id} travels without an address")
    return m.PbLocation(
        location_id=location.location_id,
        uri=location.uri,
        weight=location.weight,
        state=location.state,
    )


def location_from_proto(message: m.PbLocation) -> Location:
    """A location from the wire."""
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
    """The address of the location beside the data."""
    return parse_location(str(Path(conf[o.DATA_DIR]) / IMPLICIT_NAME), o.DATA_DIR.key)


# ---------------------------------------------------------------------------------------------
# What the configuration wants
# ---------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """An address of the configuration."""

    uri: str
    weight: int


def wanted(conf: Configuration) -> list[Wanted]:
    """The addresses that a configuration names, each checked, with their weights.

    One, `IMPLICIT`, if it names none.
    """
    dirs = [parse_location(x, o.REMOTE_DATA_DIRS.key) for x in conf[o.REMOTE_DATA_DIRS]]
    single = conf[o.REMOTE_DATA_DIR]
    one = None if single is None else parse_location(single, o.REMOTE_DATA_DIR.key)
    if not dirs:
        return [Wanted(IMPLICIT if one is None else one.text, 1)]
    _check_apart(dirs, o.REMOTE_DATA_DIRS.key)
    if one is not None and one not in dirs:
        raise ConfigError(
            f"{o.REMOTE_DATA_DIR.key} is {one.text}, which is not one of {o.REMOTE_DATA_DIRS.key} "
            f"({', '.join(x.text for x in dirs)}); put it there, first, or leave it out"
        )
    return [Wanted(x.text, w) for x, w in zip(dirs, _weights(conf, len(dirs)), strict=True)]


def _weights(conf: Configuration, count: int) -> list[int]:
    if conf[o.REMOTE_DATA_DIRS_STRATEGY] != "WEIGHTED_ROUND_ROBIN":
        return [1] * count
    key = o.REMOTE_DATA_DIRS_WEIGHTS.key
    texts = conf[o.REMOTE_DATA_DIRS_WEIGHTS]
    if len(texts) != count:
        raise ConfigError(
            f"{key} has {len(texts)} weights for the {count} of {o.REMOTE_DATA_DIRS.key}; "
            "WEIGHTED_ROUND_ROBIN needs one for each"
        )
    weights = [_weight_of(x, key) for x in texts]
    if not any(weights):
        raise ConfigError(f"{key} is 0 for every location; one at least must take new files")
    return weights


def _weight_of(text: str, key: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise ConfigError(f"{key} has {text!r:.100}; allowed: whole numbers from 0 to {WEIGHT_MAX}")
    return _checked_weight(int(text), key)


def _checked_weight(weight: int, what: str) -> int:
    if not 0 <= weight <= WEIGHT_MAX:
        raise ConfigError(f"{what} has {weight}; allowed: whole numbers from 0 to {WEIGHT_MAX}")
    return weight


def _check_apart(uris: Iterable[LocationUri], what: str) -> None:
    """No address twice, and none inside another: each file lies in one location."""
    seen: list[LocationUri] = []
    for uri in uris:
        for other in seen:
            if uri == other:
                raise ConfigError(f"{what} has {uri.text} twice; each location needs its own")
            if uri.contains(other) or other.contains(uri):
                raise ConfigError(
                    f"{what} has {other.text} and {uri.text}, one inside the other; "
                    "locations must lie apart"
                )
        seen.append(uri)


# ---------------------------------------------------------------------------------------------
# Changes
# ---------------------------------------------------------------------------------------------


def reconciled(before: Locations | None, conf: Configuration, live: Mapping[int, int]) -> Locations:
    """The registry that a configuration asks for; `before` itself if nothing changes.

    `live` is the number of files that count by location. A configuration that is not allowed is a
    `ConfigError`, and `before` stays in force.
    """
    wants = wanted(conf)
    old = () if before is None else before.locations
    kept = {x.location_id: x for x in old}
    stands: set[int] = set()
    for want in wants:
        location = _standing_for(want, wants, kept.values(), conf)
        kept[location.location_id] = location
        stands.add(location.location_id)
    for location in old:
        followed = location.configured is not None or location.uri == IMPLICIT
        if followed and location.location_id not in stands:
            kept[location.location_id] = _left_out(location, live.get(location.location_id, 0))
    adaptive = conf[o.ZUFLUSS_REMOTE_ADAPTIVE_WEIGHTS]
    return _next(before, kept.values(), adaptive, conf)


def _standing_for(
    want: Wanted, wants: Sequence[Wanted], kept: Iterable[Location], conf: Configuration
) -> Location:
    """The location of a configured address: the one it stood for, the one that is there, or new."""
    for location in kept:
        if location.configured == want.uri:
            if location.configured_weight == want.weight:
                return location
            return replace(location, weight=want.weight, configured_weight=want.weight)
    beside = implicit_uri(conf).text
    others = {other.uri for other in wants}
    for location in sorted(kept, key=lambda x: x.state is AdminState.RETIRED):
        same = (location.uri or beside) == (want.uri or beside)
        if same and location.configured not in others:
            return _configured(location, want)
    return _configured(Location(_free_id(kept), want.uri), want)


def _configured(location: Location, want: Wanted) -> Location:
    return replace(
        location,
        uri=want.uri,
        weight=want.weight,
        state=AdminState.ACTIVE,
        configured=want.uri,
        configured_weight=want.weight,
    )


def _left_out(location: Location, files: int) -> Location:
    """A location that the configuration no longer names."""
    state = AdminState.RETIRED
    if files and location.uri == IMPLICIT:
        state = AdminState.DRAINING
    elif files:
        raise ConfigError(
            f"{location} still has {files} files, so {o.REMOTE_DATA_DIRS.key} must keep "
            f"{location.configured}; give it weight 0 or drain it until they are gone"
        )
    marked = location.marked and state is not AdminState.RETIRED
    return replace(location, state=state, configured=None, configured_weight=None, marked=marked)


def altered(
    before: Locations,
    op: AlterOp,
    *,
    conf: Configuration,
    location_id: int | None = None,
    uri: str | None = None,
    weight: int | None = None,
    live: Mapping[int, int],
    expected_version: int | None = None,
) -> Locations:
    """The registry after what an operator asked for; `before` itself if it is so already.

    A `ConfigError` says what is not allowed; another version than expected is error 22.
    """
    if expected_version not in (None, before.version):
        raise ZuflussError(
            f"the registry of locations has version {before.version}, not {expected_version}; "
            "look at it again",
            code=ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION,
        )
    kept = {x.location_id: x for x in before.locations}
    if op is AlterOp.ADD:
        changed = _added(kept, _need(uri, "a location to be added needs an address"), weight)
        _leave_implicit(kept, live)
    else:
        wanted_id = _need(location_id, f"{op.name} needs the id of a location")
        if wanted_id not in kept:
            raise ConfigError(
                f"there is no location {wanted_id}; there are {_ids(before.locations)}"
            )
        changed = _changed(kept[wanted_id], op, uri, weight, live.get(wanted_id, 0))
        _check_alteration(before, kept[wanted_id], op)
    kept[changed.location_id] = changed
    return _next(before, kept.values(), before.adaptive, conf)


def _added(kept: Mapping[int, Location], uri: str, weight: int | None) -> Location:
    address = parse_location(uri, "the address of a location").text
    share = _checked_weight(1 if weight is None else weight, "the weight of a location")
    for location in kept.values():
        if location.uri == address and location.state is AdminState.RETIRED:
            return replace(location, weight=share, state=AdminState.ACTIVE)
    return Location(_free_id(kept.values()), address, share)


def _leave_implicit(kept: dict[int, Location], live: Mapping[int, int]) -> None:
    """Once there is a real location, the one beside the data takes no more files."""
    for location in kept.values():
        if location.uri == IMPLICIT and location.state is AdminState.ACTIVE:
            files = live.get(location.location_id, 0)
            state = AdminState.DRAINING if files else AdminState.RETIRED
            marked = location.marked and state is not AdminState.RETIRED
            kept[location.location_id] = replace(location, state=state, marked=marked)


def _changed(
    location: Location, op: AlterOp, uri: str | None, weight: int | None, files: int
) -> Location:
    if op is AlterOp.ACTIVATE:
        return replace(location, state=AdminState.ACTIVE)
    if op is AlterOp.RETIRE:
        return _retired(location, files)
    if location.state is AdminState.RETIRED:
        raise ConfigError(f"{location} is retired; activate it first")
    if op is AlterOp.DRAIN:
        return replace(location, state=AdminState.DRAINING)
    if op is AlterOp.SET_WEIGHT:
        share = _need(weight, "SET_WEIGHT needs a weight")
        return replace(location, weight=_checked_weight(share, f"the weight of {location}"))
    address = _need(uri, "MOVE needs the new address")
    return replace(location, uri=parse_location(address, f"the address of {location}").text)


def _check_alteration(before: Locations, location: Location, op: AlterOp) -> None:
    """Refuse what would lose files. The only one that takes files cannot be drained, yet moved."""
    others = any(x.takes_files and x is not location for x in before.locations)
    if op is AlterOp.MOVE and location.takes_files and others:
        raise ConfigError(
            f"{location} still takes files, which the copy would not have; give it weight 0, wait "
            "until uploads under way are over, copy everything, move it, and give its weight back"
        )
    if op is AlterOp.ACTIVATE and location.uri == IMPLICIT and before.explicit:
        raise ConfigError(f"{location} is where other machines cannot read; add another location")


def _retired(location: Location, files: int) -> Location:
    if files:
        raise ConfigError(
            f"{location} still has {files} files; drain it, and wait until none is left"
        )
    if location.state is AdminState.ACTIVE:
        raise ConfigError(
            f"{location} still takes files; drain it first, so that uploads under way end"
        )
    return replace(location, state=AdminState.RETIRED, marked=False)


def _next(
    before: Locations | None, kept: Iterable[Location], adaptive: bool, conf: Configuration
) -> Locations:
    """The registry of these locations, checked, one version on if something changed."""
    locations = tuple(sorted(kept, key=lambda x: x.location_id))
    found = Locations(
        1 if before is None else before.version,
        locations,
        any(x.uri != IMPLICIT and x.state is not AdminState.RETIRED for x in locations),
        adaptive,
    )
    if found == before:
        return before
    old = set() if before is None else {x.uri for x in before.live}
    _check_registry(found.resolved(conf), renamed=not old >= {x.uri for x in found.live})
    return found if before is None else replace(found, version=before.version + 1)


def _check_registry(found: Locations, *, renamed: bool) -> None:
    uris = [parse_location(x.uri, str(x)) for x in found.live]
    _check_apart(uris, "the registry of locations")
    if renamed:
        _check_apart(map(_real, uris), "the registry of locations, symbolic links followed,")
    if not any(x.takes_files for x in found.locations):
        raise ConfigError(
            "no location would take new files; add or activate another one first, or give one a "
            f"weight (there are {_ids(found.locations)})"
        )
    if len(found.locations) > LOCATIONS_MAX:
        raise ConfigError(f"there are {LOCATIONS_MAX} locations already, retired ones included")


def _real(uri: LocationUri) -> LocationUri:
    """Without symbolic links, as this server sees them, unless a hung disk does not tell.

    A directory under two names would lose its files: under each one those of the other are garbage.
    """
    if uri.scheme != FILE:
        return uri
    found: list[str] = []
    look = Thread(target=lambda: found.append(os.path.realpath(uri.path)), daemon=True)
    look.start()
    look.join(LINKS_SECONDS)
    return uri._replace(path=found[0]) if found else uri


def _free_id(kept: Iterable[Location]) -> int:
    return max((x.location_id for x in kept), default=0) + 1


def _ids(locations: Iterable[Location]) -> str:
    return ", ".join(str(x.location_id) for x in locations) or "none"


def _need(value: T | None, message: str) -> T:
    if value is None:
        raise ConfigError(message)
    return value
