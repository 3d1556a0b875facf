"""Reads of lake and log while a tiering round moves rows from one to the other.

A round is stopped before each of its steps. There rows are written, reads are planned, and streams
go on; all of them have every row once, and have the same rows when the round is over.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.counts import FULL

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss.spark
from tests.client.rounds import lake_table
from tests.spark.read.test_table import append, delete, upsert
from tests.spark.stream_queries import BatchRead, Rows, StreamRead
from zufluss.client.sync.table import Table
from zufluss.tiering.round import STEPS

pytestmark = pytest.mark.slow

KINDS = pytest.mark.parametrize(
    "kind", ["log", "keyed parted", *(["keyed", "log parted"] if FULL else [])]
)
TOLD = STEPS if FULL else ("job", "lake-commit", "server-commit", "finish")
"""Steps at which reads begin."""


class Story:
    """A table that is written to, and the expected rows of its readers."""

    def __init__(self, table: Table, bootstrap: str) -> None:
        self.table = table
        self.bootstrap = bootstrap
        self.rows: dict[int, tuple[Any, ...]] = {}
        self.written: Rows = []
        """Every row that was written, as a stream from the beginning sees it."""
        self._parted = table.info.is_partitioned
        self._numbers = 0

    def write(self) -> Rows:
        """Two new rows, and of a primary-key table a change of an old one and a delete."""
        keyed = self.table.info.has_primary_key
        self._numbers += 2
        ids = [self._numbers, self._numbers + 1]
        if keyed and self._numbers > 4:
            ids.append(self._numbers - 2)
            gone = self._numbers - 3
            delete(self.table, id=[gone], **({"p": [self._part(gone)]} if self._parted else {}))
            del self.rows[gone]
        rows = [(i, f"row {i} of {self._numbers}") for i in ids]
        if self._parted:
            rows = [(*row, self._part(row[0])) for row in rows]
        names = self.table.info.schema.names
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        (upsert if keyed else append)(self.table, **columns)
        self.rows |= {row[0]: row for row in rows}
        self.written += rows
        return sorted(rows, key=repr)

    def _part(self, number: int) -> str:
        return "ab"[number % 2]

    def now(self) -> Rows:
        """The rows of the table."""
        return sorted(self.rows.values(), key=repr)

    def batch(self, **options: str) -> BatchRead:
        return BatchRead(self.bootstrap, self.table, **options)

    def stream(self, **options: str) -> StreamRead:
        return StreamRead(self.bootstrap, self.table, **options)


@pytest.fixture
def story(connection, lake_server, kind):
    parted = "parted" in kind
    keys = (["id", "p"] if parted else ["id"]) if "keyed" in kind else None
    options: dict[str, Any] = {"partition_keys": ["p"]} if parted else {}
    schema = "id INT, name STRING" + (", p STRING" if parted else "")
    with lake_table(connection, schema, primary_key=keys, bucket_count=2, **options) as table:
        yield Story(table, lake_server.bootstrap)


@KINDS
def test_batch_reads_have_every_row_once_whatever_step_a_round_is_at(story, rounds):
    planned: list[tuple[BatchRead, Rows]] = []

    def step(name: str) -> None:
        story.write()
        if name in TOLD:
            read = story.batch()
            planned.append((read, story.now()))
            assert read.rows() == story.now(), name

    story.write()
    rounds.tier(story.table, step)
    rounds.tier(story.table, step)  # and another one, onto what the lake has
    assert len(planned) == 2 * len(TOLD)
    for read, rows in planned:
        assert read.rows() == rows, "a query that goes on has what it began with"
    assert story.batch().rows() == story.now()


@KINDS
def test_streams_have_every_row_once_whatever_step_a_round_is_at(story, rounds):
    begun: list[tuple[StreamRead, Rows, int]] = []
    follower = story.stream()

    def step(name: str) -> None:
        rows = story.write()
        found = follower.all_rows()
        assert found == rows, name
        if name in TOLD:
            stream = story.stream()
            stream.reader.stop()  # a bucket can be pinned by so many only
            begun.append((stream, story.now(), len(story.written)))

    story.write()
    assert follower.all_rows() == story.now()
    rounds.tier(story.table, step)
    rounds.tier(story.table, step)
    for stream, rows, count in begun:
        later = story.written[count:]
        assert stream.all_rows() == sorted(rows + later, key=repr)


@KINDS
def test_the_first_batch_of_a_stream_is_the_same_when_it_runs_again_after_rounds(story, rounds):
    story.write()
    rounds.tier(story.table)
    story.write()
    rows, count = story.now(), len(story.written)
    stream = story.stream()
    first = stream.plan().rows()
    story.write()
    rounds.tier(story.table)
    again = story.stream()
    again.groups = again.reader.partitions(again.start, stream.end)
    assert again.rows() == first
    assert sorted(first + stream.all_rows()) == sorted(rows + story.written[count:])


@pytest.mark.parametrize("kind", ["keyed", *(["log"] if FULL else [])])
def test_queries_of_spark_have_every_row_once_while_a_round_runs(spark, lake_server, story, rounds):
    zufluss.spark.register(spark, lake_server.bootstrap)
    story.write()
    rounds.tier(story.table)
    story.write()
    before = story.now()
    name = story.table.path.table
    frame = spark.readStream.format("fluss").load(str(story.table.path))
    query = frame.writeStream.format("memory").queryName(name).start()
    query.processAllAvailable()
    count = len(story.written)

    def step(at: str) -> None:
        if at in ("job", "lake-commit", "server-commit"):
            story.write()
            found = spark.read.format("fluss").load(str(story.table.path)).collect()
            assert sorted(map(tuple, found), key=repr) == story.now(), at

    rounds.tier(story.table, step)
    query.processAllAvailable()
    query.stop()
    seen = sorted((tuple(row) for row in spark.table(name).collect()), key=repr)
    assert seen == sorted(before + story.written[count:], key=repr)
