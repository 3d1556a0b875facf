"""The manifest of a remote log: Fluss's fields and ours; damaged ones are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import FIXTURES
from zufluss.errors import CorruptRecordError
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.files import RemoteFile, Usage, usage
from zufluss.remote.manifest import FILES, LogManifest, RemoteSegment

FIXTURE = next((FIXTURES / "remote-log" / "0" / "metadata").glob("*.manifest"))
INT64 = st.integers(0, 2**63 - 1)


def segment(
    start: int, end: int, location_id: int = 1, size: int = 10, lost_before: int = 0
) -> RemoteSegment:
    files = [RemoteFile(location_id, f"log/db/t-1/0/x/{start}.{name}", size, 7) for name in FILES]
    timestamp = 1_700_000_000_000 + end
    return RemoteSegment(f"id-{start}", start, end, timestamp, *files, lost_before=lost_before)


def manifest(*segments: RemoteSegment, partition: bool = False) -> LogManifest:
    path = PhysicalTablePath("db", "t", "2026" if partition else None)
    return LogManifest(path, TableBucket(1, 8 if partition else None, 0), segments)


def as_fluss_wrote_it() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FIXTURE.read_bytes())
    return found


def as_we_write_it(source: dict[str, Any]) -> dict[str, Any]:
    """The output of our writer for the same bucket and segments."""
    segments = []
    for found in source["remote_log_segments"]:
        files = [RemoteFile(3, f"log/{name}", found["size_in_bytes"], 7) for name in FILES]
        segments.append(
            RemoteSegment(
                found["segment_id"],
                found["start_offset"],
                found["end_offset"],
                found["max_timestamp"],
                *files,
            )
        )
    path = PhysicalTablePath(source["database"], source["table"])
    bucket = TableBucket(source["table_id"], None, source["bucket_id"])
    written: dict[str, Any] = json.loads(LogManifest(path, bucket, tuple(segments)).to_json())
    return written


def test_flusss_fields_are_the_same_as_fluss_writes_them() -> None:
    source = as_fluss_wrote_it()
    written = as_we_write_it(source)
    ours = [
        {key: x.pop(key) for key in ("location_id", "files")}
        for x in written["remote_log_segments"]
    ]
    del written["zufluss_crc32c"]
    assert written == source
    assert list(written) == list(source)
    assert [list(x["files"]) for x in ours] == [list(FILES)] * 4


def test_a_manifest_of_fluss_does_not_say_where_its_files_are() -> None:
    with pytest.raises(CorruptRecordError, match="location_id"):
        LogManifest.from_json(FIXTURE.read_bytes())


@st.composite
def manifests(draw: st.DrawFn) -> LogManifest:
    offsets = sorted(draw(st.sets(INT64, min_size=2, max_size=6)))
    segments: list[RemoteSegment] = []
    before = offsets[0]
    for start, end in pairwise(offsets):
        if segments and draw(st.booleans()):
            continue  # the records of this range were lost
        location_id = draw(st.integers(1, 9))
        files = [RemoteFile(location_id, f"log/{x}", draw(INT64), draw(INT64)) for x in FILES]
        timestamp = draw(st.integers(-1, 2**62))
        lost = start - before
        segment_id = draw(st.text())
        segments.append(RemoteSegment(segment_id, start, end, timestamp, *files, lost_before=lost))
        before = end
    path = PhysicalTablePath("db", "t", draw(st.none() | st.just("2026$eu")))
    bucket = TableBucket(draw(INT64), None if path.partition is None else draw(INT64), 0)
    return LogManifest(path, bucket, tuple(segments))


@given(manifests())
@settings(max_examples=100)
def test_a_manifest_comes_back_as_it_was(found: LogManifest) -> None:
    assert LogManifest.from_json(found.to_json()) == found


def test_a_manifest_knows_its_range_and_its_files() -> None:
    found = manifest(segment(0, 5, 1), segment(5, 9, 2), partition=True)
    assert (found.start_offset, found.end_offset) == (0, 9)
    assert (manifest().start_offset, manifest().end_offset) == (None, None)
    assert usage(found.files) == {1: Usage(4, 40), 2: Usage(4, 40)}
    assert found.without(1).segments == found.segments[1:]
    assert found.without(2).files == []


def test_a_segment_that_does_not_continue_the_last_is_refused() -> None:
    for start in (4, 6):
        with pytest.raises(ValueError, match="does not continue 5"):
            manifest(segment(0, 5)).appended(segment(start, 9))


def test_a_manifest_knows_the_records_that_were_lost_between_its_segments() -> None:
    whole = [segment(0, 5), segment(9, 12, lost_before=4), segment(12, 20)]
    found = manifest()
    for each in whole:
        found = found.appended(each)
    assert found.losses == [(5, 8)]
    assert found.without(1).losses == []
    assert LogManifest.from_json(found.without(1).to_json()) == found.without(1)
    for lost in (0, 3, 5):
        with pytest.raises(ValueError, match="does not continue 20"):
            found.appended(segment(24, 25, lost_before=lost))


@pytest.mark.parametrize(
    ("end", "starts"),
    [(5, [0]), (4, [0]), (8, []), (9, []), (10, [9]), (20, [9, 12]), (13, [9, 12]), (21, [])],
)
def test_segments_that_reach_an_offset_begin_behind_the_last_loss(
    end: int, starts: list[int]
) -> None:
    found = manifest(segment(0, 5), segment(9, 12, lost_before=4), segment(12, 20))
    assert [s.start_offset for s in found.unbroken(end)] == starts


FIRST = ("remote_log_segments", 0)
SECOND = ("remote_log_segments", 1)
LOG = (*FIRST, "files", "log")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("version",), 2),
        (("version",), None),
        (("bucket_id",), None),
        (("database",), 7),
        (("remote_log_segments",), None),
        (("remote_log_segments",), [1]),
        ((*FIRST, "end_offset"), 4),
        ((*FIRST, "end_offset"), 6),
        ((*FIRST, "end_offset"), 2**63),
        ((*FIRST, "start_offset"), 5),
        ((*FIRST, "start_offset"), -1),
        ((*FIRST, "start_offset"), False),
        ((*FIRST, "max_timestamp"), 1.5),
        ((*FIRST, "max_timestamp"), float("inf")),
        ((*FIRST, "max_timestamp"), -2),
        ((*FIRST, "location_id"), "1"),
        ((*FIRST, "location_id"), None),
        ((*FIRST, "files"), {}),
        ((*FIRST, "lost_before"), -1),
        ((*SECOND, "lost_before"), 1),
        ((*SECOND, "start_offset"), 6),
        (LOG, None),
        ((*LOG, "path"), "/etc/passwd"),
        ((*LOG, "path"), "log/../../x"),
        ((*LOG, "size"), -1),
        ((*LOG, "crc32c"), "x"),
    ],
)
def test_a_manifest_with_a_mistake_is_refused(where: tuple[str | int, ...], value: Any) -> None:
    source = json.loads(manifest(segment(0, 5), segment(5, 9)).to_json())
    inner: Any = source
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(CorruptRecordError, match="a manifest of a remote log is damaged"):
        LogManifest.from_json(json.dumps(source).encode())


def test_a_manifest_with_a_segment_twice_is_refused() -> None:
    source = json.loads(manifest(segment(0, 5), segment(5, 9)).to_json())
    source["remote_log_segments"] *= 2
    with pytest.raises(CorruptRecordError, match="does not continue"):
        LogManifest.from_json(json.dumps(source).encode())


@given(st.data())
@settings(max_examples=100)
def test_a_manifest_cut_or_changed_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    """The result is a manifest or the one error, nothing else."""
    source = bytearray(manifest(segment(0, 5), segment(5, 9), partition=True).to_json())
    position = data.draw(st.integers(0, len(source) - 1))
    if data.draw(st.booleans()):
        del source[position:]
    else:
        source[position] = data.draw(st.integers(0, 255))
    try:
        LogManifest.from_json(bytes(source))
    except CorruptRecordError:
        return


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"[" * 100_000, b'"\\ud800"', b"\xff"])
def test_bytes_that_are_not_a_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        LogManifest.from_json(data)
