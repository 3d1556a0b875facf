"""Writers take generators and other iterables of rows and batches, and read them item by item."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from tests.client.pk import create_table
from tests.waiting import eventually
from zufluss.client import ColumnMismatchError
from zufluss.client.connection import connect_async
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.testing.server import DevServer

LOG = "id BIGINT, name STRING"


@dataclass
class Event:
    id: int
    name: str = "event"


def ids(table: Table) -> list[int]:
    rows: list[int] = table.scan(["id"]).to_arrow()["id"].to_pylist()
    return rows


def test_a_generator_of_dicts_is_written_in_order(conn: Connection) -> None:
    table = create_table(conn, LOG)
    with table.append() as writer:
        writer.write({"id": n, "name": "x"} for n in range(10_000))
    assert ids(table) == list(range(10_000))


def test_items_may_be_rows_of_any_kind_and_batches(conn: Connection) -> None:
    table = create_table(conn, LOG)

    def items() -> Iterator[Any]:
        yield {"id": 0}
        yield Event(1)
        yield pa.record_batch({"id": [2, 3], "name": ["a", "b"]})
        yield {"id": [4, 5]}
        yield [{"id": 6}, Event(7)]
        yield Event(8)

    with table.append() as writer:
        writer.write(items())
        writer.write(Event(9))
        writer.write({"a": {"id": 10}, "b": {"id": 11}}.values())
    assert ids(table) == list(range(12))


def test_a_generator_is_not_read_ahead_of_what_the_writer_can_hold(conn: Connection) -> None:
    """A generator can wait for its own earlier rows, so the writer does not collect them first."""
    table = create_table(conn, LOG)

    def items() -> Iterator[dict[str, int]]:
        yield from ({"id": n} for n in range(5_000))
        eventually(lambda: table.count() > 0)
        yield {"id": 5_000}

    with table.append() as writer:
        writer.write(items())
    assert table.count() == 5_001


def test_a_generator_that_raises_ends_the_write_with_its_error(conn: Connection) -> None:
    table = create_table(conn, LOG)

    def items() -> Iterator[dict[str, int]]:
        yield {"id": 1}
        raise KeyError("source")

    with table.append() as writer:
        with pytest.raises(KeyError, match="source"):
            writer.write(items())
        writer.write({"id": 2})
    assert ids(table) == [1, 2]


def test_a_row_that_does_not_fit_is_named_and_the_others_are_written(conn: Connection) -> None:
    table = create_table(conn, LOG)
    with table.append() as writer:
        writer.write({"id": "two" if n == 2 else n} for n in range(3))
        with pytest.raises(ColumnMismatchError, match=r"column 'id'.*in the row {'id': 'two'}"):
            writer.flush()
        writer.write({"id": 3})
    assert ids(table) == [0, 1, 3]


def test_deletes_take_a_generator_too(conn: Connection) -> None:
    table = create_table(conn, "id INT, name STRING, PRIMARY KEY (id)")
    with table.upsert() as writer:
        writer.write(Event(n) for n in range(10))
        writer.delete({"id": n} for n in range(0, 10, 2))
    assert sorted(ids(table)) == [1, 3, 5, 7, 9]


async def test_an_async_writer_takes_async_generators(
    dev_server: DevServer, conn: Connection
) -> None:
    path = create_table(conn, LOG).path

    async def items() -> AsyncIterator[dict[str, int]]:
        for n in range(5_000):
            yield {"id": n}

    async with await connect_async(dev_server.bootstrap) as connection:
        table = await connection.table(path)
        async with table.append() as writer:
            await writer.write(items())
            await writer.write({"id": n} for n in range(5_000, 6_000))
        assert await table.count() == 6_000
