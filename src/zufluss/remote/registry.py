"""Changes of the registry of locations: by the configuration, and by operators. Pure functions.

Each location remembers what the configuration last said about it, so that a restart with the same
configuration keeps the changes of operators:

| the configuration | the registry |
|---|---|
| has an address that no location has | gets a new location |
| has another weight than before | takes over the weight |
| no longer has an address that it had before | retires the location; refused while it has files |
| is the same as before | does not change |

The configuration never removes a location that an operator added. The coordinator calls `reconcile`
and `alter` and stores the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Thread
from typing import Final, NamedTuple, TypeVar

from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.remote.locations import (
    IMPLICIT,
    AdminState,
    AlterOp,
    Location,
    Locations,
    ids_text,
    implicit_uri,
)
from zufluss.remote.uri import FILE, LocationUri, parse_durable_location, parse_location

T = TypeVar("T")

WEIGHT_MAX: Final = 2**31 - 1
LINKS_SECONDS: Final = 1.0
"""How long to wait for a disk to resolve symbolic links."""
LOCATIONS_MAX: Final = 1024
"""Locations of a registry at most, retired ones included."""


class ConfiguredLocation(NamedTuple):
    """An address of the configuration and its weight."""

    uri: str
    weight: int


def configured_locations(conf: Configuration) -> list[ConfiguredLocation]:
    """Return the addresses and weights of a configuration; only `IMPLICIT` if it has none.

    Raises `ConfigError` for addresses or weights that are not allowed.
    """
    dirs = [parse_durable_location(x, o.REMOTE_DATA_DIRS.key) for x in conf[o.REMOTE_DATA_DIRS]]
    single = conf[o.REMOTE_DATA_DIR]
    one = None if single is None else parse_durable_location(single, o.REMOTE_DATA_DIR.key)
    if not dirs:
        return [ConfiguredLocation(IMPLICIT if one is None else one.text, 1)]
    _check_apart(dirs, o.REMOTE_DATA_DIRS.key)
    if one is not None and one not in dirs:
        raise ConfigError(
            f"{o.REMOTE_DATA_DIR.key} is {one.text}, which is not one of {o.REMOTE_DATA_DIRS.key} "
            f"({', '.join(x.text for x in dirs)}); put it there, first, or leave it out"
        )
    weights = _weights(conf, len(dirs))
    return [ConfiguredLocation(x.text, w) for x, w in zip(dirs, weights, strict=True)]


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
    """Raise `ConfigError` if two addresses are equal or one contains the other."""
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


def reconcile(before: Locations | None, conf: Configuration, live: Mapping[int, int]) -> Locations:
    """Return the registry after following the configuration; `before` if nothing changes.

    `live` is the number of files in use by location. Raises `ConfigError` for a configuration that
    is not allowed.
    """
    wants = configured_locations(conf)
    old = () if before is None else before.locations
    locations = {x.location_id: x for x in old}
    present: set[int] = set()
    for want in wants:
        location = _location_for(want, wants, locations.values(), conf)
        locations[location.location_id] = location
        present.add(location.location_id)
    for location in old:
        followed = location.configured is not None or location.uri == IMPLICIT
        if followed and location.location_id not in present:
            locations[location.location_id] = _left_out(location, live.get(location.location_id, 0))
    adaptive = conf[o.ZUFLUSS_REMOTE_ADAPTIVE_WEIGHTS]
    return _next(before, locations.values(), adaptive, conf)


def _location_for(
    want: ConfiguredLocation,
    wants: Sequence[ConfiguredLocation],
    locations: Iterable[Location],
    conf: Configuration,
) -> Location:
    """Return the location of a configured address: of the last time, with this address, or new."""
    for location in locations:
        if location.configured == want.uri:
            if location.configured_weight == want.weight:
                return location
            return replace(location, weight=want.weight, configured_weight=want.weight)
    beside = implicit_uri(conf).text
    others = {other.uri for other in wants}
    for location in sorted(locations, key=lambda x: x.state is AdminState.RETIRED):
        same = (location.uri or beside) == (want.uri or beside)
        same = same and location.state is not AdminState.LOST
        if same and location.configured not in others:
            return _configured(location, want)
    return _configured(Location(_free_id(locations), want.uri), want)


def _configured(location: Location, want: ConfiguredLocation) -> Location:
    return replace(
        location,
        uri=want.uri,
        weight=want.weight,
        state=AdminState.ACTIVE,
        configured=want.uri,
        configured_weight=want.weight,
    )


def _left_out(location: Location, files: int) -> Location:
    """Return the new state of a location that the configuration no longer has."""
    if location.state is AdminState.LOST:
        return replace(location, configured=None, configured_weight=None)
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


def alter(
    before: Locations,
    op: AlterOp,
    *,
    conf: Configuration,
    location_id: int | None = None,
    uri: str | None = None,
    weight: int | None = None,
    live: Mapping[int, int],
    expected_version: int | None = None,
    force: bool = False,
) -> Locations:
    """Return the registry after an operation of an operator; `before` if nothing changes.

    `force` retires a location that was destroyed with files in use: it is lost until nothing refers
    to it any more. Raises `ConfigError` for an operation that is not allowed, and error 22 if the
    version is not the expected one.
    """
    if expected_version not in (None, before.version):
        raise ZuflussError(
            f"the registry of locations has version {before.version}, not {expected_version}; "
            "look at it again",
            code=ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION,
        )
    locations = {x.location_id: x for x in before.locations}
    if op is AlterOp.ADD:
        changed = _added(locations, _need(uri, "a location to be added needs an address"), weight)
        _leave_implicit(locations, live)
    else:
        number = _need(location_id, f"{op.name} needs the id of a location")
        if number not in locations:
            raise ConfigError(
                f"there is no location {number}; there are {ids_text(before.locations)}"
            )
        if force and op is AlterOp.RETIRE:
            changed = _lost(locations[number])
        else:
            changed = _changed(locations[number], op, uri, weight, live.get(number, 0))
        _check_alteration(before, locations[number], op)
    locations[changed.location_id] = changed
    return _next(before, locations.values(), before.adaptive, conf)


def _added(locations: Mapping[int, Location], uri: str, weight: int | None) -> Location:
    address = parse_durable_location(uri, "the address of a location").text
    share = _checked_weight(1 if weight is None else weight, "the weight of a location")
    for location in locations.values():
        if location.uri == address and location.state is AdminState.RETIRED:
            return replace(location, weight=share, state=AdminState.ACTIVE)
    return Location(_free_id(locations.values()), address, share)


def _leave_implicit(locations: dict[int, Location], live: Mapping[int, int]) -> None:
    """Stop using the location beside the data: there is one with an address now."""
    for location in locations.values():
        if location.uri == IMPLICIT and location.state is AdminState.ACTIVE:
            files = live.get(location.location_id, 0)
            state = AdminState.DRAINING if files else AdminState.RETIRED
            marked = location.marked and state is not AdminState.RETIRED
            locations[location.location_id] = replace(location, state=state, marked=marked)


def _changed(
    location: Location, op: AlterOp, uri: str | None, weight: int | None, files: int
) -> Location:
    if op is AlterOp.RETIRE:
        return _retired(location, files)
    if location.state is AdminState.LOST:
        raise ConfigError(
            f"{location} was lost, and {files} references to its files are being removed; wait "
            "until it is retired, or add its address again, as another location"
        )
    if op is AlterOp.ACTIVATE:
        return replace(location, state=AdminState.ACTIVE)
    if location.state is AdminState.RETIRED:
        raise ConfigError(f"{location} is retired; activate it first")
    if op is AlterOp.DRAIN:
        return replace(location, state=AdminState.DRAINING)
    if op is AlterOp.SET_WEIGHT:
        share = _need(weight, "SET_WEIGHT needs a weight")
        return replace(location, weight=_checked_weight(share, f"the weight of {location}"))
    address = _need(uri, "MOVE needs the new address")
    uri_there = parse_durable_location(address, f"the address of {location}")
    return replace(location, uri=uri_there.text)


def _check_alteration(before: Locations, location: Location, op: AlterOp) -> None:
    """Raise `ConfigError` for an operation that would lose files.

    The only location that takes files cannot be drained, so it may be moved without.
    """
    others = any(x.takes_files and x is not location for x in before.locations)
    if op is AlterOp.MOVE and location.takes_files and others:
        raise ConfigError(
            f"{location} still takes files, which the copy would not have; give it weight 0, wait "
            "until uploads under way are over, copy everything, move it, and give its weight back"
        )
    if op is AlterOp.ACTIVATE and location.uri == IMPLICIT and before.explicit:
        raise ConfigError(f"other machines cannot read {location}; add another location")


def _lost(location: Location) -> Location:
    if location.state is AdminState.RETIRED:
        raise ConfigError(f"{location} is retired already, so nothing in it is in use")
    return replace(location, state=AdminState.LOST, marked=False)


def _retired(location: Location, files: int) -> Location:
    if files:
        if location.state is AdminState.ACTIVE:
            advice = "drain it, and wait until none is left"
        else:
            advice = (
                "wait until none is left; tables that are pinned to it keep theirs, and "
                f"`zufluss location show {location.location_id}` names them"
            )
        raise ConfigError(f"{location} still has {files} files; {advice}")
    if location.state is AdminState.ACTIVE:
        raise ConfigError(
            f"{location} still takes files; drain it first, so that uploads under way end"
        )
    return replace(location, state=AdminState.RETIRED, marked=False)


def _next(
    before: Locations | None, kept: Iterable[Location], adaptive: bool, conf: Configuration
) -> Locations:
    """Return the checked registry of these locations; its version grows if something changed."""
    locations = tuple(sorted(kept, key=lambda x: x.location_id))
    registry = Locations(
        1 if before is None else before.version,
        locations,
        any(x.uri != IMPLICIT and not x.is_gone for x in locations),
        adaptive,
        0 if before is None else before.moved_version,
    )
    if registry == before:
        return before
    old = set() if before is None else {x.uri for x in before.live}
    _check_registry(registry.resolved(conf), renamed=not old >= {x.uri for x in registry.live})
    if before is None:
        return registry
    version = before.version + 1
    addresses = {x.location_id: x.uri for x in before.locations}
    moved = any(addresses.get(x.location_id, x.uri) != x.uri for x in locations)
    return replace(
        registry, version=version, moved_version=version if moved else before.moved_version
    )


def _check_registry(registry: Locations, *, renamed: bool) -> None:
    uris = [parse_location(x.uri, str(x)) for x in registry.live]
    _check_apart(uris, "the registry of locations")
    if renamed:
        _check_apart(map(_real, uris), "the registry of locations, symbolic links followed,")
    if not any(x.takes_files for x in registry.locations):
        raise ConfigError(
            "no location would take new files; add or activate another one first, or give one a "
            f"weight (there are {ids_text(registry.locations)})"
        )
    if len(registry.locations) > LOCATIONS_MAX:
        raise ConfigError(f"there are {LOCATIONS_MAX} locations already, retired ones included")


def _real(uri: LocationUri) -> LocationUri:
    """Return an address without symbolic links; unchanged if the disk does not answer in time.

    A directory under two names would lose its files: under each name those of the other look like
    garbage.
    """
    if uri.scheme != FILE:
        return uri
    paths: list[str] = []
    look = Thread(target=lambda: paths.append(os.path.realpath(uri.path)), daemon=True)
    look.start()
    look.join(LINKS_SECONDS)
    return uri._replace(path=paths[0]) if paths else uri


def _free_id(locations: Iterable[Location]) -> int:
    return max((x.location_id for x in locations), default=0) + 1


def _need(value: T | None, message: str) -> T:
    if value is None:
        raise ConfigError(message)
    return value
