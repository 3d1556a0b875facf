"""The server goes away and comes back on its port, under a live pyfluss writer and scanner.

Nothing acknowledged may be lost, nothing stored twice, nothing out of order: after a clean stop
and after SIGKILL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import fluss
import pyarrow as pa
import pytest

from tests.wire.helpers import (
    append,
    connected,
    create,
    end_offsets,
    eventually,
    ids,
    in_time,
    read_arrow,
    record_scanner,
)
from tests.wire.raw import RawClient, fetch_request, versions_request
from tests.wire.test_idempotence import new_writer, numbered
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

NewServer = Callable[..., DevServer]
ENDS = ["stop", "kill"]
PATH = fluss.TablePath("fluss", "numbers")
BATCH = 20


def restart(server: DevServer, end: str) -> None:
    """End the server in the given way and start it again on its port."""
    if end == "stop":
        assert server.stop() == 0
    else:
        server.kill()
    server.start()


class Load:
    """A writer of numbered rows and a scanner that collects them, both on one table."""

    def __init__(self, writer: fluss.AppendWriter, scanner: fluss.LogScanner) -> None:
        self.writer = writer
        self.scanner = scanner
        self.sent = 0
        self.acknowledged = 0
        self.read: list[tuple[int, int]] = []
        self.stopping = False

    async def write(self) -> None:
        """Send batch after batch, a few in flight, until told to stop."""
        in_flight: list[tuple[int, fluss.WriteResultHandle]] = []
        while not self.stopping:
            handle = await self._send(ids(self.sent, self.sent + BATCH))
            self.sent += BATCH
            in_flight.append((self.sent, handle))
            if len(in_flight) >= 4:
                end, handle = in_flight.pop(0)
                await handle.wait()
                self.acknowledged = end
        await self.writer.flush()
        for end, handle in in_flight:
            await handle.wait()
            self.acknowledged = end

    async def _send(self, batch: pa.RecordBatch) -> fluss.WriteResultHandle:
        """Hand a batch to the writer; while pyfluss has lost its metadata it takes none."""
        while True:
            try:
                return self.writer.write_arrow_batch(batch)
            except fluss.FlussError as e:
                if e.error_code != fluss.ErrorCode.TABLE_NOT_EXIST:
                    raise
                await asyncio.sleep(0.01)

    async def scan(self) -> None:
        """Collect offset and number of every record until all that was sent is here."""
        while not (self.stopping and len(self.read) >= self.sent):
            for record in await self.scanner.poll(200):
                self.read.append((record.offset, record.row["id"]))

    async def progress(self, rows: int) -> None:
        """Wait until this many more rows were acknowledged and read."""
        goal = self.acknowledged + rows
        while self.acknowledged < goal or len(self.read) < goal:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ENDS)
async def test_nothing_is_lost_repeated_or_reordered_across_restarts_under_load(
    new_server: NewServer, end: str
) -> None:
    server = new_server()
    async with connected(server.bootstrap, writer_batch_timeout_ms=5) as conn:
        table = await create(conn, PATH)
        load = Load(table.new_append().create_writer(), await record_scanner(table))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_time(load.write()))
            tasks.create_task(in_time(load.scan()))
            for _ in range(2):
                await in_time(load.progress(500))
                await asyncio.to_thread(restart, server, end)
            await in_time(load.progress(500))
            load.stopping = True
        assert load.acknowledged == load.sent
        assert load.read == [(i, i) for i in range(load.sent)]
        stored = await read_arrow(table)
        assert stored.column("id").to_pylist() == list(range(load.sent))


@pytest.mark.parametrize("end", ENDS)
async def test_what_was_there_before_is_there_after(new_server: NewServer, end: str) -> None:
    server = new_server()
    schema = pa.schema([("day", pa.string()), ("id", pa.int64())])
    daily = fluss.TablePath("mine", "daily")
    async with connected(server.bootstrap) as conn:
        admin = conn.get_admin()
        await in_time(admin.create_database("mine", fluss.DatabaseDescriptor("kept")))
        await append(await create(conn, PATH, bucket_count=3), ids(0, 300))
        table = await create(conn, daily, schema, partition_keys=["day"], comment="by day")
        await in_time(admin.create_partition(daily, {"day": "a"}))
        await append(table, pa.record_batch([["a", "a"], [1, 2]], schema=schema))
        before = await _description(conn, daily)
        ends = await end_offsets(admin, PATH, range(3))
    await asyncio.to_thread(restart, server, end)
    async with connected(server.bootstrap) as conn:
        admin = conn.get_admin()
        assert await _description(conn, daily) == before
        assert (await admin.get_database_info("mine")).get_database_descriptor().comment == "kept"
        assert await end_offsets(admin, PATH, range(3)) == ends
        rows = await read_arrow(await in_time(conn.get_table(PATH)))
        assert sorted(rows.column("id").to_pylist()) == list(range(300))


async def _description(conn: fluss.FlussConnection, path: fluss.TablePath) -> tuple[object, ...]:
    info = await in_time(conn.get_admin().get_table_info(path))
    partitions = await in_time(conn.get_admin().list_partition_infos(path))
    offsets = await in_time(
        conn.get_admin().list_partition_offsets(path, "a", [0], fluss.OffsetSpec.latest())
    )
    return (
        info.table_id,
        info.schema_id,
        info.comment,
        info.created_time,
        info.get_properties(),
        [(p.partition_id, p.partition_name) for p in partitions],
        offsets,
    )


@pytest.mark.parametrize("end", ENDS)
async def test_ids_are_not_given_twice(new_server: NewServer, end: str) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        first = (await create(conn, PATH)).get_table_info().table_id
        with RawClient(server.port) as raw:
            writers = {new_writer(raw, PATH) for _ in range(3)}
        await in_time(conn.get_admin().drop_table(PATH))
    await asyncio.to_thread(restart, server, end)
    async with connected(server.bootstrap) as conn:
        second = (await create(conn, PATH)).get_table_info().table_id
        with RawClient(server.port) as raw:
            again = {new_writer(raw, PATH) for _ in range(3)}
    assert second > first
    assert not writers & again


@pytest.mark.parametrize("end", ENDS)
async def test_a_batch_repeated_after_a_restart_is_stored_once(
    new_server: NewServer, end: str
) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        table = await create(conn, PATH)
        table_id = table.get_table_info().table_id
        with RawClient(server.port) as raw:
            writer = new_writer(raw, PATH)
            for sequence in range(8):
                assert raw.produce(table_id, numbered(writer, sequence)).error_code == 0
    await asyncio.to_thread(restart, server, end)
    with RawClient(server.port) as raw:
        for sequence in (6, 7):
            entry = raw.produce(table_id, numbered(writer, sequence))
            assert (entry.error_code, entry.base_offset) == (0, sequence)
        assert raw.produce(table_id, numbered(writer, 9)).error_code == 31
        entry = raw.produce(table_id, numbered(writer, 8))
        assert (entry.error_code, entry.base_offset) == (0, 8)
        assert raw.end_offset(table_id) == 9


@pytest.mark.parametrize("end", ENDS)
async def test_commit_times_never_go_back(new_server: NewServer, end: str) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        table = await create(conn, PATH)
        table_id = table.get_table_info().table_id
        await append(table, ids(0, 5))
        await asyncio.to_thread(restart, server, end)
        await append(table, ids(5, 10))
    with RawClient(server.port) as raw:
        times = [header.timestamp for header in raw.batches(table_id)]
    assert len(times) == 2
    assert times == sorted(times)


async def test_a_dropped_table_leaves_nothing_on_the_disk(new_server: NewServer) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        await append(await create(conn, PATH), ids(0, 1000))
        table_dirs = list(server.data_dir.glob("**/numbers-*"))
        assert table_dirs
        await in_time(conn.get_admin().drop_table(PATH))

    async def gone() -> bool:
        return not any(directory.exists() for directory in table_dirs)

    await eventually(gone)


async def test_a_clean_stop_answers_a_waiting_fetch(new_server: NewServer) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        table_id = (await create(conn, PATH)).get_table_info().table_id
    with RawClient(server.port) as raw:
        held = raw.begin(ApiKey.FETCH_LOG, fetch_request(table_id, max_wait_ms=55_000))
        raw.begin(ApiKey.API_VERSIONS, versions_request())
        assert raw.receive().request_id != held
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        frame = await asyncio.to_thread(raw.answer, held)
        assert frame.error is None
        assert await stopping == 0
