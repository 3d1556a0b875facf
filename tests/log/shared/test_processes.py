"""Real processes: killed or stopped in the middle of their puts, sealed by others, and woken."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.counts import rounds
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.model.table import TableBucket
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.shared_log import BUCKETS, read_back, session

Ends = dict[TableBucket, int]


@contextmanager
def writing(directory: Path, epoch: int) -> Iterator[subprocess.Popen[str]]:
    """A process that appends; killed at the end."""
    command = [sys.executable, "-m", "tests.log.shared.child", str(directory), str(epoch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str], ends: Ends, lines: int | None = None) -> bool:
    """Take so many lines of a process, or all; whether it was fenced."""
    assert process.stdout is not None
    while lines is None or lines > 0:
        line = process.stdout.readline()
        if line == "fenced\n":
            return True
        if not line.endswith("\n"):
            return False
        if line.startswith("durable "):
            _, bucket, end = line.split()
            ends[BUCKETS[int(bucket)]] = int(end)
            lines = None if lines is None else lines - 1
    return False


def log_at(directory: Path) -> ObjectLog:
    return ObjectLog(Objects(parse_location(str(directory), "test")), WalSettings())


async def seal_and_read(directory: Path, epoch: int) -> Ends:
    """The ends of all buckets, as a new leader finds them."""
    end = await log_at(directory).seal(session(epoch), 0, 1)
    starts = dict.fromkeys(BUCKETS, 0)
    tails, _ = await read_back(log_at(directory), session(epoch), 0, end, starts)
    assert tails.lost == {}
    return tails.end_offsets


async def test_what_a_killed_process_acknowledged_is_read_by_its_successor(tmp_path: Path) -> None:
    draw = random.Random(5)
    for epoch in range(1, rounds(3, 200) + 1):
        ends = dict.fromkeys(BUCKETS, 0)
        with writing(tmp_path, epoch) as process:
            heard(process, ends, draw.randrange(1, 60))
            process.send_signal(signal.SIGKILL)
            heard(process, ends)
        found = await seal_and_read(tmp_path, epoch)
        assert all(found[bucket] >= ends[bucket] for bucket in BUCKETS)


async def test_a_stopped_process_acknowledges_nothing_that_its_successor_does_not_have(
    tmp_path: Path,
) -> None:
    draw = random.Random(6)
    for epoch in range(1, rounds(3, 200) + 1):
        ends = dict.fromkeys(BUCKETS, 0)
        with writing(tmp_path, epoch) as process:
            heard(process, ends, draw.randrange(1, 60))
            process.send_signal(signal.SIGSTOP)
            found = await seal_and_read(tmp_path, epoch)
            process.send_signal(signal.SIGCONT)
            assert heard(process, ends), "a zombie must learn that it was replaced"
        assert all(found[bucket] >= ends[bucket] for bucket in BUCKETS)


async def test_a_process_is_sealed_in_the_middle_of_its_work(tmp_path: Path) -> None:
    for epoch in range(1, rounds(3, 200) + 1):
        ends = dict.fromkeys(BUCKETS, 0)
        with writing(tmp_path, epoch) as process:
            heard(process, ends, 5)
            found = await seal_and_read(tmp_path, epoch)
            assert heard(process, ends)
        assert all(found[bucket] >= ends[bucket] > 0 for bucket in BUCKETS)
        assert await seal_and_read(tmp_path, epoch) == found
