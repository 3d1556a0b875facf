"""A log whose file was cut behind the server's back: refused, and never served shorter.

Promises A1, A2 and A7. Large entries are durable in their segment alone. When the file loses its
end, it looks like one whose end was never synced. The server must know better: after a kill -9, at
each later start, and when it opens the log again because a sync failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.raw import RawClient
from tests.fault.load import Target, create_target, encode, rows
from tests.fault.strace import injected
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.errors import ErrorCode
from zufluss.record.header import iter_headers

LARGE, ENTRIES = 70_000, 3
"""Bytes of an entry that is not copied to the commit log, and the number of entries."""
REASON = f"everything below {ENTRIES} was acknowledged"


@pytest.fixture
def server(warm_server: Callable[..., WarmServer]) -> Iterator[WarmServer]:
    with warm_server({}) as server:
        yield server


def produce(server: WarmServer, target: Target, bucket: int = 0) -> int:
    """Append a large entry; returns the error code."""
    data = encode(rows(0, 1, LARGE))
    with RawClient(server.port) as client:
        return int(client.produce(target.table_id, data, bucket).error_code)


def written(server: WarmServer) -> tuple[Target, Path]:
    """A table with acknowledged large entries in both buckets, and the segment of the first."""
    target = create_target(server.port, "t", 2)
    for bucket in (0, 1):
        assert [produce(server, target, bucket) for _ in range(ENTRIES)] == [0] * ENTRIES
    (segment,) = server.data_dir.glob("crash/t-*/log-0/*.log")
    return target, segment


def cut(segment: Path) -> bytes:
    """Remove the last entry from a file; returns what it was."""
    data = segment.read_bytes()
    *_, (last, _) = iter_headers(data)
    os.truncate(segment, last)
    return data


def check_refused(server: WarmServer, target: Target) -> None:
    """The first bucket is refused with the reason, the other one is served."""
    with RawClient(server.port) as client:
        entry = client.fetch(target.table_id, 0, 0)
        assert entry.error_code == ErrorCode.LOG_STORAGE_EXCEPTION
        assert REASON in entry.error_message
        assert client.end_offset(target.table_id, 1) >= ENTRIES
    assert produce(server, target, 0) != 0
    assert produce(server, target, 1) == 0


def check_mended(server: WarmServer, target: Target, segment: Path, data: bytes) -> None:
    """With the file as it was, everything is there."""
    server.kill()
    segment.write_bytes(data)
    server.start()
    with RawClient(server.port) as client:
        assert client.end_offset(target.table_id, 0) == ENTRIES
        assert len(client.batches(target.table_id, 0)) == ENTRIES
    assert produce(server, target, 0) == 0


def test_a_file_that_lost_synced_entries_is_refused_after_a_kill(server: WarmServer) -> None:
    target, segment = written(server)
    data = cut(segment)
    for _ in range(2):
        server.kill()
        server.start()
        check_refused(server, target)
        assert segment.stat().st_size < len(data), "the file is left as it is"
    check_mended(server, target, segment, data)


def test_a_file_found_short_while_the_server_runs_is_refused_from_then_on(
    server: WarmServer,
) -> None:
    target, segment = written(server)
    data = cut(segment)
    with injected(server.pid, "fdatasync:error=EIO:when=1"):
        assert produce(server, target, 0) != 0

    def is_refused() -> bool:
        with RawClient(server.port) as client:
            entry = client.fetch(target.table_id, 0, 0)
            return REASON in entry.error_message

    eventually(is_refused, "the bucket was opened again")
    check_refused(server, target)
    for _ in range(2):
        server.kill()
        server.start()
        check_refused(server, target)
    check_mended(server, target, segment, data)
