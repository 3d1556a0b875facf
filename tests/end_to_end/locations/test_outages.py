"""Locations that fail, come back, flap, or all fail at once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.end_to_end.locations.stage import (
    CLIENT,
    DIRS,
    PROBE_INTERVAL,
    ROWS,
    Death,
    Stage,
    batch,
    directories,
    everything,
    rows,
    rows_by_pyfluss,
    stage,
    until_health,
    write,
)
from tests.end_to_end.raw import RawClient, fetch_request
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.errors import ErrorCode
from zufluss.record.keys.encoding import bucket_assign
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.locations import Health
from zufluss.testing.proxy import Fault, FaultProxy, Kind
from zufluss.testing.s3 import S3Server, properties
from zufluss.wire.api import ApiKey

SICK = (Health.SUSPECT, Health.DOWN)
NEVER = {PROBE_INTERVAL: "1h"}
"""With these options a failed location does not recover during a test."""
SOON = {PROBE_INTERVAL: "10ms"}
DOWN_AFTER = 3
BATCHES = 7
"""Batches of each bucket of a table with two buckets."""
INSIDE = 15
"""An offset in the second batch of a segment: the server needs the index to locate it."""


@dataclass
class Victim:
    """A location that can be made to fail."""

    uri: str
    fail: Callable[[], None]
    work: Callable[[], None]
    properties: dict[str, str]
    """Options with which the server reaches it."""
    tries: Callable[[], set[str]]
    """The segments whose upload to it failed, as far as they are seen."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3_server.port) as proxy:
        yield proxy


def directory(root: Path, how: str) -> Victim:
    death = Death(root / "victim")
    fail, work = {
        "unmounted": (death.unmount, death.mount),
        "read-only": (death.freeze, death.thaw),
    }[how]
    return Victim(f"file://{death.directory}", fail, work, {}, set)


def bucket(s3: S3Server, proxy: FaultProxy, kind: Kind) -> Victim:
    """Make a bucket refuse all files."""
    uri = s3.bucket(f"victim-{time.time_ns()}")

    def tries() -> set[str]:
        return {
            request.path.split("/")[-2]
            for request in proxy.seen
            if request.faults and request.path.endswith(".log")
        }

    def fail() -> None:
        proxy.set([Fault(kind, methods=("PUT",))])

    return Victim(f"{uri}/x", fail, proxy.set, properties(proxy.endpoint), tries)


# -- places that accept no files -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["unmounted", "read-only"])
def test_uploads_leave_a_directory_that_takes_none(tmp_path: Path, how: str) -> None:
    check_uploads_move(tmp_path, directory(tmp_path, how))


@pytest.mark.parametrize("kind", ["reset", "half_open", "status_503", "error_after_success"])
def test_uploads_leave_a_bucket_that_takes_none(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy, kind: Kind
) -> None:
    check_uploads_move(tmp_path, bucket(s3_server, proxy, kind))


def check_uploads_move(root: Path, victim: Victim) -> None:
    conf = {DIRS: f"{root}/other,{victim.uri}", **victim.properties, **NEVER}
    with stage(root, conf) as it:
        table = it.create("moving")
        write(table, 0, 5)
        it.until_copied(table, 5)
        assert it.places(table, victim.properties) == [1, 2, 1, 2]
        victim.fail()
        write(table, 5, 25)
        it.until_copied(table, 25)
        assert it.health(2) in SICK
        assert it.places(table, victim.properties)[4:] == [1] * 20
        assert len(victim.tries()) <= DOWN_AFTER
        assert rows_from(table, 4 * ROWS) == everything(25)[4 * ROWS :]
        victim.work()
        it.until_gone(table)
        assert rows(table) == everything(25)
        if not victim.properties:  # its token opens both places
            assert rows_by_pyfluss(it.server.bootstrap, "moving") == everything(25)


def rows_from(table: Table, offset: int, bucket: int = 0) -> list[int]:
    return sorted(table.scan(start={bucket: offset}).to_arrow()["id"].to_pylist())


# -- places that come back -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unmounted", "read-only"])
def test_a_directory_that_is_back_is_used_again(tmp_path: Path, how: str) -> None:
    check_comes_back(tmp_path, directory(tmp_path, how))


def test_a_bucket_that_is_back_is_used_again(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy
) -> None:
    check_comes_back(tmp_path, bucket(s3_server, proxy, "reset"))


def check_comes_back(root: Path, victim: Victim) -> None:
    conf = {DIRS: f"{root}/other,{victim.uri}", **victim.properties, **SOON}
    with stage(root, conf) as it:
        table = it.create("back")
        write(table, 0, 3)
        it.until_copied(table, 3)
        victim.fail()
        write(table, 3, 7)
        it.until_copied(table, 7)
        until_health(it, 2, *SICK)
        victim.work()
        until_health(it, 2, Health.ACTIVE)
        write(table, 7, 17)
        it.until_copied(table, 17)
        places = it.places(table, victim.properties)
        assert places[:2] == [1, 2]
        assert places[2:6] == [1] * 4
        assert places[6:].count(2) in (5, 6)
        assert rows(table) == everything(17)


def test_a_place_that_flaps_does_not_make_placement_flap(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy
) -> None:
    victim = bucket(s3_server, proxy, "reset")
    conf = {DIRS: f"{tmp_path}/other,{victim.uri}", **victim.properties}
    with stage(tmp_path, {**conf, PROBE_INTERVAL: "20s"}) as it:
        table = it.create("calm")
        write(table, 0, 5)
        it.until_copied(table, 5)
        for batches in range(5, 45, 2):
            if batches % 4 == 1:
                victim.fail()
            else:
                victim.work()
            write(table, batches, batches + 2)
            it.until_copied(table, batches + 2)
        assert it.places(table, victim.properties) == [1, 2, 1, 2] + [1] * 40
        assert len(victim.tries()) == 1


# -- all places dead -----------------------------------------------------------------------------


def test_with_all_places_dead_uploads_wait_and_writers_do_not(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy
) -> None:
    victims = [directory(tmp_path, "unmounted"), bucket(s3_server, proxy, "reset")]
    s3 = victims[1].properties
    conf = {DIRS: ",".join(v.uri for v in victims), **s3, **SOON}
    with stage(tmp_path, conf) as it:
        table = it.create("patient", **{"table.log.local-ttl": "1ms"})
        write(table, 0, 5)
        it.until_copied(table, 6)  # the last batch, too, since all that is here has expired
        for victim in victims:
            victim.fail()
        write(table, 5, 25)
        until_health(it, 1, Health.DOWN)
        until_health(it, 2, Health.DOWN)
        write(table, 25, 45)
        eventually(lambda: failed_rounds(it) >= 4, "uploads are tried again and again")
        check_nothing_left(it, table)
        assert len(victims[1].tries()) <= DOWN_AFTER, "a place that is down is sent no files"
        assert rows_from(table, 5 * ROWS) == everything(45)[5 * ROWS :]
        for victim in victims:
            victim.work()
        it.until_copied(table, 46)
        it.until_gone(table)
        assert set(it.places(table, s3)[5:]) == {1, 2}
        assert rows(table) == everything(45)


def check_nothing_left(it: Stage, table: Table) -> None:
    """Assert that the server's disk has every segment that is not in remote storage."""
    assert it.copied(table) == 5 * ROWS
    assert set(it.local(table)) >= {f"{n * ROWS:020d}.log" for n in range(5, 45)}


def failed_rounds(it: Stage) -> int:
    """The number of rounds in a row that failed, from the server's log."""
    found = re.findall(r"remote_log_round_failed.*in_a_row=(\d+)", it.server.log())
    return max(map(int, found), default=0)


def test_a_death_while_all_places_are_dead_loses_nothing(tmp_path: Path) -> None:
    victims = [Death(d) for d in directories(tmp_path, "a", "b")]
    conf = {DIRS: ",".join(str(v.directory) for v in victims), **SOON}
    with stage(tmp_path, conf) as it:
        table = it.create("patient", **{"table.log.local-ttl": "1ms"})
        write(table, 0, 5)
        it.until_copied(table, 6)
        for victim in victims:
            victim.unmount()
        write(table, 5, 25)
        it.server.kill()
        it.server.start()
        write(table, 25, 45)
        check_nothing_left(it, table)
        for victim in victims:
            victim.mount()
        it.until_copied(table, 46)
        it.until_gone(table)
        assert rows(table) == everything(45)
        assert rows_by_pyfluss(it.server.bootstrap, "patient") == everything(45)


# -- reading from a dead place -------------------------------------------------------------------


@pytest.fixture
def two_buckets(tmp_path: Path) -> Iterator[tuple[Stage, Table, Death]]:
    """Bucket 0 has its segments in the directory that fails, bucket 1 in the other one."""
    dirs = directories(tmp_path, "dying", "other")
    two_batches = {"log.segment.file-size": "4kb"}
    with stage(tmp_path, {DIRS: ",".join(map(str, dirs)), **NEVER, **two_batches}) as it:
        table = it.create("halves", buckets=2)
        for end in range(1, BATCHES + 1, 2):
            for number in (0, 1):
                write_bucket(table, number, max(end - 2, 0), end)
                it.until_copied(table, end, number)
        for number in (0, 1):
            eventually(lambda number=number: len(it.local(table, number)) <= 2)
            found = {s.location_id for s in it.manifest(table, number).segments}
            assert found == {number + 1}
        yield it, table, Death(dirs[0])


def write_bucket(table: Table, number: int, begin: int, end: int) -> None:
    """Batches with rows of one bucket."""
    with table.append() as writer:
        for count in range(begin, end):
            writer.write(of_bucket(table, number).slice(count * ROWS, ROWS))
            writer.flush()


def of_bucket(table: Table, number: int) -> pa.Table:
    many = pa.concat_tables([batch(n) for n in range(20)]).combine_chunks()
    return many.filter(pa.array(bucket_assign(many.to_batches()[0], table.info) == number))


def ids_of(table: Table, number: int) -> list[int]:
    return of_bucket(table, number).slice(0, BATCHES * ROWS)["id"].to_pylist()


def test_a_segment_in_a_dead_place_is_a_retriable_error_that_names_it(
    two_buckets: tuple[Stage, Table, Death],
) -> None:
    it, table, dying = two_buckets
    dying.unmount()
    no_backoff = {**CLIENT, "client.request-timeout": "300ms"}
    with (
        zufluss.connect(it.server.bootstrap, **no_backoff) as conn,
        pytest.raises(LocationUnavailableError, match=str(dying.directory)) as caught,
    ):
        rows_from(conn.table("halves"), 0, bucket=0)
    assert caught.value.retriable
    assert rows_from(table, 0, bucket=1) == ids_of(table, 1)
    dying.mount()
    assert rows_from(table, 0, bucket=0) == ids_of(table, 0)
    assert rows(table) == sorted(ids_of(table, 0) + ids_of(table, 1))


FOR_EVER = {**CLIENT, "client.request-timeout": "1h"}
"""Options of a client that retries calls to servers as long as a test lasts."""


def test_a_scan_says_at_once_that_a_place_is_dead_and_soon_gives_up(
    two_buckets: tuple[Stage, Table, Death], caplog: pytest.LogCaptureFixture
) -> None:
    it, _, dying = two_buckets
    dying.unmount()
    limited = {**FOR_EVER, "client.remote-file.read-timeout": "300ms"}
    with (
        zufluss.connect(it.server.bootstrap, **limited) as conn,
        pytest.raises(LocationUnavailableError, match=str(dying.directory)),
    ):
        rows_from(conn.table("halves"), 0, bucket=0)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "scan.location_unavailable" in said[0]
    assert f"file://{dying.directory}" in said[0]
    assert "failures=1 retried_for_ms=300" in said[0]


def test_a_place_that_accepts_requests_and_never_answers_is_dead_for_a_scan(
    tmp_path: Path, s3_server: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zufluss.client.read.remote.FIRST_SECONDS", 0.2)
    uri = s3_server.bucket(f"silent-{time.time_ns()}")
    with stage(tmp_path, {DIRS: f"{uri}/x", **properties(proxy.endpoint)}) as it:
        table = it.create("silent")
        write(table, 0, 5)
        it.until_copied(table, 5)
        it.until_gone(table)
        proxy.set([Fault("half_open", methods=("GET",), path_contains=".log")])
        limited = {**FOR_EVER, "client.remote-file.read-timeout": "1ms"}
        with (
            zufluss.connect(it.server.bootstrap, **limited) as conn,
            pytest.raises(LocationUnavailableError, match=rf"{uri}.*no answer within 0\.2 s"),
        ):
            rows(conn.table("silent"))
        proxy.set()
        assert rows(table) == everything(5)


def test_a_scan_of_all_buckets_goes_on_with_those_that_can_be_read(
    two_buckets: tuple[Stage, Table, Death],
) -> None:
    it, _, dying = two_buckets
    dying.unmount()
    patient = {**CLIENT, "client.request-timeout": "60s"}
    with zufluss.connect(it.server.bootstrap, **patient) as conn:
        table = conn.table("halves")
        expected = {0: ids_of(table, 0), 1: ids_of(table, 1)}
        seen: list[int] = []
        with table.scan(stop=None).open() as scanner:
            eventually(lambda: polled(scanner, seen) >= len(expected[1]))
            assert seen == expected[1]
            write_bucket(table, 1, BATCHES, BATCHES + 1)
            eventually(lambda: polled(scanner, seen) == (BATCHES + 1) * ROWS)
            dying.mount()
            eventually(lambda: polled(scanner, seen) == (2 * BATCHES + 1) * ROWS)
        assert [i for i in seen if i in expected[0]] == expected[0]


def polled(scanner: zufluss.client.sync.connection.LogScanner, seen: list[int]) -> int:
    found = scanner.poll(timeout_ms=100)
    seen += [] if found is None else found["id"].to_pylist()
    return len(seen)


def test_the_server_says_which_place_it_needs_and_answers_for_other_buckets(
    two_buckets: tuple[Stage, Table, Death],
) -> None:
    it, table, dying = two_buckets
    dying.unmount()
    request = fetch_request(table.info.table_id, INSIDE, bucket=0, max_wait_ms=60_000)
    request.tables_req[0].buckets_req.add(bucket_id=1, fetch_offset=INSIDE, max_fetch_bytes=1 << 20)
    with RawClient(it.server.port) as client:
        answers = {}
        while len(answers) < 2:  # it may answer for one bucket before it knows about the other
            for each in client.call(ApiKey.FETCH_LOG, request).tables_resp[0].buckets_resp:
                if each.error_code or each.HasField("remote_log_fetch_info"):
                    answers[each.bucket_id] = each
        assert answers[0].error_code == ErrorCode.STORAGE_EXCEPTION
        assert f"file://{dying.directory}" in answers[0].error_message
        info = answers[1].remote_log_fetch_info
        assert info.remote_log_tablet_dir.startswith(f"file://{dying.directory.parent}/other/")
        dying.mount()

        def answered() -> bool:
            found = client.fetch(table.info.table_id, INSIDE)
            return found.HasField("remote_log_fetch_info")

        eventually(answered, "it was a passing error")
