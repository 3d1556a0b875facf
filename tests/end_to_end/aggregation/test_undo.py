"""Undos of many keys, undos that are not needed, readers during an undo, producer ids."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasketches import compact_theta_sketch, hll_sketch

import zufluss
from tests.conftest import SERVERS
from tests.counts import rounds
from tests.end_to_end.aggregation.job import Work, job
from tests.end_to_end.aggregation.producers import Epoch, init
from tests.end_to_end.aggregation.recovery import (
    AGGREGATION,
    DELETES,
    IDEMPOTENT,
    SUM,
    bucket_of,
    create,
    folded,
    metric,
    rows_of,
    without_crash,
    writers_of,
)
from tests.end_to_end.raw import RawClient
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import ErrorCode, InvalidProducerIdError
from zufluss.model.aggregate import FUNCTIONS
from zufluss.model.producer import UNDO_TASK
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

KEYS = rounds(30_000, 1_000_000)
EXTRA_MB = 256
"""Memory limit of an undo for any number of keys; an undo of 1,000,000 keys takes 115 MB."""
PART = 10_000
SEEN = "page INT, a BIGINT SUM, b BIGINT SUM, names STRING LISTAGG, PRIMARY KEY (page)"


# -- undos of many keys --------------------------------------------------------------------------


@pytest.fixture
def own(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """A server of its own, so that its memory can be measured."""
    server = WarmServer(tmp_path_factory.mktemp("own"), {"kv.snapshot.interval": "1h"})
    known = request.config.stash.setdefault(SERVERS, [])
    known.append(server)
    with server:
        yield server
    known.remove(server)


def status_mb(server: DevServer, name: str) -> float:
    """A value of the process's `/proc` status."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(value) / 1024


def extra_mb(server: DevServer, work: Callable[[], object]) -> float:
    """Peak memory that a server needs during the block, in addition to before."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak is what there is
    before = status_mb(server, "VmRSS")
    work()
    return status_mb(server, "VmHWM") - before


def test_an_undo_of_many_keys_takes_little_memory_and_tells_how_far_it_is(
    own: DevServer,
) -> None:
    with zufluss.connect(own.bootstrap) as conn, RawClient(own.port) as raw:
        table = create(conn, SUM, buckets=1)
        with table.exactly_once_writer("job") as writer:
            for first in range(0, KEYS, PART):
                pages = [*range(first, first + PART)]
                writer.write({"page": pages, "views": [1] * PART})
        epoch = Epoch.begin(raw, table)
        told: list[m.UndoProducerResponse] = []

        def undo() -> None:
            while not told or not told[-1].done:
                told.append(epoch.undo(0, limit_ms=1))

        extra = extra_mb(own, undo)
        assert len(told) > 2, "it answers before it is done"
        positions = [each.position for each in told]
        keys = [each.keys for each in told]
        assert positions == sorted(positions)
        assert keys == sorted(keys)
        assert (positions[-1], keys[-1], told[-1].end_offset) == (KEYS, KEYS, KEYS)
        assert extra < EXTRA_MB
        assert table.scan().to_arrow().num_rows == 0


def test_a_writer_is_told_how_far_its_undo_is(conn: Connection) -> None:
    table = create(conn, SUM, buckets=4)
    first = table.exactly_once_writer("job")
    first.write({"page": [*range(1000)], "views": [1] * 1000})
    first.flush()
    told: list[Any] = []
    second = table.exactly_once_writer("job", on_undo=told.append)
    assert [each.buckets_done for each in told] == sorted(each.buckets_done for each in told)
    assert [each.keys for each in told] == sorted(each.keys for each in told)
    last = told[-1]
    assert second.undone == last
    assert (last.buckets, last.buckets_done, last.keys) == (4, 4, 1000)
    assert last.records == last.records_read == 1000
    second.release()
    first.close()


# -- undos that are not needed -------------------------------------------------------------------


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the estimates of sketches, because a union with itself may have other bytes."""
    return [
        row
        | {
            "visitors": row["visitors"] and hll_sketch.deserialize(row["visitors"]).get_estimate(),
            "guests": row["guests"]
            and compact_theta_sketch.deserialize(row["guests"]).get_estimate(),
        }
        for row in rows
    ]


def test_functions_that_a_replay_does_not_change_need_no_undo_and_get_none(
    conn: Connection, server: DevServer, raw: RawClient, tmp_path: Path, rng: random.Random
) -> None:
    table = create(conn, IDEMPOTENT)
    there = {c.agg_function.type for c in table.info.schema.columns if c.agg_function is not None}
    assert there == {name for name, declared in FUNCTIONS.items() if declared.idempotent}
    work = Work(
        server.bootstrap,
        str(table.path),
        tmp_path / "kept",
        rng.randrange(1 << 30),
        rounds(60, 300),
    )
    before = undos(server)
    killed = 0
    while work.position < work.count:
        with job(work, rng.randrange(1 << 30)) as running:
            for _ in range(rng.randrange(2, 12)):
                if (line := running.next_line()) == "done":
                    break
                assert not line.startswith(("failed", "undo")), line
            killed += 1
    assert killed > 1
    assert undos(server) == before, "none was asked for, and none was done"
    writers = [w for b in range(3) for w in writers_of(raw, table, b)]
    assert not [w for w in writers if w is not None and w.task == UNDO_TASK]
    expected = without_crash(conn, work.seed, work.count, IDEMPOTENT)
    assert readable(rows_of(table)) == readable(expected)
    with table.exactly_once_writer(state=work.state) as last:
        assert last.undone is None
        last.release()


def undos(server: DevServer) -> tuple[float, float]:
    """Calls and keys of undos."""
    calls = metric(server, "zufluss_requests_total", '"UNDO_PRODUCER"')
    return calls, metric(server, "zufluss_undo_keys_total")


def test_one_other_function_or_deletes_and_the_undo_is_done_and_counted(
    conn: Connection, server: DevServer
) -> None:
    for schema, properties in (
        ("page INT, top INT MAX, views INT SUM, PRIMARY KEY (page)", {}),
        ("page INT, top INT MAX, PRIMARY KEY (page)", DELETES),
    ):
        table = create(conn, schema, buckets=1, properties=properties)
        first = table.exactly_once_writer("job")
        first.write([dict.fromkeys(table.info.schema.names, 1)])
        first.flush()
        calls, keys = undos(server)
        table.exactly_once_writer("job").release()
        assert undos(server) == (calls + 1, keys + 1)
        assert rows_of(table) == []
        first.close()


# -- readers during an undo ----------------------------------------------------------------------


class Readers:
    """Threads that read continuously and remember every version of a row that they saw."""

    def __init__(self, bootstrap: str, path: str, pages: list[int]) -> None:
        self.seen: dict[int, set[tuple[Any, ...] | None]] = {page: set() for page in pages}
        self.problems: list[Exception] = []
        self._stop = threading.Event()
        self._bootstrap, self._path, self._pages = bootstrap, path, pages
        self._threads = [
            threading.Thread(target=self._run, args=(read,)) for read in (self._look, self._scan)
        ]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, read: Callable[[Table], list[dict[str, Any]]]) -> None:
        try:
            with zufluss.connect(self._bootstrap) as conn:
                table = conn.table(self._path)
                last = False
                while not last:
                    last = self._stop.is_set()  # once more after that
                    self._note(read(table))
        except Exception as problem:
            self.problems.append(problem)

    def _look(self, table: Table) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = table.lookup(self._pages, missing="drop").to_pylist()
        return rows

    def _scan(self, table: Table) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
        return rows

    def _note(self, rows: list[dict[str, Any]]) -> None:
        there = {row["page"]: tuple(row.values()) for row in rows}
        for page, seen in self.seen.items():
            seen.add(there.get(page))


def test_a_reader_sees_the_old_or_the_rolled_back_row_and_never_half_a_row(
    conn: Connection, server: DevServer
) -> None:
    pages = [*range(rounds(6_000, 60_000))]
    table = create(conn, SEEN, buckets=2)

    def rows(span: list[int], number: int) -> dict[str, list[Any]]:
        same = [number] * len(span)
        return {"page": span, "a": same, "b": same, "names": [f"n{number}"] * len(span)}

    first = table.exactly_once_writer("job")
    first.write(rows(pages[::2], 1))
    kept = first.checkpoint()
    first.write(rows(pages, 10))
    first.flush()
    with Readers(server.bootstrap, str(table.path), pages) as readers:
        second = table.exactly_once_writer(state=kept)
    assert readers.problems == []
    assert second.undone is not None
    assert second.undone.keys == len(pages)
    for page, seen in readers.seen.items():
        if page % 2:
            old, back = (page, 10, 10, "n10"), None
        else:
            old, back = (page, 11, 11, "n1,n10"), (page, 1, 1, "n1")
        assert back in seen
        assert seen <= {old, back}
    second.release()
    first.close()


def test_the_changelog_from_any_offset_on_gives_the_table(
    conn: Connection, rng: random.Random
) -> None:
    table = create(conn, SEEN, buckets=1)
    bucket = bucket_of(table)
    kept, left = None, []
    for step in range(5):  # four undos are in it
        writer = table.exactly_once_writer(None if kept else "job", state=kept)
        left.append(writer)
        for part in range(4):
            span = [rng.randrange(30) for _ in range(10)]
            writer.write({"page": span, "a": span, "b": span, "names": [f"{step}{part}"] * 10})
            writer.flush()
            if part == 1:
                kept = writer.checkpoint()
    final = {row["page"]: row for row in rows_of(table)}
    everything = table.changelog().to_arrow()
    assert folded(everything) == final
    kinds = dict(
        zip(
            everything["_log_offset"].to_pylist(),
            everything["_change_type"].to_pylist(),
            strict=True,
        )
    )
    offsets = [offset for offset, kind in kinds.items() if kind != "+U"]
    for offset in rng.sample(offsets, rounds(12, len(offsets))):
        rows = table.scan(at={bucket: offset}).to_arrow().to_pylist()
        rest = table.changelog(start={bucket: offset}).to_arrow()
        assert folded(rest, {row["page"]: row for row in rows}) == final, offset
    for writer in left:
        writer.close()


# -- producer ids --------------------------------------------------------------------------------

NO_IDS = ["../x", "", "x" * 300, "x" * 201, ".", "..", "a/b", "a b", "ä", "a\0b", "a\nb"]


@pytest.mark.parametrize("producer_id", NO_IDS)
def test_an_id_that_is_none_is_refused_everywhere(
    conn: Connection, raw: RawClient, producer_id: str
) -> None:
    table = create(conn, SUM, buckets=1)
    table_id = table.info.table_id
    with pytest.raises(InvalidProducerIdError, match="1 to 200 letters"):
        table.exactly_once_writer(producer_id)
    with pytest.raises(InvalidProducerIdError, match="1 to 200 letters"):
        init(raw, table, producer_id)
    for key, request in (
        (
            ApiKey.RELEASE_PRODUCER,
            m.ReleaseProducerRequest(producer_id=producer_id, table_id=table_id),
        ),
        (
            ApiKey.REGISTER_PRODUCER_OFFSETS,
            m.RegisterProducerOffsetsRequest(producer_id=producer_id),
        ),
        (ApiKey.GET_PRODUCER_OFFSETS, m.GetProducerOffsetsRequest(producer_id=producer_id)),
        (ApiKey.DELETE_PRODUCER_OFFSETS, m.DeleteProducerOffsetsRequest(producer_id=producer_id)),
    ):
        assert raw.error_code(key, request) == ErrorCode.INVALID_PRODUCER_ID_EXCEPTION, key
    assert conn.admin.list_producers(table.path) == []
    assert AGGREGATION.items() <= table.info.descriptor.properties.items()


def test_ids_of_all_allowed_letters_and_the_longest_one_are_taken(conn: Connection) -> None:
    table = create(conn, SUM, buckets=1)
    for producer_id in ("x" * 200, "a", "Job-1:views_2.0", "...", "-"):
        table.exactly_once_writer(producer_id).release()
