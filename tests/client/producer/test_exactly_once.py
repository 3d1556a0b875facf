"""Exactly-once writers in the client: their requests in order, and how they end.

The cluster is a fake that refuses, loses answers and forgets on demand;
`test_exactly_once_server.py` tests the effect on real tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.client.leases import Time
from tests.client.producers import MANY, NUMBER, FakeProducers, at, create_views, sequences, writers
from zufluss.client import ColumnMismatchError, ProducerState
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.producer import undo
from zufluss.client.producer.exactly_once import AsyncExactlyOnceWriter
from zufluss.client.producer.handle import OWN_TASK, ProducerHandle, ProducerSession
from zufluss.client.producer.undo import UndoProgress
from zufluss.client.table import AsyncTable
from zufluss.errors import (
    AggregationError,
    ConfigError,
    ErrorCode,
    InvalidProducerIdError,
    InvalidTableError,
    InvalidTargetColumnError,
    LeaderNotAvailableError,
    NotLeaderError,
    ProducerFencedError,
    ProducerNotFoundError,
    ProducerStateError,
    UndoImpossibleError,
    UndoUnderWayError,
    ZuflussError,
)
from zufluss.model.producer import ProducerWriter
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


@pytest.fixture
def producers(cluster: FakeCluster) -> FakeProducers:
    return FakeProducers(cluster)


@pytest.fixture
async def table(
    cluster: FakeCluster, producers: FakeProducers, connection: AsyncConnection
) -> AsyncTable:
    return await create_views(cluster, connection)


@pytest.fixture
async def days(
    cluster: FakeCluster, producers: FakeProducers, connection: AsyncConnection
) -> AsyncTable:
    columns = "page BIGINT, day STRING, views BIGINT, PRIMARY KEY (page, day)"
    cluster.create("days", columns, bucket_count=1, partition_keys=("day",))
    cluster.tables[next(reversed(cluster.tables))].partitions["old"] = 100
    return await connection.table("fluss.days")


@pytest.fixture
async def writer(
    table: AsyncTable, producers: FakeProducers
) -> AsyncIterator[AsyncExactlyOnceWriter]:
    producers.created = True
    made = await table.exactly_once_writer("job")
    yield made
    await made._producer.stop()


def state(table: AsyncTable, *offsets: int, column_ids: tuple[int, ...] = ()) -> ProducerState:
    info = table.info
    offsets_of = at(table, *offsets)
    return ProducerState(info.path, info.table_id, "job", NUMBER, 1, column_ids, 4, offsets_of)


# -- beginning -----------------------------------------------------------------------------------


async def test_a_new_producer_takes_its_columns_and_undoes_nothing(
    writer: AsyncExactlyOnceWriter, producers: FakeProducers
) -> None:
    [asked] = producers.of(m.InitProducerRequest)
    assert (asked.producer_id, list(asked.column_ids), asked.is_restore) == ("job", [], False)
    assert asked.ttl_ms == 600_000
    assert not producers.of(m.UndoProducerRequest)
    assert (writer.producer_id, writer.epoch, writer.exclusive) == ("job", 1, True)
    assert writer.undone is None
    assert writer.state is None
    assert "producer job, epoch 1" in repr(writer)


async def test_without_an_id_there_is_a_new_one_which_checkpoints_remember(
    table: AsyncTable, producers: FakeProducers
) -> None:
    async with await table.exactly_once_writer() as first:
        kept = await first.checkpoint()
    async with await table.exactly_once_writer() as second:
        assert second.producer_id != first.producer_id
    async with await table.exactly_once_writer(state=kept.to_bytes()) as third:
        assert third.producer_id == first.producer_id


async def test_id_and_ttl_come_from_the_options_of_the_client(
    cluster: FakeCluster, producers: FakeProducers, table: AsyncTable
) -> None:
    options = {"client.column-lock.owner-id": "counts", "client.column-lock.ttl": "1min"}
    async with await connect_async(cluster.bootstrap, **FAST, **options) as connection:
        async with await (await connection.table("fluss.views")).exactly_once_writer() as writer:
            assert writer.producer_id == "counts"
        [asked] = producers.of(m.InitProducerRequest)
        assert asked.ttl_ms == 60_000


async def test_only_the_columns_asked_for_are_taken_and_written(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    async with await table.exactly_once_writer("job", ["page", "views"], ttl="5s") as writer:
        await writer.write({"page": 1, "views": 1})
    [asked] = producers.of(m.InitProducerRequest)
    assert (list(asked.column_ids), asked.ttl_ms) == ([1], 5_000)
    assert [list(put.target_columns) for put in cluster.puts] == [[0, 1]]


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        ({"producer_id": "../x"}, InvalidProducerIdError, "Invalid producer ID"),
        ({"producer_id": ""}, InvalidProducerIdError, "Invalid producer ID"),
        ({"columns": ["views"]}, InvalidTargetColumnError, "lack page of the primary key"),
        ({"ttl": "soon"}, ConfigError, "ttl of a producer 'soon' is not allowed"),
        ({"undo": "nobody"}, ConfigError, "undo 'nobody' is none of server, client"),
        ({"pre_aggregate": True}, InvalidTableError, "has no merge engine"),
        ({"state": b""}, ProducerStateError, "is empty"),
        ({"state": []}, ProducerStateError, "no state to merge"),
    ],
)
async def test_impossible_arguments_are_refused_before_an_epoch_begins(
    table: AsyncTable,
    producers: FakeProducers,
    arguments: dict[str, Any],
    expected: type[ZuflussError],
    message: str,
) -> None:
    with pytest.raises(expected, match=message):
        await table.exactly_once_writer(**arguments)
    assert not producers.asked


async def test_a_log_table_has_no_exactly_once_writer(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("log", "id BIGINT")
    table = await connection.table("fluss.log")
    with pytest.raises(InvalidTableError, match=r"no exactly-once writer; use table\.append"):
        await table.exactly_once_writer()


async def test_without_idempotence_there_is_no_producer(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    options = {"client.writer.enable-idempotence": "false", "client.writer.acks": "1"}
    async with await connect_async(cluster.bootstrap, **FAST, **options) as connection:
        plain = await connection.table("fluss.views")
        with pytest.raises(ConfigError, match="enable-idempotence = false switches off"):
            await plain.exactly_once_writer("job")
        with pytest.raises(ConfigError, match="enable-idempotence"):
            plain.producer_writer(ProducerHandle(plain.info.table_id, "job", 1, 1, (1,)), 0)


# -- restarting ----------------------------------------------------------------------------------


async def test_a_restart_undoes_every_bucket_from_the_checkpoint_before_it_writes(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    told: list[UndoProgress] = []
    async with await table.exactly_once_writer(
        state=state(table, 10, 20), on_undo=told.append
    ) as writer:
        assert not cluster.puts
        assert writer.undone == told[-1] == UndoProgress(2, 2, 8, 8, 6)
        assert writer.state == state(table, 10, 20)
        assert writer.columns == ("page", "views", "last")
    [asked] = producers.of(m.InitProducerRequest)
    assert asked.is_restore
    assert (asked.producer_id, asked.restored_number) == ("job", NUMBER)
    undone = {undo.bucket_id: undo for undo in producers.of(m.UndoProducerRequest)}
    assert {i: undo.from_offset for i, undo in undone.items()} == {0: 10, 1: 20}
    assert {(undo.producer_number, undo.epoch) for undo in undone.values()} == {(NUMBER, 1)}


async def test_a_restart_without_state_undoes_what_the_coordinator_knows(
    table: AsyncTable, producers: FakeProducers
) -> None:
    producers.baseline = at(table, 3, 4)
    await (await table.exactly_once_writer("job")).close()
    assert sorted(u.from_offset for u in producers.of(m.UndoProducerRequest)) == [3, 4]


async def test_partitions_newer_than_the_checkpoint_are_undone_from_their_beginning(
    cluster: FakeCluster, days: AsyncTable, producers: FakeProducers
) -> None:
    partitions = cluster.tables[days.path].partitions
    partitions["new"] = 101
    table_id = days.info.table_id
    offsets = {TableBucket(table_id, 100, 0): 9, TableBucket(table_id, 99, 0): 7}
    kept = ProducerState(days.path, table_id, "job", NUMBER, 1, (2,), 1, offsets)
    await (await days.exactly_once_writer(state=kept)).close()
    asked = {u.partition_id: u.from_offset for u in producers.of(m.UndoProducerRequest)}
    assert asked == {100: 9, 101: 0}  # 99 was dropped meanwhile


async def test_nothing_is_undone_if_a_replay_changes_nothing(
    table: AsyncTable, producers: FakeProducers
) -> None:
    producers.undo_needed = False
    async with await table.exactly_once_writer(state=state(table, 10, 20)) as writer:
        assert writer.undone is None
    assert not producers.of(m.UndoProducerRequest)


async def test_an_undo_goes_on_over_lost_leaders_and_calls_that_ended_early(
    table: AsyncTable, producers: FakeProducers
) -> None:
    answers: dict[int, list[Any]] = {
        0: [
            NotLeaderError("moved"),
            UndoUnderWayError("of somebody else"),
            m.UndoProducerResponse(done=False, position=12, end_offset=20, keys=1),
            LeaderNotAvailableError("nobody"),
            m.UndoProducerResponse(done=True, position=20, end_offset=20, keys=5),
        ],
        1: [m.UndoProducerResponse(done=True, position=5, end_offset=5, keys=0)],
    }
    producers.undo = lambda request: answers[request.bucket_id].pop(0)
    told: list[UndoProgress] = []
    async with await table.exactly_once_writer(
        state=state(table, 10, 5), on_undo=told.append
    ) as writer:
        assert writer.undone == UndoProgress(2, 2, 10, 10, 5)
    assert UndoProgress(2, 1, 10, 2, 1) in told
    assert not answers[0]


async def test_a_bucket_that_waits_for_its_turn_is_not_given_up_while_others_move(
    table: AsyncTable,
    producers: FakeProducers,
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader undoes few buckets at a time, so most of them make no progress for long."""
    monkeypatch.setattr(undo, "STALLED_MS", 0)
    asked, moved = asyncio.Event(), asyncio.Event()
    position = seen = 0

    async def answer(request: m.UndoProducerRequest) -> m.UndoProducerResponse:
        nonlocal position
        if request.bucket_id == 0:
            await asked.wait()
            asked.clear()
            position += 1
            return m.UndoProducerResponse(
                done=position == 6, position=position, end_offset=6, keys=position
            )
        asked.set()
        await moved.wait()
        moved.clear()
        return m.UndoProducerResponse(done=position == 6, position=0, end_offset=0, keys=0)

    def told(progress: UndoProgress) -> None:
        nonlocal seen
        if progress.records_read > seen:
            seen = progress.records_read
            moved.set()

    cluster.handlers[ApiKey.UNDO_PRODUCER] = answer
    async with await table.exactly_once_writer(state=state(table, 0, 0), on_undo=told) as writer:
        assert writer.undone == UndoProgress(2, 2, 6, 6, 6)


async def test_an_impossible_undo_is_raised_and_the_producer_stays(
    table: AsyncTable, producers: FakeProducers, connection: AsyncConnection
) -> None:
    producers.undo = lambda request: UndoImpossibleError("bucket 0: 10 to 20 is gone")
    with pytest.raises(UndoImpossibleError, match="10 to 20 is gone"):
        await table.exactly_once_writer(state=state(table, 10, 20))
    assert not connection.tasks


async def test_a_state_restores_its_own_producer_and_columns_only(
    table: AsyncTable, producers: FakeProducers
) -> None:
    kept = state(table, 1, 2, column_ids=(1,))
    with pytest.raises(ProducerStateError, match="cannot be restored by producer 'other'"):
        await table.exactly_once_writer("other", state=kept)
    with pytest.raises(ProducerStateError, match="other columns than page, last; leave them out"):
        await table.exactly_once_writer("job", ["page", "last"], state=kept)
    with pytest.raises(ProducerStateError, match="has no column of id 9 any more"):
        await table.exactly_once_writer(state=state(table, 1, 2, column_ids=(9,)))
    assert not producers.asked
    async with await table.exactly_once_writer("job", ["page", "views"], state=kept) as writer:
        assert writer.columns == ("page", "views")


async def test_a_cluster_without_producers_is_an_error_that_says_so(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    problem = ZuflussError("unknown", code=ErrorCode.UNSUPPORTED_VERSION)
    producers.problem = lambda request: problem
    with pytest.raises(ZuflussError, match="knows no producers, which are an extension"):
        await table.exactly_once_writer("job")


# -- checkpoints ---------------------------------------------------------------------------------


async def test_a_checkpoint_has_every_bucket_and_the_one_before_is_reported(
    writer: AsyncExactlyOnceWriter, table: AsyncTable, producers: FakeProducers
) -> None:
    await writer.write(MANY)
    first = await writer.checkpoint()
    assert first.offsets == at(table, 1, 1)
    assert first.checkpoint == 1
    assert first.column_ids == ()
    assert first.producer_id == "job"
    assert first.epoch == 1
    await writer.write(MANY)
    second = await writer.checkpoint()
    assert second.offsets == at(table, 2, 2)
    assert second.checkpoint == 2
    assert writer.state == second
    assert producers.reports == [{}, first.offsets]


async def test_the_restored_checkpoint_is_reported_with_the_first_one_after_it(
    table: AsyncTable, producers: FakeProducers
) -> None:
    async with await table.exactly_once_writer(state=state(table, 10, 20)) as writer:
        assert (await writer.checkpoint()).checkpoint == 5
    assert producers.reports == [at(table, 10, 20)]


async def test_a_checkpoint_with_an_id_counts_at_once(
    writer: AsyncExactlyOnceWriter, table: AsyncTable, producers: FakeProducers
) -> None:
    assert writer.last_checkpoint_id is None
    await writer.write(MANY)
    await writer.checkpoint(checkpoint_id=41)
    [asked] = producers.of(m.CheckpointProducerRequest)
    assert (asked.checkpoint_id, producers.reports) == (41, [at(table, 1, 1)])
    producers.checkpoint_id = 41
    async with await table.exactly_once_writer("job") as again:
        assert again.last_checkpoint_id == again.handle.last_checkpoint_id == 41


async def test_rows_written_during_a_checkpoint_come_after_it(
    cluster: FakeCluster,
    writer: AsyncExactlyOnceWriter,
    table: AsyncTable,
    producers: FakeProducers,
) -> None:
    await writer.write(MANY)
    late: list[asyncio.Task[None]] = []

    def write_meanwhile(request: Any) -> None:
        if isinstance(request, m.CheckpointProducerRequest):
            writer.add_row({"page": 1, "views": 1})
            rows = writer.write(MANY)
            late.append(asyncio.ensure_future(rows))

    producers.problem = write_meanwhile  # type: ignore[assignment]
    kept = await writer.checkpoint()
    assert kept.offsets == at(table, 1, 1)
    assert set(sequences(cluster)) == {0}
    await asyncio.gather(*late)
    await writer.flush()
    assert (await writer.checkpoint()).offsets == at(table, 2, 2)


async def test_a_checkpoint_that_the_coordinator_does_not_confirm_fails(
    writer: AsyncExactlyOnceWriter, producers: FakeProducers
) -> None:
    producers.problem = lambda request: ZuflussError("disk", code=ErrorCode.STORAGE_EXCEPTION)
    with pytest.raises(ZuflussError, match="disk"):
        await writer.checkpoint()
    assert writer.state is None
    producers.problem = lambda request: None
    assert (await writer.checkpoint()).checkpoint == 1


async def test_a_checkpoint_waits_for_a_server_that_comes_back(
    cluster: FakeCluster, writer: AsyncExactlyOnceWriter, table: AsyncTable
) -> None:
    await writer.write(MANY)
    await writer.flush()
    offsets, metadata = ApiKey.LIST_OFFSETS, ApiKey.GET_METADATA
    working = {key: cluster.handlers[key] for key in (offsets, metadata)}

    async def away_once_more(request: Any) -> None:
        cluster.handlers[metadata] = working[metadata]
        cluster.drop_connections()

    async def moved_once(request: Any) -> Any:
        cluster.handlers |= {offsets: working[offsets], metadata: away_once_more}
        return NotLeaderError("moved")

    cluster.handlers[offsets] = moved_once
    assert (await writer.checkpoint()).offsets == at(table, 1, 1)
    assert cluster.handlers[metadata] is working[metadata]


async def test_with_offsets_of_tasks_only_what_they_wrote_moves_on(
    table: AsyncTable, producers: FakeProducers
) -> None:
    async with await table.exactly_once_writer(state=state(table, 10, 20)) as writer:
        bucket = TableBucket(table.info.table_id, None, 1)
        kept = await writer.checkpoint(tasks=[{bucket: 23}, {bucket: 25}, {}])
        assert kept.offsets == at(table, 10, 25)


async def test_a_new_partition_that_a_task_wrote_to_is_complete_in_the_checkpoint(
    cluster: FakeCluster, producers: FakeProducers, connection: AsyncConnection
) -> None:
    columns = "page BIGINT, day STRING, views BIGINT, PRIMARY KEY (page, day)"
    info = cluster.create("parts", columns, bucket_count=2, partition_keys=("day",))
    cluster.tables[info.path].partitions["new"] = 101
    table = await connection.table("fluss.parts")
    producers.baseline = {
        TableBucket(info.table_id, 99, 0): 1,
        TableBucket(info.table_id, 99, 1): 1,
    }
    async with await table.exactly_once_writer("job") as writer:
        kept = await writer.checkpoint(tasks=[{TableBucket(info.table_id, 101, 1): 5}])
        kept.check(info)
    new = [TableBucket(info.table_id, 101, i) for i in (0, 1)]
    assert kept.offsets == {new[0]: 0, new[1]: 5}  # partition 99 was dropped


# -- failing and ending --------------------------------------------------------------------------


async def test_batches_carry_the_producer_its_epoch_and_sequences_from_zero(
    cluster: FakeCluster, writer: AsyncExactlyOnceWriter
) -> None:
    for _ in range(3):
        await writer.write({"page": [1], "views": [1]})
        await writer.flush()
    assert set(writers(cluster)) == {ProducerWriter(NUMBER, 1, OWN_TASK)}
    assert sequences(cluster) == [0, 1, 2]
    assert not cluster.writer_ids


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.PRODUCER_FENCED, ProducerFencedError),
        (ErrorCode.AGGREGATION_FAILED, AggregationError),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION, ZuflussError),
        (ErrorCode.UNKNOWN_WRITER_ID_EXCEPTION, ZuflussError),
    ],
)
async def test_a_batch_that_is_refused_ends_the_writer(
    cluster: FakeCluster,
    writer: AsyncExactlyOnceWriter,
    producers: FakeProducers,
    code: ErrorCode,
    expected: type[ZuflussError],
) -> None:
    producers.refuse_puts(code)
    await writer.write(MANY)
    with pytest.raises(expected):
        await writer.flush()
    cluster.produce_fault = lambda *_: None
    sent = len(cluster.puts)
    for call in (writer.flush, writer.checkpoint, writer.release):
        with pytest.raises(expected, match="the writer has ended and takes no more rows"):
            await call()
    with pytest.raises(expected, match="continue from the last checkpoint with a new one"):
        await writer.write(MANY)
    assert len(cluster.puts) == sent
    assert not cluster.writer_ids
    assert not producers.of(m.ReleaseProducerRequest)
    await writer.close()


async def test_batches_behind_a_failed_one_fail_with_it(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    options = FAST | {"client.writer.batch-size": "1kb"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        plain = await connection.table("fluss.views")
        writer = await plain.exactly_once_writer("job")
        cluster.produce_fault = lambda _, sequence: (
            ErrorCode.AGGREGATION_FAILED if sequence == 1 else None
        )
        await writer.write({"page": list(range(4000)), "views": [1] * 4000})
        with pytest.raises(AggregationError):
            await writer.close()
        assert not writer._pending
        assert writer._budget._used == 0
        for bucket in cluster.stores.values():
            assert len(bucket.batches) == 1


async def test_rows_that_were_not_sent_are_not_lost_silently(
    cluster: FakeCluster, writer: AsyncExactlyOnceWriter, producers: FakeProducers
) -> None:
    await writer.write({"page": 1, "views": 1})
    writer._sender.end(ProducerFencedError("epoch 1 is over"))
    with pytest.raises(ProducerFencedError, match="epoch 1 is over"):
        await writer.close()


async def test_a_bucket_that_still_undoes_is_asked_again(
    cluster: FakeCluster, writer: AsyncExactlyOnceWriter
) -> None:
    faults = iter([ErrorCode.UNDO_UNDER_WAY, ErrorCode.UNDO_UNDER_WAY])
    cluster.produce_fault = lambda *_: next(faults, None)
    await writer.write({"page": [1], "views": [1]})
    await writer.flush()
    assert len(cluster.puts) == 3


async def test_a_lost_answer_does_not_write_a_row_twice(
    cluster: FakeCluster, writer: AsyncExactlyOnceWriter
) -> None:
    faults = iter(["lost"])
    cluster.produce_fault = lambda *_: next(faults, None)
    await writer.write({"page": [1], "views": [1]})
    await writer.flush()
    assert sum(len(store.batches) for store in cluster.stores.values()) == 1


async def test_a_row_that_does_not_fit_ends_nothing(
    cluster: FakeCluster, writer: AsyncExactlyOnceWriter
) -> None:
    with pytest.raises(ColumnMismatchError):
        await writer.write({"page": ["text"], "views": [1]})
    await writer.write({"page": [1], "views": [1]})
    assert (await writer.checkpoint()).checkpoint == 1


async def test_closing_keeps_the_producer_and_releasing_ends_it(
    writer: AsyncExactlyOnceWriter, producers: FakeProducers, connection: AsyncConnection
) -> None:
    await writer.close()
    assert not producers.of(m.ReleaseProducerRequest)
    assert not connection.tasks


async def test_a_release_flushes_first_and_a_second_one_does_nothing(
    cluster: FakeCluster,
    writer: AsyncExactlyOnceWriter,
    producers: FakeProducers,
    connection: AsyncConnection,
) -> None:
    await writer.write({"page": 1, "views": 1})
    await writer.release()
    await writer.release()
    [asked] = producers.of(m.ReleaseProducerRequest)
    assert (asked.producer_id, asked.epoch, len(cluster.puts)) == ("job", 1, 1)
    assert not connection.tasks


async def test_a_producer_that_is_gone_already_is_released(
    writer: AsyncExactlyOnceWriter, producers: FakeProducers
) -> None:
    producers.epoch = 0
    await writer.release()


# -- signs of life -------------------------------------------------------------------------------


class Alive:
    """A producer on the clock of a test."""

    def __init__(self, connection: AsyncConnection, table: AsyncTable, time: Time) -> None:
        self.time = time
        self.producer = ProducerSession(
            connection, table.info, "job", 60_000, clock=time.clock, sleep=time.sleep
        )

    async def advance(self, seconds: float) -> None:
        await self.time.advance(seconds, self._resting)

    def _resting(self) -> bool:
        renewer = self.producer._renewer
        return renewer is None or renewer.done()


@pytest.fixture
async def alive(
    connection: AsyncConnection, table: AsyncTable, producers: FakeProducers
) -> AsyncIterator[Alive]:
    made = Alive(connection, table, Time())
    await made.producer.begin([1, 2], None)
    yield made
    await made.producer.stop()


async def test_signs_of_life_come_in_time_without_anybody_writing(
    alive: Alive, producers: FakeProducers
) -> None:
    await alive.advance(20.1)
    assert producers.reports == [{}]
    await alive.advance(80)
    assert 4 <= len(producers.reports) <= 7


async def test_a_checkpoint_is_a_sign_of_life(alive: Alive, producers: FakeProducers) -> None:
    await alive.advance(15)
    await alive.producer.report(None)
    await alive.advance(14)
    assert len(producers.reports) == 1


async def test_a_coordinator_that_is_away_is_tried_again(
    alive: Alive, producers: FakeProducers, caplog: pytest.LogCaptureFixture
) -> None:
    away = ZuflussError("away", code=ErrorCode.UNKNOWN_SERVER_ERROR)
    producers.problem = lambda request: away
    await alive.advance(100)
    assert alive.producer.lost is None
    [warning] = caplog.records
    assert "others may take its columns after 1min" in warning.getMessage()
    producers.problem = lambda request: None
    await alive.advance(2)
    assert alive.producer._renewals.problem is None


@pytest.mark.parametrize(
    ("epoch", "expected"), [(9, ProducerFencedError), (0, ProducerNotFoundError)]
)
async def test_a_loss_that_a_sign_of_life_tells_ends_the_writer(
    alive: Alive, producers: FakeProducers, epoch: int, expected: type[ZuflussError]
) -> None:
    told: list[ZuflussError] = []
    alive.producer.on_loss = told.append
    producers.epoch = epoch
    await alive.advance(30)
    [loss] = told
    assert isinstance(loss, expected)
    assert alive.producer.lost is loss


async def test_a_checkpoint_of_a_writer_that_was_replaced_is_refused(
    writer: AsyncExactlyOnceWriter, producers: FakeProducers
) -> None:
    producers.epoch = 2
    with pytest.raises(ProducerFencedError, match="epoch 1 is over, 2 has begun"):
        await writer.checkpoint()
    with pytest.raises(ProducerFencedError, match="takes no more rows"):
        await writer.write({"page": 1, "views": 1})
