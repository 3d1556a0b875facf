"""The server stops and restarts on its port, under a live pyfluss writer and scanner.

Nothing acknowledged may be lost, nothing stored twice, nothing out of order: after a clean stop
and after SIGKILL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import fluss
import pyarrow as pa
import pytest

from tests.conftest import SERVERS
from tests.end_to_end.helpers import (
    append,
    connected,
    create,
    end_offsets,
    ids,
    in_time,
    read_arrow,
    record_scanner,
)
from tests.end_to_end.raw import RawClient, fetch_request, versions_request
from tests.end_to_end.test_idempotence import new_writer, numbered
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS, eventually_async
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

NewServer = Callable[..., DevServer]
ENDS = ["stop", "kill"]
PATH = fluss.TablePath("fluss", "numbers")
DAILY = fluss.TablePath("mine", "daily")
REPEATED = fluss.TablePath("mine", "repeated")
DROPPED = fluss.TablePath("mine", "dropped")
DAYS = pa.schema([("day", pa.string()), ("id", pa.int64())])
BATCH = 20
RESTARTS_SECONDS = WAIT_SECONDS
"""Deadline for a test with several restarts, on a busy machine."""


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
        self.written = False

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
        self.written = True

    async def _send(self, batch: pa.RecordBatch) -> fluss.WriteResultHandle:
        """Give a batch to the writer; retries while pyfluss has no metadata."""
        while True:
            try:
                return self.writer.write_arrow_batch(batch)
            except fluss.FlussError as e:
                if e.error_code != fluss.ErrorCode.TABLE_NOT_EXIST:
                    raise
                await asyncio.sleep(0.01)

    async def scan(self) -> None:
        """Collect offset and number of every record until all that was sent is here."""
        while not (self.written and len(self.read) >= self.sent):
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
        async with asyncio.timeout(RESTARTS_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(load.write())
            tasks.create_task(load.scan())
            for _ in range(2):
                await load.progress(500)
                await asyncio.to_thread(restart, server, end)
            await load.progress(500)
            load.stopping = True
        assert load.acknowledged == load.sent
        assert load.read == [(i, i) for i in range(load.sent)]
        stored = await read_arrow(table)
        assert stored.column("id").to_pylist() == list(range(load.sent))


@dataclass(frozen=True, slots=True)
class Before:
    """A server that was restarted, and what it held before."""

    server: DevServer
    """The server, running again."""
    description: tuple[object, ...]
    """The partitioned table as pyfluss saw it."""
    ends: dict[int, int]
    """End of each bucket of the table of numbers."""
    dropped_id: int
    """Id of a table that was dropped."""
    writers: set[int]
    """Writer ids that were given out."""
    table_id: int
    """The table that the last writer appended eight batches to."""
    writer: int
    """That writer."""


@pytest.fixture(scope="module", params=ENDS)
def restarted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Before]:
    """A server that was filled, then ended in one way or the other, then started again."""
    server = WarmServer(tmp_path_factory.mktemp("restarted"))
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        before = asyncio.run(_fill(server))
        restart(server, request.param)
        yield before


async def _fill(server: DevServer) -> Before:
    async with connected(server.bootstrap) as conn:
        admin = conn.get_admin()
        await in_time(admin.create_database("mine", fluss.DatabaseDescriptor("kept")))
        await append(await create(conn, PATH, bucket_count=3), ids(0, 300))
        daily = await create(conn, DAILY, DAYS, partition_keys=["day"], comment="by day")
        await in_time(admin.create_partition(DAILY, {"day": "a"}))
        await append(daily, pa.record_batch([["a", "a"], [1, 2]], schema=DAYS))
        table_id = (await create(conn, REPEATED)).get_table_info().table_id
        dropped = (await create(conn, DROPPED)).get_table_info().table_id
        await in_time(admin.drop_table(DROPPED))
        with RawClient(server.port) as raw:
            writers = [new_writer(raw, REPEATED) for _ in range(3)]
            for sequence in range(8):
                entry = raw.produce(table_id, numbered(writers[-1], sequence))
                assert entry.error_code == 0
        ends = await end_offsets(admin, PATH, range(3))
        description = await _description(conn)
    return Before(server, description, ends, dropped, set(writers), table_id, writers[-1])


async def _description(conn: fluss.FlussConnection) -> tuple[object, ...]:
    admin = conn.get_admin()
    info = await in_time(admin.get_table_info(DAILY))
    partitions = await in_time(admin.list_partition_infos(DAILY))
    latest = fluss.OffsetSpec.latest()
    return (
        info.table_id,
        info.schema_id,
        info.comment,
        info.created_time,
        info.get_properties(),
        [(p.partition_id, p.partition_name) for p in partitions],
        await in_time(admin.list_partition_offsets(DAILY, "a", [0], latest)),
        (await admin.get_database_info("mine")).get_database_descriptor().comment,
    )


async def test_what_was_there_before_is_there_after(restarted: Before) -> None:
    async with connected(restarted.server.bootstrap) as conn:
        assert await _description(conn) == restarted.description
        assert await end_offsets(conn.get_admin(), PATH, range(3)) == restarted.ends
        assert not await conn.get_admin().table_exists(DROPPED)
        rows = await read_arrow(await in_time(conn.get_table(PATH)))
    assert sorted(rows.column("id").to_pylist()) == list(range(300))


async def test_ids_are_not_given_twice(restarted: Before) -> None:
    async with connected(restarted.server.bootstrap) as conn:
        again = (await create(conn, DROPPED)).get_table_info().table_id
        with RawClient(restarted.server.port) as raw:
            writers = {new_writer(raw, PATH) for _ in range(3)}
    assert again > restarted.dropped_id
    assert not writers & restarted.writers


def test_a_batch_repeated_after_a_restart_is_stored_once(restarted: Before) -> None:
    with RawClient(restarted.server.port) as raw:

        def send(sequence: int) -> tuple[int, int]:
            batch = numbered(restarted.writer, sequence)
            entry = raw.produce(restarted.table_id, batch)
            return entry.error_code, entry.base_offset

        assert [send(6), send(7)] == [(0, 6), (0, 7)]
        assert send(9)[0] == 31
        assert send(8) == (0, 8)
        assert raw.end_offset(restarted.table_id) == 9
        times = [header.timestamp for header in raw.batches(restarted.table_id)]
        assert times == sorted(times), "commit times never go back"


async def test_a_dropped_table_leaves_nothing_on_the_disk(new_server: NewServer) -> None:
    server = new_server()
    async with connected(server.bootstrap) as conn:
        await append(await create(conn, PATH), ids(0, 1000))
        table_dirs = list(server.data_dir.glob("**/numbers-*"))
        assert table_dirs
        await in_time(conn.get_admin().drop_table(PATH))

    async def gone() -> bool:
        return not any(directory.exists() for directory in table_dirs)

    await eventually_async(gone)


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
