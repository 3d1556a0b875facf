"""What a tablet server finds about its buckets, memory and locations (`zufluss doctor`)."""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.examination import Examine, Finding, Severity
from zufluss.config import options
from zufluss.remote.locations import Health
from zufluss.tablet.server import TabletServer


def tablet_findings(tablet: TabletServer) -> Examine:
    """Buckets that are not served, the memory of key-value state, locations that are down."""

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
        for report in tablet.storage.reports():
            if report.health is Health.DOWN:
                subject = f"location {report.location_id}"
                text = f"gets no files until it answers again: {report.last_error}"
                yield Finding(Severity.PROBLEM, subject, text)

    return examine
