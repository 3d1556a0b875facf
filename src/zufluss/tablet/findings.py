"""What a tablet server finds about its buckets, memory and locations (`zufluss doctor`)."""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.examination import Examine, Finding, Severity
from zufluss.config import options
from zufluss.remote.locations import Health
from zufluss.tablet.server import TabletServer
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.shared.trim import retained_bytes
from zufluss.tablet.standby.standbys import Standbys

WAL_SECONDS_MAX = 5.0
"""An object of the shared log that takes longer than this is worth a look."""

WAL_RETAINED_MAX = 2
"""More than this many times the retained bytes is worth a look."""


def tablet_findings(tablet: TabletServer) -> Examine:
    """Buckets that are not served, memory of rows, the shared log, locations that are down."""

    def examine() -> Iterable[Finding]:
        used, budget = tablet.kv.memory_bytes
        if budget:
            text = f"{used >> 20} of {budget >> 20} MiB hold rows ({options.ZUFLUSS_KV_MEMORY.key})"
            yield Finding(Severity.FINE, "kv memory", text)
        served = sum(len(table.replicas) for table in tablet.buckets.tables.values())
        yield Finding(Severity.FINE, "buckets", f"{served} are served")
        for refused in tablet.buckets.refused():
            subject = f"bucket {refused.path} {refused.bucket.bucket_id}"
            state = "recovering" if refused.recovering else "refused until the next start"
            yield Finding(Severity.PROBLEM, subject, f"{state}: {refused.reason.message}")
        if tablet.shared is not None:
            yield _shared_log_finding(tablet.shared)
            yield from _retained_findings(tablet)
        if tablet.standbys is not None and len(tablet.standbys):
            yield _standby_finding(tablet.standbys)
        for report in tablet.storage.reports():
            if report.health is Health.DOWN:
                subject = f"location {report.location_id}"
                text = f"gets no files until it answers again: {report.last_error}"
                yield Finding(Severity.PROBLEM, subject, text)

    return examine


def _standby_finding(standbys: Standbys) -> Finding:
    """How many followed buckets keep up; a take-over of the others would take longer."""
    count, in_sync = len(standbys), standbys.in_sync
    text = f"{in_sync} of {count} followed buckets have caught up with their leaders"
    if in_sync == count:
        return Finding(Severity.FINE, "standbys", text)
    return Finding(Severity.WARNING, "standbys", f"{text}; until then a take-over takes longer")


def _retained_findings(tablet: TabletServer) -> Iterable[Finding]:
    """What whoever takes over would have to read, if it is much more than it should be."""
    shared, trimmer = tablet.shared, tablet.trimmer
    if shared is None or shared.live is None or trimmer is None:
        return
    retained = retained_bytes(shared.live)
    if retained <= WAL_RETAINED_MAX * trimmer.retained:
        return
    reason = trimmer.problem or "it is written faster than it can be trimmed"
    if trimmer.held is not None:
        bucket, why = trimmer.held
        reason = f"{tablet.buckets.name_of(bucket)} holds it: {why}"
    limit = f"{options.ZUFLUSS_WAL_RETAINED.key} is {trimmer.retained >> 20} MiB"
    text = f"{retained >> 20} MiB are kept, {limit}; {reason}"
    yield Finding(Severity.PROBLEM, "size of the shared log", text)


def _shared_log_finding(shared: SharedHost) -> Finding:
    subject = "shared log"
    if shared.live is None:
        text = "this server has no session, so it leads no bucket; it registers again by itself"
        return Finding(Severity.PROBLEM, subject, text)
    waiting = shared.waiting
    if waiting.seconds > WAL_SECONDS_MAX:
        reason = waiting.reason or "its location does not answer"
        text = f"writes have not been acknowledged for {waiting.seconds:.0f} s: {reason}"
        return Finding(Severity.PROBLEM, subject, text)
    epoch = shared.live.identity.server_epoch
    return Finding(Severity.FINE, subject, f"{shared.counts.objects} objects, in session {epoch}")
