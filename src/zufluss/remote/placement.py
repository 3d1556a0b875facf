"""The choice of a location for new files: smooth weighted round-robin, and policies of tables.

Each location has a current weight. A pick adds its weight to each location, chooses the largest and
subtracts the sum of all weights from it: 5, 1, 1 gives A A B A C A A, and after every seven picks
the shares are exact. The current weights are the whole state. They survive restarts, so the shares
stay exact however often a server starts.

Locations come and go between picks, so current weights are bounded by as many rounds as there are
locations: a location that was 1000 : 1 and is 1 : 1 now does not get a thousand files in a row.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import structlog

from zufluss.config.table_options import TABLE_ZUFLUSS_REMOTE_PLACEMENT
from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.model.schema import dump_object
from zufluss.remote.locations import Locations

log = structlog.get_logger("zufluss.remote")

STATE_FILE: Final = Path(".remote") / "placement.json"
"""Name of the stored round-robin below a server's data directory."""
TABLET_STATE_FILE: Final = Path(".remote") / "tablet-placement.json"
"""The same of a tablet server of its own, which may share its directory with a coordinator."""

PINNED_MAX: Final = 64
"""Locations that a table may be pinned to at most."""


class SmoothRoundRobin:
    """Picks by weight, evenly interleaved; its state is `current`."""

    def __init__(self, current: Mapping[int, int] | None = None) -> None:
        self.current = dict(current or {})

    def pick(self, weights: Mapping[int, int]) -> int:
        """Return one of the keys of `weights`; at least one weight must be above 0."""
        usable = {key: weight for key, weight in sorted(weights.items()) if weight > 0}
        if not usable:
            raise ValueError(f"no weight above 0 in {dict(weights)}")
        if len(usable) == 1:  # no choice, so the turns of the others stay as they are
            return next(iter(usable))
        total = sum(usable.values())
        bound = total * len(usable)
        for key, weight in usable.items():
            before = min(max(self.current.get(key, 0), -bound), bound)
            self.current[key] = before + weight
        best = max(usable, key=lambda key: (self.current[key], -key))
        self.current[best] -= total
        return best

    def keep(self, keys: Iterable[int]) -> None:
        """Drop the state of all other keys."""
        keys_kept = set(keys)
        self.current = {key: value for key, value in self.current.items() if key in keys_kept}

    def to_json(self) -> bytes:
        """Return the bytes of the state."""
        return dump_object({"current": {str(k): v for k, v in sorted(self.current.items())}})

    @classmethod
    def from_json(cls, data: bytes) -> SmoothRoundRobin:
        """Parse the bytes of a state; raises `CorruptRecordError` if they are damaged."""
        try:
            return cls({int(k): _whole(v) for k, v in json.loads(data)["current"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptRecordError(f"the state of placement is damaged: {e!r:.300}") from e


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.100} is not a whole number")
    return value


class StoredRoundRobin(SmoothRoundRobin):
    """A round-robin whose state is in a file, so that restarts do not change the shares.

    The file is not synced: after a power failure a few files go to another location than they
    would have, which does no harm. Without a file (None) the state is lost with the process.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__(_read_current(file))
        self._file = file
        self._saving = threading.Lock()
        self._state = self.to_json()

    def mark(self) -> None:
        """Note the present state for `save`; in the thread that picks."""
        self._state = self.to_json()

    def save(self) -> None:
        """Write the marked state. Blocks; a failure is logged and costs even shares only."""
        if self._file is None:
            return
        with self._saving:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                partial = self._file.with_suffix(".partial")
                partial.write_bytes(self._state)
                partial.replace(self._file)
            except OSError as error:
                log.warning("placement_not_saved", file=str(self._file), error=str(error))


def _read_current(file: Path | None) -> dict[int, int]:
    """Return the stored weights; a damaged file costs even shares, not the start."""
    if file is None or not file.exists():
        return {}
    try:
        return SmoothRoundRobin.from_json(file.read_bytes()).current
    except (CorruptRecordError, OSError) as error:
        log.warning("placement_lost", file=str(file), error=str(error))
        return {}


class Spread(Enum):
    """How the files of a table are spread."""

    CLUSTER = "cluster"
    """Over all locations."""
    PARTITION = "partition"
    """All files of a partition, or of a table without partitions, in one location."""
    PINNED = "pinned"
    """Over the locations that the policy names."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The placement policy of a table: `table.zufluss.remote.placement`."""

    spread: Spread = Spread.CLUSTER
    """How files are spread."""
    ids: tuple[int, ...] = ()
    """Ids of the locations of a pinned table."""

    def allows(self, location_id: int) -> bool:
        """Whether new files of the table may go there."""
        return self.spread is not Spread.PINNED or location_id in self.ids

    def binds_to(self, location_id: int, locations: Locations) -> bool:
        """Whether files in a pinned location have no other place to go to at present."""
        if self.spread is not Spread.PINNED or location_id not in self.ids:
            return False
        others = [x for x in locations.live if x.location_id != location_id]
        return not any(x.takes_files and x.location_id in self.ids for x in others)

    def check(self, locations: Locations) -> None:
        """Raise `ConfigError` for locations that the registry does not have."""
        known = {x.location_id for x in locations.live}
        unknown = [location_id for location_id in self.ids if location_id not in known]
        if unknown:
            raise ConfigError(
                f"{TABLE_ZUFLUSS_REMOTE_PLACEMENT.key} is {self}, but there is no location "
                f"{unknown[0]}; there are {', '.join(map(str, sorted(known)))}"
            )

    def __str__(self) -> str:
        ids = ",".join(map(str, self.ids))
        return f"{self.spread.value}:{ids}" if self.ids else self.spread.value


CLUSTER: Final = Policy()
"""The default policy."""

PARTITION: Final = Policy(Spread.PARTITION)
"""All files in the home location, as long as it works."""


def parse_policy(text: str) -> Policy:
    """Parse the policy in a table property."""
    word, colon, rest = text.strip().partition(":")
    if not colon and word in (Spread.CLUSTER.value, Spread.PARTITION.value):
        return Policy(Spread(word))
    ids = [x.strip() for x in rest.split(",")]
    if word != Spread.PINNED.value or not all(_is_id(x) for x in ids):
        raise _bad(text)
    numbers = tuple(dict.fromkeys(map(int, ids)))
    if len(numbers) > PINNED_MAX:
        raise ConfigError(
            f"{TABLE_ZUFLUSS_REMOTE_PLACEMENT.key} has {len(numbers)} locations; at most "
            f"{PINNED_MAX} are allowed"
        )
    return Policy(Spread.PINNED, numbers)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _bad(text: str) -> ConfigError:
    return ConfigError(
        f"{TABLE_ZUFLUSS_REMOTE_PLACEMENT.key} has {text!r:.200}; allowed: cluster, partition, or "
        "pinned: and the ids of locations with commas between, such as pinned:1,3"
    )
