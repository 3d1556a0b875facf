"""Where new files go: smooth weighted round-robin, and what a table says about it.

Each location has a current weight. A pick adds to each its weight, takes the largest and takes the
sum of all weights off it: 5, 1, 1 gives A A B A C A A, and after every seven picks the shares are
exact. The current weights are the whole state; kept over restarts, the next pick goes on where the
last one was, however often a server starts.

Locations come and go between picks, so current weights are kept within as many rounds as there are
locations: one that was 1000 : 1 and now is 1 : 1 gets no thousand files in a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from zufluss.config.table_options import TABLE_ZUFLUSS_REMOTE_PLACEMENT
from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.model.schema import dump_object
from zufluss.remote.locations import AdminState, Locations

PINNED_MAX: Final = 64
"""Locations that a table may be pinned to."""


class SmoothRoundRobin:
    """Picks by weight, evenly interleaved; its state is `current`."""

    def __init__(self, current: Mapping[int, int] | None = None) -> None:
        self.current = dict(current or {})

    def pick(self, weights: Mapping[int, int]) -> int:
        """One of the keys of `weights`, of which one at least must be above 0."""
        usable = {key: weight for key, weight in sorted(weights.items()) if weight > 0}
        if not usable:
            raise ValueError(f"no weight above 0 in {dict(weights)}")
        if len(usable) == 1:  # nobody's turn: it must not bring the others' out of step
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
        """Forget all others."""
        kept = set(keys)
        self.current = {key: value for key, value in self.current.items() if key in kept}

    def to_json(self) -> bytes:
        """As it is stored."""
        return dump_object({"current": {str(k): v for k, v in sorted(self.current.items())}})

    @classmethod
    def from_json(cls, data: bytes) -> SmoothRoundRobin:
        """What was stored; `CorruptRecordError` if that is something else."""
        try:
            return cls({int(k): _whole(v) for k, v in json.loads(data)["current"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptRecordError(f"the state of placement is damaged: {e!r:.300}") from e


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r:.100} is no whole number")
    return value


class Spread(Enum):
    """How the files of a table are spread."""

    CLUSTER = "cluster"
    """Over all locations."""
    PARTITION = "partition"
    """Those of a partition, or of a table without any, in one."""
    PINNED = "pinned"
    """Over some locations."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What `table.zufluss.remote.placement` says."""

    spread: Spread = Spread.CLUSTER
    """How files are spread."""
    ids: tuple[int, ...] = ()
    """Of the locations of a pinned table."""

    def allows(self, location_id: int) -> bool:
        """Whether new files of the table may go there."""
        return self.spread is not Spread.PINNED or location_id in self.ids

    def check(self, locations: Locations) -> None:
        """Refuse ids that the registry does not have, when a table is made or altered."""
        known = {x.location_id for x in locations.locations if x.state is not AdminState.RETIRED}
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
"""The default."""

PARTITION: Final = Policy(Spread.PARTITION)
"""Everything in the location that is named as home, as long as that works."""


def parse_policy(text: str) -> Policy:
    """The policy in a table property."""
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
