"""What a log has to do with remote storage: what may go there, what may go here, a start anew."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.log.disk import SilentFiles
from tests.log.support import BUCKET, append, batch, crash, expire, offsets, open_log, read_all
from tests.paths import FIXTURES
from zufluss.errors import CorruptRecordError, OutOfOrderSequenceError
from zufluss.log.config import LogConfig
from zufluss.log.export import build_indexes, export
from zufluss.log.files import Files
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.log.segment import Segment
from zufluss.log.writer_state import WriterState
from zufluss.replica.remote_index import offset_before, position_in

FLUSS = FIXTURES / "remote-log"
EXPIRY_MS = 1000
SMALL = {"segment_bytes_max": 120, "index_interval_bytes": 40}


def filled(directory: Path, batches: int = 10, **settings: int) -> Log:
    """A log with two batches of two records in each segment, one each second."""
    log = open_log(directory, **{**SMALL, **settings})
    for i in range(batches):
        append(log, batch(2, writer=7, sequence=i), now_ms=1000 * (i + 1))
    log._sync_now()
    return log


def fluss_segment(directory: Path) -> tuple[Segment, int]:
    """A closed segment as Fluss wrote it, and its end."""
    (path,) = directory.glob("*.log")
    (snapshot,) = directory.glob("*.writer_snapshot")
    return Segment(directory, int(path.stem), path.stat().st_size), int(snapshot.stem)


SEGMENTS = sorted(p.parent for p in FLUSS.glob("0/*/*.log"))


# -- what may leave ---------------------------------------------------------------------------


def test_only_durable_segments_below_the_high_watermark_can_be_copied(tmp_path: Path) -> None:
    log = filled(tmp_path)
    bases = [s.base_offset for s in log.segments]
    assert [(s.base_offset, end) for s, end in log.closed_from(0)] == list(pairwise(bases))
    assert [s.base_offset for s, _ in log.closed_from(8)] == bases[2:-1]
    append(log, batch(2, writer=7, sequence=10), visible=False)
    append(log, batch(2, writer=7, sequence=11), visible=False)
    append(log, batch(2, writer=7, sequence=12), visible=False)
    assert log.closed_from(0)[-1][1] <= log.high_watermark
    log.segments[1].synced -= 1
    assert [s.base_offset for s, _ in log.closed_from(0)] == [0]


@pytest.mark.parametrize("directory", SEGMENTS, ids=lambda p: p.name[:8])
def test_indexes_are_those_that_fluss_writes(directory: Path) -> None:
    segment, _ = fluss_segment(directory)
    index, times = build_indexes(segment, Files())
    stem = f"{segment.base_offset:020d}"
    assert index == (directory / f"{stem}.index").read_bytes()
    assert times == (directory / f"{stem}.timeindex").read_bytes()


@pytest.mark.parametrize("directory", SEGMENTS, ids=lambda p: p.name[:8])
def test_a_segment_of_fluss_is_exported_as_it_is(directory: Path) -> None:
    segment, end = fluss_segment(directory)
    found = export(segment, end, Files(), EXPIRY_MS)
    assert found.index == (directory / f"{segment.base_offset:020d}.index").read_bytes()
    assert found.writer_snapshot == (directory / f"{end:020d}.writer_snapshot").read_bytes()
    manifest = json.loads(next(FLUSS.glob("0/metadata/*.manifest")).read_text())
    (named,) = [
        s for s in manifest["remote_log_segments"] if s["start_offset"] == found.start_offset
    ]
    assert (found.end_offset, found.max_timestamp) == (named["end_offset"], named["max_timestamp"])


def test_fluss_starts_a_reader_where_we_do(tmp_path: Path) -> None:
    answer = json.loads((FLUSS / "expected.json").read_text())["fetch_answer"]
    info = answer["tables_resp"][0]["buckets_resp"][0]["remote_log_fetch_info"]
    segment = info["remote_log_segments"][0]["remote_log_segment_id"]
    index = (FLUSS / "0" / segment / f"{0:020d}.index").read_bytes()
    assert position_in(index, 25) <= info["first_start_pos"]
    assert position_in(index, 0) == 0


@pytest.mark.parametrize("damage", ["missing", "cut", "zeros", "foreign"])
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_damaged_indexes_are_made_anew_for_remote_readers(
    tmp_path: Path, damage: str, suffix: str
) -> None:
    log = filled(tmp_path)
    segment, end = log.closed_from(0)[1]
    wanted = export(segment, end, log.files, EXPIRY_MS)
    path = segment.directory / f"{segment.base_offset:020d}{suffix}"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"cut": data[:-1], "zeros": bytes(len(data)), "foreign": b"\xff" * 24}[damage]
        )
    assert export(segment, end, log.files, EXPIRY_MS) == wanted


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_writer_snapshot_is_made_anew(tmp_path: Path, damage: str) -> None:
    log = filled(tmp_path)
    segment, end = log.closed_from(0)[2]
    path = segment.directory / f"{end:020d}.writer_snapshot"
    wanted = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(wanted[:-5])
    assert export(segment, end, log.files, EXPIRY_MS).writer_snapshot == wanted
    (segment.directory / f"{segment.base_offset:020d}.writer_snapshot").unlink()
    with pytest.raises(CorruptRecordError, match="writer snapshots"):
        export(segment, end, log.files, EXPIRY_MS)


def test_times_and_positions_are_found_in_indexes(tmp_path: Path) -> None:
    log = filled(tmp_path, segment_bytes_max=300, index_interval_bytes=1)
    segment, end = log.closed_from(0)[0]
    found = export(segment, end, log.files, EXPIRY_MS)
    assert offset_before(found.timeindex, 0) == 0
    assert offset_before(found.timeindex, 3000) == 2
    assert offset_before(found.timeindex, 3001) == 4
    assert position_in(found.index, 0) == 0
    for relative in range(end):
        assert position_in(found.index, relative) <= segment.position_of(log.files, relative)


# -- what may go here -------------------------------------------------------------------------


def test_nothing_goes_that_remote_storage_does_not_have(tmp_path: Path) -> None:
    log = filled(tmp_path, local_segments=1)
    log.holds.set(Holder.REMOTE_COPY, 0)
    assert expire(log, 1 << 60) == []
    log.holds.set(Holder.REMOTE_COPY, 8)
    assert expire(log, 0) == [0, 4]
    assert log.log_start_offset == 8
    assert offsets(read_all(log))[0] == (8, 2)


def test_the_newest_segments_stay_as_long_as_they_are_young(tmp_path: Path) -> None:
    log = filled(tmp_path, local_segments=2, local_ttl_ms=10_000)
    log.holds.set(Holder.REMOTE_COPY, log.high_watermark)
    assert expire(log, 10_000) == [0, 4]
    assert len(log.segments) == 3
    log.holds.set(Holder.LAKE, 0)
    assert expire(log, 16_500) == [8]
    assert expire(log, 1 << 60) == [12, 16]
    assert log.log_start_offset == log.log_end_offset == 20


def test_recovery_keeps_what_it_needs_although_remote_storage_has_it(tmp_path: Path) -> None:
    log = filled(tmp_path, local_segments=1)
    log.holds.set(Holder.REMOTE_COPY, log.high_watermark)
    log.holds.set(Holder.KV_STATE, 5)
    assert expire(log, 0) == [0]
    assert log.held_back


def test_a_snapshot_is_continued_however_old_its_changelog_is(tmp_path: Path) -> None:
    log = filled(tmp_path, ttl_ms=1)
    log.holds.set(Holder.SNAPSHOT, 9)
    assert expire(log, 1 << 60) == [0, 4]


# -- a start anew -----------------------------------------------------------------------------


def test_a_log_can_start_where_remote_storage_ends(tmp_path: Path) -> None:
    old = filled(tmp_path / "old")
    writers = old.writers.to_json()
    Log.create_at(tmp_path / "new" / "log-0", 20, writers, 10_000, Files())
    log = open_log(tmp_path / "new", **SMALL)
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (20, 20, 20)
    assert log.writers == old.writers
    assert append(log, batch(2, writer=7, sequence=9)).duplicate
    with pytest.raises(OutOfOrderSequenceError):
        append(log, batch(2, writer=7, sequence=11))
    assert append(log, batch(2, writer=7, sequence=10), now_ms=1).base_offset == 20
    assert log.last_timestamp == 10_000
    crash(log)
    log = open_log(tmp_path / "new", **SMALL)
    assert offsets(read_all(log)) == [(20, 2)]


class DyingFiles(SilentFiles):
    """Files that fail for good at the n-th change."""

    def __init__(self, lives: int) -> None:
        super().__init__()
        self.lives = lives

    def _live(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise OSError("dead")

    def open(self, path: Path, *, create: bool = False):  # type: ignore[no-untyped-def]
        self._live()
        return super().open(path, create=create)

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)


def test_a_log_that_starts_anew_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    writers = WriterState(EXPIRY_MS).to_json()
    for lives in range(10):
        directory = tmp_path / str(lives) / "db" / "t-1" / "log-0"
        try:
            Log.create_at(directory, 20, writers, 0, DyingFiles(lives))
        except OSError:
            assert not directory.exists()
            assert lives < 5
        else:
            log = Log.open(directory, LogConfig(), files=SilentFiles(), now_ms=0, bucket=BUCKET)
            assert log.log_end_offset == 20
            return
    raise AssertionError("it never came about")
