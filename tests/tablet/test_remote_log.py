"""Log segments that go to remote storage, are read from there, and leave it again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.log.support import entry
from tests.tablet.gateway import Gateway
from tests.tablet.support import TABLE, Connection, Tablet, batch, fetch_request
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.refusal import refusal_batch
from zufluss.cluster.replicas import LakeOffsets, ReplicaStop
from zufluss.errors import ErrorCode
from zufluss.log.export import build_indexes
from zufluss.log.holds import Holder
from zufluss.model.table import TableBucket
from zufluss.net.services import RequestContext
from zufluss.record.header import iter_headers
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.layout import parse
from zufluss.remote.locations import AdminState
from zufluss.remote.uri import MEMORY_VARIABLE
from zufluss.replica.replica import Replica
from zufluss.tablet.service import EARLIEST, TIMESTAMP
from zufluss.wire import messages as m

ROWS = 3
"""Rows of one batch; a segment of 1 kb has two of them."""


class Remote(Tablet):
    """A tablet server with three locations, whose rounds begin when the test says so."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.roots = [root / name for name in ("a", "b", "c")]
        conf = {
            "remote.data.dirs": ",".join(map(str, self.roots)),
            "remote.log.task-interval-duration": "1h",
            "log.segment.file-size": "1kb",
            "log.index.interval-size": "100b",
            "zufluss.log.flush": "os",
            **options.pop("conf", {}),
        }
        options.setdefault("properties", {"table.log.tiered.local-segments": "1"})
        super().__init__(root / "data", conf=conf, **options)

    def replica(self, bucket: int = 0) -> Replica:
        return self.server.buckets.replica(TABLE, None, bucket)

    async def write(self, batches: int, bucket: int = 0) -> None:
        for _ in range(batches):
            replica = self.replica(bucket)
            appended = replica.log.append(*entry(batch()), self.now_ms)
            replica.advance(appended.end_offset)
            self.now_ms += 1000
        await self.synced()

    async def synced(self) -> None:
        done = asyncio.get_running_loop().create_future()
        self.server.logs._flusher.flush(self.server.logs.logs, done.set_result)
        await done

    async def round(self) -> None:
        for replica in self.server.buckets.tables[TABLE].replicas.values():
            if replica.remote is not None:
                replica.remote.retry_at = 0.0
        self.server.remote_logs.begin()
        await self.server.remote_logs.settled()

    def remote_files(self) -> list[set[str]]:
        """The paths in each location, all of them with a name we know."""
        found = []
        for root in self.roots:
            paths = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
            assert all(parse(path) for path in paths)
            found.append(paths)
        return found

    def set_state(self, location_id: int, state: AdminState) -> None:
        before = self.server.storage.locations
        locations = tuple(
            dataclasses.replace(x, state=state) if x.location_id == location_id else x
            for x in before.locations
        )
        self.server.storage.update(
            dataclasses.replace(before, version=before.version + 1, locations=locations)
        )

    async def fetched(self, offset: int, bucket: int = 0, **options: Any) -> Any:
        connection = Connection()
        request = fetch_request(bucket, offset=offset, max_wait_ms=200, **options)
        return await connection.fetched(connection.send(self.server.fetch.handle, request))

    async def read_all(self, bucket: int = 0, start: int | None = None) -> list[int]:
        """The base offsets of all batches, as a reader finds them."""
        offset, found = self.replica(bucket).start_offset if start is None else start, list[int]()
        while offset < self.replica(bucket).log.high_watermark:
            answer = await self.fetched(offset, bucket)
            assert answer.error_code == 0, answer.error_message
            if answer.HasField("remote_log_fetch_info"):
                data = self.download(answer.remote_log_fetch_info)
            else:
                data = answer.records
            for _, header in iter_headers(data):
                if header.next_offset > offset:
                    assert header.base_offset == offset
                    found.append(offset)
                    offset = header.next_offset
        return found

    def download(self, info: m.PbRemoteLogFetchInfo) -> bytes:
        directory = Path(info.remote_log_tablet_dir.removeprefix("file://"))
        parts = []
        for segment in info.remote_log_segments:
            name = f"{segment.remote_log_start_offset:020d}.log"
            parts.append((directory / segment.remote_log_segment_id / name).read_bytes())
            assert len(parts[-1]) == segment.segment_size_in_bytes
        parts[0] = parts[0][info.first_start_pos :]
        return b"".join(parts)

    async def list_offset(self, kind: int, timestamp: int | None = None, **ours: bool) -> Any:
        request = m.ListOffsetsRequest(
            follower_server_id=-1, offset_type=kind, table_id=TABLE, bucket_id=[0], **ours
        )
        if timestamp is not None:
            request.startTimestamp = timestamp
        answer = await self.server.service.list_offsets(request, _context())
        return answer.buckets_resp[0]


def _context() -> RequestContext:
    return None  # type: ignore[return-value]


@asynccontextmanager
async def serving(root: Path, **options: Any) -> AsyncIterator[Remote]:
    tablet = Remote(root, **options)
    await tablet.start()
    await tablet.server.remote_logs.settled()
    try:
        yield tablet
    finally:
        await tablet.server.close()


async def test_closed_segments_go_to_all_locations_and_leave_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(20)
        log = tablet.replica().log
        closed = len(log.segments) - 1
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        assert len(remote.manifest.segments) == closed
        assert len(log.segments) == 2
        assert log.log_start_offset > 0 == tablet.replica().start_offset
        counts = [sum(p.endswith(".log") for p in paths) for paths in tablet.remote_files()]
        assert sum(counts) == closed
        assert max(counts) - min(counts) <= 1
        assert await tablet.read_all() == list(range(0, 60, ROWS))


async def test_any_offset_of_a_remote_segment_is_found(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(12)
        await tablet.round()
        for offset in range(tablet.replica().log.log_start_offset):
            info = (await tablet.fetched(offset)).remote_log_fetch_info
            bases = [h.base_offset for _, h in iter_headers(tablet.download(info))]
            assert bases[0] <= offset < bases[0] + 2 * ROWS


async def test_segments_of_one_answer_lie_in_one_location(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(20)
        await tablet.round()
        info = (await tablet.fetched(0)).remote_log_fetch_info
        assert len(info.remote_log_segments) == 1
        assert info.remote_log_tablet_dir == f"file://{tablet.roots[0]}/log/db/t-{TABLE}/0"
        first = tablet.replica().remote.manifest.segments[0]  # type: ignore[union-attr]
        assert info.remote_log_segments[0].crc32c == first.log.crc32c


async def test_offsets_by_time_are_found_in_remote_storage(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(12)
        await tablet.round()
        assert (await tablet.list_offset(EARLIEST)).offset == 0
        for batch in range(12):
            for timestamp in (1000 + 1000 * batch, 1 + 1000 * batch):
                found = await tablet.list_offset(TIMESTAMP, timestamp)
                assert found.offset == batch * ROWS


async def test_a_limit_scan_reaches_into_remote_storage(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(12)
        await tablet.round()
        data = b"".join(await tablet.server.service._last_rows(tablet.replica(), 30))
        offsets = [h.base_offset for _, h in iter_headers(data)]
        assert offsets[0] <= 6
        assert offsets[-1] == 33
        assert offsets == list(range(offsets[0], 36, ROWS))


async def test_indexes_in_remote_storage_are_those_of_the_batches(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(4)
        segment = tablet.replica().log.segments[0]
        wanted = build_indexes(segment, tablet.server.logs._files)
        for suffix in (".index", ".timeindex"):
            (segment.directory / f"{0:020d}{suffix}").unlink()
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        first = remote.manifest.segments[0]
        storage = tablet.server.storage
        assert await storage.read(first.index, limit=1 << 20) == wanted[0]
        assert await storage.read(first.timeindex, limit=1 << 20) == wanted[1]


async def test_a_restart_reads_the_manifest_again(tmp_path: Path) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(12)
        await tablet.round()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        assert await tablet.read_all() == list(range(0, 36, ROWS))
        await tablet.write(6)
        await tablet.round()
        assert await tablet.read_all() == list(range(0, 54, ROWS))


async def test_an_unreachable_manifest_deletes_nothing_and_is_told_to_readers(
    tmp_path: Path,
) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(12)
        await tablet.round()
    for root in tablet.roots:
        root.rename(root.with_suffix(".away"))
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        log = tablet.replica().log
        start = log.log_start_offset
        await tablet.write(6)
        await tablet.round()
        tablet.server.logs.expire(1 << 60)
        assert log.log_start_offset == start
        answer = await tablet.fetched(0)
        assert answer.error_code == ErrorCode.STORAGE_EXCEPTION
        assert str(tmp_path) in answer.error_message
        assert (await tablet.fetched(start)).error_code == 0
        assert (await tablet.list_offset(EARLIEST)).offset == 0
        for root in tablet.roots:
            root.with_suffix(".away").rename(root)
        await tablet.round()
        assert await tablet.read_all() == list(range(0, 54, ROWS))


async def test_without_any_location_writers_work_and_segments_stay(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=2) as tablet:
        for root in tablet.roots:
            root.write_bytes(b"")  # no directory can be made there
        await tablet.write(12)
        count = len(tablet.replica().log.segments)
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        assert remote.failures == 1
        assert remote.retry_at > asyncio.get_running_loop().time()
        await tablet.write(2)
        assert len(tablet.replica().log.segments) >= count
        assert tablet.replica().log.log_start_offset == 0


async def test_a_lost_answer_of_a_commit_is_found_out(tmp_path: Path) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        gateway.lose_answer = 1
        await tablet.write(12)
        await tablet.round()
        assert len(gateway.commits) == 1
        remote = tablet.replica().remote
        assert remote is not None
        assert (remote.pending, remote.failures) == (None, 0)
        assert await tablet.read_all() == list(range(0, 36, ROWS))


@pytest.mark.parametrize("arrived", [True, False])
async def test_nothing_is_deleted_while_nobody_knows_what_counts(
    tmp_path: Path, arrived: bool
) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(12)
        if arrived:
            gateway.lose_answer = 1
        else:
            gateway.lose_request = 1
        gateway.before_commit = lambda: setattr(gateway, "silent", True)
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        assert remote.pending is not None
        tablet.server.logs.expire(tablet.now_ms)
        assert tablet.replica().log.log_start_offset == 0
        files = tablet.remote_files()
        gateway.silent = False
        gateway.before_commit = lambda: None
        await tablet.round()
        assert remote.pending is None
        assert tablet.remote_files() == files
        assert len(gateway.commits) == 1
        assert await tablet.read_all() == list(range(0, 36, ROWS))


@pytest.mark.parametrize("why", ["swept", "retired"])
async def test_a_manifest_whose_files_may_be_gone_is_not_committed_again(
    tmp_path: Path, why: str
) -> None:
    gateway = Gateway()
    conf = {"zufluss.remote.sweep.grace": "0s" if why == "swept" else "1h"}
    async with serving(tmp_path, buckets=1, gateway=gateway, conf=conf) as tablet:
        await tablet.write(12)
        gateway.lose_request = 1
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        assert remote.pending is not None
        if why == "swept":
            for root, paths in zip(tablet.roots, tablet.remote_files(), strict=True):
                for path in paths:
                    (root / path).unlink()
        else:
            tablet.set_state(1, AdminState.RETIRED)
            gateway.lose_request = 9  # as the coordinator does that knows of it
        await tablet.round()
        assert remote.pending is None
        assert not gateway.commits
        gateway.lose_request = 0
        await tablet.round()
        assert tablet.replica().log.log_start_offset > 0
        assert await tablet.read_all() == list(range(0, 36, ROWS))


async def test_a_refused_commit_leaves_no_files_and_reads_what_counts(tmp_path: Path) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(12)
        gateway.leader_epoch = 9
        await tablet.round()
        assert tablet.remote_files() == [set(), set(), set()]
        assert tablet.replica().log.log_start_offset == 0
        gateway.leader_epoch = 0
        await tablet.round()
        assert await tablet.read_all() == list(range(0, 36, ROWS))


async def test_expired_segments_leave_the_manifest_first_and_then_the_location(
    tmp_path: Path,
) -> None:
    properties = {"table.log.tiered.local-segments": "1", "table.log.ttl": "10s"}
    async with serving(tmp_path, buckets=1, properties=properties) as tablet:
        await tablet.write(8)
        await tablet.round()
        before = sum(map(len, tablet.remote_files()))
        tablet.now_ms += 5000
        await tablet.round()
        start = tablet.replica().start_offset
        assert start > 0
        await tablet.round()
        assert sum(map(len, tablet.remote_files())) < before
        assert await tablet.read_all() == list(range(start, 24, ROWS))
        assert (await tablet.fetched(0)).error_code == ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
        tablet.now_ms += 3_600_000
        for _ in range(3):
            await tablet.round()
            tablet.server.logs.expire(tablet.now_ms)
            await tablet.synced()
        assert [len(files) for files in tablet.remote_files()].count(0) == 2
        assert sum(map(len, tablet.remote_files())) == 1
        assert tablet.replica().start_offset == 24
        await tablet.write(6)
        await tablet.round()
        assert await tablet.read_all() == list(range(24, 42, ROWS))


async def test_what_the_lake_does_not_have_does_not_expire(tmp_path: Path) -> None:
    properties = {"table.log.tiered.local-segments": "1", "table.log.ttl": "10s"}
    async with serving(tmp_path, buckets=1, properties=properties) as tablet:
        await tablet.write(8)
        await tablet.round()
        tablet.now_ms += 3_600_000
        tablet.replica().log.holds.set(Holder.LAKE, 10)
        await tablet.round()
        assert tablet.replica().start_offset == 9


async def test_segments_leave_a_location_that_is_drained(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(30)
        await tablet.round()
        tablet.set_state(1, AdminState.DRAINING)
        for _ in range(6):
            await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        assert {s.location_id for s in remote.manifest.segments} == {2, 3}
        assert tablet.remote_files()[0] == set()
        assert await tablet.read_all() == list(range(0, 90, ROWS))
        assert list((tmp_path / "data" / ".remote" / "moving").iterdir()) == []


async def test_one_dead_location_stops_neither_uploads_nor_readers_of_others(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, buckets=2) as tablet:
        await tablet.write(12)
        await tablet.round()
        tablet.roots[0].rename(tmp_path / "away")
        tablet.roots[0].write_bytes(b"")
        await tablet.write(12)
        await tablet.write(12, bucket=1)
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        assert 1 not in {s.location_id for s in remote.manifest.segments[-4:]}
        assert len({s.segment_id for s in remote.manifest.segments}) == len(
            remote.manifest.segments
        )
        answer = await tablet.fetched(1)
        assert answer.error_code == ErrorCode.STORAGE_EXCEPTION
        assert str(tablet.roots[0]) in answer.error_message
        assert await tablet.read_all(1) == list(range(0, 36, ROWS))


async def test_a_location_that_comes_back_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(12)
        await tablet.round()
        tablet.roots[0].rename(tmp_path / "away")
        assert (await tablet.fetched(1)).error_code == ErrorCode.STORAGE_EXCEPTION
        (tmp_path / "away").rename(tablet.roots[0])
        assert (await tablet.fetched(1)).error_code == ErrorCode.STORAGE_EXCEPTION
        monkeypatch.setattr("zufluss.replica.remote_index.FAILURE_SECONDS", 0.0)
        async with asyncio.timeout(WAIT_SECONDS):
            while not (answer := await tablet.fetched(1)).HasField("remote_log_fetch_info"):
                assert answer.error_code == ErrorCode.STORAGE_EXCEPTION


async def test_a_client_with_one_token_is_refused_in_another_kind_of_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    dirs = {"remote.data.dirs": f"{tmp_path / 'a'},memory://other/x"}
    async with serving(tmp_path, buckets=1, conf=dirs) as tablet:
        await tablet.write(12)
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        other = next(s for s in remote.manifest.segments if s.location_id == 2)
        answer = await tablet.fetched(other.start_offset)
        assert answer.records == refusal_batch(2, other.start_offset)
        assert (await tablet.fetched(0)).error_code == 0


async def test_a_new_location_gets_segments_of_old_tables_in_the_next_round(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        tablet.set_state(3, AdminState.DRAINING)
        await tablet.write(12)
        await tablet.round()
        assert tablet.remote_files()[2] == set()
        tablet.set_state(3, AdminState.ACTIVE)
        await tablet.write(12)
        await tablet.round()
        assert tablet.remote_files()[2] != set()
        assert await tablet.read_all() == list(range(0, 72, ROWS))


async def test_segments_that_come_one_by_one_are_spread_evenly(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        for _ in range(18):
            await tablet.write(3)
            await tablet.round()
        counts = [sum(p.endswith(".log") for p in paths) for paths in tablet.remote_files()]
        assert max(counts) - min(counts) <= 1


async def test_pinned_tables_use_their_locations_only(tmp_path: Path) -> None:
    properties = {"table.zufluss.remote.placement": "pinned:2"}
    async with serving(tmp_path, buckets=1, properties=properties) as tablet:
        await tablet.write(20)
        await tablet.round()
        assert [bool(files) for files in tablet.remote_files()] == [False, True, False]


async def test_logs_stay_on_the_server_without_a_location_or_when_switched_off(
    tmp_path: Path,
) -> None:
    for name, conf in (
        ("none", {"remote.data.dirs": ""}),
        ("off", {"remote.log.task-interval-duration": "0"}),
    ):
        async with serving(tmp_path / name, buckets=1, conf=conf) as tablet:
            await tablet.write(20)
            await tablet.round()
            assert tablet.replica().remote is None
            assert tablet.replica().log.log_start_offset == 0
            assert await tablet.read_all() == list(range(0, 60, ROWS))


async def test_a_log_still_expires_when_copying_is_switched_off(tmp_path: Path) -> None:
    gateway = Gateway()
    options: dict[str, Any] = {
        "buckets": 1,
        "gateway": gateway,
        "properties": {"table.log.ttl": "1h", "table.log.tiered.local-segments": "1"},
    }
    async with serving(tmp_path, **options) as tablet:
        await tablet.write(12)
        await tablet.round()
    off = {"remote.log.task-interval-duration": "0"}
    async with serving(tmp_path, conf=off, **options) as tablet:
        tablet.now_ms += 100_000
        await tablet.write(12)
        copied = len(gateway.commits)
        assert await tablet.read_all() == list(range(0, 72, ROWS))
        tablet.now_ms += 2 * 3600 * 1000
        await tablet.round()
        assert len(gateway.commits) == copied + 1, "what is there has expired"
        tablet.server.logs.expire(tablet.now_ms)
        assert tablet.replica().start_offset == tablet.replica().log.log_start_offset == 72


async def test_what_cannot_be_deleted_is_deleted_later_and_stops_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(12)
        await tablet.round()
        await tablet.write(12)
        await tablet.round()
        remote = tablet.replica().remote
        assert remote is not None
        (old,) = remote.garbage
        with monkeypatch.context() as patched:
            patched.setattr(tablet.server.storage, "delete", _unavailable)
            await tablet.write(12)
            await tablet.round()
        assert remote.failures == 1
        assert old in remote.garbage
        assert remote.end_offset == tablet.replica().log.segments[-1].base_offset
        await tablet.round()
        assert remote.garbage == []
        assert old.path not in tablet.remote_files()[old.location_id - 1]


async def _unavailable(files: object) -> None:
    raise LocationUnavailableError("file:///gone", "", "it does not answer")


async def test_a_dropped_bucket_ends_its_round(tmp_path: Path) -> None:
    async with serving(tmp_path, buckets=1) as tablet:
        await tablet.write(12)
        tablet.server.remote_logs.begin()
        await tablet.server.stop_replicas([ReplicaStop(TableBucket(TABLE, None, 0), 0, True)])
        await tablet.server.remote_logs.settled()
        assert tablet.gateway.commits == []


async def test_a_log_whose_disk_is_lost_goes_on_where_remote_storage_ends(tmp_path: Path) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(12)
        await tablet.round()
    (tmp_path / "data" / "db").rename(tmp_path / "lost")
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        assert tablet.replica().log.log_end_offset == 27
        tablet.now_ms += 100_000
        await tablet.write(6)
        await tablet.round()
        assert await tablet.read_all() == list(range(0, 45, ROWS))


async def test_a_lost_log_gives_no_offset_again_that_the_lake_has(tmp_path: Path) -> None:
    gateway = Gateway()
    properties = {"table.datalake.enabled": "true", "table.log.ttl": "1h"}
    options: dict[str, Any] = {"buckets": 1, "gateway": gateway, "properties": properties}
    async with serving(tmp_path, **options) as tablet:
        await tablet.write(12)
        await tablet.round()
        assert gateway.commits[-1].end_offset < 33
    gateway.lake_offsets[TableBucket(TABLE, None, 0)] = 33
    (tmp_path / "data" / "db").rename(tmp_path / "lost")
    async with serving(tmp_path, **options) as tablet:
        log = tablet.replica().log
        assert (log.log_start_offset, log.log_end_offset) == (33, 33)
        await tablet.write(1)
        assert (await tablet.fetched(33)).error_code == 0
        uploaded = gateway.commits[-1].end_offset
        for offset in (uploaded, 32):
            missing = await tablet.fetched(offset)
            assert missing.error_code == ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
            lost = f"{uploaded} to 32 were lost with a disk or location; read on at offset 33"
            assert lost in missing.error_message
        assert (await tablet.fetched(uploaded - 1)).error_code == 0
        assert "lost" not in (await tablet.fetched(10**6)).error_message


@asynccontextmanager
async def after_a_loss(root: Path, **properties: str) -> AsyncIterator[Remote]:
    """A log whose offsets 27 to 32 are lost, with uploaded segments before and behind."""
    gateway = Gateway()
    properties = {
        "table.datalake.enabled": "true", "table.log.tiered.local-segments": "1", **properties
    }  # fmt: skip
    options: dict[str, Any] = {"buckets": 1, "gateway": gateway, "properties": properties}
    async with serving(root, **options) as tablet:
        await tablet.write(12)
        await tablet.round()
        assert gateway.commits[-1].end_offset == 27
    gateway.lake_offsets[TableBucket(TABLE, None, 0)] = 33
    (root / "data" / "db").rename(root / "lost")
    async with serving(root, **options) as tablet:
        tablet.now_ms += 100_000
        await tablet.write(12)
        await tablet.round()
        assert gateway.commits[-1].end_offset > 33
        assert tablet.replica().log.log_start_offset > 33
    async with serving(root, **options) as tablet:
        tablet.now_ms += 200_000
        await tablet.round()
        yield tablet


async def read_behind(tablet: Remote, offset: int) -> None:
    """Assert that readers find every offset but the lost ones."""
    lost = await tablet.fetched(offset)
    assert lost.error_code == ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
    assert "27 to 32 were lost with a disk or location; read on at offset 33" in lost.error_message
    assert await tablet.read_all(start=33) == list(range(33, 69, ROWS))
    before = await tablet.fetched(0)
    segments = before.remote_log_fetch_info.remote_log_segments
    assert segments[-1].remote_log_end_offset <= 27


async def test_a_log_is_uploaded_and_read_behind_lost_records(tmp_path: Path) -> None:
    async with after_a_loss(tmp_path) as tablet:
        remote = tablet.replica().remote
        assert remote is not None
        assert (remote.start_offset, remote.losses) == (0, [(27, 32)])
        for offset in (27, 32):
            await read_behind(tablet, offset)
        assert (await tablet.list_offset(EARLIEST)).offset == 0
        assert (await tablet.list_offset(EARLIEST, unbroken=True)).offset == 33
        assert tablet.replica().row_count() == 27 + 36
        data = b"".join(await tablet.server.service._last_rows(tablet.replica(), 69 - 24))
        bases = [header.base_offset for _, header in iter_headers(data)]
        assert [base for base in bases if base >= 24] == [24, *range(33, 69, ROWS)]


async def test_segments_behind_a_loss_leave_a_drained_location(tmp_path: Path) -> None:
    async with after_a_loss(tmp_path) as tablet:
        remote = tablet.replica().remote
        assert remote is not None
        for location_id in (1, 2):
            tablet.set_state(location_id, AdminState.DRAINING)
        for _ in range(len(remote.manifest.segments)):
            await tablet.round()
        assert {s.location_id for s in remote.manifest.segments} == {3}
        assert remote.losses == [(27, 32)]
        await read_behind(tablet, 30)


async def test_a_loss_is_forgotten_when_the_segments_before_it_have_expired(
    tmp_path: Path,
) -> None:
    async with after_a_loss(tmp_path, **{"table.log.ttl": "150s"}) as tablet:
        remote = tablet.replica().remote
        assert remote is not None
        tiered = LakeOffsets(TableBucket(TABLE, None, 0), 1, 69, (1,))
        await tablet.server.notify_lake_offsets([tiered])
        await tablet.round()
        assert remote.losses == []
        assert remote.start_offset is None or remote.start_offset >= 33
        start = (await tablet.list_offset(EARLIEST)).offset
        assert (await tablet.list_offset(EARLIEST, unbroken=True)).offset == start >= 33
        assert "27 to 32" not in (await tablet.fetched(27)).error_message


async def test_a_log_whose_end_is_lost_is_not_copied_over_the_remote_one(tmp_path: Path) -> None:
    gateway = Gateway()
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(12)
        await tablet.round()
    (tmp_path / "data" / "db").rename(tmp_path / "lost")
    (tmp_path / "data" / "db" / f"t-{TABLE}" / "log-0").mkdir(parents=True)
    async with serving(tmp_path, buckets=1, gateway=gateway) as tablet:
        await tablet.write(4)
        await tablet.round()
        assert len(gateway.commits) == 1
        remote = tablet.replica().remote
        assert remote is not None
        assert "restored" in str(remote.problem)
