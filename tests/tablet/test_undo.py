"""Producers at a leader: who may write, and UNDO_PRODUCER from the call to the rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.kv import kv_batch, put_request
from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed
from tests.tablet.remote.test_restore import copied_log
from tests.tablet.support import TABLE, Connection
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import ClusterNode
from zufluss.cluster.producers import ProducerEntry, TableProducers, producers_to_proto
from zufluss.cluster.replicas import assignments
from zufluss.config.values import Endpoint
from zufluss.errors import (
    ErrorCode,
    ProducerFencedError,
    ProducerStateError,
    UndoImpossibleError,
    UndoUnderWayError,
    ZuflussError,
)
from zufluss.kv import tablet
from zufluss.kv.producer import own_changes
from zufluss.log.holds import Holder
from zufluss.model.producer import UNDO_TASK, ProducerWriter
from zufluss.model.schema import Schema
from zufluss.net.services import RequestContext
from zufluss.tablet import undo
from zufluss.tablet.coordinator_client import CoordinatorClient
from zufluss.tablet.link import CoordinatorLink
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

SCHEMA = Schema.of("id BIGINT NOT NULL, a BIGINT, b STRING", primary_key=["id"])
NUMBER = 3
OWN, OTHER = (0, 1), (0, 2)
OPTIONS: dict[str, Any] = {
    "conf": {"log.segment.file-size": "1kb"},
    "properties": {"table.log.tiered.local-segments": "1"},
}


class Produced(Keyed):
    """A table whose column `a` belongs to producer 3, in the epoch that is set."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, schema=SCHEMA, **options)
        self.version = 0
        self.epoch = 0
        self._sequences: dict[tuple[int, int], int] = {}

    async def begin(self, epoch: int, **entry: Any) -> None:
        """What the coordinator says when the producer is started."""
        self.epoch, self.version = epoch, self.version + 1
        fields: dict[str, Any] = {
            "producer_id": "p", "number": NUMBER, "epoch": epoch, "column_ids": frozenset({1}),
            "exclusive": True, "lost": False, "holds": False, **entry,
        }  # fmt: skip
        table = TableProducers(TABLE, self.version, (ProducerEntry(**fields),))
        await self.server.update_producers([table])

    def send(
        self, *rows: tuple[Any, ...], targets: tuple[int, ...], epoch: int | None, task: int = 0
    ) -> asyncio.Task[int]:
        """Put rows as the producer, or as nobody; the error code."""
        writer: dict[str, int] = {}
        if epoch is not None:
            sequence = self._sequences.get((epoch, task), 0)
            writer_id = ProducerWriter(NUMBER, epoch, task).writer_id
            writer = {"writer_id": writer_id, "sequence": sequence}
        batch = kv_batch([self.codec.put(row) for row in rows], **writer)
        connection = Connection()
        request = put_request(TABLE, batch, targets=targets)
        sent = connection.send(self.server.put.handle, request)

        async def answered() -> int:
            (entry,) = decode(m.PutKvResponse, await connection.answer(sent)).buckets_resp
            if epoch is not None and not entry.error_code:
                self._sequences[epoch, task] = sequence + 1
            return int(entry.error_code)

        return asyncio.create_task(answered())

    async def own(self, *values: tuple[int, int | None], epoch: int | None = None) -> int:
        """A put of the producer."""
        now = self.epoch if epoch is None else epoch
        return await self.send(*((k, v, None) for k, v in values), targets=OWN, epoch=now)

    async def other(self, *values: tuple[int, str]) -> int:
        """A put of somebody else to column `b`."""
        return await self.send(*((k, None, v) for k, v in values), targets=OTHER, epoch=None)

    async def undo(
        self, from_offset: int, *, epoch: int | None = None, limit_ms: int | None = None
    ) -> m.UndoProducerResponse:
        request = m.UndoProducerRequest(
            table_id=TABLE, bucket_id=0, producer_number=NUMBER,
            epoch=self.epoch if epoch is None else epoch, from_offset=from_offset,
            time_limit_ms=limit_ms,
        )  # fmt: skip
        context = RequestContext(None, "CLIENT", 0, "test")
        return await self.server.undos.undo_producer(request, context)

    async def table(self) -> dict[int, tuple[Any, ...]]:
        """Everything that is visible."""
        store = self.replica().tablet.store
        _, values = await self.server.kv.call(
            lambda: store.scan(None, 1 << 20, 1 << 30, store.horizon)
        )
        rows = [self.codec.value(value) for value in values.tolist() if value is not None]
        return {row[0]: row[1:] for row in rows if row is not None}


@pytest.fixture
async def bucket(tmp_path: Path) -> AsyncIterator[Produced]:
    made = Produced(tmp_path, gateway=Gateway(), **OPTIONS)
    await made.start()
    yield made
    await made.server.close()


class Halted:
    """The key-value worker stands still meanwhile."""

    def __init__(self, bucket: Produced) -> None:
        self._go = threading.Event()
        bucket.server.kv.worker.run(self._wait)

    def _wait(self) -> None:
        assert self._go.wait(WAIT_SECONDS)

    def go(self) -> None:
        self._go.set()


async def test_a_producer_owns_its_columns_and_nobody_else_writes_them(bucket: Produced) -> None:
    assert await bucket.send((1, 1, "x"), targets=(), epoch=None) == 0, "the table is free"
    await bucket.begin(1)
    assert await bucket.own((1, 5)) == 0
    for targets in ((), OWN, (0, 1, 2)):
        code = await bucket.send((1, 1, "x"), targets=targets, epoch=None)
        assert code == ErrorCode.COLUMN_LOCKED
    assert await bucket.other((1, "others")) == 0
    code = await bucket.send((1, 1, "x"), targets=(), epoch=1, task=7)
    assert code == ErrorCode.INVALID_TARGET_COLUMN
    assert await bucket.table() == {1: (5, "others")}
    assert bucket.server.put.fenced == 3


@pytest.mark.parametrize("entry", [{}, {"lost": True}, {"number": 4}, {"exclusive": False}])
async def test_an_epoch_that_is_not_the_present_one_is_fenced(
    bucket: Produced, entry: dict[str, Any]
) -> None:
    assert await bucket.own((1, 1), epoch=1) == ErrorCode.PRODUCER_FENCED, "nobody knows it yet"
    await bucket.begin(2, **entry)
    for epoch in (1, 3):
        assert await bucket.own((1, 1), epoch=epoch) == ErrorCode.PRODUCER_FENCED
    allowed = 0 if entry in ({}, {"exclusive": False}) else ErrorCode.PRODUCER_FENCED
    assert await bucket.own((1, 1)) == allowed
    code = await bucket.send((1, 1, None), targets=OWN, epoch=2, task=UNDO_TASK)
    assert code == ErrorCode.PRODUCER_FENCED, "that task is the leader's own"


async def test_puts_that_waited_before_the_news_came_are_fenced_too(bucket: Produced) -> None:
    """When the coordinator is answered, nothing of an earlier epoch can come any more."""
    await bucket.begin(1)
    assert await bucket.own((1, 1)) == 0
    halted = Halted(bucket)
    late = bucket.send((1, 2, None), targets=OWN, epoch=1)
    told = asyncio.create_task(bucket.begin(2))
    await asyncio.sleep(0)
    assert not told.done(), "the worker has to be done with what came before"
    halted.go()
    await told
    assert await late == ErrorCode.PRODUCER_FENCED
    assert await bucket.table() == {1: (1, None)}


async def test_older_news_change_nothing(bucket: Produced) -> None:
    await bucket.begin(2)
    bucket.version -= 2
    await bucket.begin(1)
    assert await bucket.own((1, 1), epoch=1) == ErrorCode.PRODUCER_FENCED
    assert await bucket.own((1, 1), epoch=2) == 0


async def test_a_restarted_server_knows_its_producers_from_the_first_put_on(
    bucket: Produced,
) -> None:
    await bucket.begin(1)
    entry = ProducerEntry("p", NUMBER, 2, frozenset({1}), True, False, {(None, 0): 4})
    told = [TableProducers(TABLE, 1, (entry,))]
    await bucket.server.assign(bucket.image, assignments(bucket.image, 1), told)
    assert await bucket.own((1, 1), epoch=1) == ErrorCode.PRODUCER_FENCED
    assert bucket.replica().log.holds.offset(Holder.PRODUCER) == 4
    await bucket.server.assign(bucket.image, assignments(bucket.image, 1))
    assert await bucket.send((1, 1, "x"), targets=(), epoch=None) == 0, "it has none any more"
    assert bucket.replica().log.holds.offset(Holder.PRODUCER) is None


async def test_the_leader_tells_how_long_ago_a_producer_wrote(bucket: Produced) -> None:
    await bucket.begin(1)
    assert await bucket.server.producer_idle_ms(TABLE, [NUMBER, 9]) == [-1, -1]
    await bucket.own((1, 1))
    (idle, never) = await bucket.server.producer_idle_ms(TABLE, [NUMBER, 9])
    assert 0 <= idle < 60_000
    assert never == -1


async def test_a_server_of_its_own_hears_of_producers_over_the_wire(bucket: Produced) -> None:
    async def nobody() -> Any:
        raise AssertionError("nothing is sent")

    link = CoordinatorLink(
        ClusterNode(1, (Endpoint("FLUSS", "localhost", 1),)), bucket.image, bucket.server,
        CoordinatorClient(nobody), check_cluster=lambda _: None,
    )  # fmt: skip
    link._coordinator.epoch, link.server_epoch = 1, 4
    context = RequestContext(None, "FLUSS", 0, "test")
    entry = ProducerEntry("p", NUMBER, 2, frozenset({1}), True, False)
    told = m.UpdateProducersRequest(
        coordinator_epoch=1, server_epoch=4,
        tables=[producers_to_proto(TableProducers(TABLE, 1, (entry,)))],
    )  # fmt: skip
    await link.update_producers(told, context)
    assert await bucket.own((1, 1), epoch=1) == ErrorCode.PRODUCER_FENCED
    assert await bucket.own((1, 1), epoch=2) == 0
    asked = m.GetProducerActivityRequest(table_id=TABLE, producer_numbers=[9, NUMBER])
    never, idle = (await link.get_producer_activity(asked, context)).idle_ms
    assert (never, idle >= 0) == (-1, True)
    told.server_epoch = 3
    with pytest.raises(ZuflussError, match="belongs to server epoch 3"):
        await link.update_producers(told, context)


# -- undo -----------------------------------------------------------------------------------------


async def test_an_undo_takes_back_what_the_earlier_epoch_wrote(bucket: Produced) -> None:
    await bucket.begin(1)
    await bucket.own((1, 10), (2, 20))
    await bucket.other((1, "others"))
    start = bucket.replica().log.high_watermark
    await bucket.own((1, 11), (3, 30), (4, 40))
    await bucket.other((4, "others"))
    await bucket.begin(2)
    answer = await bucket.undo(start)
    assert (answer.done, answer.position, answer.keys) == (True, answer.end_offset, 3)
    expected = {1: (10, "others"), 2: (20, None), 4: (None, "others")}
    assert await bucket.table() == expected
    again = await bucket.undo(start)
    assert again == answer, "what is done is remembered"
    assert await bucket.own((1, 12)) == 0
    assert await bucket.undo(start) == answer
    with pytest.raises(ProducerStateError, match="has written to this bucket"):
        await bucket.undo(start - 1)
    assert bucket.server.undos.keys_total == 3


async def test_the_present_epoch_waits_for_the_undo_and_calls_join_it(
    bucket: Produced, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.begin(1)
    await bucket.own((1, 1))
    await bucket.begin(2)
    go, steps = threading.Event(), undo.Undo.steps

    def late(self: undo.Undo, source: Any) -> Any:
        assert go.wait(WAIT_SECONDS)
        return steps(self, source)

    monkeypatch.setattr(undo.Undo, "steps", late)
    answer = await bucket.undo(0, limit_ms=0)
    assert not answer.done
    assert await bucket.own((1, 2)) == ErrorCode.UNDO_UNDER_WAY
    assert await bucket.other((1, "others")) == 0
    held_from = bucket.replica().log.holds.offset(Holder.UNDO)
    assert held_from == 0, "retention spares what the undo reads"
    with pytest.raises(UndoUnderWayError, match="from offset 0 on, not 1"):
        await bucket.undo(1)
    joined = asyncio.create_task(bucket.undo(0))
    go.set()
    assert (await joined).done
    assert await bucket.own((1, 2)) == 0
    assert await bucket.table() == {1: (2, "others")}
    assert bucket.replica().log.holds.offset(Holder.UNDO) is None


async def test_a_newer_epoch_ends_an_undo_and_begins_its_own(
    bucket: Produced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_changes, "STEP_ROWS", 1)
    await bucket.begin(1)
    for key in range(20):
        await bucket.own((key, key))
    await bucket.begin(2)
    going = asyncio.create_task(bucket.undo(0))
    await asyncio.sleep(0)
    await bucket.begin(3)
    with pytest.raises(ProducerFencedError, match="is in epoch 3, not 2"):
        await going
    with pytest.raises(ProducerFencedError):
        await bucket.undo(0, epoch=2)
    assert (await bucket.undo(0)).done
    assert await bucket.table() == {}


async def test_the_end_is_found_behind_every_put_that_was_taken(bucket: Produced) -> None:
    """Puts that wait in the worker when the undo begins are in the log before its end."""
    await bucket.begin(1)
    halted = Halted(bucket)
    waiting = [bucket.send((9, None, f"{i}"), targets=OTHER, epoch=None) for i in range(5)]
    told = asyncio.create_task(bucket.begin(2))
    await asyncio.sleep(0)
    going = asyncio.create_task(bucket.undo(0))
    await asyncio.sleep(0)
    halted.go()
    await told
    answer = await going
    assert answer.done
    assert await asyncio.gather(*waiting) == [0] * 5
    assert answer.end_offset >= 9, "+I, then four times -U and +U"


async def test_nothing_before_the_baseline_is_undone_whatever_a_call_says(bucket: Produced) -> None:
    """A request without its offset has 0, and would take back checkpoints."""
    await bucket.begin(1)
    assert await bucket.own((1, 10)) == 0
    kept = bucket.replica().log.log_end_offset
    assert await bucket.own((1, 11)) == 0
    await bucket.begin(2, baseline={(None, 0): kept})
    with pytest.raises(ProducerStateError, match=f"below offset {kept}"):
        await bucket.undo(0)
    assert await bucket.table() == {1: (11, None)}
    assert (await bucket.undo(kept)).done
    assert await bucket.table() == {1: (10, None)}


async def test_a_step_that_meets_large_rows_is_done_in_parts(
    bucket: Produced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows grow behind their first change, which is what the size of a step is decided by."""
    monkeypatch.setattr(tablet, "STORED_BYTES_MAX", 50)
    monkeypatch.setattr(tablet, "STORED_ROWS_MIN", 0)
    await bucket.begin(1)
    assert await bucket.own(*((key, key) for key in range(9))) == 0
    start = bucket.replica().log.log_end_offset
    assert await bucket.own(*((key, 99) for key in range(9)), (20, 1)) == 0
    assert await bucket.other((3, "x" * 60)) == 0
    end = bucket.replica().log.log_end_offset
    await bucket.begin(2)
    answer = await bucket.undo(start)
    assert (answer.done, answer.keys, answer.end_offset) == (True, 10, end)
    assert await bucket.table() == {key: (key, "x" * 60 if key == 3 else None) for key in range(9)}


@pytest.mark.parametrize("from_offset", [-1, 1_000])
async def test_offsets_that_the_changelog_never_had_cannot_be_undone_to(
    bucket: Produced, from_offset: int
) -> None:
    await bucket.begin(1)
    await bucket.own((1, 1))
    await bucket.begin(2)
    with pytest.raises(UndoImpossibleError, match=f"bucket 0 .* offset {from_offset} "):
        await bucket.undo(from_offset)
    assert await bucket.table() == {1: (1, None)}
    assert await bucket.own((1, 2)) == 0, "puts are taken again"


async def test_what_has_moved_to_remote_storage_is_undone_too(bucket: Produced) -> None:
    await bucket.begin(1)
    for key in range(60):
        await bucket.own((key, key))
    log = bucket.replica().log
    log.roll()
    await copied_log(bucket)
    await bucket.server.kv.call(bucket.replica().tablet.flush)
    await asyncio.to_thread(bucket.replica().tablet.store.flush_wait)
    log.holds.set(Holder.KV_STATE, None)
    bucket.server.logs.expire(1 << 60)
    assert log.log_start_offset > 0
    await bucket.begin(2)
    answer = await bucket.undo(10)
    assert (answer.done, answer.keys) == (True, 50)
    assert sorted(await bucket.table()) == list(range(10))
    assert not [*bucket.kv_directory().rglob("*.new")]


async def test_a_changelog_that_has_expired_cannot_be_undone_and_nothing_is_touched(
    bucket: Produced,
) -> None:
    await bucket.begin(1, holds=True, baseline={(None, 0): 0})
    for key in range(60):
        await bucket.own((key, key))
    log = bucket.replica().log
    log.roll()
    await bucket.server.kv.call(bucket.replica().tablet.flush)
    await asyncio.to_thread(bucket.replica().tablet.store.flush_wait)
    log.holds.set(Holder.KV_STATE, None)
    log.holds.set(Holder.SNAPSHOT, None)
    bucket.server.logs.expire(1 << 60)
    assert log.log_start_offset == 0, "the producer holds it"
    await bucket.begin(2)
    bucket.server.logs.expire(1 << 60)
    start = log.log_start_offset
    assert start > 0, "and does not any more"
    with pytest.raises(UndoImpossibleError, match=f"it begins at {start}"):
        await bucket.undo(0)
    assert len(await bucket.table()) == 60


async def test_a_bucket_that_stops_ends_its_undo(
    bucket: Produced, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.begin(1)
    await bucket.own((1, 1))
    await bucket.begin(2)
    go, steps = threading.Event(), undo.Undo.steps

    def late(self: undo.Undo, source: Any) -> Any:
        assert go.wait(WAIT_SECONDS)
        return steps(self, source)

    monkeypatch.setattr(undo.Undo, "steps", late)
    assert not (await bucket.undo(0, limit_ms=0)).done
    going = asyncio.create_task(bucket.undo(0))
    await asyncio.sleep(0)
    await bucket.drop(0)
    go.set()
    with pytest.raises(ZuflussError, match="has stopped"):
        await going
