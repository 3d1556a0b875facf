"""Jobs that hold leases and are restarted, cancelled, killed, or disconnected."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.client.relay import Relay
from tests.end_to_end.leases.local_coordinator import inside
from tests.end_to_end.leases.stage import DAY_MS, Stage, exist, rows, stage, unique
from tests.waiting import eventually
from zufluss.client.sync.lease import KvSnapshotLease
from zufluss.client.sync.table import Table
from zufluss.errors import KvSnapshotLeaseNotFoundError
from zufluss.model.table import TableBucket
from zufluss.testing.process import ReadyProcess
from zufluss.wire.api import ApiKey


def texts(table: Table, bucket: TableBucket, lease: KvSnapshotLease) -> set[str]:
    """The rows of the leased snapshot of a bucket."""
    with table.kv_snapshot(bucket, lease=lease) as reader:
        return set(pa.Table.from_batches(reader, reader.schema)["text"].to_pylist())


# -- jobs that start again -----------------------------------------------------------------------


async def test_after_two_hours_a_job_goes_on_with_its_snapshots_and_after_25_not(
    tmp_path: Path,
) -> None:
    """Shown with the requests that `resume=True` sends, and a clock that the test sets."""
    resume = {"lease_id": "job", "lease_duration_ms": DAY_MS}
    async with inside(tmp_path) as it:
        leased = await it.take(0)
        target = {"table_id": it.bucket.table_id}
        acquire = ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE
        first = await it.ask(acquire, targets=[target], **resume)
        for snapshot_id in (1, 2, 3):
            await it.take(snapshot_id)
        it.time.now += 2 * 3600
        again = await it.ask(acquire, **resume)
        assert first.lease_epoch < again.lease_epoch
        assert list(again.leased) == list(first.leased)
        assert it.are_there([leased])
        it.time.now += 25 * 3600
        with pytest.raises(KvSnapshotLeaseNotFoundError, match="read from the beginning"):
            await it.ask(acquire, **resume)
        await it.settled()
        assert not it.are_there([leased])
        latest = await it.ask(acquire, targets=[target], **resume)
        assert [list(columns.snapshot_ids) for columns in latest.leased] == [[3]]


def test_a_job_restarts_from_where_it_was_or_by_option_from_the_latest(it: Stage) -> None:
    table, (bucket,) = it.filled()
    lease_id = unique("job")
    with zufluss.connect(it.server.bootstrap) as conn:
        lease = conn.admin.kv_snapshot_lease(table.path, lease_id=lease_id)
        held = lease.snapshots
        lease.detach()
    for number in range(3):
        it.take(table, range(8), f"newer {number}")
    with zufluss.connect(it.server.bootstrap) as conn:
        again = conn.admin.kv_snapshot_lease(table.path, lease_id=lease_id, resume=True)
        assert (again.resumed, again.snapshots) == (True, held)
        assert texts(conn.table(table.path), bucket, again) == {"snapshot 0"}
        again.detach()
    it.calls.renew(lease_id, 1)
    eventually(lambda: it.calls.lease(lease_id) is None, "the lease expires")
    with pytest.raises(KvSnapshotLeaseNotFoundError, match="acquire again"):
        it.admin.kv_snapshot_lease(table.path, lease_id=lease_id, resume=True)
    with it.admin.kv_snapshot_lease(
        table.path, lease_id=lease_id, resume=True, if_lost="latest"
    ) as anew:
        assert not anew.resumed
        assert texts(table, bucket, anew) == {"newer 2"}


# -- jobs that end or are killed -----------------------------------------------------------------


class Job(ReadyProcess):
    """A reader in a process of its own."""

    def __init__(self, it: Stage, table: Table, duration: str) -> None:
        super().__init__(re.compile(r"leased (\S+)"))
        self._arguments = [
            "-m",
            "tests.end_to_end.leases.job",
            it.server.bootstrap,
            str(table.path),
            duration,
        ]
        self.lease_id = ""

    def arguments(self) -> Sequence[str]:
        """The command line."""
        return [sys.executable, *self._arguments]

    def became_ready(self, line: re.Match[str]) -> None:
        """The id of its lease."""
        self.lease_id = line[1]


def test_a_cancelled_job_drops_its_lease_and_a_killed_one_loses_it_by_time(it: Stage) -> None:
    cancelled, (first,) = it.filled()
    killed, (second,) = it.filled()
    with Job(it, cancelled, "1h") as polite, Job(it, killed, "2s") as rude:
        held = [it.files(bucket, 0) for bucket in (first, second)]
        for table in (cancelled, killed):
            for number in range(3):
                it.take(table, range(8), f"newer {number}")
        assert all(exist(files) == files for files in held)
        assert it.calls.leased(polite.lease_id) == {first: 0}
        assert polite.process is not None
        polite.process.send_signal(signal.SIGINT)
        polite.wait()
        assert it.calls.lease(polite.lease_id) is None
        rude.kill()
    for table, files in zip((cancelled, killed), held, strict=True):
        it.until_kept(table, [2, 3])
        eventually(lambda files=files: exist(files) != files, "its own files go")  # type: ignore[misc]
    assert it.calls.lease(rude.lease_id) is None


# -- two jobs in one process ---------------------------------------------------------------------


def test_two_jobs_of_one_process_have_leases_of_their_own(it: Stage) -> None:
    table, (bucket,) = it.filled()
    with it.admin.kv_snapshot_lease(table.path) as one:
        with (
            it.admin.kv_snapshot_lease(table.path) as other,
            zufluss.connect(it.server.bootstrap) as conn,
            conn.admin.kv_snapshot_lease(table.path) as third,
        ):
            assert len({one.lease_id, other.lease_id, third.lease_id}) == 3
        for number in range(3):
            it.take(table, range(8), f"newer {number}")
        one.renew()
        assert texts(table, bucket, one) == {"snapshot 0"}
    it.until_kept(table, [2, 3])


# -- connections that are cut --------------------------------------------------------------------


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture(scope="module")
def far(relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server whose clients connect through a relay that can be cut; the test does not."""
    advertised = {"advertised.listeners": f"OPEN://{relay.bootstrap}"}
    with stage(tmp_path_factory.mktemp("far"), advertised) as it:
        relay.target = it.ports["OPEN"]
        yield it


@contextmanager
def cut(relay: Relay) -> Iterator[None]:
    relay.cut()
    try:
        yield
    finally:
        relay.mend()


def test_a_server_out_of_reach_for_two_thirds_of_the_time_is_no_loss(
    far: Stage, relay: Relay
) -> None:
    table, (bucket,) = far.filled()
    with far.admin.kv_snapshot_lease(table.path, duration="6s") as lease:
        for number in range(3):
            far.take(table, range(8), f"newer {number}")
        lease.renew()
        epoch = lease.epoch
        with cut(relay):
            eventually(lambda: lease.remaining_ms <= 2_000, "two thirds of the time pass")
        eventually(lambda: lease.remaining_ms > 4_000, "it is renewed again")
        lease.check()
        assert lease.epoch == epoch
        assert texts(table, bucket, lease) == {"snapshot 0"}


def test_a_server_out_of_reach_for_longer_ends_the_reader_before_a_file_is_gone(
    far: Stage, relay: Relay
) -> None:
    table, (bucket,) = far.filled()
    with (
        far.admin.kv_snapshot_lease(table.path, duration="3s") as lease,
        table.kv_snapshot(bucket, lease=lease) as reader,
    ):
        for number in range(3):
            far.take(table, range(8), f"newer {number}")
        files = far.files(bucket, 0)
        lease.renew()
        with cut(relay):
            eventually(lambda: lease.lost is not None, "the client takes it for lost")
            for call in (lambda: next(reader), lambda: table.kv_snapshot(bucket, lease=lease)):
                with pytest.raises(KvSnapshotLeaseNotFoundError, match="not renewed for 3s"):
                    call()
            eventually(lambda: far.calls.lease(lease.lease_id) is None, "the server ends it")
        far.until_kept(table, [2, 3])
        eventually(lambda: exist(files) != files, "its own files go")
        eventually(lambda: "there is no lease" in str(lease.lost), "the server's word is told")
    assert rows(table, bucket, 3) == dict.fromkeys(range(8), "newer 2")
