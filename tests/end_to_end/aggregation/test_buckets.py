"""Which buckets an undo covers, from which offset, and how often, whichever task wrote to them."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.counts import rounds
from tests.end_to_end.aggregation.job import Share, Work, task
from tests.end_to_end.aggregation.recovery import (
    DAYS,
    DELETES,
    EVERY_FUNCTION,
    column_of,
    columns_of,
    create,
    event,
    rows_of,
    undo_records,
    views,
    without_crash,
)
from tests.end_to_end.raw import RawClient
from tests.waiting import eventually
from zufluss.client import ProducerState
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.write import ExactlyOnceWriter
from zufluss.testing.server import DevServer

MANY = range(40)


def day(name: str, *pages: int) -> dict[str, Any]:
    return {"page": pages, "day": [name] * len(pages), "views": [1] * len(pages)}


def undone_buckets(server: DevServer, table_id: int, epoch: int) -> list[int]:
    """The buckets whose undos ended in an epoch, once per undo."""
    lines = [line for line in server.output if "undo_ended" in line and f"epoch={epoch} " in line]
    mine = [
        line.split(f"table {table_id}, bucket ")[1]
        for line in lines
        if f"'table {table_id}," in line
    ]
    return sorted(int(rest.split("'")[0]) for rest in mine)


# -- partitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", ["server", "client"])
def test_a_partition_newer_than_the_checkpoint_is_undone_from_its_beginning(
    conn: Connection, undo: Any
) -> None:
    table = create(conn, DAYS, buckets=2, partition_keys=["day"], properties=DELETES)
    first = table.exactly_once_writer("job")
    first.write(day("old", 1, 2))
    kept = first.checkpoint()
    first.write(day("old", 1))
    first.write(day("new", 3, 4, 5, 6))
    first.flush()
    first.write(day("new", 3))
    first.flush()
    (partition,) = [p for p in conn.admin.list_partitions(table.path) if p.name == "new"]
    assert partition.partition_id not in {b.partition_id for b in kept.offsets}
    second = table.exactly_once_writer(state=kept, undo=undo)
    assert column_of(table) == {1: 1, 2: 1}
    assert second.undone is not None
    assert (second.undone.buckets, second.undone.keys) == (4, 5)
    second.write(day("old", 1))
    second.write(day("new", 3, 4, 5, 6, 3))
    again = second.checkpoint()
    assert partition.partition_id in {b.partition_id for b in again.offsets}
    second.release()
    first.close()
    assert column_of(table) == {1: 2, 2: 1, 3: 2, 4: 1, 5: 1, 6: 1}


@pytest.mark.parametrize("undo", ["server", "client"])
def test_a_partition_that_was_dropped_since_is_skipped_also_when_it_came_back(
    conn: Connection, undo: Any
) -> None:
    table = create(conn, DAYS, buckets=2, partition_keys=["day"], properties=DELETES)
    first = table.exactly_once_writer("job")
    first.write(day("gone", 1, 2))
    first.write(day("back", 3))
    first.write(day("stays", 4))
    kept = first.checkpoint()
    first.write(day("gone", 1))
    first.write(day("back", 3))
    first.write(day("stays", 4))
    first.flush()
    conn.admin.drop_partition(table.path, "gone")
    conn.admin.drop_partition(table.path, "back")
    conn.admin.create_partition(table.path, "back")
    late = table.producer_writer(first.handle, 0)
    late.write(day("back", 3, 5))
    late.close()
    second = table.exactly_once_writer(state=kept, undo=undo)
    assert second.undone is not None
    assert second.undone.buckets == second.undone.buckets_done == 4
    assert column_of(table) == {4: 1}, "nothing of the new partition was in the checkpoint"
    there = {p.partition_id for p in conn.admin.list_partitions(table.path)}
    assert {b.partition_id for b in second.checkpoint().offsets} == there
    second.release()
    first.close()


# -- buckets without writes ----------------------------------------------------------------------


def test_a_bucket_untouched_since_the_checkpoint_costs_nothing_and_stays_in_the_next(
    conn: Connection, raw: RawClient
) -> None:
    table = create(conn, buckets=4)
    first = table.exactly_once_writer("job")
    first.write(views(*MANY))
    kept = first.checkpoint()
    first.write(views(7, each=10))
    first.flush()
    ends = conn.admin.list_all_offsets(table.path)
    (touched,) = [b for b, end in ends.items() if end != kept.offsets[b]]
    second = table.exactly_once_writer(state=kept)
    assert second.undone is not None
    assert (second.undone.keys, second.undone.records) == (1, 2)
    batches = {b.bucket_id: undo_records(raw, table, b.bucket_id) for b in ends}
    assert batches == {b.bucket_id: {2: 2} if b == touched else {} for b in ends}
    now = conn.admin.list_all_offsets(table.path)
    assert {b for b in now if now[b] != ends[b]} == {touched}, "nothing was written elsewhere"
    following = second.checkpoint()
    assert following.offsets == now
    assert set(following.offsets) == set(kept.offsets)
    second.release()
    first.close()
    assert column_of(table) == dict.fromkeys(MANY, 1)


# -- changing numbers of writers -----------------------------------------------------------------


def run_tasks(
    work: Work, driver: ExactlyOnceWriter, tasks: int, span: range, *, ends: bool
) -> None:
    """Run processes that each write the events of their keys, to their end or until killed."""
    shares = [
        Share(work, driver.handle, number, tasks, span.start, span.stop, ends)
        for number in range(tasks)
    ]
    with ExitStack() as stack:
        running = [stack.enter_context(task(share)) for share in shares]
        for each in running:
            line = each.until("done" if ends else "wrote")
            assert not line.startswith("failed"), line


def test_two_writers_then_four_then_one_and_every_bucket_is_undone_once(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random
) -> None:
    count = rounds(24, 120)
    table = create(conn, EVERY_FUNCTION, buckets=5)
    work = Work(server.bootstrap, str(table.path), tmp_path, rng.randrange(1 << 30), 3 * count)
    drivers = [table.exactly_once_writer("job")]
    run_tasks(work, drivers[0], 2, range(count), ends=True)
    first = drivers[0].checkpoint()
    run_tasks(work, drivers[0], 2, range(count, 2 * count), ends=False)

    drivers.append(table.exactly_once_writer(state=pieces_of(first, 2)))
    assert rows_of(table) == without_crash(conn, work.seed, count)
    run_tasks(work, drivers[1], 4, range(count, 2 * count), ends=True)
    second = drivers[1].checkpoint()
    run_tasks(work, drivers[1], 4, range(2 * count, 3 * count), ends=False)

    drivers.append(table.exactly_once_writer(state=pieces_of(second, 4)))
    assert rows_of(table) == without_crash(conn, work.seed, 2 * count)
    for position in range(2 * count, 3 * count):
        drivers[2].write(columns_of([event(work.seed, position)]))
    drivers[2].release()
    assert rows_of(table) == without_crash(conn, work.seed, 3 * count)

    table_id = table.info.table_id
    for epoch in (2, 3):
        eventually(lambda e=epoch: len(undone_buckets(server, table_id, e)) >= 5, "undo")  # type: ignore[misc]
        assert undone_buckets(server, table_id, epoch) == [*range(5)]
    for driver in drivers[:2]:
        driver.close()


def pieces_of(state: ProducerState, count: int) -> list[bytes]:
    """A state in parts, as tasks keep it: each part has some buckets."""
    buckets = sorted(state.offsets, key=lambda b: b.bucket_id)
    return [
        replace(state, offsets={b: state.offsets[b] for b in buckets[i::count]}).to_bytes()
        for i in range(count)
    ]
