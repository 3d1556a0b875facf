"""Fetches of some columns: the same bytes however they are read, and as many as fit projected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.support import SCHEMA, TABLE, Connection, Tablet, batch
from zufluss.errors import CorruptRecordError
from zufluss.log.log import Log
from zufluss.log.reader import LARGE_BYTES
from zufluss.record.arrow.project import Projector
from zufluss.tablet.projected import read_projected
from zufluss.wire import messages as m

LARGE = LARGE_BYTES // 8
PROJECTOR = Projector({1: SCHEMA}.get, SCHEMA)


async def filled(tmp_path: Path, *rows: int) -> tuple[Tablet, Log]:
    """A tablet whose bucket 0 has batches of so many rows."""
    tablet = await Tablet(tmp_path, conf={"zufluss.log.flush": "os"}).start()
    for count in rows:
        request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
        request.buckets_req.add(bucket_id=0, records=batch(count))
        connection = Connection()
        sent = connection.send(tablet.server.produce.handle, request)
        assert await connection.produced(sent) == [(0, 0)]
    return tablet, tablet.server.buckets.replica(TABLE, None, 0).log


def projected(log: Log, offset: int = 0, bytes_max: int = 1 << 24, **options: Any) -> bytes:
    options = {"span_max": 1 << 26, "at_least_one": True, "nowait": True, **options}
    return b"".join(read_projected(log, PROJECTOR, (0,), offset, bytes_max, **options)[0])


def whole(log: Log, offset: int = 0, bytes_max: int = 1 << 24) -> bytes:
    """The twin: read everything, then project."""
    read = log.read(offset, bytes_max, at_least_one=True)
    return b"".join(PROJECTOR.project_all(read.records, (0,)))


@pytest.mark.parametrize(
    "rows", [(LARGE,), (1, 2, 3), (LARGE, 1, LARGE, LARGE), (2, LARGE, 5, 6, LARGE * 3)]
)
async def test_parts_of_batches_are_the_same_bytes_as_whole_ones_projected(
    tmp_path: Path, rows: tuple[int, ...]
) -> None:
    tablet, log = await filled(tmp_path, *rows)
    assert projected(log) == whole(log)
    for offset in (1, rows[0] - 1, sum(rows) - 1):
        assert projected(log, offset) == whole(log, offset)
    assert projected(log, sum(rows)) == b""
    await tablet.server.close()


async def test_of_a_large_batch_only_the_wanted_ranges_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet, log = await filled(tmp_path, LARGE * 4)
    read = 0
    preadv = os.preadv

    def counted(fd: int, buffers: Any, *more: int) -> int:
        nonlocal read
        count = preadv(fd, buffers, *more)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    result = projected(log)
    assert 8 * LARGE * 4 < len(result) < read < len(result) + 8192
    monkeypatch.undo()
    await tablet.server.close()


@pytest.mark.parametrize("rows", [1, LARGE])
async def test_the_limit_counts_projected_bytes(tmp_path: Path, rows: int) -> None:
    tablet, log = await filled(tmp_path, *[rows] * 9)
    one = len(projected(log, bytes_max=1))
    assert one == len(whole(log, bytes_max=1)), "at least one"
    assert projected(log, bytes_max=1, at_least_one=False) == b""
    in_log = len(log.read(0, 1, at_least_one=True).records)
    limit = in_log + one
    taken = len(projected(log, bytes_max=limit))
    assert in_log < taken <= limit, "more batches than fit as they lie in the log"
    await tablet.server.close()


async def test_a_batch_in_doubt_is_verified_as_a_whole(tmp_path: Path) -> None:
    """What comes from the disk is not trusted, and a part of a batch has no checksum."""
    tablet, log = await filled(tmp_path, LARGE, LARGE)
    expected = projected(log)
    log.segments[0].distrust()
    assert log.large_batch(0) is None
    assert projected(log) == expected
    assert log.large_batch(0) is not None, "verified now"
    log.segments[0].distrust()
    file = log.segments[0].reader(log.files)
    os.pwrite(file.fd, b"\xff", log.segments[0].size - 1)
    with pytest.raises(CorruptRecordError):
        projected(log)
    await tablet.server.close()


async def test_one_fetch_passes_over_a_bounded_part_of_the_log(tmp_path: Path) -> None:
    tablet, log = await filled(tmp_path, *[LARGE] * 4)
    assert projected(log, span_max=LARGE_BYTES) == whole(log, bytes_max=1)
    await tablet.server.close()
