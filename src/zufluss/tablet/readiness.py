"""Whether a tablet server is ready (`/ready`): its buckets are open, its coordinator answers.

A bucket that is refused or retried is a warning, not a reason to be unready.
"""

from __future__ import annotations

from zufluss.obs.pulse import RECOVERING, UNREADY, PartState, ReadPart
from zufluss.tablet.link import CoordinatorLink
from zufluss.tablet.server import TabletServer


def buckets_state(tablet: TabletServer) -> ReadPart:
    """The buckets of a tablet server: recovering until each was opened or refused once."""

    def read() -> PartState:
        opened, total = tablet.assignments.progress
        if not tablet.started or tablet.waits_for:
            reason = tablet.waits_for or f"{opened} of {total} buckets are recovered"
            return PartState(RECOVERING, (reason,), numbers={"recovered": opened, "buckets": total})
        refused = [*tablet.buckets.refused()]
        warnings = tuple(
            f"bucket {each.path} {each.bucket.bucket_id} is "
            f"{'being recovered' if each.recovering else 'refused'}: {each.reason.message}"
            for each in refused
        )
        served = len(tablet.buckets.by_log)
        return PartState(
            warnings=warnings, numbers={"buckets": served, "unavailable_buckets": len(refused)}
        )

    return read


def coordinator_state(link: CoordinatorLink) -> ReadPart:
    """The coordinator of a tablet server: lost when it has not answered for a session."""

    def read() -> PartState:
        silent = link.silent_seconds
        if silent is None:
            return PartState("starting", ("the coordinator has not answered yet",))
        if not link.lost:
            return PartState()
        reason = f"the coordinator has not answered for {silent:.0f} s"
        return PartState(UNREADY, (reason,))

    return read
