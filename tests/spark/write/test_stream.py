"""Micro-batches as Spark has them written, step by step and without Spark, so that any can be last.

A `Query` has a checkpoint, by whose id its micro-batches are known. `run` does what Spark does with
one of them, up to the step where its driver dies.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.spark.sinks import AGGREGATION, ROWS, log_rows, state, struct
from zufluss.client.sync.connection import Connection
from zufluss.errors import ConfigError, ProducerFencedError, ProducerStateError
from zufluss.spark.source_options import parse_options
from zufluss.spark.write import stream as stream_writer
from zufluss.spark.write.stream import checkpoint_of, make_stream_writer, txn_of
from zufluss.testing.server import DevServer

SUMS = "id BIGINT, k BIGINT LAST_VALUE, v BIGINT SUM, PRIMARY KEY (id)"
KINDS = {
    "log": (ROWS, {}),
    "keyed": (f"{ROWS}, PRIMARY KEY (id)", {}),
    "sums": (SUMS, {"properties": AGGREGATION}),
}
STEPS = ("begun", "task", "tasks", "committed")


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


class Query:
    """A streaming query with two tasks."""

    def __init__(self, server: str, table: str, checkpoint: Path, **options: str) -> None:
        self.id = str(uuid4())
        checkpoint.mkdir()
        (checkpoint / "metadata").write_text(json.dumps({"id": self.id}))
        given = {"bootstrap.servers": server, "table": table, **options}
        self._given = given | {"checkpointLocation": str(checkpoint)}

    def writer(self) -> Any:
        return make_stream_writer(parse_options(self._given), struct(ROWS), False)

    def begin(self) -> Any:
        """The writer as it is sent to the tasks."""
        return pickle.loads(pickle.dumps(self.writer()))

    def task(self, writer: Any, batch_id: int, task: int) -> Any:
        """What a task of a micro-batch does."""
        about = {"streaming.sql.batchId": str(batch_id), "sql.streaming.queryId": self.id}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream_writer, "_property", about.__getitem__)
            patch.setattr(stream_writer, "task_attempt", lambda: (task, 0))
            return pickle.loads(pickle.dumps(writer.write(iter([rows(batch_id, task)]))))

    def run(self, batch_id: int, until: str = "") -> None:
        """Write a micro-batch up to a step, or to its end."""
        writer = self.begin()
        if until == "begun":
            return
        messages = [self.task(writer, batch_id, 0)]
        if until == "task":
            return
        messages.append(self.task(writer, batch_id, 1))
        if until != "tasks":
            self.writer().commit(messages, batch_id)


def rows(batch_id: int, task: int) -> pa.RecordBatch:
    """The rows of a task: one of its own, and one of a key that all have."""
    ids = [10 * batch_id + task, -1]
    return pa.record_batch({n: pa.array(ids, pa.int64()) for n in ("id", "k")} | {"v": [1, 1]})


def check(conn: Connection, kind: str, table: str, batches: int) -> None:
    """Each row of the micro-batches is there once."""
    ids = sorted(10 * batch + task for batch in range(batches) for task in range(2))
    if kind == "log":
        found = sorted(row["id"] for row in log_rows(conn, table))
        assert found == [-1] * (2 * batches) + ids
        return
    found = {key: row["v"] for key, row in state(conn, table).items()}
    assert found == dict.fromkeys(ids, 1) | {-1: 2 * batches if kind == "sums" else 1}


@pytest.fixture
def create(conn: Connection) -> Callable[[str], str]:
    """Makes a table of a kind."""

    def table(kind: str) -> str:
        schema, more = KINDS[kind]
        return str(create_table(conn, schema, bucket_count=2, **more).path)

    return table


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_micro_batch_that_was_cut_short_anywhere_counts_once(
    conn: Connection,
    dev_server: DevServer,
    create: Callable[[str], str],
    tmp_path: Path,
    kind: str,
    named: bool,
) -> None:
    table = create(kind)
    options = {"txn.id": "sums"} if named else {}
    query = Query(dev_server.bootstrap, table, tmp_path / "state", **options)
    for batch_id, step in enumerate(STEPS):
        query.run(batch_id, until=step)
        query.run(batch_id, until=step)
        query.run(batch_id)
        check(conn, kind, table, batch_id + 1)


@pytest.mark.parametrize("kind", ["keyed", "sums"])
def test_a_driver_that_should_be_gone_writes_nothing(
    conn: Connection,
    dev_server: DevServer,
    create: Callable[[str], str],
    tmp_path: Path,
    kind: str,
) -> None:
    table = create(kind)
    query = Query(dev_server.bootstrap, table, tmp_path / "state")
    zombie = query.begin()
    query.run(0)
    with pytest.raises(ProducerFencedError):
        query.task(zombie, 0, 0)
    check(conn, kind, table, 1)


def test_a_new_checkpoint_is_a_new_stream_or_is_refused(
    conn: Connection, dev_server: DevServer, create: Callable[[str], str], tmp_path: Path
) -> None:
    for kind in KINDS:
        table = create(kind)
        first, second = (
            Query(dev_server.bootstrap, table, tmp_path / f"{kind} {n}", **{"txn.id": "name"})
            for n in range(2)
        )
        first.run(0)
        if kind == "sums":
            with pytest.raises(ProducerStateError, match="checkpoint of its query was replaced"):
                second.run(0)
            check(conn, kind, table, 1)
        else:
            second.run(0)
            assert kind == "keyed" or len(log_rows(conn, table)) == 8


def test_a_micro_batch_before_the_last_one_is_refused(
    dev_server: DevServer, create: Callable[[str], str], tmp_path: Path
) -> None:
    query = Query(dev_server.bootstrap, create("sums"), tmp_path / "state")
    query.run(4)
    with pytest.raises(ProducerStateError, match=r"micro-batch 3 .* does not follow on"):
        query.run(3)


def test_a_query_without_a_name_is_refused_or_not_fenced(
    dev_server: DevServer, create: Callable[[str], str]
) -> None:
    for kind in KINDS:
        given = {"bootstrap.servers": dev_server.bootstrap, "table": create(kind)}
        for more in ({}, {"checkpointLocation": "hdfs://nowhere:1/state"}):
            if kind == "sums":
                with pytest.raises(ConfigError, match=r"option .*txn.id"):
                    make_stream_writer(parse_options(given | more), struct(ROWS), False)
            else:
                made = make_stream_writer(parse_options(given | more), struct(ROWS), False)
                assert pickle.loads(pickle.dumps(made))._handle is None


def test_commits_are_identified_by_query_and_micro_batch() -> None:
    one, other = str(uuid4()), str(uuid4())
    assert txn_of(one, "name") == f"name:{one}"
    with pytest.raises(zufluss.errors.InvalidProducerIdError):
        txn_of(one, "n" * 200)
    assert checkpoint_of(one, 7) - checkpoint_of(one, 6) == 1
    assert checkpoint_of(one, 7) != checkpoint_of(other, 7)
    assert 0 <= checkpoint_of(one, (1 << 40) - 1) < 1 << 63
