"""Columns added to a primary-key table, and restarts: all rows are still read.

Old values keep their schema id in the store, old changelog batches theirs in the log; a reader
finds NULL in a column that was not there yet, and an update of an old row writes it whole.
"""

from __future__ import annotations

from collections.abc import Callable

import fluss
import pytest

from tests.counts import FULL
from tests.end_to_end.helpers import connected, in_time, poll_records
from tests.end_to_end.kv import (
    changelog,
    create_keyed,
    delete,
    described,
    limit_scan,
    lookup,
    lookups,
    upsert,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.test_primary_key_tables import agrees
from tests.end_to_end.test_restarts import restart
from tests.end_to_end.test_schema_evolution import add_column
from tests.kv.model import Model, Rules
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

ENDS = ["stop", "kill"] if FULL else ["kill"]


@pytest.fixture
async def evolved(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> fluss.FlussTable:
    """Keys 0 to 4 with three columns, then a fourth column `score`."""
    await upsert(await create_keyed(conn, path), *([i, f"row {i}", i] for i in range(5)))
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "score", {"type": "DOUBLE"}))
    return await in_time(conn.get_table(path))


def old(key: int) -> dict[str, object]:
    return {"id": key, "text": f"row {key}", "n": key, "score": None}


async def test_old_rows_have_null_in_the_new_column(evolved: fluss.FlussTable) -> None:
    assert await lookups(evolved, [[i] for i in range(6)]) == [*map(old, range(5)), None]
    assert (await limit_scan(evolved, 10)).to_pylist() == [old(i) for i in range(5)]


async def test_old_rows_are_updated_and_deleted_under_the_new_schema(
    evolved: fluss.FlussTable,
) -> None:
    await upsert(evolved, [1, "new", 1, 0.5])
    await delete(evolved, [2])
    await upsert(evolved, {"id": 3, "score": 1.5}, columns=["id", "score"])
    assert await lookups(evolved, [[1], [2], [3]]) == [
        {"id": 1, "text": "new", "n": 1, "score": 0.5},
        None,
        {**old(3), "score": 1.5},
    ]
    scanner = await in_time(evolved.new_scan().with_fixed_schema(True).create_log_scanner())
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    records = [described(r) for r in await poll_records(scanner, 10)]
    assert [(offset, kind, row) for offset, kind, row in records[5:]] == [
        (5, "-U", old(1)),
        (6, "+U", {"id": 1, "text": "new", "n": 1, "score": 0.5}),
        (7, "-D", old(2)),
        (8, "-U", old(3)),
        (9, "+U", {**old(3), "score": 1.5}),
    ]
    assert [row for _, _, row in records[:5]] == [old(i) for i in range(5)]


async def test_a_writer_that_knows_only_the_old_schema_goes_on(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    before = await create_keyed(conn, path)
    await upsert(before, [1, "a", 1])
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "score", {"type": "DOUBLE"}))
    await upsert(before, [1, "b", 2], [2, "c", 3])
    after = await in_time(conn.get_table(path))
    assert await lookups(after, [[1], [2]]) == [
        {"id": 1, "text": "b", "n": 2, "score": None},
        {"id": 2, "text": "c", "n": 3, "score": None},
    ]


async def test_a_reader_that_knows_only_the_old_schema_reads_new_rows(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    before = await create_keyed(conn, path)
    await upsert(before, [1, "a", 1])
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "score", {"type": "DOUBLE"}))
    after = await in_time(conn.get_table(path))
    await upsert(after, [2, "b", 2, 0.5])
    assert await lookup(before, [2]) == {"id": 2, "text": "b", "n": 2}


@pytest.mark.parametrize("end", ENDS)
async def test_columns_added_twice_and_a_restart_in_between(
    new_server: Callable[..., DevServer], end: str
) -> None:
    server = new_server()
    path = fluss.TablePath("fluss", "evolved")
    for number, name in enumerate((None, "x", "y")):
        with RawClient(server.port) as raw:
            if name is not None:
                raw.call(ApiKey.ALTER_TABLE, add_column(path, name, {"type": "INTEGER"}))
        async with connected(server.bootstrap) as conn:
            if name is None:
                await create_keyed(conn, path)
            table = await in_time(conn.get_table(path))
            await upsert(
                table, [number, "t", number, *range(number)], [9, "all", *range(number + 1)]
            )
        restart(server, end)
    async with connected(server.bootstrap) as conn:
        table = await in_time(conn.get_table(path))
        assert await lookups(table, [[0], [1], [2], [9]]) == [
            {"id": 0, "text": "t", "n": 0, "x": None, "y": None},
            {"id": 1, "text": "t", "n": 1, "x": 0, "y": None},
            {"id": 2, "text": "t", "n": 2, "x": 0, "y": 1},
            {"id": 9, "text": "all", "n": 0, "x": 1, "y": 2},
        ]


@pytest.mark.parametrize("end", ENDS)
async def test_state_and_changelog_survive_restarts(
    new_server: Callable[..., DevServer], end: str
) -> None:
    server, model = new_server(), Model(Rules(3, (0,)))
    path = fluss.TablePath("fluss", "survivor")
    for number in range(3):
        async with connected(server.bootstrap) as conn:
            if not number:
                await create_keyed(conn, path)
            table = await in_time(conn.get_table(path))
            rows = [(key, f"{number}", key) for key in range(number, number + 20)]
            model.upsert(*rows)
            await upsert(table, *rows)
            model.delete((number,), (99,))
            await delete(table, [number], [99])
            model.upsert((5, None, number), targets=(0, 2))
            await upsert(table, {"id": 5, "n": number}, columns=["id", "n"])
            await agrees(conn, table, model, [(k,) for k in range(25)])
        restart(server, end)
    async with connected(server.bootstrap) as conn:
        table = await in_time(conn.get_table(path))
        await agrees(conn, table, model, [(k,) for k in range(25)])


@pytest.mark.parametrize("end", ENDS)
async def test_writer_scanner_and_lookuper_live_through_a_restart(
    new_server: Callable[..., DevServer], end: str
) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        table = await create_keyed(conn, fluss.TablePath("fluss", "alive"))
        writer = table.new_upsert().create_writer()
        scanner = await in_time(table.new_scan().create_log_scanner())
        scanner.subscribe(0, fluss.EARLIEST_OFFSET)
        for number in range(3):
            writer.upsert([1, f"{number}", number])
            await in_time(writer.flush())
            count = 2 if number else 1
            records = [described(r) for r in await poll_records(scanner, count)]
            assert records[-1][2] == {"id": 1, "text": f"{number}", "n": number}
            restart(server, end)
        assert [kind for _, kind, _ in await changelog(table, 5)] == ["+I", "-U", "+U", "-U", "+U"]
        assert await lookup(table, [1]) == {"id": 1, "text": "2", "n": 2}
