"""The effect of write tasks on tables, without Spark: each row once, however tasks are run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.spark.sinks import halfway, log_rows, state, struct
from zufluss.client.core.convert import ColumnMismatchError
from zufluss.client.sync.connection import Connection
from zufluss.errors import ColumnLockedError, ConfigError, ProducerFencedError
from zufluss.model.producer import EPOCH_MAX
from zufluss.spark.source_options import parse_options
from zufluss.spark.write import tasks
from zufluss.spark.write.sink import Sink, make_sink
from zufluss.spark.write.stage import Stage
from zufluss.testing.server import DevServer

ROWS = "id BIGINT, k BIGINT, v BIGINT"
KEYED = f"{ROWS}, PRIMARY KEY (id)"
COUNTS = "k BIGINT, n BIGINT SUM, PRIMARY KEY (k)"
SMALL = {"client.writer.batch-size": "1kb"}
AGGREGATION = {"table.merge-engine": "aggregation"}


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


@pytest.fixture
def sink_of(conn: Connection, dev_server: DevServer) -> Callable[..., Sink]:
    """Makes a table, and a write to it: `sink_of("id INT, …", "id INT, …", **options)`."""

    def sink(schema: str, rows: str = ROWS, *, table: Any = None, **options: str) -> Sink:
        made = create_table(conn, schema, **{"bucket_count": 2} | (table or {}))
        given = options | {"bootstrap.servers": dev_server.bootstrap, "table": str(made.path)}
        return make_sink(parse_options(given), struct(rows), False)

    return sink


def rows(*ids: int, v: int = 0, **more: Any) -> pa.RecordBatch:
    arrays = {"id": ids, "k": [i % 7 for i in ids], "v": [v + i for i in ids]}
    return pa.record_batch({n: pa.array(a, pa.int64()) for n, a in arrays.items()} | more)


def values(conn: Connection, sink: Sink) -> dict[int, int]:
    return {key: row["v"] for key, row in state(conn, str(sink.info.path)).items()}


# -- primary-key tables ------------------------------------------------------------------------


def test_upserts_of_a_driver_that_should_be_gone_are_refused(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(KEYED)
    zombie = tasks.fence(sink, "stream")
    tasks.write_upserts(sink, [rows(1, 2)], zombie, 0, 0)
    present = tasks.fence(sink, "stream")
    tasks.write_upserts(sink, [rows(1, v=100)], present, 0, 0)
    with pytest.raises(ProducerFencedError, match="was started again, and this writer must end"):
        tasks.write_upserts(sink, [rows(1, 2)], zombie, 1, 0)
    assert values(conn, sink) == {1: 101, 2: 2}
    assert present is not None
    tasks.release(sink, present)
    with pytest.raises(ProducerFencedError, match="released or dropped"):
        tasks.write_upserts(sink, [rows(1)], present, 0, 1)
    assert conn.admin.list_producers(str(sink.info.path)) == []


def test_every_attempt_of_an_upsert_is_written_whatever_its_rows(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(KEYED)
    handle = tasks.fence(sink, "stream")
    tasks.write_upserts(sink, [rows(1, 2, 3)], handle, 0, 0)
    tasks.write_upserts(sink, [rows(4, 3, 2, 1, v=10)], handle, 0, 1)
    assert values(conn, sink) == {1: 11, 2: 12, 3: 13, 4: 14}
    with pytest.raises(ConfigError, match="at most 8191 tasks"):
        tasks.write_upserts(sink, [rows(1)], handle, 8191, 0)


def test_a_stage_that_is_run_again_in_another_order_loses_no_upsert(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    """Spark counts the attempts of each stage attempt from 0 on."""
    sink = sink_of(KEYED, **SMALL)
    handle = tasks.fence(sink, "stream")

    def fail() -> None:
        raise RuntimeError("lost")

    with halfway(fail), pytest.raises(RuntimeError, match="lost"):
        tasks.write_upserts(sink, [rows(*range(2000)), rows(*range(2000, 4000))], handle, 0, 0)
    tasks.write_upserts(sink, [rows(*reversed(range(4000)))], handle, 0, 0)
    assert values(conn, sink) == {i: i for i in range(4000)}


def test_only_the_last_row_of_a_key_is_sent(conn: Connection, sink_of: Callable[..., Sink]) -> None:
    sink = sink_of(KEYED, f"op STRING, {ROWS}", **{"write.change-type-column": "op"})
    handle = tasks.fence(sink, "stream")
    ops = ["+I", "+I", "-D", "-U", "+U", "+I"]
    batches = [rows(1, 2, 1, 2, 2, 3, op=ops), rows(3, 4, op=["-D", "+I"])]
    tasks.write_upserts(sink, batches, handle, 0, 0)
    assert values(conn, sink).keys() == {2, 4}
    assert conn.table(str(sink.info.path)).changelog().to_arrow().num_rows == 2


def test_where_deletes_are_ignored_the_row_before_one_is_written(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    ignored = {"properties": {"table.delete.behavior": "IGNORE"}}
    sink = sink_of(KEYED, f"op STRING, {ROWS}", table=ignored, **{"write.change-type-column": "op"})
    tasks.write_upserts(sink, [rows(1, 1, op=["+I", "-D"])], None, 0, 0)
    assert values(conn, sink) == {1: 1}


def test_of_a_table_that_keeps_the_first_row_the_first_is_kept(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(KEYED, table={"properties": {"table.merge-engine": "first_row"}})
    for attempt in range(2):
        batch = pa.concat_batches([rows(1, 2), rows(1, 2, v=10)])
        tasks.write_upserts(sink, [batch], None, 0, attempt)
    assert values(conn, sink) == {1: 1, 2: 2}


def test_columns_that_somebody_owns_are_not_upserted(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(KEYED, table={"properties": {"table.column-lock.enabled": "true"}})
    handle = tasks.fence(sink, "stream")
    with conn.table(str(sink.info.path)).exactly_once_writer("owner") as owner:
        owner.write({"id": [1], "k": [1], "v": [5]})
        with pytest.raises(ColumnLockedError, match="belong to producer owner"):
            tasks.write_upserts(sink, [rows(1)], handle, 0, 0)
    assert values(conn, sink) == {1: 5}


def test_of_updates_with_their_old_rows_the_new_ones_are_sent_together(
    sink_of: Callable[..., Sink],
) -> None:
    sink = sink_of(KEYED, f"op STRING, {ROWS}", **{"write.change-type-column": "op"})
    ids = [i // 2 for i in range(1000)]
    assert len(list(tasks._changes(sink, [rows(*ids, op=["-U", "+U"] * 500)]))) == 1
    mixed = list(tasks._changes(sink, [rows(*ids, op=["+I", "-D"] * 500)]))
    assert [(delete, part.num_rows) for delete, part in mixed] == [(True, 500)]


# -- log tables --------------------------------------------------------------------------------


def test_a_task_of_a_log_table_is_written_once_in_any_order(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(ROWS, **SMALL, **{"write.order": "canonical"})
    handle = tasks.log_producer(sink, None)
    for seed in range(3):
        ids = list(range(500))
        random.Random(seed).shuffle(ids)
        tasks.write_log(sink, [rows(*ids[:100]), rows(*ids[100:])], handle, 0)
    assert sorted(row["id"] for row in log_rows(conn, str(sink.info.path))) == list(range(500))


def test_micro_batches_of_a_log_table_go_on_after_half_a_million(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(ROWS)
    ids = [tasks.BATCHES - 2, tasks.BATCHES - 1, tasks.BATCHES, 3 * tasks.BATCHES]
    for batch_id in [i for each in ids for i in (each, each)]:  # each is run again
        handle = tasks.log_producer(sink, "stream", batch_id)
        assert handle.epoch < EPOCH_MAX
        tasks.write_log(sink, [rows(batch_id)], handle, 0)
    assert sorted(row["id"] for row in log_rows(conn, str(sink.info.path))) == ids


def test_a_log_producer_gives_signs_of_life(
    conn: Connection, sink_of: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(ROWS)
    first = tasks.log_producer(sink, "stream", 1)
    conn.admin.drop_producer(str(sink.info.path), "stream")  # as the cluster does after a silence
    assert tasks.log_producer(sink, "stream", 1) == first  # not asked again
    monkeypatch.setattr(tasks, "SIGN_SECONDS", -1.0)
    assert tasks.log_producer(sink, "stream", 1).number > first.number


# -- aggregation tables ------------------------------------------------------------------------


def test_an_aggregation_stream_outlives_the_epochs_of_its_producer(
    conn: Connection, sink_of: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch is an epoch, and after 2^20 of them the producer is another one."""
    sink = sink_of(COUNTS, "k BIGINT, n BIGINT", table={"properties": AGGREGATION})
    monkeypatch.setattr(tasks, "EPOCHS_LEFT", EPOCH_MAX - 3)
    numbers = set()
    one = pa.record_batch({"k": pa.array([1], pa.int64()), "n": pa.array([1], pa.int64())})
    for batch_id in range(8):
        for killed in (True, False):  # before its commit, whose inputs do not count
            handle = tasks.begin(sink, "stream")
            assert handle.last_checkpoint_id == (batch_id - 1 if batch_id else None)
            offsets = tasks.write_inputs(sink, [one], handle, 0)
            numbers.add(handle.number)
            if not killed:
                tasks.checkpoint(sink, [tasks.TaskCommit(offsets, handle, batch_id)])
        assert state(conn, str(sink.info.path), "k")[1]["n"] == batch_id + 1
    assert len(numbers) > 2
    stale = replace(handle, number=min(numbers))
    with pytest.raises(ProducerFencedError, match="released or dropped"):
        tasks.write_inputs(sink, [one], stale, 0)


# -- nothing half-written ----------------------------------------------------------------------


@pytest.mark.parametrize("schema", [ROWS, KEYED])
def test_a_task_with_a_wrong_row_writes_none(
    conn: Connection, sink_of: Callable[..., Sink], schema: str
) -> None:
    sink = sink_of(schema.replace("v BIGINT", "v BIGINT NOT NULL"))
    wrong = rows(7).set_column(2, "v", pa.nulls(1, pa.int64()))
    batches = [rows(*range(i, i + 100)) for i in range(0, 1000, 100)]
    batches.append(wrong)

    def write() -> None:
        if sink.info.has_primary_key:
            tasks.write_upserts(sink, batches, tasks.fence(sink, "job"), 0, 0)
        else:
            tasks.write_log(sink, batches, tasks.log_producer(sink, None), 0)

    with pytest.raises(ColumnMismatchError, match=r"column 'v' has .*null.*NOT NULL"):
        write()
    assert conn.table(str(sink.info.path)).scan().to_arrow().num_rows == 0


def test_rows_that_do_not_fit_into_memory_come_back_from_disk(
    sink_of: Callable[..., Sink],
) -> None:
    info = sink_of(KEYED).info
    for last_wins in (False, True):
        with Stage(info, last_wins=last_wins, memory=2_000) as stage:
            for part in range(0, 500, 50):
                stage.add(part % 100 == 0, rows(*range(part, part + 50)))
            stage.add(False, rows(0, 499, v=10))
            found = [(delete, part["id"].to_pylist()) for delete, part in stage]
        ids = [i for _, part in found for i in part]
        expected = [*range(500), 0, 499]
        assert ids == ([*expected[1:499], 0, 499] if last_wins else expected)
        assert [delete for delete, _ in found] == [n % 2 == 0 for n in range(10)] + [False]


def test_a_micro_batch_of_a_driver_that_should_be_gone_is_appended_once(
    conn: Connection, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of(ROWS)
    for batch_id in (4, 5, 6):
        tasks.write_log(sink, [rows(batch_id)], tasks.log_producer(sink, "stream", batch_id), 0)
    late = tasks.log_producer(sink, "stream", 4)
    with pytest.raises(ProducerFencedError, match="writes as epoch 4, and epoch 6"):
        tasks.write_log(sink, [rows(4)], late, 0)  # 4 and 6 go to the same bucket
    tasks.write_log(sink, [rows(5)], tasks.log_producer(sink, "stream", 5), 0)
    assert sorted(row["id"] for row in log_rows(conn, str(sink.info.path))) == [4, 5, 6]
