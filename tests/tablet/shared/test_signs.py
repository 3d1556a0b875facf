"""What operators see of the shared log: metrics and findings of a tablet server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.support import TABLE, Tablet
from zufluss.cluster.examination import Finding, Severity
from zufluss.log.shared.api import SessionFencedError
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.marked import MarkedObjects
from zufluss.tablet import findings
from zufluss.tablet.findings import tablet_findings
from zufluss.tablet.samples import tablet_samples


@pytest_asyncio.fixture
async def tablet(tmp_path: Path) -> AsyncIterator[Tablet]:
    tablet = await SharedCluster(tmp_path).start()
    yield tablet
    await killed(tablet)


def finding(tablet: Tablet) -> Finding:
    (found,) = [f for f in tablet_findings(tablet.server)() if f.subject == "shared log"]
    return found


def values(tablet: Tablet) -> dict[str, float]:
    return {s.metric.name: s.value for s in tablet_samples(tablet.server)()}


async def test_metrics_count_what_all_sessions_of_a_process_wrote(tablet: Tablet) -> None:
    shared = tablet.server.shared
    assert shared is not None
    await written(tablet, 0)
    await written(tablet, 1)
    before = values(tablet)
    assert before["zufluss_wal_objects_total"] == 2
    assert before["zufluss_wal_bytes_total"] > 0
    assert before["zufluss_wal_retained_bytes"] == before["zufluss_wal_bytes_total"]
    assert (before["zufluss_wal_waiting_bytes"], before["zufluss_wal_waiting_seconds"]) == (0, 0)
    shared._end_fenced(SessionFencedError("ended by the test"))
    after = values(tablet)
    assert after["zufluss_wal_objects_total"] == 2, "a counter never goes back"
    assert after["zufluss_wal_retained_bytes"] == 0
    assert after["zufluss_wal_sessions_fenced_total"] == 1
    assert finding(tablet).severity is Severity.PROBLEM
    assert "has no session" in finding(tablet).text


async def test_rows_that_wait_for_a_location_are_a_problem_with_its_reason(
    tablet: Tablet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finding(tablet).severity is Severity.FINE
    create = MarkedObjects.create

    async def refused(self: MarkedObjects, path: str, data: bytes) -> None:
        raise LocationUnavailableError("file:///there", path, "the disk is gone")

    monkeypatch.setattr(MarkedObjects, "create", refused)
    monkeypatch.setattr(findings, "WAL_SECONDS_MAX", 0.0)
    connection, request = await tablet.produce(0)
    await until(lambda: finding(tablet).severity is Severity.PROBLEM)
    await until(lambda: "the disk is gone" in finding(tablet).text)
    assert values(tablet)["zufluss_wal_put_failures_total"] > 0
    monkeypatch.setattr(MarkedObjects, "create", create)
    answers = await connection.produced(request)
    assert [code for _, code in answers] == [0], "nothing has to be restarted"
    assert finding(tablet).severity is Severity.FINE


async def test_who_holds_a_shared_log_that_grew_too_long_is_a_problem(tablet: Tablet) -> None:
    def text() -> str:
        every = tablet_findings(tablet.server)()
        return "".join(f.text for f in every if f.subject == "size of the shared log")

    trimmer = tablet.server.trimmer
    assert trimmer is not None
    for _ in range(3):
        await written(tablet, 0, 1)
    assert not text()
    trimmer.retained = 1
    assert "written faster than it can be trimmed" in text()
    trimmer.problem = "the coordinator does not answer"
    assert "the coordinator does not answer" in text()
    trimmer.held = tablet.server.buckets.replica(TABLE, None, 1).bucket, "its disk is full"
    assert "db.t, bucket 1 holds it: its disk is full" in text()
    assert "zufluss.wal.retained is 0 MiB" in text()
