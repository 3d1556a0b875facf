"""`zufluss wal`: the shared log of a directory, looked at without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.remote.wal import HEADER_BYTES, WalName
from zufluss.testing.shared_log import BUCKETS, WrittenSession, session

from .conftest import Result

Run = Callable[..., Result]
OPEN, CLOSED, SEALED = 5, 6, 7
OBJECTS = 4


@pytest.fixture
def location(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A location with three sessions: one goes on, one was closed, one was sealed."""

    async def write() -> None:
        store = Objects(parse_location(str(tmp_path), "a test"))
        log = ObjectLog(store, WalSettings(interval_seconds=0))
        for epoch in (OPEN, CLOSED, SEALED):
            written = WrittenSession(log, session(epoch))
            await written.fill(OBJECTS)
            if epoch == CLOSED:
                await written.writer.close()
            await written.writer.stop()
        await log.seal(session(SEALED), 0, coordinator_epoch=3)

    asyncio.run(write())
    capsys.readouterr()  # what servers log is no output of the command
    return tmp_path


def place(location: Path, epoch: int, number: int) -> Path:
    return location / WalName(epoch, number).path


def problems(result: Result) -> list[tuple[int, int, int | None]]:
    """Session, number and bucket of what was found."""
    return [(p["session"], p["number"], p["bucket"]) for p in json.loads(result.out)]


def test_sessions_are_listed_with_their_ends(run: Run, location: Path) -> None:
    result = run("wal", "ls", str(location), "-o", "json")
    assert result.code == 0
    listed = {each["session"]: each for each in json.loads(result.out)}
    states = {epoch: each["state"] for epoch, each in listed.items()}
    assert states == {OPEN: "open", CLOSED: "closed", SEALED: "sealed"}
    for each in listed.values():
        assert (each["server"], each["first"], each["end"]) == (1, 0, OBJECTS)
        assert each["objects"] == OBJECTS


def test_objects_of_a_session_are_listed(run: Run, location: Path) -> None:
    result = run("wal", "ls", str(location), "--session", str(CLOSED), "-o", "json")
    listed = json.loads(result.out)
    assert [each["number"] for each in listed] == list(range(OBJECTS + 1))
    assert [each["kind"] for each in listed] == ["data"] * OBJECTS + ["close"]
    assert [each["entries"] for each in listed] == [len(BUCKETS)] * OBJECTS + [0]
    assert run("wal", "ls", str(location), "--session", str(CLOSED)).out.startswith("number")


def test_a_log_that_is_whole_has_no_problems(run: Run, location: Path) -> None:
    result = run("wal", "check", str(location))
    assert (result.code, result.out) == (0, "")
    assert f"3 sessions, {3 * OBJECTS} objects" in result.err


def test_a_damaged_entry_is_a_problem_of_its_bucket(run: Run, location: Path) -> None:
    file = place(location, SEALED, 2)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = run("wal", "check", str(location), "-o", "json")
    assert result.code == 1
    assert problems(result) == [(SEALED, 2, BUCKETS[-1].bucket_id)]
    assert "checksum" in json.loads(result.out)[0]["problem"]


def test_a_missing_object_is_found_with_the_offsets_that_it_had(run: Run, location: Path) -> None:
    place(location, OPEN, 1).unlink()
    result = run("wal", "check", str(location), "--session", str(OPEN), "-o", "json")
    assert result.code == 1
    found = json.loads(result.out)
    assert (found[0]["number"], found[0]["bucket"]) == (1, None)
    assert [each["number"] for each in found[1:]] == [2] * len(BUCKETS)
    assert all("offsets 3 to 5" in each["problem"] for each in found[1:])


def test_a_damaged_header_is_listed_and_found(run: Run, location: Path) -> None:
    place(location, OPEN, 0).write_bytes(bytes(HEADER_BYTES))
    listed = json.loads(run("wal", "ls", str(location), "--session", str(OPEN), "-o", "json").out)
    assert listed[0]["kind"] == "damaged"
    assert "begins with" in listed[0]["problem"]
    result = run("wal", "check", str(location), "-o", "json")
    assert (OPEN, 0, None) in problems(result)


def test_a_session_without_a_readable_header_is_found(run: Run, location: Path) -> None:
    for number in range(OBJECTS):
        place(location, OPEN, number).write_bytes(b"")
    assert run("wal", "ls", str(location)).code == 0
    result = run("wal", "check", str(location), "-o", "json")
    assert problems(result) == [(OPEN, 0, None)]


def test_a_session_that_is_not_there_is_a_usage_error(run: Run, location: Path) -> None:
    result = run("wal", "check", str(location), "--session", "9")
    assert result.code == 2
    assert "has no session 9; it has 5, 6, 7" in result.err


def test_a_place_without_a_shared_log_says_so(run: Run, tmp_path: Path) -> None:
    for command, code in {"ls": 0, "check": 2}.items():
        result = run("wal", command, str(tmp_path))
        assert (result.code, result.out) == (code, "")
        assert "has no shared log" in result.err
    assert run("wal", "ls", "s3:/wrong").code == 2
