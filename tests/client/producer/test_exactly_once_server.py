"""Exactly-once writers on a real server: the rows after crashes, restarts and other writers.

A crash is a writer that is not closed: the next one begins while it still exists.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

import zufluss
from tests.client.pk import create_table, delete, upsert
from zufluss.client import ProducerHandle, ProducerState
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.client.sync.write import ExactlyOnceWriter
from zufluss.errors import (
    AggregationError,
    ColumnLockedError,
    ProducerFencedError,
    ProducerNotFoundError,
    ProducerStateError,
    UndoImpossibleError,
)
from zufluss.model.aggregate import AggFunction
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

COUNTS = "page INT, views BIGINT SUM, top INT MAX, PRIMARY KEY (page)"
DAYS = "page INT, day STRING, views BIGINT SUM, PRIMARY KEY (page, day)"
AGGREGATION = {"table.merge-engine": "aggregation"}
DELETES = {"table.delete.behavior": "ALLOW"}
UNDOS: list[Literal["server", "client"]] = ["server", "client"]


def counts(conn: Connection, schema: str = COUNTS, **options: Any) -> Table:
    properties = AGGREGATION | options.pop("properties", {})
    return create_table(conn, schema, properties=properties, **{"bucket_count": 3} | options)


def rows_of(table: Table, value: str = "views") -> dict[Any, Any]:
    """The values of one column by the first one."""
    return {row["page"]: row[value] for row in table.scan().to_arrow().to_pylist()}


def views(*pages: int, each: int = 1) -> dict[str, list[int]]:
    return {"page": list(pages), "views": [each] * len(pages), "top": list(pages)}


@pytest.fixture
def crashed() -> Iterator[Callable[[ExactlyOnceWriter], None]]:
    """Writers that nobody closes until the test is over; their rows are on the server."""
    left: list[ExactlyOnceWriter] = []

    def crash(writer: ExactlyOnceWriter) -> None:
        writer.flush()
        left.append(writer)

    yield crash
    for writer in left:
        writer.close()


Crash = Callable[[ExactlyOnceWriter], None]

# -- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", UNDOS)
def test_a_restart_from_a_checkpoint_takes_back_what_came_after(
    conn: Connection, crashed: Crash, undo: Literal["server", "client"]
) -> None:
    table = counts(conn, properties=DELETES)
    first = table.exactly_once_writer("job")
    first.write(views(1, 2, 3))
    kept = first.checkpoint().to_bytes()
    first.write(views(2, 3, 4, 99, each=10))
    crashed(first)
    assert rows_of(table) == {1: 1, 2: 11, 3: 11, 4: 10, 99: 10}
    with table.exactly_once_writer(state=kept, undo=undo) as second:
        assert rows_of(table) == {1: 1, 2: 1, 3: 1}
        assert rows_of(table, "top") == {1: 1, 2: 2, 3: 3}
        assert second.undone is not None
        assert (second.undone.keys, second.undone.buckets_done) == (4, 3)
        assert (second.epoch, second.producer_id) == (2, "job")
        second.write(views(2, each=5))
    assert rows_of(table) == {1: 1, 2: 6, 3: 1}


def test_a_restart_before_the_first_checkpoint_begins_anew(
    conn: Connection, crashed: Crash
) -> None:
    table = counts(conn)
    upsert(table, views(1, 2, each=100))
    for _ in range(3):
        writer = table.exactly_once_writer("job")
        writer.write(views(1, 2, 3))
        crashed(writer)
    writer = table.exactly_once_writer("job")
    writer.write(views(1, 2, 3))
    writer.release()
    assert rows_of(table) == {1: 101, 2: 101, 3: 1}


def test_a_restart_without_the_state_that_was_kept_is_refused(
    conn: Connection, crashed: Crash
) -> None:
    table = counts(conn)
    writer = table.exactly_once_writer("job")
    writer.write(views(1))
    writer.checkpoint()
    writer.checkpoint()  # the caller came back, so it has the first one
    crashed(writer)
    with pytest.raises(ProducerStateError, match="job"):
        table.exactly_once_writer("job")
    assert rows_of(table) == {1: 1}


def test_every_checkpoint_can_be_restored_again_and_again(conn: Connection, crashed: Crash) -> None:
    table = counts(conn)
    kept: ProducerState | None = None
    for step in range(1, 5):
        for _ in range(2):  # the first attempt of each step crashes
            writer = table.exactly_once_writer(
                *(["job"] if kept is None else []), state=kept, ttl="1min"
            )
            writer.write(views(1, 2, step, each=step))
            crashed(writer)
        kept = writer.checkpoint()
        assert kept.checkpoint == step
    assert rows_of(table)[1] == 1 + 1 + 2 + 3 + 4


def test_random_crashes_and_undos_of_both_kinds_leave_the_right_sums(
    conn: Connection, crashed: Crash
) -> None:
    choose = random.Random(5)
    table = counts(conn, DAYS, properties=DELETES, partition_keys=["day"])
    events = [(choose.randrange(8), f"d{i // 60}", choose.randrange(-5, 9)) for i in range(240)]
    kept, done = None, 0
    while done < len(events):
        writer = table.exactly_once_writer(
            "job" if kept is None else None, state=kept, undo=choose.choice(UNDOS)
        )
        position = done
        while position < len(events) and (choose.random() < 0.8 or position == done):
            page, day, number = events[position]
            writer.write({"page": [page], "day": [day], "views": [number]})
            position += 1
            if choose.random() < 0.2 or position == len(events):
                kept, done = writer.checkpoint(), position
        crashed(writer)
    expected: dict[tuple[int, str], int] = {}
    for page, day, number in events:
        expected[page, day] = expected.get((page, day), 0) + number
    found = table.scan().to_arrow().to_pylist()
    assert {(row["page"], row["day"]): row["views"] for row in found} == expected


@pytest.mark.parametrize("undo", UNDOS)
def test_partitions_that_came_and_went_since_the_checkpoint(
    conn: Connection, crashed: Crash, undo: Literal["server", "client"]
) -> None:
    table = counts(conn, DAYS, properties=DELETES, partition_keys=["day"], bucket_count=2)

    def day(name: str, *pages: int) -> dict[str, Any]:
        return {"page": pages, "day": [name] * len(pages), "views": [1] * len(pages)}

    writer = table.exactly_once_writer("job")
    writer.write(day("old", 1, 2))
    writer.write(day("kept", 3))
    kept = writer.checkpoint()
    writer.write(day("new", 4, 5, 6))
    writer.write(day("kept", 3, 7))
    crashed(writer)
    conn.admin.drop_partition(table.path, "old")
    table.exactly_once_writer(state=kept, undo=undo).close()
    assert rows_of(table) == {3: 1}


def test_a_writer_of_whole_rows_gets_columns_that_the_table_got(
    conn: Connection, crashed: Crash
) -> None:
    table = counts(conn, "page INT, views BIGINT NOT NULL SUM, PRIMARY KEY (page)")
    writer = table.exactly_once_writer("job")
    writer.write({"page": [1], "views": [1]})
    kept = writer.checkpoint().to_bytes()
    writer.write({"page": [1, 2], "views": [10, 10]})
    crashed(writer)
    conn.admin.alter_table(table.path, add_columns="top INT MAX")
    table = conn.table(table.path)
    with table.exactly_once_writer(state=kept) as writer:
        assert writer.columns == ("page", "views", "top")
        writer.write({"page": [1], "views": [1], "top": [5]})
    assert table.scan().to_arrow().to_pylist() == [{"page": 1, "views": 2, "top": 5}]


@pytest.mark.parametrize("undo", UNDOS)
def test_a_table_without_merge_engine_is_undone_too(
    conn: Connection, crashed: Crash, undo: Literal["server", "client"]
) -> None:
    schema = "page INT, views BIGINT, PRIMARY KEY (page)"
    table = create_table(conn, schema, properties={"table.column-lock.enabled": "true"})
    upsert(table, {"page": [1, 2], "views": [1, 2]})
    writer = table.exactly_once_writer("job")
    kept = writer.checkpoint()
    writer.write({"page": [1, 1, 3], "views": [5, 6, 7]})
    writer.delete({"page": [2]})
    crashed(writer)
    assert rows_of(table) == {1: 6, 3: 7}
    table.exactly_once_writer(state=kept, undo=undo).release()
    assert rows_of(table) == {1: 1, 2: 2}


def test_a_table_that_was_created_again_takes_no_state_of_the_old_one(conn: Connection) -> None:
    table = counts(conn)
    with table.exactly_once_writer("job") as writer:
        kept = writer.checkpoint()
    conn.admin.drop_table(table.path)
    conn.admin.create_table(table.path, COUNTS, bucket_count=3, properties=AGGREGATION)
    with pytest.raises(ProducerStateError, match="dropped and created again"):
        conn.table(table.path).exactly_once_writer(state=kept)


@pytest.mark.parametrize("undo", UNDOS)
def test_a_checkpoint_beyond_the_end_of_a_changelog_touches_nothing(
    conn: Connection, crashed: Crash, undo: Literal["server", "client"]
) -> None:
    table = counts(conn, bucket_count=1, properties=DELETES)
    writer = table.exactly_once_writer("job")
    writer.write(views(1))
    kept = writer.checkpoint()
    crashed(writer)
    bucket = TableBucket(table.info.table_id, None, 0)
    wrong = ProducerState.from_bytes(kept.to_bytes())
    object.__setattr__(wrong, "offsets", {bucket: 1_000})
    with pytest.raises(UndoImpossibleError, match="1000"):
        table.exactly_once_writer(state=wrong, undo=undo)
    assert rows_of(table) == {1: 1}


def test_a_server_that_was_killed_knows_producers_and_their_batches(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server()
    with zufluss.connect(server.bootstrap) as conn:
        table = counts(conn)
        writer = table.exactly_once_writer("job")
        writer.write(views(1, 2))
        kept = writer.checkpoint()
        server.kill()
        server.start()
        writer.write(views(1, 2))
        writer.flush()
        assert rows_of(table) == {1: 2, 2: 2}
        server.kill()
        server.start()
        with pytest.raises(ColumnLockedError, match="job"):
            upsert(table, views(1))
        with table.exactly_once_writer(state=kept) as again:
            assert rows_of(table) == {1: 1, 2: 1}
            again.write(views(1))
        writer.write(views(1))
        with pytest.raises(ProducerFencedError):
            writer.close()
        assert rows_of(table) == {1: 2, 2: 1}


# -- others --------------------------------------------------------------------------------------


def test_a_writer_that_was_replaced_writes_nothing_and_says_why(conn: Connection) -> None:
    table = counts(conn)
    old = table.exactly_once_writer("job")
    old.write(views(1))
    with table.exactly_once_writer("job") as new:
        with pytest.raises(ProducerFencedError, match="epoch 2"):
            old.flush()
        with pytest.raises(ProducerFencedError):
            old.checkpoint()
        new.write(views(2))
    old.close()
    assert rows_of(table) == {2: 1}


def test_nobody_else_writes_the_columns_of_a_producer_until_it_is_released(
    conn: Connection,
) -> None:
    table = counts(conn)
    owner = table.exactly_once_writer("owner", ["page", "views"])
    with pytest.raises(ColumnLockedError, match="owner"):
        table.exactly_once_writer("other")
    with pytest.raises(ColumnLockedError, match="zufluss producer drop"):
        upsert(table, views(1))
    with table.exactly_once_writer("other", ["page", "top"]) as other:
        other.write(views(1))
    owner.release()
    with table.exactly_once_writer("third", ["page", "views"]) as third:
        third.write(views(1))
    assert table.lookup(1) == {"page": 1, "views": 1, "top": 1}


@pytest.mark.parametrize("undo", UNDOS)
def test_an_undo_leaves_the_columns_of_others_alone(
    conn: Connection, crashed: Crash, undo: Literal["server", "client"]
) -> None:
    table = counts(conn, properties=DELETES)
    mine = table.exactly_once_writer("mine", ["page", "views"])
    other = table.exactly_once_writer("other", ["page", "top"])
    mine.write(views(1))
    kept = mine.checkpoint()
    mine.write(views(1, 2, 3, each=10))  # 2 is updated by the other one, 3 is not
    mine.flush()
    other.write({"page": [1, 2, 4], "top": [7, 8, 9]})
    other.flush()
    mine.write(views(4, each=10))
    crashed(mine)
    table.exactly_once_writer(state=kept, undo=undo).close()
    other.close()
    assert rows_of(table) == {1: 1, 2: None, 4: None}
    assert rows_of(table, "top") == {1: 7, 2: 8, 4: 9}


@pytest.mark.parametrize("behavior", ["IGNORE", "DISABLE"])
@pytest.mark.parametrize("undo", UNDOS)
def test_an_undo_takes_back_new_rows_where_nobody_may_delete(
    conn: Connection, crashed: Crash, undo: Literal["server", "client"], behavior: str
) -> None:
    table = counts(conn, properties={"table.delete.behavior": behavior})
    upsert(table, views(1))
    writer = table.exactly_once_writer("job")
    writer.write(views(1, 2))
    crashed(writer)
    table.exactly_once_writer("job", undo=undo).release()
    assert rows_of(table) == {1: 1}


def test_producers_that_share_a_column_undo_their_own_part(
    conn: Connection, crashed: Crash
) -> None:
    shared = {"table.column-lock.enabled": "false"}
    table = counts(conn, "page INT, views BIGINT SUM, PRIMARY KEY (page)", properties=shared)

    def add(page: int, number: int) -> dict[str, list[int]]:
        return {"page": [page], "views": [number]}

    one = table.exactly_once_writer("one")
    other = table.exactly_once_writer("other")
    assert not one.exclusive
    one.write(add(1, 1))
    kept = one.checkpoint()
    one.write(add(1, 10))
    one.flush()
    other.write(add(1, 100))
    other.flush()
    one.write(add(1, 10))
    crashed(one)
    with pytest.raises(ProducerStateError, match="shares its columns"):
        table.exactly_once_writer(state=kept, undo="client")
    table.exactly_once_writer(state=kept).close()
    other.close()
    assert rows_of(table) == {1: 101}


def test_a_producer_that_was_dropped_or_released_has_no_state_to_come_back_to(
    conn: Connection,
) -> None:
    table = counts(conn)
    with table.exactly_once_writer("job") as writer:
        kept = writer.checkpoint()
        writer.release()
    with pytest.raises(ProducerNotFoundError, match="job"):
        table.exactly_once_writer(state=kept)


def test_a_silent_producer_loses_its_columns_after_its_time(conn: Connection) -> None:
    table = counts(conn)
    silent = table.exactly_once_writer("silent", ttl=1)
    conn._thread.run(silent._twin._producer.stop())
    deadline = time.monotonic() + 60
    while True:
        try:
            following = table.exactly_once_writer("next")
            break
        except ColumnLockedError:
            assert time.monotonic() < deadline
    silent.write(views(1))
    with pytest.raises(ProducerFencedError):
        silent.close()
    following.write(views(2))
    following.release()
    with pytest.raises(ProducerFencedError):
        table.exactly_once_writer("silent")
    assert rows_of(table) == {2: 1}


# -- checkpoints with a number, tasks ------------------------------------------------------------


def test_a_checkpoint_with_a_number_needs_no_state(conn: Connection, crashed: Crash) -> None:
    table = counts(conn)
    for batch in range(1, 4):
        for _ in range(2):
            writer = table.exactly_once_writer("stream")
            assert writer.last_checkpoint_id == (batch - 1 or None)
            writer.write(views(1, batch))
            crashed(writer)
        writer.checkpoint(checkpoint_id=batch)
    assert rows_of(table) == {1: 4, 2: 1, 3: 1}


def run_task(bootstrap: str, path: str, handle: bytes, task: int) -> dict[TableBucket, int]:
    with zufluss.connect(bootstrap) as conn:
        found: ProducerHandle = pickle.loads(handle)
        with conn.table(path).producer_writer(found, task) as writer:
            for page in range(50):
                writer.write(views(page, page + 1))
            return dict(writer.finish())


def test_tasks_that_are_run_again_count_once(conn: Connection, dev_server: DevServer) -> None:
    table = counts(conn)
    driver = table.exactly_once_writer("job")
    handle = pickle.dumps(driver.handle)
    for task in (0, 1, 0, 1):
        run_task(dev_server.bootstrap, str(table.path), handle, task)
    kept = driver.checkpoint()
    assert sum(rows_of(table).values()) == 200
    run_task(dev_server.bootstrap, str(table.path), handle, 2)
    driver.close()
    table.exactly_once_writer(state=kept).release()
    assert sum(rows_of(table).values()) == 200


def test_a_driver_takes_the_offsets_of_its_tasks(conn: Connection, dev_server: DevServer) -> None:
    table = counts(conn)
    driver = table.exactly_once_writer("job")
    handle = pickle.dumps(driver.handle)
    ended = run_task(dev_server.bootstrap, str(table.path), handle, 0)
    kept = driver.checkpoint(tasks=[ended])
    assert kept.offsets == conn.admin.list_all_offsets(table.path)
    driver.close()
    with table.exactly_once_writer(state=kept) as again:
        assert again.undone is not None
        assert again.undone.keys == 0


def test_a_task_of_an_epoch_that_is_over_is_fenced(conn: Connection) -> None:
    table = counts(conn)
    with table.exactly_once_writer("job") as old:
        handle = old.handle
    with table.exactly_once_writer("job"):
        writer = table.producer_writer(handle, 0)
        writer.write(views(1))
        with pytest.raises(ProducerFencedError):
            writer.finish()
    assert rows_of(table) == {}


def test_tasks_append_to_a_log_once(conn: Connection) -> None:
    table = create_table(conn, "id BIGINT", bucket_count=3)
    handle = table.append_producer("load-1")
    assert table.append_producer("load-1").number == handle.number
    assert table.append_producer().number != handle.number
    for task in (0, 1, 1, 0):
        with table.producer_writer(handle, task) as writer:
            for step in range(4):
                first = task * 1000 + step * 10
                writer.write({"id": list(range(first, first + 10))})
                writer.flush()
    found = sorted(table.scan().to_arrow()["id"].to_pylist())
    assert found == [*range(40), *range(1000, 1040)]


# -- merge modes ---------------------------------------------------------------------------------


def test_rows_are_overwritten_taken_back_and_merged_as_states(conn: Connection) -> None:
    table = counts(conn)
    upsert(table, views(1, 2, each=5))
    with table.upsert(["page", "views"], merge_mode="retract") as writer:
        writer.write(views(1, each=2))
    with table.upsert(merge_mode="merge_state") as writer:
        writer.write(views(2, each=2))
    with table.upsert(merge_mode="overwrite") as writer:
        writer.write({"page": [3], "views": [9], "top": [9]})
        writer.write({"page": [3], "views": [1], "top": [1]})
    assert rows_of(table) == {1: 3, 2: 7, 3: 1}
    writer = table.upsert(merge_mode="retract")
    writer.write(views(1))
    with pytest.raises(AggregationError, match="top"):
        writer.close()


def test_inputs_that_are_aggregated_before_give_the_same(conn: Connection) -> None:
    choose = random.Random(3)
    schema = (
        "page INT, n BIGINT COUNT, s BIGINT SUM, top INT MAX, names STRING LISTAGG,"
        " first STRING FIRST_VALUE_IGNORE_NULLS, PRIMARY KEY (page)"
    )
    rows = [
        {
            "page": choose.randrange(5),
            "n": 1 if choose.random() < 0.7 else None,
            "s": choose.randrange(100),
            "top": choose.randrange(100),
            "first": choose.choice(["a", None, "b"]),
            "names": choose.choice("xyz"),
        }
        for _ in range(300)
    ]
    plain, folded = counts(conn, schema), counts(conn, schema)
    upsert(plain, rows)
    with folded.upsert(pre_aggregate=True) as writer:
        writer.write(rows[:100])
    with folded.exactly_once_writer(pre_aggregate=True) as writer:
        writer.write(rows[100:])
        with pytest.raises(zufluss.errors.ZuflussError, match="without pre_aggregate"):
            writer.delete({"page": [1]})
    keys = list(range(5))
    assert folded.lookup(keys).to_pylist() == plain.lookup(keys).to_pylist()


def test_an_added_column_belongs_to_the_producer_of_all_columns(
    conn: Connection, crashed: Callable[[ExactlyOnceWriter], None]
) -> None:
    """Otherwise others could write it, and the next undo would remove their values."""
    table = counts(conn)
    writer = table.exactly_once_writer("p")
    writer.write(views(1))
    state = writer.checkpoint()
    note = Column("note", parse_type("STRING"), agg_function=AggFunction.named("last_value", {}))
    conn.admin.alter_table(table.path, add_columns=[note])
    writer.write(views(1, 2))
    crashed(writer)
    altered = conn.table(table.path)
    with altered.upsert(["page", "note"]) as others:
        others.write({"page": [1], "note": ["mine"]})
        with pytest.raises(ColumnLockedError, match="note"):
            others.flush()
    with pytest.raises(ColumnLockedError, match="note"):
        altered.exactly_once_writer("q", columns=["page", "note"])
    with altered.exactly_once_writer(state=state) as again:
        assert rows_of(altered) == {1: 1}
        again.write({"page": [1], "views": [5], "top": [1], "note": ["own"]})
        again.flush()
        assert rows_of(altered, "note") == {1: "own"}


def test_deletes_are_undone_too(conn: Connection, crashed: Crash) -> None:
    table = counts(conn, properties=DELETES)
    upsert(table, views(1, 2, 3))
    delete(table, views(3))
    for undo in UNDOS:
        writer = table.exactly_once_writer(f"job-{undo}")
        kept = writer.checkpoint()
        writer.delete({"page": [1, 2]})
        writer.write(views(2, 3))
        crashed(writer)
        table.exactly_once_writer(state=kept, undo=undo).release()
        assert rows_of(table) == {1: 1, 2: 1}
