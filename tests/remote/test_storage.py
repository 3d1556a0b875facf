"""Storage over many locations: uploads that move on, reads that verify, shares that last."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import WAIT_SECONDS
from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.errors import ErrorCode
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectForbiddenError,
    ObjectMissingError,
    RemoteStorageError,
)
from zufluss.remote.files import RemoteFile
from zufluss.remote.health import HealthReport
from zufluss.remote.locations import (
    AdminState,
    AlterOp,
    Health,
    Location,
    Locations,
    UnknownLocationError,
)
from zufluss.remote.placement import CLUSTER, PARTITION, parse_policy
from zufluss.remote.registry import alter, reconcile
from zufluss.remote.storage import NoLocationError, RemoteStorage, Upload
from zufluss.remote.uri import MEMORY_VARIABLE

DOCUMENT = b"a document"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Cluster:
    """Locations in directories, and a server that uses them."""

    def __init__(self, root: Path, count: int = 3, weights: str | None = None, **more: str) -> None:
        self.root = root
        self.clock = Clock()
        self.dirs = [root / f"location-{x}" for x in range(1, count + 1)]
        pairs = {
            "data.dir": str(root / "data"),
            "remote.data.dirs": ",".join(map(str, self.dirs)),
            "zufluss.remote.probe-interval": "5s",
        }
        if weights is not None:
            pairs["remote.data.dirs.weights"] = weights
            pairs["remote.data.dirs.strategy"] = "WEIGHTED_ROUND_ROBIN"
        self.conf = Configuration.of(pairs | more)
        self.locations = reconcile(None, self.conf, {})
        self.storage = self.started()
        self.uploads = 0

    def started(self) -> RemoteStorage:
        """The server after a start."""
        state_file = self.root / "data" / ".remote" / "placement.json"
        return RemoteStorage(self.conf, self.locations, state_file=state_file, clock=self.clock)

    def alter(self, op: AlterOp, **more: Any) -> None:
        """Change the registry as an operator does, and tell the server."""
        self.locations = alter(self.locations, op, conf=self.conf, live={}, **more)
        self.storage.update(self.locations)

    async def upload(self, policy: str = "cluster", home: int | None = None) -> int:
        """Upload a file; returns its location."""
        self.uploads += 1
        unit = Upload(f"log/db/t-1/0/{self.uploads}", DOCUMENT)
        (file,) = await self.storage.upload([unit], parse_policy(policy), home)
        return file.location_id

    async def uploaded(self, count: int, policy: str = "cluster") -> Counter[int]:
        return Counter([await self.upload(policy) for _ in range(count)])

    def break_down(self, location_id: int) -> None:
        """Break a location: replace its directory by a file."""
        directory = self.dirs[location_id - 1]
        if directory.exists():
            directory.rename(directory.with_suffix(".away"))
        directory.write_bytes(b"")

    def repair(self, location_id: int) -> None:
        directory = self.dirs[location_id - 1]
        directory.unlink()
        away = directory.with_suffix(".away")
        if away.exists():
            away.rename(directory)

    async def pass_time(self, seconds: int) -> None:
        """Let time pass, with the probes that fall into it."""
        for _ in range(seconds):
            self.clock.seconds += 1
            await self.storage.probe_due()

    def report(self, location_id: int) -> HealthReport:
        return {x.location_id: x for x in self.storage.reports()}[location_id]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def files_below(directory: Path) -> set[str]:
    return {str(x.relative_to(directory)) for x in directory.rglob("*") if x.is_file()}


async def test_files_that_belong_together_lie_in_one_location(
    cluster: Cluster, tmp_path: Path
) -> None:
    source = tmp_path / "00.log"
    source.write_bytes(b"x" * 100_000)
    files = await cluster.storage.upload(
        [Upload("log/a/00.log", source), Upload("log/a/00.index", b"index")], CLUSTER
    )
    assert files == [
        RemoteFile(1, "log/a/00.log", 100_000, crc32c(b"x" * 100_000)),
        RemoteFile(1, "log/a/00.index", 5, crc32c(b"index")),
    ]
    assert (cluster.dirs[0] / "log/a/00.log").read_bytes() == source.read_bytes()
    assert cluster.storage.full_path(files[1]) == f"file://{cluster.dirs[0]}/log/a/00.index"
    assert cluster.storage.uri(1) == f"file://{cluster.dirs[0]}"


async def test_files_are_spread_by_weight_and_counted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, weights="5,1,1")
    assert await cluster.uploaded(70) == {1: 50, 2: 10, 3: 10}
    assert [len(files_below(x)) for x in cluster.dirs] == [50, 10, 10]
    report = cluster.report(1)
    assert (report.placed_files, report.placed_bytes) == (50, 50 * len(DOCUMENT))
    assert (report.health, report.errors, report.effective_weight) == (Health.ACTIVE, 0, 5.0)


async def test_a_location_of_weight_zero_is_read_and_gets_nothing(cluster: Cluster) -> None:
    (file,) = await cluster.storage.upload([Upload("log/old", DOCUMENT)], CLUSTER)
    assert file.location_id == 1
    cluster.storage.update(
        alter(
            cluster.locations,
            AlterOp.SET_WEIGHT,
            conf=cluster.conf,
            live={},
            location_id=1,
            weight=0,
        )
    )
    assert await cluster.uploaded(60) == {2: 30, 3: 30}
    assert await cluster.storage.read(file, limit=100) == DOCUMENT


async def test_a_draining_location_is_read_and_gets_nothing(cluster: Cluster) -> None:
    (file,) = await cluster.storage.upload([Upload("log/old", DOCUMENT)], CLUSTER)
    cluster.storage.update(
        alter(cluster.locations, AlterOp.DRAIN, conf=cluster.conf, live={}, location_id=1)
    )
    assert await cluster.uploaded(60) == {2: 30, 3: 30}
    assert await cluster.storage.read(file, limit=100) == DOCUMENT
    assert cluster.report(1).effective_weight == 0


async def test_restarts_do_not_change_the_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 files of a server that restarts after every fifth of them."""
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    dirs = ",".join(f"memory://{uuid.uuid4()}" for _ in range(3))
    cluster = Cluster(tmp_path, weights="3,2,1", **{"remote.data.dirs": dirs})
    found: Counter[int] = Counter()
    for _ in range(60):
        cluster.storage = cluster.started()
        found += await cluster.uploaded(5)
    assert found == {1: 150, 2: 100, 3: 50}


@pytest.mark.parametrize("data", [b"", b"garbage", b'{"current":{"1":"x"}}'])
async def test_a_damaged_placement_file_costs_nothing_but_the_order(
    cluster: Cluster, data: bytes
) -> None:
    state = cluster.root / "data" / ".remote" / "placement.json"
    state.parent.mkdir(parents=True)
    state.write_bytes(data)
    cluster.storage = cluster.started()
    assert await cluster.uploaded(6) == {1: 2, 2: 2, 3: 2}


async def test_a_placement_file_that_cannot_be_written_fails_no_upload(cluster: Cluster) -> None:
    (cluster.root / "data").write_bytes(b"in the way")
    assert await cluster.uploaded(6) == {1: 2, 2: 2, 3: 2}


async def test_an_upload_goes_on_elsewhere_under_the_same_names(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.break_down(1)
    source = tmp_path / "00.log"
    source.write_bytes(b"records")
    units = [Upload("log/a/00.log", source), Upload("log/a/00.index", b"index")]
    files = await cluster.storage.upload(units, CLUSTER)
    assert [(x.location_id, x.path) for x in files] == [(2, "log/a/00.log"), (2, "log/a/00.index")]
    assert [await cluster.storage.read(x, limit=100) for x in files] == [b"records", b"index"]
    assert not files_below(cluster.dirs[2])
    report = cluster.report(1)
    assert (report.health, report.placed_files, report.errors) == (Health.SUSPECT, 0, 1)
    assert report.last_error is not None


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=6))
@settings(max_examples=15, deadline=None)
def test_uploads_while_locations_come_and_go_are_each_whole_in_one_place(
    steps: list[tuple[int, int]],
) -> None:
    """Whatever fails, an acknowledged file can be read from its location."""

    async def run(cluster: Cluster) -> None:
        broken: set[int] = set()
        placed: list[RemoteFile] = []
        for location_id, count in steps:
            if location_id in broken:
                cluster.repair(location_id)
            else:
                cluster.break_down(location_id)
            broken ^= {location_id}
            for files in await asyncio.gather(*(_pair(cluster) for _ in range(count))):
                assert len({x.location_id for x in files}) <= 1
                placed += files
            await cluster.pass_time(10)
        for location_id in broken:
            cluster.repair(location_id)
        assert len({x.path for x in placed}) == len(placed)
        for file in placed:
            assert await cluster.storage.read(file, limit=100) == DOCUMENT

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Cluster(Path(directory))))


async def _pair(cluster: Cluster) -> list[RemoteFile]:
    """Two files that belong together; none if no location takes them."""
    cluster.uploads += 1
    units = [Upload(f"log/{cluster.uploads}/{x}", DOCUMENT) for x in ("log", "index")]
    try:
        return await cluster.storage.upload(units, CLUSTER)
    except NoLocationError:
        return []


async def test_only_so_many_files_are_sent_to_a_location_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, count=1, **{"remote.log.data-transfer-thread-num": "2"})
    sending, most = 0, 0
    objects = cluster.storage.objects(1)
    put = objects.put

    async def counted(path: str, data: bytes | memoryview, *, if_absent: bool = False) -> int:
        nonlocal sending, most
        sending += 1
        most = max(most, sending)
        try:
            return await put(path, data, if_absent=if_absent)
        finally:
            sending -= 1

    objects.put = counted  # type: ignore[method-assign]
    await asyncio.gather(*(cluster.upload() for _ in range(10)))
    assert most == 2


async def test_a_location_that_hangs_keeps_no_files_from_the_others(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, count=2, **{"remote.log.data-transfer-thread-num": "1"})
    hanging = asyncio.Event()

    async def hang(path: str, data: bytes | memoryview, *, if_absent: bool = False) -> int:
        hanging.set()
        return await asyncio.get_running_loop().create_future()

    cluster.storage.objects(1).put = hang  # type: ignore[method-assign]
    stuck = asyncio.create_task(cluster.upload("pinned:1"))
    await hanging.wait()
    assert await cluster.uploaded(5, "pinned:2") == {2: 5}
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck


async def test_a_location_that_failed_once_is_avoided(cluster: Cluster) -> None:
    cluster.break_down(1)
    assert await cluster.uploaded(21) == {2: 11, 3: 10}
    assert cluster.report(1).errors == 1


async def test_after_some_failures_in_a_row_a_location_gets_nothing(tmp_path: Path) -> None:
    """A single location that fails is DOWN, and says why."""
    cluster = Cluster(tmp_path, count=1)
    cluster.break_down(1)
    for _ in range(4):
        with pytest.raises(NoLocationError, match="no location took the files"):
            await cluster.upload()
    report = cluster.report(1)
    assert (report.health, report.errors, report.effective_weight) == (Health.DOWN, 3, 0.0)
    with pytest.raises(NoLocationError, match=r"1 is DOWN: file://.*location-1") as e:
        await cluster.upload()
    assert e.value.retriable
    assert e.value.code is ErrorCode.STORAGE_EXCEPTION


async def test_when_every_location_fails_the_upload_may_be_tried_again(cluster: Cluster) -> None:
    """Once one is back, the same upload works."""
    for location_id in (1, 2, 3):
        cluster.break_down(location_id)
    with pytest.raises(NoLocationError, match=r"1 failed: .*; 2 failed: .*; 3 failed: "):
        await cluster.upload()
    cluster.repair(2)
    assert await cluster.upload() == 2


async def test_a_location_that_is_back_is_used_again_after_its_probes(cluster: Cluster) -> None:
    cluster.break_down(1)
    await cluster.uploaded(3)
    await cluster.pass_time(60)
    assert cluster.report(1).health is Health.DOWN
    cluster.repair(1)
    assert await cluster.uploaded(10) == {2: 5, 3: 5}
    await cluster.pass_time(90)
    assert cluster.report(1).health is Health.ACTIVE
    assert (await cluster.uploaded(30))[1] in (9, 10)  # the failed try took its turn once
    assert not any(x.startswith(".zufluss-probe") for x in files_below(cluster.dirs[0]))


async def test_flapping_every_second_does_not_flap_placement(cluster: Cluster) -> None:
    """The location flaps for five minutes, while two files are uploaded each second."""
    before, moves = 1, 0
    for second in range(300):
        if second % 2:
            cluster.repair(1)
        else:
            cluster.break_down(1)
        used = int(1 in await cluster.uploaded(2))
        moves, before = moves + (used != before), used
        await cluster.pass_time(1)
    assert moves <= 12


async def test_the_prober_brings_a_location_back_by_itself(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, count=1, **{"zufluss.remote.probe-interval": "10ms"})
    cluster.storage = RemoteStorage(cluster.conf, cluster.locations, state_file=None)
    cluster.break_down(1)
    with pytest.raises(NoLocationError):
        await cluster.upload()
    cluster.storage.start()
    try:
        cluster.repair(1)
        async with asyncio.timeout(WAIT_SECONDS):
            while cluster.storage.health(1) is not Health.ACTIVE:
                await asyncio.sleep(0.01)
    finally:
        await cluster.storage.stop()
    assert await cluster.upload() == 1


async def test_a_probe_answers_with_its_time_or_the_error(cluster: Cluster) -> None:
    assert await cluster.storage.probe(1) == 0  # by the clock of the test
    cluster.break_down(1)
    with pytest.raises(LocationUnavailableError, match="location-1"):
        await cluster.storage.probe(1)
    assert cluster.report(1).health is Health.SUSPECT


async def test_a_table_that_keeps_together_goes_elsewhere_only_when_it_must(
    cluster: Cluster,
) -> None:
    assert [await cluster.upload("partition", 2) for _ in range(6)] == [2] * 6
    cluster.break_down(2)
    assert await cluster.upload("partition", 2) in (1, 3)
    assert cluster.report(2).errors == 1
    (file,) = await cluster.storage.upload([Upload("log/x", DOCUMENT)], PARTITION)
    assert file.location_id != 2


async def test_a_pinned_table_stays_within_its_locations(cluster: Cluster) -> None:
    assert await cluster.uploaded(10, "pinned:1,3") == {1: 5, 3: 5}
    cluster.break_down(3)
    with pytest.raises(NoLocationError, match=r"1 is not in pinned:3; .*3 failed"):
        await cluster.upload("pinned:3")
    assert await cluster.upload("pinned:1,3") == 1


async def test_a_pinned_table_says_when_its_location_takes_nothing(cluster: Cluster) -> None:
    cluster.storage.update(
        alter(cluster.locations, AlterOp.DRAIN, conf=cluster.conf, live={}, location_id=3)
    )
    with pytest.raises(NoLocationError, match="3 is DRAINING"):
        await cluster.upload("pinned:3")


async def test_a_local_file_that_is_missing_is_no_failure_of_the_location(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(RemoteStorageError, match="gone") as e:
        await cluster.storage.upload([Upload("log/x", tmp_path / "gone")], CLUSTER)
    assert not isinstance(e.value, LocationUnavailableError)
    assert [x.errors for x in cluster.storage.reports()] == [0, 0, 0]


async def test_a_file_that_came_back_changed_is_noticed(cluster: Cluster, tmp_path: Path) -> None:
    (file,) = await cluster.storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    target = tmp_path / "target"
    await cluster.storage.download(file, target)
    assert target.read_bytes() == DOCUMENT
    for damaged in (b"A document", b"a docum", b""):
        (cluster.dirs[0] / "kv/x").write_bytes(damaged)
        with pytest.raises(ObjectCorruptError, match="kv/x"):
            await cluster.storage.read(file, limit=100)
        with pytest.raises(ObjectCorruptError, match="kv/x"):
            await cluster.storage.download(file, target)
    assert target.read_bytes() == DOCUMENT
    assert not list(tmp_path.glob("*.partial"))
    assert cluster.report(1).health is Health.ACTIVE


async def test_a_document_of_unknown_checksum_is_read_up_to_a_limit(cluster: Cluster) -> None:
    await cluster.storage.upload([Upload("kv/_METADATA", DOCUMENT)], CLUSTER)
    assert await cluster.storage.read_at(1, "kv/_METADATA", limit=100) == DOCUMENT
    with pytest.raises(RemoteStorageError, match="at most 5"):
        await cluster.storage.read_at(1, "kv/_METADATA", limit=5)


async def test_a_missing_object_says_nothing_about_the_location(cluster: Cluster) -> None:
    cluster.dirs[0].mkdir(parents=True)
    for _ in range(5):
        with pytest.raises(ObjectMissingError):
            await cluster.storage.read(RemoteFile(1, "kv/none", 1, 1), limit=100)
    assert cluster.report(1).health is Health.ACTIVE


async def test_a_failed_read_names_the_location_and_counts(cluster: Cluster) -> None:
    (file,) = await cluster.storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    cluster.break_down(1)
    with pytest.raises(LocationUnavailableError, match="location-1") as e:
        await cluster.storage.read(file, limit=100)
    assert e.value.retriable
    assert cluster.report(1).health is Health.SUSPECT


async def test_deleting_reaches_every_location_although_one_fails(cluster: Cluster) -> None:
    files = [
        (await cluster.storage.upload([Upload(f"kv/{x}", DOCUMENT)], CLUSTER))[0] for x in range(6)
    ]
    cluster.break_down(1)
    with pytest.raises(LocationUnavailableError, match="location-1"):
        await cluster.storage.delete(files)
    assert not files_below(cluster.dirs[1]) | files_below(cluster.dirs[2])
    cluster.repair(1)
    await cluster.storage.delete(files)
    assert not files_below(cluster.dirs[0])


async def test_a_moved_location_is_read_at_its_new_address(cluster: Cluster) -> None:
    """Files keep their names, nothing that refers to them is rewritten."""
    (file,) = await cluster.storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    copy = cluster.root / "copy"
    shutil.copytree(cluster.dirs[0], copy)
    shutil.rmtree(cluster.dirs[0])
    cluster.alter(AlterOp.DRAIN, location_id=1)
    cluster.alter(AlterOp.MOVE, location_id=1, uri=str(copy))
    assert await cluster.storage.read(file, limit=100) == DOCUMENT
    assert cluster.storage.full_path(file) == f"file://{copy}/kv/x"


async def test_a_moved_location_starts_with_a_clean_record(cluster: Cluster) -> None:
    cluster.break_down(1)
    await cluster.uploaded(3)
    cluster.alter(AlterOp.DRAIN, location_id=1)
    cluster.alter(AlterOp.MOVE, location_id=1, uri=str(cluster.root / "copy"))
    assert cluster.report(1).health is Health.ACTIVE


def test_a_registry_that_comes_late_is_ignored(cluster: Cluster) -> None:
    newer = replace(cluster.locations, version=5, locations=cluster.locations.locations[:2])
    cluster.storage.update(newer)
    cluster.storage.update(replace(cluster.locations, version=4))
    assert cluster.storage.locations == newer


async def test_a_new_location_gets_its_share_at_once(cluster: Cluster) -> None:
    await cluster.uploaded(7)
    cluster.storage.update(
        alter(
            cluster.locations,
            AlterOp.ADD,
            conf=cluster.conf,
            live={},
            uri=str(cluster.root / "new"),
        )
    )
    assert (await cluster.uploaded(40))[4] == 10


async def test_a_retired_location_is_still_read_and_not_reported(cluster: Cluster) -> None:
    (file,) = await cluster.storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    first, *others = cluster.locations.locations
    retired = (replace(first, state=AdminState.RETIRED), *others)
    cluster.storage.update(replace(cluster.locations, version=2, locations=retired))
    assert await cluster.storage.read(file, limit=100) == DOCUMENT
    assert [x.location_id for x in cluster.storage.reports()] == [2, 3]


def test_a_file_in_an_unknown_location_is_a_retriable_error(cluster: Cluster) -> None:
    with pytest.raises(UnknownLocationError) as e:
        cluster.storage.full_path(RemoteFile(9, "kv/x", 1, 1))
    assert e.value.retriable


async def test_a_server_that_knows_no_location_yet_uploads_nothing(cluster: Cluster) -> None:
    storage = RemoteStorage(cluster.conf, Locations(0, (), explicit=False), state_file=None)
    with pytest.raises(NoLocationError):
        await storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    storage.update(cluster.locations)
    assert len(await storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)) == 1


async def test_the_location_beside_the_data_needs_no_configuration(tmp_path: Path) -> None:
    conf = Configuration.of({"data.dir": str(tmp_path)})
    storage = RemoteStorage(conf, reconcile(None, conf, {}), state_file=None)
    await storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    assert (tmp_path / "remote" / "kv" / "x").read_bytes() == DOCUMENT


class Answering(ThreadingHTTPServer):
    """A store that answers every request with one status, as an S3 bucket could."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = 200
        self.deletes = 0
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def conf(self) -> Configuration:
        return Configuration.of(
            {
                "s3.endpoint": f"http://127.0.0.1:{self.server_port}",
                "s3.access-key": "a",
                "s3.secret-key": "b",
                "zufluss.remote.request-timeout": "2s",
            }
        )


class _Answer(BaseHTTPRequestHandler):
    server: Answering
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def do_POST(self) -> None:
        self.server.deletes += 1
        self.do_PUT()

    def do_DELETE(self) -> None:
        self.server.deletes += 1
        self.answer()

    def answer(self) -> None:
        self.send_response(self.server.status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the output belongs to the tests."""


@pytest.fixture
def answering() -> Iterator[Answering]:
    server = Answering()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def mixed(answering: Answering, tmp_path: Path) -> RemoteStorage:
    locations = (Location(1, "s3://bucket/x"), Location(2, f"file://{tmp_path}/two"))
    return RemoteStorage(answering.conf, Locations(1, locations, explicit=True), state_file=None)


@pytest.mark.parametrize("status", [429, 503, 500])
async def test_throttling_and_errors_of_the_store_move_the_upload(
    answering: Answering, mixed: RemoteStorage, status: int
) -> None:
    """A file that may have arrived at the first location is left to the sweep."""
    answering.status = status
    (file,) = await mixed.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    assert file.location_id == 2
    assert mixed.health(1) is Health.SUSPECT
    assert answering.deletes == 0


async def test_a_store_that_does_not_listen_moves_the_upload(
    answering: Answering, mixed: RemoteStorage
) -> None:
    answering.shutdown()
    answering.server_close()
    (file,) = await mixed.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    assert file.location_id == 2
    assert "s3://bucket/x/kv/x" in str(mixed.reports()[0].last_error)


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, ObjectForbiddenError), (401, ObjectForbiddenError), (404, ObjectMissingError)],
)
async def test_a_refusal_is_an_error_and_moves_nothing(
    answering: Answering, mixed: RemoteStorage, tmp_path: Path, status: int, error: type[Exception]
) -> None:
    """Wrong credentials must be seen, not hidden by another location."""
    answering.status = status
    with pytest.raises(error, match=r"s3://bucket/x"):
        await mixed.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    assert mixed.health(1) is Health.ACTIVE
    assert not (tmp_path / "two").exists()


async def test_a_slow_location_gets_less_when_weights_adapt(tmp_path: Path) -> None:
    """Three locations, one ten times slower."""
    cluster = Cluster(tmp_path, **{"zufluss.remote.adaptive-weights": "true"})
    latency = {1: 0.1, 2: 0.01, 3: 0.01}
    for location_id, seconds in latency.items():
        _slow_down(cluster, location_id, seconds)
    found = await cluster.uploaded(300)
    assert found[1] < 45
    assert abs(found[2] - found[3]) <= 3
    assert cluster.report(1).effective_weight == pytest.approx(0.15)
    assert cluster.report(2).effective_weight == 1
    assert cluster.report(1).latency_ms == pytest.approx(100)


async def test_weights_do_not_adapt_unless_they_are_told_to(cluster: Cluster) -> None:
    _slow_down(cluster, 1, 0.1)
    assert await cluster.uploaded(60) == {1: 20, 2: 20, 3: 20}


def _slow_down(cluster: Cluster, location_id: int, seconds: float) -> None:
    """Make puts to a location take time on the test's clock."""
    objects = cluster.storage.objects(location_id)
    put = objects.put

    async def slow_put(path: str, data: bytes | memoryview, *, if_absent: bool = False) -> int:
        cluster.clock.seconds += seconds
        return await put(path, data, if_absent=if_absent)

    objects.put = slow_put  # type: ignore[method-assign]


async def test_uploads_that_wait_for_a_location_leave_when_it_goes_down(tmp_path: Path) -> None:
    """Otherwise a location that hangs would hold each of them for a timeout, one by one."""
    one_at_a_time = {"remote.log.data-transfer-thread-num": "1", "zufluss.remote.down-after": "1"}
    cluster = Cluster(tmp_path, count=2, **one_at_a_time)
    opened = cluster.storage._open(1)
    await opened.sending.acquire()
    waiting = [asyncio.create_task(cluster.upload("partition", home=1)) for _ in range(3)]
    while len(opened.sending._waiters or ()) < 3:
        await asyncio.sleep(0)
    cluster.storage.failed(1, LocationUnavailableError(opened.uri, "", "test"))
    opened.sending.release()
    assert await asyncio.gather(*waiting) == [2, 2, 2]
    assert cluster.report(1).errors == 1


@pytest.mark.parametrize("op", [AlterOp.MOVE, AlterOp.RETIRE])
async def test_an_upload_to_a_place_that_is_none_any_more_goes_elsewhere(
    cluster: Cluster, op: AlterOp
) -> None:
    """Otherwise a manifest would name a file that is at the old address only."""
    opened = cluster.storage._open(1)
    count = cluster.conf[o.REMOTE_LOG_DATA_TRANSFER_THREAD_NUM]
    for _ in range(count):
        await opened.sending.acquire()
    uploading = asyncio.create_task(cluster.upload("partition", home=1))
    while not opened.sending._waiters:
        await asyncio.sleep(0)
    cluster.alter(AlterOp.DRAIN, location_id=1)
    uri = {"uri": str(cluster.root / "copy")} if op is AlterOp.MOVE else {}
    cluster.alter(op, location_id=1, **uri)
    opened.sending.release()
    assert await uploading in (2, 3)


async def test_a_location_without_new_files_is_not_compared_with_others(tmp_path: Path) -> None:
    """Otherwise a fast location that drains would make all others look slow."""
    cluster = Cluster(tmp_path, **{"zufluss.remote.adaptive-weights": "true"})
    for location_id, latency_ms in ((1, 0.1), (2, 100.0), (3, 1000.0)):
        for _ in range(10):
            cluster.storage._healths.of(location_id).succeeded(latency_ms)
    cluster.alter(AlterOp.DRAIN, location_id=1)
    found = await cluster.uploaded(40)
    assert found[2] > 4 * found[3] > 0
    assert cluster.report(2).effective_weight == 1


def test_a_placement_file_that_cannot_be_read_does_not_keep_a_server_from_starting(
    cluster: Cluster,
) -> None:
    (cluster.root / "data" / ".remote" / "placement.json").mkdir(parents=True)
    cluster.started()


async def test_a_good_probe_removes_what_failed_ones_left(cluster: Cluster) -> None:
    objects = cluster.storage.objects(1)
    real = objects.get

    async def lost(path: str, *, limit: int) -> bytes:
        raise LocationUnavailableError(objects.uri.text, path, "the answer was lost")

    objects.get = lost  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(LocationUnavailableError):
            await cluster.storage.probe(1)
    assert len(files_below(cluster.dirs[0])) == 3
    objects.get = real  # type: ignore[method-assign]
    await cluster.storage.probe(1)
    assert not files_below(cluster.dirs[0])


async def test_a_probe_that_hangs_does_not_delay_the_return_of_others(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, count=2, **{"zufluss.remote.probe-interval": "10ms"})
    storage = RemoteStorage(cluster.conf, cluster.locations, state_file=None)
    cluster.storage = storage
    hanging = asyncio.Event()

    async def hang(path: str, *, limit: int) -> bytes:
        hanging.set()
        return await asyncio.Future()

    storage.objects(1).get = hang  # type: ignore[method-assign]
    for location_id in (1, 2):
        storage.failed(location_id, LocationUnavailableError("", "", "test"))
    storage.start()
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await hanging.wait()
            while storage.health(2) is not Health.ACTIVE:
                await asyncio.sleep(0.01)
    finally:
        await storage.stop()
    assert storage.health(1) is Health.SUSPECT


async def test_the_shared_log_does_not_share_the_requests_of_uploads(tmp_path: Path) -> None:
    storage = Cluster(tmp_path).storage
    objects = storage.wal_objects(1)
    assert storage.wal_objects(1) is objects
    assert storage.objects(1) is not objects
    assert objects.uri == storage.objects(1).uri
