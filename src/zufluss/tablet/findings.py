"""What a tablet server finds about its buckets, memory and locations (`zufluss doctor`)."""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.examination import Examine, Finding, Severity
from zufluss.config import options
from zufluss.remote.locations import Health
from zufluss.tablet.server import TabletServer
from zufluss.tablet.shared.host import SharedHost

WAL_SECONDS_MAX = 5.0
"""An object of the shared log that takes longer than this is worth a look."""


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
        for report in tablet.storage.reports():
            if report.health is Health.DOWN:
                subject = f"location {report.location_id}"
                text = f"gets no files until it answers again: {report.last_error}"
                yield Finding(Severity.PROBLEM, subject, text)

    return examine


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
