"""The pins of plans: few, since Spark may never read them.

Spark plans queries that it never runs, stops early or kills, without notice. A pin that no task
reads stays on its server for its idle time, `kv.scanner.ttl`, and a server has room for
`kv.scanner.max-per-server` pins of all its clients. So a plan pins at most `PINS_MAX` buckets, and
before it does, the process closes pins of older plans until all plans together stay below that.

| bucket | its task |
|---|---|
| pinned | reads its pin and closes it |
| not pinned, or pin expired | asks for the state at the offset of the plan, and reads that |

Both have the same rows. If nothing was written since, the server pins its current state; otherwise
it rebuilds the state from a snapshot and the changelog behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from zufluss.client.connection import AsyncConnection
from zufluss.client.core.offsets import BucketPlace, list_offsets
from zufluss.client.keyed.pins import BucketPin, BucketPins
from zufluss.model.table import TableInfo

PINS_MAX: Final = 32
"""The most pins that the plans of a process have in a cluster at a time."""
PLANS_KEPT: Final = 2
"""The most plans of one table with pins at a time; a bucket has room for 8 pins in all."""


@dataclass(frozen=True, slots=True)
class _PinnedPlan:
    """The pins of one plan."""

    table_id: int
    count: int
    pins: BucketPins


_plans: WeakKeyDictionary[AsyncConnection, list[_PinnedPlan]] = WeakKeyDictionary()
"""Plans whose pins may still be open, the oldest first."""


async def pin_states(
    connection: AsyncConnection, info: TableInfo, places: Sequence[BucketPlace]
) -> list[BucketPin]:
    """The current state of these buckets, without buckets that were never written to."""
    end = await list_offsets(connection, info, places, "latest")
    places = [place for place in places if end[place.bucket]]
    few = places[:PINS_MAX]
    if not few:
        return []
    plans = _plans.setdefault(connection, [])
    for old in _taken_out(plans, info.table_id, len(few)):
        await old.pins.close()
    pins = BucketPins(connection, info, resume=True, keep=False)
    await pins.open(few, {})
    plans.append(_PinnedPlan(info.table_id, len(few), pins))
    rest = [BucketPin.not_opened(place, end[place.bucket]) for place in places[PINS_MAX:]]
    return [*(pins[place.bucket] for place in few), *rest]


def _taken_out(plans: list[_PinnedPlan], table_id: int, pin_count: int) -> list[_PinnedPlan]:
    """Remove the plans that must make room for a new plan of a table with `wanted` pins."""
    same = [plan for plan in plans if plan.table_id == table_id]
    out = same[: max(0, len(same) + 1 - PLANS_KEPT)]
    staying = [plan for plan in plans if plan not in out]
    while staying and sum(plan.count for plan in staying) + pin_count > PINS_MAX:
        out.append(staying.pop(0))
    plans[:] = staying
    return out
