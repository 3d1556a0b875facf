"""The offsets an undo can begin at, and which batches it reads and skips."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c

import zufluss
from tests.conftest import SERVERS
from tests.counts import rounds
from tests.end_to_end.aggregation.producers import Epoch, init
from tests.end_to_end.aggregation.recovery import (
    DELETES,
    SUM,
    VIEWS,
    bucket_of,
    column_of,
    create,
    put_plain,
    rows_of,
    views,
    writers_of,
)
from tests.end_to_end.raw import RawClient
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client import ProducerState
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ErrorCode,
    ProducerNotFoundError,
    ProducerStateError,
    UndoImpossibleError,
)
from zufluss.model.producer import UNDO_TASK
from zufluss.model.table import TableBucket

UNDOS: list[Any] = ["server", "client"]
EAGER = {
    "log.segment.file-size": "1kb",
    "log.retention.check-interval": "10ms",
    "remote.log.task-interval-duration": "0",
    "kv.snapshot.interval": "20ms",
}
"""A server that removes changelogs as soon as it may."""
SHORT = {"table.log.ttl": "1ms"}


# -- changelogs that begin too late --------------------------------------------------------------


@pytest.fixture(scope="module")
def forgetful(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connection]:
    server = WarmServer(tmp_path_factory.mktemp("forgetful"), EAGER)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server, zufluss.connect(server.bootstrap) as conn:
        yield conn
    request.config.stash[SERVERS].remove(server)


def start_of(conn: Connection, table: Table) -> int:
    return conn.admin.list_offsets(table.path, "earliest")[0]


@pytest.mark.parametrize("undo", UNDOS)
def test_a_baseline_that_the_changelog_does_not_reach_back_to_is_refused(
    forgetful: Connection, undo: Any
) -> None:
    conn = forgetful
    table = create(conn, buckets=1, properties=SHORT | DELETES)
    bucket = bucket_of(table)
    writer = table.exactly_once_writer("job")
    states: list[ProducerState] = []
    while len(states) < 3 or start_of(conn, table) <= states[0].offsets[bucket]:
        writer.write(views(*range(20)))
        states.append(writer.checkpoint())
        assert start_of(conn, table) <= states[-2 if len(states) > 1 else 0].offsets[bucket]
    writer.write(views(1, 99, each=1000))
    writer.flush()
    before, first = rows_of(table), states[0].offsets[bucket]
    with pytest.raises(UndoImpossibleError) as refused:
        table.exactly_once_writer(state=states[0], undo=undo)
    found = re.findall(r"\d+", str(refused.value))
    assert str(first) in found, "where the undo was to begin"
    assert any(int(n) > first for n in found), "where the changelog begins"
    assert f"{table.info.path}, bucket 0" in str(refused.value)
    assert rows_of(table) == before
    second = table.exactly_once_writer(state=states[-1], undo=undo)
    assert column_of(table) == dict.fromkeys(range(20), len(states)), "the last one is there"
    second.release()
    writer.close()


def test_the_changelog_is_kept_for_who_has_no_checkpoint_yet(forgetful: Connection) -> None:
    conn = forgetful
    table, free = (create(conn, SUM, buckets=1, properties=SHORT) for _ in range(2))
    first = table.exactly_once_writer("job")
    for _ in range(rounds(40, 200)):
        first.write({"page": [*range(10)], "views": [1] * 10})
        first.flush()
        put_plain(free, {"page": [*range(10)], "views": [1] * 10})
    eventually(lambda: start_of(conn, free) > 100, "others' changelogs are forgotten")
    assert start_of(conn, table) == 0
    second = table.exactly_once_writer("job")
    assert rows_of(table) == []
    second.release()
    first.close()


# -- offsets and tables that do not fit ----------------------------------------------------------


@pytest.mark.parametrize("undo", UNDOS)
def test_a_baseline_above_the_end_is_refused_and_the_right_one_is_taken_after_it(
    conn: Connection, undo: Any
) -> None:
    table = create(conn, buckets=2, properties=DELETES)
    writer = table.exactly_once_writer("job")
    writer.write(views(1, 2, 3, 4))
    kept = writer.checkpoint()
    writer.write(views(1, 2, 3, 4, each=10))
    writer.flush()
    before = rows_of(table)
    wrong = replace(kept, offsets={**kept.offsets, bucket_of(table, 1): 1_000_000})
    with pytest.raises(UndoImpossibleError, match=r"bucket 1\b.*1000000"):
        table.exactly_once_writer(state=wrong, undo="client")
    assert rows_of(table) == before, "no bucket was touched"
    with pytest.raises(UndoImpossibleError, match=r"bucket 1\b.*1000000"):
        table.exactly_once_writer(state=wrong)
    assert {row["page"]: row for row in before if row in rows_of(table)}, "bucket 1 is as it was"
    table.exactly_once_writer(state=kept, undo=undo).release()
    assert column_of(table) == dict.fromkeys((1, 2, 3, 4), 1)
    writer.close()


def test_a_state_of_a_table_that_was_recreated_is_refused(conn: Connection, raw: RawClient) -> None:
    table = create(conn, SUM, buckets=1)
    with table.exactly_once_writer("job") as writer:
        writer.write({"page": [1], "views": [1]})
        kept = writer.checkpoint()
    properties = dict(table.info.descriptor.properties)
    conn.admin.drop_table(table.path)
    conn.admin.create_table(table.path, SUM, bucket_count=1, properties=properties)
    other = conn.table(table.path)
    put_plain(other, {"page": [1], "views": [7]})
    with pytest.raises(ProducerStateError, match=f"table id {kept.table_id}.*created again"):
        other.exactly_once_writer(state=kept)
    with pytest.raises(ProducerNotFoundError, match="no producer 'job'"):
        init(raw, other, restored={bucket_of(other): 1})
    fresh = Epoch.begin(raw, other)
    assert init(raw, other).epoch == fresh.epoch + 1
    with pytest.raises(ProducerStateError, match="dropped since"):
        other.exactly_once_writer(
            state=replace(kept, table_id=other.info.table_id, offsets={bucket_of(other): 0})
        )
    assert column_of(other) == {1: 7}


# -- states that are wrong -----------------------------------------------------------------------


def reversioned(state: ProducerState, version: object, **changed: object) -> bytes:
    """A state with another version number and a valid checksum."""
    document = json.loads(state.to_bytes()) | {"zufluss_producer_state": version} | changed
    del document["crc32c"]
    data = json.dumps(document, separators=(",", ":")).encode()
    return json.dumps(document | {"crc32c": crc32c(data)}, separators=(",", ":")).encode()


def moved(offsets: Mapping[TableBucket, int], by: int) -> dict[TableBucket, int]:
    return {bucket: offset + by for bucket, offset in offsets.items()}


def wrong_states(state: ProducerState) -> dict[str, tuple[Any, str]]:
    """Wrong states by their defect, with the expected message."""
    data = state.to_bytes()
    half = replace(state, offsets=dict([*state.offsets.items()][:1]))
    conflicting = replace(state, offsets=moved(state.offsets, 1))
    return {
        "empty": (b"", "is empty"),
        "no pieces": ([], "no state to merge"),
        "no offsets": (replace(state, offsets={}), "not complete"),
        "partial": (half, "not complete: .*bucket 1"),
        "partial pieces": ([half.to_bytes(), half], "not complete"),
        "conflicting": ([data, conflicting], "contradict each other"),
        "of two checkpoints": ([data, replace(state, checkpoint=2)], "belong together"),
        "of another table": (replace(state, table_id=state.table_id + 1_000), "another table"),
        "of another producer": (replace(state, producer_id="other"), "producer"),
        "an older form": (reversioned(state, 0), "version 0, this client reads 1"),
        "a newer form": (reversioned(state, 2), "version 2, this client reads 1"),
        "something missing": (reversioned(state, 1, column_ids=None), "lacks something"),
        "damaged": (data.replace(b'"epoch":1', b'"epoch":7'), "checksum"),
        "cut off": (data[:-9], "damaged"),
        "no state": (b'{"a": 1}', "zufluss_producer_state is missing"),
    }


def test_each_state_that_is_wrong_is_refused_and_the_writer_that_runs_goes_on(
    conn: Connection,
) -> None:
    table = create(conn, buckets=2)
    writer = table.exactly_once_writer("job")
    writer.write(views(1, 2, 3))
    kept = writer.checkpoint()
    writer.write(views(1, 2, 3))
    writer.flush()
    for what, (state, message) in wrong_states(kept).items():
        with pytest.raises((ProducerStateError, ProducerNotFoundError), match=message):
            print(what, table.exactly_once_writer("job", state=state))
    with pytest.raises(ProducerStateError, match="columns"):
        table.exactly_once_writer(columns=["page", "top"], state=kept)
    assert column_of(table) == dict.fromkeys((1, 2, 3), 2), "nothing was undone"
    writer.write(views(1))
    writer.flush()
    with table.exactly_once_writer(state=[kept.to_bytes(), kept]) as again:
        assert column_of(table) == dict.fromkeys((1, 2, 3), 1), "copies are one state"
        again.release()
    writer.close()


def test_offsets_that_do_not_fit_are_refused_by_the_server_too(
    conn: Connection, raw: RawClient
) -> None:
    table = create(conn, SUM, buckets=2)
    epoch = Epoch.begin(raw, table)
    there = {bucket_of(table, i): 0 for i in range(2)}
    for wrong in (
        {},
        {bucket_of(table, 0): 0},
        {**there, bucket_of(table, 2): 0},
        {**there, bucket_of(table, 1): -1},
        {TableBucket(table.info.table_id, 5, i): 0 for i in range(2)},
    ):
        with pytest.raises(ProducerStateError):
            init(raw, table, restored=wrong)
    assert init(raw, table, restored=there).epoch == epoch.epoch + 1, "no epoch was begun"


# -- the range of an undo ------------------------------------------------------------------------


@pytest.mark.parametrize("undo", UNDOS)
def test_a_range_with_empty_batches_and_those_of_others_is_undone_to_its_end(
    conn: Connection, raw: RawClient, undo: Any
) -> None:
    table = create(conn, buckets=1, properties=DELETES)
    first = table.exactly_once_writer("job", ["page", "views"])
    first.write({"page": [1], "views": [1]})
    kept = first.checkpoint()

    def nothing() -> None:
        first.delete({"page": [99]})
        first.flush()

    def others() -> None:
        put_plain(table, {"page": [1, 2], "top": [5, 6]}, columns=["page", "top"])

    def own() -> None:
        first.write({"page": [1, 3], "views": [10, 10]})
        first.flush()

    for step in (nothing, others, nothing, own, others, nothing, nothing):
        step()
    assert [h.record_count for h in raw.batches(table.info.table_id)].count(0) >= 4
    second = table.exactly_once_writer(state=kept, undo=undo)
    assert second.undone is not None
    assert second.undone.records == second.undone.records_read > 0
    assert rows_of(table) == [
        {"page": 1, "views": 1, "top": 5},
        {"page": 2, "views": None, "top": 6},
    ]
    second.close()
    first.close()


@pytest.mark.parametrize("undo", UNDOS)
def test_a_range_of_nothing_but_empty_batches_is_done(conn: Connection, undo: Any) -> None:
    table = create(conn, buckets=1, properties=DELETES)
    first = table.exactly_once_writer("job")
    first.write(views(1, each=0))
    kept = first.checkpoint()
    for _ in range(5):
        first.delete({"page": [99]})
        first.flush()
    second = table.exactly_once_writer(state=kept, undo=undo)
    assert second.undone is not None
    assert (second.undone.keys, second.undone.buckets_done) == (0, 1)
    assert column_of(table) == {1: 0}
    second.release()
    first.close()


def test_what_comes_at_or_after_the_captured_end_is_not_touched(
    conn: Connection, raw: RawClient
) -> None:
    table = create(conn, VIEWS, buckets=1)
    old = Epoch.begin(raw, table, columns=(1,))
    old.targets = (0, 1)
    assert old.put((1, 1, None), (2, 2, None)) is ErrorCode.NONE
    now = Epoch.begin(raw, table, columns=(1,))
    now.targets = (0, 1)
    end = raw.end_offset(table.info.table_id)
    answer = now.undo(0)
    assert (answer.done, answer.end_offset, answer.keys) == (True, end, 2)
    assert now.put((1, 7, None)) is ErrorCode.NONE
    put_plain(table, {"page": [2], "top": [2]}, columns=["page", "top"])
    again = now.undo(0)
    assert (again.done, again.end_offset, again.keys) == (True, end, 2), "it is done"
    with pytest.raises(ProducerStateError):
        now.undo(1)
    assert rows_of(table) == [
        {"page": 1, "views": 7, "top": None},
        {"page": 2, "views": None, "top": 2},
    ]
    undone = [w for w in writers_of(raw, table) if w is not None and w.task == UNDO_TASK]
    assert [w.epoch for w in undone] == [now.epoch] * len(undone)
