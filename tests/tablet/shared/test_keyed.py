"""Primary-key buckets whose changelogs are in the shared log: what their next leader answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.end_to_end.kv import Codec, kv_batch, lookup_request, put_request, records_of
from tests.tablet.shared.cluster import SharedCluster, killed, until
from tests.tablet.shared.test_damage import damage
from tests.tablet.shared.test_takeover import rows_of
from tests.tablet.support import TABLE, Connection, Tablet
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.producers import ProducerEntry, TableProducers
from zufluss.errors import ErrorCode, NotLeaderError, UnknownTableOrBucketError
from zufluss.model.producer import ProducerWriter
from zufluss.model.schema import Schema
from zufluss.net.services import RequestContext
from zufluss.remote.marked import MarkedObjects
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

SCHEMA = Schema.of("id BIGINT NOT NULL, a BIGINT, b STRING", primary_key=["id"])
CODEC = Codec(SCHEMA)
CONTEXT = RequestContext(None, "CLIENT", 0, "test")
Row = tuple[int, int | None, str | None]
NUMBER = 3
OWN = (0, 1)


async def put(
    tablet: Tablet,
    *rows: Row,
    delete: bool = False,
    targets: Sequence[int] = (),
    **writer: int,
) -> int:
    """Put or delete rows of bucket 0 in one batch; the error code."""
    records = [(CODEC.delete if delete else CODEC.put)(row) for row in rows]
    request = put_request(TABLE, kv_batch(records, **writer), targets=tuple(targets))
    connection = Connection()
    answer = await connection.answer(connection.send(tablet.server.put.handle, request, 2))
    (entry,) = decode(m.PutKvResponse, answer).buckets_resp
    return int(entry.error_code)


async def looked_up(tablet: Tablet, keys: Sequence[int]) -> dict[int, Row]:
    """The rows of keys, as a client gets them."""
    connection = Connection()
    request = lookup_request(TABLE, [CODEC.key((key,)) for key in keys])
    answer = await connection.answer(connection.send(tablet.server.lookup.handle, request, 1))
    (entry,) = decode(m.LookupResponse, answer).buckets_resp
    assert not entry.error_code, entry.error_message
    values = [CODEC.value(value.values) for value in entry.values if value.values]
    return {row[0]: row for row in values if row is not None}  # type: ignore[misc]


def folded(tablet: Tablet) -> dict[int, Row]:
    """What the changelog of bucket 0 says."""
    rows: dict[int, Row] = {}
    for _, kind, row in records_of(rows_of(tablet), SCHEMA):
        if kind in ("+I", "+U"):
            rows[row[0]] = row  # type: ignore[assignment]
        else:
            del rows[row[0]]
    return rows


def row_count(tablet: Tablet) -> int:
    return tablet.server.buckets.replica(TABLE, None, 0).row_count()


async def filled(tablet: Tablet) -> dict[int, Row]:
    """A bucket with inserts, updates of whole rows and of some columns, and deletes."""
    assert await put(tablet, *((i, i, f"row {i}") for i in range(20))) == 0
    assert await put(tablet, *((i, -i, None) for i in range(5)), targets=OWN) == 0
    assert await put(tablet, *((i, 7, "again") for i in range(5, 8))) == 0
    assert await put(tablet, (10, None, None), (11, None, None), delete=True) == 0
    expected: dict[int, Row] = {i: (i, i, f"row {i}") for i in range(20) if i not in (10, 11)}
    expected |= {i: (i, -i, f"row {i}") for i in range(5)}
    return expected | {i: (i, 7, "again") for i in range(5, 8)}


@pytest.mark.parametrize("disk", ["warm", "lost", "damaged", "of another"])
@pytest.mark.parametrize("snapshot", [True, False])
async def test_lookups_after_a_take_over_are_the_fold_of_the_changelog(
    tmp_path: Path, disk: str, snapshot: bool
) -> None:
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    if snapshot:
        assert await put(tablet, (100, 1, "in the snapshot")) == 0
        replica = tablet.server.buckets.replica(TABLE, None, 0)
        assert await tablet.server.snapshots.snapshot(replica) is not None
        assert await put(tablet, (100, None, None), delete=True) == 0
    expected = await filled(tablet)
    if disk == "warm":
        await tablet.server.close()
    else:
        await killed(tablet)
    if disk == "lost":
        shutil.rmtree(tmp_path / "one")
    if disk == "damaged":
        damage(tmp_path / "one")
    tablet = await cluster.start("two" if disk == "of another" else "one")
    assert await looked_up(tablet, range(101)) == expected == folded(tablet)
    assert row_count(tablet) == len(expected)
    assert await put(tablet, (3, 9, None), targets=OWN) == 0
    expected[3] = (3, 9, "row 3")
    await killed(tablet)
    tablet = await cluster.start("three")
    assert await looked_up(tablet, range(101)) == expected == folded(tablet)
    assert row_count(tablet) == len(expected)
    await tablet.server.close()


async def test_a_retry_of_a_put_is_known_to_the_next_leader(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    assert await put(tablet, (1, 1, "a"), writer_id=5, sequence=0) == 0
    assert await put(tablet, (1, 2, "b"), writer_id=5, sequence=1) == 0
    before = rows_of(tablet)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert await put(tablet, (1, 1, "a"), writer_id=5, sequence=0) == 0
    assert rows_of(tablet) == before, "nothing is appended"
    assert await put(tablet, (1, 3, "c"), writer_id=5, sequence=2) == 0
    assert await looked_up(tablet, [1]) == {1: (1, 3, "c")}
    await tablet.server.close()


async def test_an_undo_at_the_next_leader_takes_back_what_the_former_one_acknowledged(
    tmp_path: Path,
) -> None:
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    assert await put(tablet, (1, 1, "one"), (2, 2, "two")) == 0
    start = tablet.server.buckets.replica(TABLE, None, 0).log.high_watermark
    await _producer(tablet, epoch=0)
    writer = ProducerWriter(NUMBER, 0, 0).writer_id
    assert await put(tablet, (1, 50, None), targets=OWN, writer_id=writer, sequence=0) == 0
    await killed(tablet)
    tablet = await cluster.start("two")
    await _producer(tablet, epoch=1)
    assert await looked_up(tablet, [1]) == {1: (1, 50, "one")}
    request = m.UndoProducerRequest(
        table_id=TABLE, bucket_id=0, producer_number=NUMBER, epoch=1, from_offset=start
    )
    answer = await tablet.server.undos.undo_producer(request, CONTEXT)
    assert (answer.done, answer.keys) == (True, 1)
    assert await looked_up(tablet, [1, 2]) == {1: (1, 1, "one"), 2: (2, 2, "two")}
    await killed(tablet)
    tablet = await cluster.start("three")
    assert await looked_up(tablet, [1, 2]) == {1: (1, 1, "one"), 2: (2, 2, "two")} == folded(tablet)
    await tablet.server.close()


async def test_a_new_leader_serves_nothing_before_the_lookups_of_the_former_one_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a row that it acknowledged would be missing in answers of the former leader."""
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    assert await put(tablet, (1, 1, "a")) == 0
    await killed(tablet)
    loop, waits, over = asyncio.get_running_loop(), list[float](), asyncio.Event()

    async def slept(seconds: float) -> None:
        waits.append(seconds)
        await over.wait()

    patched = SimpleNamespace(**vars(asyncio) | {"sleep": slept})  # others sleep as usual
    monkeypatch.setattr("zufluss.tablet.shared.copy.asyncio", patched)
    began = loop.time()
    starting = asyncio.create_task(cluster.start("two", lease_ms=60_000))
    await until(lambda: len(waits) == 2)
    assert all(60 - (loop.time() - began) <= wait <= 60 for wait in waits)
    new = cluster.tablet
    assert new is not None
    assert new is not tablet
    sources = {session.server_epoch for session in cluster.gateway.wal.values()}
    assert sources == {1}, "who takes over now has to wait for the former leader, too"
    assert await put(new, (2, 2, "b")) != 0, "it acknowledges nothing"
    assert not new.server.buckets.by_log
    over.set()
    await starting
    assert await put(new, (2, 2, "b")) == 0
    assert await looked_up(new, [1, 2]) == {1: (1, 1, "a"), 2: (2, 2, "b")}
    await new.server.close()


@pytest.mark.parametrize("delete", [True, False])
async def test_a_put_that_changes_nothing_is_not_acknowledged_by_a_former_leader(
    tmp_path: Path, delete: bool
) -> None:
    """The new leader may have the row. An empty batch is appended, and the seal stops that."""
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    former = await cluster.start("one")
    assert await put(former, (1, 1, "a")) == 0
    leader = await cluster.start("two")
    assert await put(leader, (7, 7, "b")) == 0
    shared = former.server.shared
    assert shared is not None
    shared.lease.seconds = -1
    row = (7, None, None) if delete else (1, 1, "a")
    code = await put(former, row, delete=delete)
    assert code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert await looked_up(leader, [7]) == {7: (7, 7, "b")}
    await killed(former)
    await leader.server.close()


async def test_an_undo_is_not_done_by_a_former_leader(tmp_path: Path) -> None:
    """It may not have the last changes of the producer."""
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    await _producer(tablet, epoch=1)
    request = m.UndoProducerRequest(
        table_id=TABLE, bucket_id=0, producer_number=NUMBER, epoch=1, from_offset=0
    )
    assert (await tablet.server.undos.undo_producer(request, CONTEXT)).done
    assert tablet.server.shared is not None
    lease, check = tablet.server.shared.lease, partial(next, iter([None]), NotLeaderError("over"))

    def checked() -> None:
        if (problem := check()) is not None:
            raise problem

    lease.check = checked  # type: ignore[method-assign]
    with pytest.raises(NotLeaderError, match="over"):  # it ends while the undo is under way
        await tablet.server.undos.undo_producer(request, CONTEXT)
    with pytest.raises(NotLeaderError, match="over"):
        await tablet.server.undos.undo_producer(request, CONTEXT)
    await killed(tablet)


async def test_a_snapshot_is_not_taken_by_a_former_leader(tmp_path: Path) -> None:
    """It would name the end of its own log, and whoever reads it would miss later rows."""
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    assert await put(tablet, (1, 1, "a")) == 0
    request = m.TakeKvSnapshotRequest(table_id=TABLE, bucket_id=0)
    service = tablet.server._snapshot_service
    while not (answer := await service.take_kv_snapshot(request, CONTEXT)).finished:
        pass
    assert answer.log_offset == 1
    assert tablet.server.shared is not None
    tablet.server.shared.lease.seconds = -1
    tablet.server.shared.lease._confirmed = 0
    with pytest.raises(NotLeaderError, match="no word from the coordinator"):
        await service.take_kv_snapshot(request, CONTEXT)
    await tablet.server.close()


async def test_a_server_stops_in_the_middle_of_an_undo_while_its_location_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SharedCluster(tmp_path, schema=SCHEMA)
    tablet = await cluster.start("one")
    assert await put(tablet, (1, 1, "one")) == 0
    start = tablet.server.buckets.replica(TABLE, None, 0).log.high_watermark
    await _producer(tablet, epoch=0)
    writer = ProducerWriter(NUMBER, 0, 0).writer_id
    assert await put(tablet, (1, 50, None), targets=OWN, writer_id=writer, sequence=0) == 0
    await _producer(tablet, epoch=1)
    created = asyncio.Event()

    async def away(self: MarkedObjects, *what: Any) -> None:
        created.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(MarkedObjects, "create", away)
    request = m.UndoProducerRequest(
        table_id=TABLE, bucket_id=0, producer_number=NUMBER, epoch=1, from_offset=start
    )
    undoing = asyncio.create_task(tablet.server.undos.undo_producer(request, CONTEXT))
    await created.wait()
    async with asyncio.timeout(WAIT_SECONDS):
        await tablet.server.close()
    with pytest.raises(UnknownTableOrBucketError):
        await undoing


async def _producer(tablet: Tablet, epoch: int) -> None:
    """What the coordinator says when the producer is started."""
    entry = ProducerEntry("p", NUMBER, epoch, frozenset({1}), True, False, holds=False)
    await tablet.server.update_producers([TableProducers(TABLE, epoch + 1, (entry,))])
