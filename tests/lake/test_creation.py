"""The process that creates lake tables for a coordinator, and the end that asks it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from tests.lake.iceberg.tables import catalog_properties, lake_table, table_info
from zufluss.errors import InvalidTableError, LakeTableAlreadyExistError
from zufluss.lake.creation import LakeTableCreator
from zufluss.lake.iceberg.catalog import load

LIMIT_MS = 120_000
WITHOUT_PYICEBERG = (
    "-c",
    "import sys; sys.modules['pyiceberg'] = None; from zufluss.lake.process import main; main()",
)


@asynccontextmanager
async def creator(*command: str) -> AsyncIterator[LakeTableCreator]:
    made = LakeTableCreator(command) if command else LakeTableCreator()
    try:
        yield made
    finally:
        await made.stop()


@contextmanager
def silent_catalog() -> Iterator[str]:
    """The address of a REST catalog that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_lake_table_is_created_and_then_left_as_it_is(tmp_path: Path) -> None:
    table, properties = table_info(), catalog_properties(tmp_path)
    async with creator() as lakes:
        await lakes.warm()
        for _ in range(2):
            assert await lakes.prepare(table, "iceberg", properties, LIMIT_MS) is None
            metadata = lake_table(tmp_path, table).metadata_location
            assert metadata.endswith(".json")
    assert "00000-" in metadata


async def test_a_lake_table_with_other_columns_is_taken(tmp_path: Path) -> None:
    table, properties = table_info(), catalog_properties(tmp_path)
    catalog = load(properties)
    catalog.create_namespace("shop")
    catalog.create_table(("shop", "orders"), pa.schema([("x", pa.int32())]))
    async with creator() as lakes:
        with pytest.raises(LakeTableAlreadyExistError, match="its columns are x"):
            await lakes.prepare(table, "iceberg", properties, LIMIT_MS)


async def test_a_server_without_pyiceberg_says_so_and_refuses_what_can_never_be(
    tmp_path: Path,
) -> None:
    properties = catalog_properties(tmp_path)
    async with creator(*WITHOUT_PYICEBERG) as lakes:
        await lakes.warm()
        with pytest.raises(InvalidTableError, match="no identifier fields"):
            await lakes.prepare(
                table_info("id DOUBLE", primary_key=["id"]), "iceberg", properties, LIMIT_MS
            )
        reason = await lakes.prepare(table_info(), "iceberg", properties, LIMIT_MS)
        assert reason is not None
        assert "needs packages that are not installed" in reason


@pytest.mark.parametrize(
    ("format", "properties", "reason"),
    [
        ("lance", {}, "lake format 'lance' is not installed"),
        ("iceberg", {}, "datalake.iceberg.type is missing"),
        ("iceberg", {"type": "rest", "uri": "http://127.0.0.1:1"}, "cannot be opened"),
    ],
)
async def test_a_lake_that_cannot_be_asked_is_a_reason(
    format: str, properties: dict[str, str], reason: str
) -> None:
    async with creator() as lakes:
        answer = await lakes.prepare(table_info(), format, properties, LIMIT_MS)
        assert answer is not None
        assert reason in answer


async def test_a_catalog_that_never_answers_costs_the_process_and_not_the_next_call(
    tmp_path: Path,
) -> None:
    properties = catalog_properties(tmp_path)
    async with creator() as lakes:
        assert await lakes.prepare(table_info(), "iceberg", properties, LIMIT_MS) is None
        with silent_catalog() as uri:
            silent = {"type": "rest", "uri": uri}
            reason = await lakes.prepare(table_info(), "iceberg", silent, 50)
        assert reason == "the lake's catalog did not answer within 50 ms"
        assert lakes.process_id is None
        assert await lakes.prepare(table_info(), "iceberg", properties, LIMIT_MS) is None


async def test_a_process_that_dies_is_a_reason_and_is_started_again(tmp_path: Path) -> None:
    flag = tmp_path / "died"
    code = f"""
import os, pathlib
flag = pathlib.Path({str(flag)!r})
if not flag.exists():
    flag.touch()
    os._exit(1)
from zufluss.lake.process import main
main()
"""
    async with creator("-c", code) as lakes:
        properties = catalog_properties(tmp_path)
        reason = await lakes.prepare(table_info(), "iceberg", properties, LIMIT_MS)
        assert reason is not None
        assert "ended" in reason
        assert await lakes.prepare(table_info(), "iceberg", properties, LIMIT_MS) is None


async def test_a_creator_that_is_stopped_while_its_process_starts_leaves_none() -> None:
    """The stop of a server does not wait for the imports of a process that just began."""
    async with creator("-c", "import time; time.sleep(100)") as lakes:
        warming = asyncio.create_task(lakes.warm())
        await asyncio.sleep(0)
        assert lakes.process_id is None
        await lakes.stop()
        async with asyncio.timeout(60):
            await warming
        assert lakes.process_id is None


async def test_a_stopped_creator_starts_nothing() -> None:
    async with creator() as lakes:
        await lakes.stop()
        reason = await lakes.prepare(table_info(), "iceberg", {}, LIMIT_MS)
        assert reason is not None
        assert "the server stops" in reason
