"""Two jobs on one table, fenced writers, lost acknowledgements, and the ownership of columns."""

from __future__ import annotations

import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.counts import rounds
from tests.end_to_end.aggregation.job import Work, job
from tests.end_to_end.aggregation.producers import HOUR_MS, Epoch, init
from tests.end_to_end.aggregation.recovery import (
    DELETES,
    EVERY_FUNCTION,
    SHARED,
    SUM,
    VIEWS,
    column_of,
    create,
    metric,
    paused,
    put_plain,
    rows_of,
    views,
    without_crash,
)
from tests.end_to_end.kv import PUT_VERSION, put_request
from tests.end_to_end.raw import RawClient
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ColumnLockedError,
    ErrorCode,
    InvalidTargetColumnError,
    ProducerFencedError,
    ZuflussError,
)
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

PUTS_MAX = 5_000
"""A sequence number that no fenced writer reaches."""


def adds(pages: dict[int, int]) -> dict[str, list[int]]:
    return {"page": [*pages], "views": [*pages.values()]}


# -- two jobs on one table -----------------------------------------------------------------------


@pytest.mark.parametrize("undo", ["server", "client"])
def test_of_two_jobs_with_their_own_columns_one_crashes_and_the_other_keeps_all(
    conn: Connection, undo: Any
) -> None:
    table = create(conn, properties=DELETES)
    mine = table.exactly_once_writer("mine", ["page", "views"])
    other = table.exactly_once_writer("other", ["page", "top"])
    other.write({"page": [1, 5], "top": [1, 5]})
    other.flush()
    mine.write(adds({1: 1, 2: 1}))
    kept = mine.checkpoint()
    mine.write(adds({1: 10, 2: 10, 3: 10, 4: 10, 5: 10}))
    mine.flush()
    other.write({"page": [1, 3, 6], "top": [7, 8, 9]})  # 3 was inserted by the one that crashes
    other.flush()
    mine.write(adds({3: 10, 6: 10, 7: 10}))
    mine.flush()
    again = table.exactly_once_writer(state=kept, undo=undo)
    assert column_of(table, "top") == {1: 7, 2: None, 3: 8, 5: 5, 6: 9}
    assert column_of(table, "views") == {1: 1, 2: 1, 3: None, 5: None, 6: None}
    other.write({"page": [2, 3], "top": [20, 3]})
    other.close()
    again.close()
    mine.close()
    assert column_of(table, "top") == {1: 7, 2: 20, 3: 8, 5: 5, 6: 9}, (
        "the other one was not fenced"
    )


def test_both_jobs_crash_in_any_order_and_replay_what_they_have_to(
    conn: Connection, rng: random.Random
) -> None:
    for _ in range(rounds(2, 30)):
        table = create(conn, buckets=2)
        jobs = {"views": adds_views, "top": adds_top}
        writers = {name: table.exactly_once_writer(name, ["page", name]) for name in jobs}
        left = [*writers.values()]
        kept: dict[str, Any] = dict.fromkeys(jobs)
        position = dict.fromkeys(jobs, 0)
        done = dict.fromkeys(jobs, 0)
        inputs = {name: [rng.randrange(1, 9) for _ in range(40)] for name in jobs}
        while min(done.values()) < 40:
            name = rng.choice([*jobs])
            choice = rng.random()
            if choice < 0.15:
                writers[name].flush()
                given = {"state": kept[name]} if kept[name] else {"producer_id": name}
                writers[name] = table.exactly_once_writer(columns=["page", name], **given)
                left.append(writers[name])
                position[name] = done[name]
            elif choice < 0.3 or position[name] == 40:
                kept[name], done[name] = writers[name].checkpoint(), position[name]
            else:
                writers[name].write(jobs[name](position[name], inputs[name]))
                position[name] += 1
        for writer in left:
            writer.close()
        assert column_of(table, "views") == summed(inputs["views"])
        assert column_of(table, "top") == highest(inputs["top"])


def adds_views(position: int, inputs: list[int]) -> dict[str, list[int]]:
    return {"page": [position % 7], "views": [inputs[position]]}


def adds_top(position: int, inputs: list[int]) -> dict[str, list[int]]:
    return {"page": [position % 7], "top": [inputs[position]]}


def summed(inputs: list[int]) -> dict[int, int]:
    return {page: sum(inputs[page::7]) for page in range(7)}


def highest(inputs: list[int]) -> dict[int, int]:
    return {page: max(inputs[page::7]) for page in range(7)}


def test_a_second_job_on_the_same_sum_is_refused_by_the_lock(conn: Connection) -> None:
    table = create(conn)
    with table.exactly_once_writer("first", ["page", "views"]) as first:
        first.write(adds({1: 1}))
        first.flush()
        with pytest.raises(ColumnLockedError, match=r"'first' owns the columns views .* \d+ ms"):
            table.exactly_once_writer("second")
        with pytest.raises(ColumnLockedError, match="zufluss producer drop"):
            put_plain(table, views(1))
        with pytest.raises(ColumnLockedError, match="first"):
            put_plain(table, adds({1: 1}), columns=["page", "views"])
        put_plain(table, {"page": [1], "top": [3]}, columns=["page", "top"])
    assert rows_of(table) == [{"page": 1, "views": 1, "top": 3}]


def test_in_shared_mode_the_contribution_of_one_survives_the_undo_of_the_other(
    conn: Connection, rng: random.Random
) -> None:
    schema = "page INT, views BIGINT SUM, cents DECIMAL(12, 2) SUM, n INT COUNT, PRIMARY KEY (page)"
    table = create(conn, schema, properties=SHARED)

    def rows(each: int) -> dict[str, list[Any]]:
        pages = [rng.randrange(6) for _ in range(5)]
        return {"page": pages, "views": [each] * 5, "cents": [each] * 5, "n": [each] * 5}

    def totals() -> tuple[int, int, int]:
        found = rows_of(table)
        return tuple(int(sum(row[c] or 0 for row in found)) for c in ("views", "cents", "n"))  # type: ignore[return-value]

    one, other = (table.exactly_once_writer(name) for name in ("one", "other"))
    assert not one.exclusive
    one.write(rows(1))
    kept = one.checkpoint()
    for _ in range(rounds(4, 40)):
        one.write(rows(1000))
        one.flush()
        other.write(rows(10))
        put_plain(table, rows(100))
        other.flush()
    left, steps = [one], rounds(4, 40)
    for _ in range(2):  # an undo that is done again takes nothing away twice
        left.append(table.exactly_once_writer(state=kept))
        expected = 5 * (1 + 10 * steps + 100 * steps)
        assert totals() == (expected, expected, 5 * (1 + 2 * steps))
    other.write(rows(10))
    left[-1].write(rows(1000))
    for writer in (other, *left):
        writer.close()
    assert totals()[0] == expected + 50 + 5000


# -- fenced writers ------------------------------------------------------------------------------


def test_a_writer_that_was_asleep_gets_fenced_and_counts_nothing(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random
) -> None:
    for number in range(rounds(1, 10)):
        table = create(conn, EVERY_FUNCTION)
        kept = tmp_path / f"zombie{number}"
        seed = rng.randrange(1 << 30)
        first = Work(server.bootstrap, str(table.path), kept, seed, 1 << 30, ttl="10min")
        with job(replace(first, checkpoints=1.0)) as running:
            running.until("kept")
        zombie = replace(first, checkpoints=0.0)  # it does nothing but write
        fenced = metric(server, "zufluss_producer_puts_fenced_total")
        with job(zombie, rng.randrange(1 << 30)) as old:
            for _ in range(rng.randrange(1, 20)):
                old.until("wrote")
            with paused(old.pid):
                shutil.copy(kept, kept.with_suffix(".copy"))
                work = replace(zombie, kept=kept.with_suffix(".copy"))
                work = replace(work, count=work.position + 30)
                with job(work, 1) as new:
                    assert new.until("done") == "done"
                after = rows_of(table)
            assert after == without_crash(conn, seed, work.count)
            assert old.until("failed") == "failed ProducerFencedError"
        assert metric(server, "zufluss_producer_puts_fenced_total") > fenced
        assert rows_of(table) == after


def test_a_put_that_was_under_way_when_the_epoch_began_is_undone_or_fenced(
    conn: Connection, server: DevServer, raw: RawClient
) -> None:
    table = create(conn, SUM, buckets=1)
    for _ in range(rounds(5, 100)):
        epoch = Epoch.begin(raw, table)
        assert epoch.undo(0).done
        codes: list[ErrorCode] = []

        def write(epoch: Epoch = epoch, codes: list[ErrorCode] = codes) -> None:
            with RawClient(server.port) as own:
                mine = replace(epoch, raw=own)
                while not codes or (codes[-1] is ErrorCode.NONE and len(codes) < PUTS_MAX):
                    codes.append(mine.put((1, 1)))

        thread = threading.Thread(target=write)
        thread.start()
        eventually(lambda c=codes: len(c) > 2 or not thread.is_alive(), "puts")  # type: ignore[misc]  # noqa: B023
        assert set(codes[:3]) == {ErrorCode.NONE}
        following = Epoch.begin(raw, table)
        answer = following.undo(0)
        thread.join()
        assert answer.done
        assert codes[-1] is ErrorCode.PRODUCER_FENCED
        assert rows_of(table) == [], "nothing of the old epoch is there, whenever it was sent"


# -- repeated batches ----------------------------------------------------------------------------


def test_the_same_batch_sent_again_is_applied_once(
    conn: Connection, server: DevServer, raw: RawClient
) -> None:
    table = create(conn, SUM, buckets=1)
    epoch = Epoch.begin(raw, table)
    for sequence in range(8):
        for _ in range(3):
            assert epoch.send((1, 1), sequence=sequence) is ErrorCode.NONE
    assert rows_of(table) == [{"page": 1, "views": 8}]
    assert epoch.send((1, 1), sequence=0) is ErrorCode.NONE, "long acknowledged, and still known"
    assert epoch.send((1, 1), sequence=9) is not ErrorCode.NONE, "a gap"
    with RawClient(server.port) as other:  # both at once, on two connections
        data = epoch.batch((1, 1), sequence=8)
        sent = [(c, c.begin(*put_frame(table, data))) for c in (raw, other)]
        for connection, request_id in sent:
            assert connection.answer(request_id).error is None
    assert epoch.send((1, 1), sequence=0, task=1) is ErrorCode.NONE, "another task is another one"
    assert rows_of(table) == [{"page": 1, "views": 10}]


def put_frame(table: Table, data: bytes) -> tuple[Any, ...]:
    return ApiKey.PUT_KV, put_request(table.info.table_id, data), PUT_VERSION


# -- ownership of columns ------------------------------------------------------------------------


def refusal(raw: RawClient, table: Table, producer_id: str) -> ZuflussError | None:
    try:
        init(raw, table, producer_id)
    except ZuflussError as problem:
        return problem
    return None


def test_a_lock_is_over_after_its_time_without_renewal_and_then_for_good(
    conn: Connection, raw: RawClient
) -> None:
    table = create(conn, SUM, buckets=1)
    old = Epoch.begin(raw, table, "old", ttl_ms=200)
    assert old.put((1, 1)) is ErrorCode.NONE
    eventually(lambda: refusal(raw, table, "new") is None, "the end of the lock")
    assert old.put((1, 1)) is ErrorCode.PRODUCER_FENCED
    with pytest.raises(ProducerFencedError, match="another one has taken columns"):
        init(raw, table, "old")
    (lost,) = [p for p in conn.admin.list_producers(table.path) if p.lost]
    assert lost.producer_id == "old"
    assert column_of(table) == {1: 1}, "what it wrote stays"


def test_a_lock_is_renewed_by_writes_alone(conn: Connection, raw: RawClient) -> None:
    for ttl in (0.4, 2.0, 10.0):
        table = create(conn, SUM, buckets=1)
        began = time.monotonic()
        owner = Epoch.begin(raw, table, "owner", ttl_ms=int(ttl * 1000))
        proven = False
        while not proven and (sent := time.monotonic()):
            code = owner.put((1, 1))
            problem = refusal(raw, table, "rival")
            if code is not ErrorCode.NONE or time.monotonic() - sent >= ttl:
                break  # this machine was too slow for so short a time
            assert isinstance(problem, ColumnLockedError), problem
            proven = sent - began > 2 * ttl
        if proven:
            return
    pytest.fail("no time was long enough")


def test_a_clean_stop_releases_and_a_close_does_not(conn: Connection) -> None:
    table = create(conn)
    with table.exactly_once_writer("first") as first:
        first.write(views(1))
    with pytest.raises(ColumnLockedError, match="first"):
        table.exactly_once_writer("second")
    with table.exactly_once_writer("first") as first:
        first.write(views(1))
        first.release()
    with table.exactly_once_writer("second") as second:
        second.write(views(1))
        second.release()
    put_plain(table, views(1))
    assert conn.admin.list_producers(table.path) == []
    assert column_of(table) == {1: 3}


def test_each_takeover_bumps_the_epoch_and_fences_the_one_before(
    conn: Connection, raw: RawClient
) -> None:
    table = create(conn, SUM, buckets=1)
    epochs = [Epoch.begin(raw, table)]
    for number in range(2, 6):
        epochs.append(Epoch.begin(raw, table))
        assert (epochs[-1].epoch, epochs[-1].number) == (number, epochs[0].number)
        assert epochs[-1].put((1, 1)) is ErrorCode.NONE
        for before in epochs[:-1]:
            assert before.put((1, 100)) is ErrorCode.PRODUCER_FENCED
    conn.admin.drop_producer(table.path, "job")
    assert epochs[-1].put((1, 100)) is ErrorCode.PRODUCER_FENCED
    another = Epoch.begin(raw, table)
    assert another.number != epochs[0].number
    assert column_of(table) == {1: 4}


@pytest.mark.parametrize(
    ("column_ids", "message"),
    [((99,), "column id 99 .* unknown"), ((1, -1), "column id -1"), ((0,), "of the key")],
)
def test_an_unknown_column_id_is_refused(
    conn: Connection, raw: RawClient, column_ids: tuple[int, ...], message: str
) -> None:
    table = create(conn, VIEWS, buckets=1)
    with pytest.raises(InvalidTargetColumnError, match=message):
        init(raw, table, "job", column_ids)
    assert conn.admin.list_producers(table.path) == []


def test_a_column_that_it_does_not_own_is_refused_at_the_put(
    conn: Connection, raw: RawClient
) -> None:
    table = create(conn, VIEWS, buckets=1)
    owner = Epoch.begin(raw, table, columns=(1,), ttl_ms=HOUR_MS)
    assert owner.put((1, 1, 1)) is ErrorCode.INVALID_TARGET_COLUMN
    owner.targets = (0, 1)
    assert owner.put((1, 1, None)) is ErrorCode.NONE
    assert column_of(table) == {1: 1}
