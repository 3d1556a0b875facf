"""Opening a log after every kind of stop, and after damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.log.disk import SilentFiles
from tests.log.support import append, batch, crash, offsets, open_log, read_all, segment_files
from tests.paths import FIXTURES
from zufluss.errors import CorruptRecordError, OutOfOrderSequenceError
from zufluss.log.checkpoint import LogCheckpoint, read_checkpoint, write_checkpoint
from zufluss.log.log import Log
from zufluss.log.segment import Segment, headers

FIXTURES = FIXTURES / "remote-log"


def filled(tmp_path: Path, count: int = 12, **settings: int) -> Log:
    log = open_log(tmp_path, **settings)
    for sequence in range(count):
        append(log, batch(2, writer=1, sequence=sequence), now_ms=sequence)
    return log


def test_a_log_closed_cleanly_is_opened_without_a_scan(tmp_path: Path) -> None:
    log = filled(tmp_path, segment_bytes_max=200)
    before, writers = read_all(log), log.writers
    log.close(clean=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zufluss.log.recovery._Scan", None)
        log = open_log(tmp_path)
    assert (read_all(log), log.writers, log.last_timestamp) == (before, writers, 11)
    assert log.recovery_point == 24


def test_a_log_that_was_written_after_a_clean_close_is_scanned(tmp_path: Path) -> None:
    filled(tmp_path).close(clean=True)
    log = open_log(tmp_path)
    append(log, batch(2, writer=1, sequence=12))
    before = read_all(log)
    crash(log)
    assert read_all(open_log(tmp_path)) == before


def test_closing_twice_in_a_row_writes_nothing(tmp_path: Path) -> None:
    filled(tmp_path).close(clean=True)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "log-0").iterdir()}
    open_log(tmp_path).close(clean=True)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "log-0").iterdir()} == before


def test_nothing_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    log = filled(tmp_path, segment_bytes_max=250)
    before, writers = read_all(log), log.writers
    crash(log)
    log = open_log(tmp_path)
    assert (read_all(log), log.writers, log.last_timestamp) == (before, writers, 11)
    assert log.high_watermark == log.recovery_point == 24


TAILS: dict[str, Callable[[bytes], bytes]] = {
    "cut inside a header": lambda data: data[:-40],
    "cut inside a body": lambda data: data[:-1],
    "zero-filled batch": lambda data: data[:-52] + bytes(52),
    "zeros behind": lambda data: data + bytes(4096),
    "half a batch behind": lambda data: data + data[:30],
    "a stale batch behind": lambda data: data + data[:52],
    "flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "absurd length": lambda data: data[:-44] + b"\xff\xff\xff\x7f" + data[-40:],
}


@pytest.mark.parametrize("name", TAILS)
def test_a_torn_tail_is_cut(tmp_path: Path, name: str) -> None:
    """What a crash tears was never acknowledged; everything before it stays."""
    log = filled(tmp_path)
    before = read_all(log)
    crash(log)
    path = segment_files(tmp_path, ".log")[0]
    path.write_bytes(TAILS[name](path.read_bytes()))
    log = open_log(tmp_path)
    assert log.log_end_offset == (24 if "behind" in name else 22)
    assert read_all(log) == before[: 52 * log.log_end_offset // 2]
    assert path.stat().st_size == log.size
    next_sequence = log.log_end_offset // 2
    assert append(log, batch(2, writer=1, sequence=next_sequence)).base_offset == 2 * next_sequence


@pytest.mark.parametrize("position", [0, 30, 51, 300])
def test_damage_above_the_recovery_point_cuts_the_log_there(tmp_path: Path, position: int) -> None:
    log = filled(tmp_path, count=4, segment_bytes_max=320)
    log.close(clean=True)
    log = open_log(tmp_path, segment_bytes_max=320)
    for sequence in range(4, 20):
        append(log, batch(2, writer=1, sequence=sequence))
    crash(log)
    data = _damage(segment_files(tmp_path, ".log")[1], position)
    log = open_log(tmp_path, segment_bytes_max=320)
    kept = 6 + position // 52
    assert log.log_end_offset == 2 * kept
    assert [b.sequence for b in log.writers.retained(1)][-1] == kept - 1
    assert len(data) > position


def _damage(path: Path, position: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize(("segment", "position"), [(-1, 8), (-1, 60), (0, 312 - 44)])
def test_damage_below_the_recovery_point_refuses_the_log_and_changes_nothing(
    tmp_path: Path, segment: int, position: int
) -> None:
    """Cutting here would silently drop what was acknowledged."""
    filled(tmp_path, count=14, segment_bytes_max=320).close(clean=True)
    log = open_log(tmp_path, segment_bytes_max=320)
    append(log, batch(2, writer=1, sequence=14))
    crash(log)
    _damage(segment_files(tmp_path, ".log")[segment], position)
    before = {p: p.read_bytes() for p in segment_files(tmp_path, ".log")}
    with pytest.raises(CorruptRecordError, match="restore"):
        open_log(tmp_path)
    assert {p: p.read_bytes() for p in segment_files(tmp_path, ".log")} == before


@pytest.mark.parametrize("missing", [1, 2, -1])
def test_a_missing_segment_refuses_the_log(tmp_path: Path, missing: int) -> None:
    filled(tmp_path, segment_bytes_max=160).close(clean=True)
    segment_files(tmp_path, ".log")[missing].unlink()
    with pytest.raises(CorruptRecordError):
        open_log(tmp_path)


def test_a_segment_that_shrank_below_the_recovery_point_refuses_the_log(tmp_path: Path) -> None:
    filled(tmp_path, segment_bytes_max=160).close(clean=True)
    path = segment_files(tmp_path, ".log")[-1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptRecordError):
        open_log(tmp_path)


def test_all_segments_gone_is_not_an_empty_log(tmp_path: Path) -> None:
    filled(tmp_path).close(clean=True)
    for path in segment_files(tmp_path, ".log"):
        path.unlink()
    with pytest.raises(CorruptRecordError, match="no segment"):
        open_log(tmp_path)


def test_an_empty_last_segment_is_fine(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.roll()
    before = read_all(log)
    crash(log)
    log = open_log(tmp_path)
    assert read_all(log) == before
    assert append(log, batch(writer=1, sequence=12)).base_offset == 24


def test_segments_whose_removal_was_interrupted_come_back_whole(tmp_path: Path) -> None:
    log = filled(tmp_path, segment_bytes_max=160, ttl_ms=5)
    retired = log.expire(1000)
    assert retired is not None
    for path in retired.paths[:4]:
        path.unlink(missing_ok=True)
    crash(log)
    log = open_log(tmp_path)
    assert log.log_start_offset == 12
    assert offsets(read_all(log))[0] == (12, 2)
    bases = {f"{s.base_offset:020d}" for s in log.segments}
    assert {p.stem for p in segment_files(tmp_path, "index")} <= bases


INDEX_DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)),
    "shifted": lambda path: path.write_bytes(b"\0\0\0\1" + path.read_bytes()[:-4]),
}


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("name", INDEX_DAMAGE)
def test_a_damaged_index_never_gives_a_wrong_answer(tmp_path: Path, name: str, clean: bool) -> None:
    log = filled(tmp_path, count=300, segment_bytes_max=4000, index_interval_bytes=100)
    before = read_all(log)
    log.close(clean=clean)
    for path in segment_files(tmp_path, "index"):
        INDEX_DAMAGE[name](path)
    log = open_log(tmp_path, segment_bytes_max=4000, index_interval_bytes=100)
    assert read_all(log, 500) == before
    for offset in range(0, 600, 7):
        log._cursors.clear()
        assert offsets(bytes(log.read(offset, 60).records)) == [(offset // 2 * 2, 2)]
        assert log.offset_for_timestamp(offset // 2) == offset // 2 * 2
    for sequence in range(300, 400):
        append(log, batch(2, writer=1, sequence=sequence), now_ms=sequence)
    assert log.offset_for_timestamp(399) == 798


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version":1', bytes(100)])
def test_a_damaged_writer_snapshot_is_replaced_by_the_batches(
    tmp_path: Path, content: bytes
) -> None:
    log = filled(tmp_path, segment_bytes_max=200)
    writers = log.writers
    log.close(clean=True)
    segment_files(tmp_path, ".writer_snapshot")[-1].write_bytes(content)
    log = open_log(tmp_path)
    assert log.writers == writers
    with pytest.raises(OutOfOrderSequenceError):
        append(log, batch(writer=1, sequence=20))


def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    files = SilentFiles()
    for counter in range(4):
        write_checkpoint(files, tmp_path, LogCheckpoint(counter, 10 * counter, 0, 0, 0, 0))
    path = tmp_path / "log.checkpoint"
    for at, expected in ((512 + 20, 20), (20, None)):
        _damage(path, at)
        found = read_checkpoint(tmp_path)
        assert (found.recovery_point if found else None) == expected


def test_a_lost_checkpoint_only_costs_a_scan(tmp_path: Path) -> None:
    log = filled(tmp_path, segment_bytes_max=200)
    before = read_all(log)
    log.close(clean=True)
    (tmp_path / "log-0" / "log.checkpoint").write_bytes(bytes(1024))
    assert read_all(open_log(tmp_path)) == before


def test_the_indexes_of_the_reference_server_are_reproduced_to_the_byte(tmp_path: Path) -> None:
    """Remote readers get these files, so they must be what those readers expect."""
    for path in sorted(FIXTURES.rglob("*.log")):
        base = int(path.stem)
        (tmp_path / path.name).write_bytes(path.read_bytes())
        segment = Segment(tmp_path, base, path.stat().st_size)
        files = SilentFiles()
        index = segment.empty_index(files)
        for position, header in headers(segment.reader(files), 0, segment.size):
            segment.note(header, position)
        index.flush(files, all_entries=True)
        for suffix in (".index", ".timeindex"):
            ours = (tmp_path / path.with_suffix(suffix).name).read_bytes()
            assert ours == path.with_suffix(suffix).read_bytes()


def test_appending_the_reference_batches_reproduces_their_indexes(tmp_path: Path) -> None:
    path = sorted(FIXTURES.rglob("00000000000000000000.log"))[0]
    log = open_log(tmp_path)
    log.append_stamped(memoryview(path.read_bytes()))
    log.advance_high_watermark(log.log_end_offset)
    assert read_all(log) == path.read_bytes()
    log.roll()
    for suffix in (".index", ".timeindex"):
        ours = segment_files(tmp_path, suffix)[0].read_bytes()
        assert ours == path.with_suffix(suffix).read_bytes()
