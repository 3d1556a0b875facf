"""pyfluss reads tables whose old segments are in remote storage only, over several locations.

Small segments and rounds every few milliseconds: after some writes the server has little left, and
whatever a reader finds further back, it finds in the locations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import fluss
import pytest

from tests.end_to_end.helpers import (
    DATABASE,
    append,
    connected,
    create,
    end_offsets,
    fresh_path,
    ids,
    in_time,
    poll_records,
    read_arrow,
    read_records,
    record_scanner,
)
from tests.end_to_end.kv import changelog, create_keyed, lookups, upsert
from tests.servers import RoleServer, WarmServer
from tests.waiting import eventually_async
from zufluss.remote.uri import MEMORY_VARIABLE
from zufluss.testing.server import DevServer

BATCHES, ROWS = 60, 20
SERVER = {
    "log.segment.file-size": "4kb",
    "log.index.interval-size": "512b",
    "log.retention.check-interval": "50ms",
    "remote.log.task-interval-duration": "50ms",
}
PROPERTIES = {"table.log.tiered.local-segments": "1", "table.log.arrow.compression.type": "NONE"}
AUTHORIZATION = 48


@pytest.fixture
def locations(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("east", "west")]


@pytest.fixture
def serve(
    tmp_path: Path, locations: list[Path]
) -> Callable[..., AbstractContextManager[DevServer]]:
    @contextmanager
    def start(**properties: str) -> Iterator[DevServer]:
        dirs = ",".join(map(str, locations))
        conf = {**SERVER, "remote.data.dirs": dirs, **properties}
        with WarmServer(tmp_path / "data", conf, environ={MEMORY_VARIABLE: "1"}) as server:
            yield server

    return start


async def make(conn: fluss.FlussConnection, **properties: str) -> fluss.FlussTable:
    await conn.get_admin().create_database(DATABASE, ignore_if_exists=True)
    return await create(
        conn, fresh_path("remote"), bucket_count=1, properties={**PROPERTIES, **properties}
    )


async def write(table: fluss.FlussTable, begin: int, end: int) -> None:
    await append(table, *(ids(at * ROWS, (at + 1) * ROWS) for at in range(begin, end)))


async def read(table: fluss.FlussTable, offset: int | None = None) -> list[int]:
    rows = await read_arrow(table, None if offset is None else {0: offset})
    return list(rows["id"].to_pylist())


async def until_old_segments_are_remote_only(server: DevServer) -> None:
    async def few() -> bool:
        return len(list(server.data_dir.glob(f"{DATABASE}/*/log-0/*.log"))) <= 2

    await eventually_async(few)


def remote_segments(locations: list[Path]) -> list[int]:
    return [len(list(root.glob("log/**/*.log"))) for root in locations]


async def test_pyfluss_reads_segments_of_two_locations(
    serve: Callable[..., AbstractContextManager[DevServer]], locations: list[Path]
) -> None:
    with serve() as server:
        async with connected(server.bootstrap) as conn:
            table = await make(conn)
            path = table.get_table_path()
            await write(table, 0, BATCHES)
            await until_old_segments_are_remote_only(server)
            counts = remote_segments(locations)
            assert sum(counts) > 5
            assert max(counts) - min(counts) <= 1
            assert await read(table) == list(range(BATCHES * ROWS))
            for offset in (1, 333, BATCHES * ROWS - 1):
                assert await read(table, offset) == list(range(offset, BATCHES * ROWS))
            records = await read_records(table, BATCHES * ROWS)
            assert [r.offset for r in records] == list(range(BATCHES * ROWS))
        server.kill()
        server.start()
        async with connected(server.bootstrap) as conn:
            table = await conn.get_table(path)
            assert await read(table) == list(range(BATCHES * ROWS))
            await write(table, BATCHES, BATCHES + 20)
            await until_old_segments_are_remote_only(server)
            assert await read(table) == list(range((BATCHES + 20) * ROWS))
        assert server.stop() == 0


async def test_offsets_by_time_reach_into_remote_storage(
    serve: Callable[..., AbstractContextManager[DevServer]],
) -> None:
    with serve() as server:
        async with connected(server.bootstrap) as conn:
            table = await make(conn)
            await write(table, 0, BATCHES)
            await until_old_segments_are_remote_only(server)
            path, admin = table.get_table_path(), conn.get_admin()
            records = await read_records(table, BATCHES * ROWS)
            for record in records[:: 7 * ROWS]:
                spec = fluss.OffsetSpec.timestamp(record.timestamp)
                offset = (await in_time(admin.list_offsets(path, [0], spec)))[0]
                first = next(r.offset for r in records if r.timestamp >= record.timestamp)
                assert offset == first
            earliest = fluss.OffsetSpec.earliest()
            assert await in_time(admin.list_offsets(path, [0], earliest)) == {0: 0}


async def test_a_limit_scan_reaches_into_remote_storage(
    serve: Callable[..., AbstractContextManager[DevServer]],
) -> None:
    with serve() as server:
        async with connected(server.bootstrap) as conn:
            table = await make(conn)
            await write(table, 0, BATCHES)
            await until_old_segments_are_remote_only(server)
            scanner = (
                table.new_scan()
                .limit(BATCHES * ROWS - 5)
                .create_bucket_batch_scanner(fluss.TableBucket(table.get_table_info().table_id, 0))
            )
            rows = await in_time(scanner.to_arrow())
            assert rows["id"].to_pylist() == list(range(5, BATCHES * ROWS))


async def test_expired_segments_leave_every_location(
    serve: Callable[..., AbstractContextManager[DevServer]], locations: list[Path]
) -> None:
    with serve() as server:
        async with connected(server.bootstrap) as conn:
            table = await make(conn, **{"table.log.ttl": "1ms"})
            await write(table, 0, BATCHES)
            path, admin = table.get_table_path(), conn.get_admin()

            async def empty() -> bool:
                spec = fluss.OffsetSpec.earliest()
                earliest = (await admin.list_offsets(path, [0], spec))[0]
                return earliest == BATCHES * ROWS and remote_segments(locations) == [0, 0]

            await eventually_async(empty)
            assert await end_offsets(admin, path) == {0: BATCHES * ROWS}
            scanner = await record_scanner(table, {0: 0})
            with pytest.raises(fluss.FlussError, match="out of range"):
                await poll_records(scanner, 1)


async def test_pyfluss_is_told_of_a_location_that_its_token_does_not_open(
    serve: Callable[..., AbstractContextManager[DevServer]], locations: list[Path]
) -> None:
    with serve(**{"remote.data.dirs": f"{locations[0]},memory://elsewhere/x"}) as server:
        async with connected(server.bootstrap) as conn:
            table = await make(conn)
            await write(table, 0, BATCHES)
            await until_old_segments_are_remote_only(server)
            scanner = await record_scanner(table)
            with pytest.raises(fluss.FlussError, match="memory://elsewhere/x") as caught:
                await poll_records(scanner, BATCHES * ROWS)
            assert caught.value.error_code == AUTHORIZATION
            with pytest.raises(fluss.FlussError, match="memory://elsewhere/x"):
                await read(table)  # by batches, which swallow the errors of buckets


async def test_a_changelog_is_read_from_remote_storage_and_its_state_survives_a_death(
    serve: Callable[..., AbstractContextManager[DevServer]], locations: list[Path]
) -> None:
    rows = [{"id": i, "text": "text" * 10, "n": i} for i in range(BATCHES * ROWS)]
    with serve() as server:
        async with connected(server.bootstrap) as conn:
            await conn.get_admin().create_database(DATABASE, ignore_if_exists=True)
            path = fresh_path("remote_changelog")
            table = await create_keyed(conn, path, bucket_count=1, properties=PROPERTIES)
            for at in range(BATCHES):
                await upsert(table, *rows[at * ROWS : (at + 1) * ROWS])
            await until_old_segments_are_remote_only(server)
            assert [row["id"] for _, _, row in await changelog(table, len(rows))] == list(
                range(len(rows))
            )
        server.kill()
        server.start()
        async with connected(server.bootstrap) as conn:
            table = await conn.get_table(path)
            assert await lookups(table, [{"id": 0}, {"id": 7}, {"id": rows[-1]["id"]}]) == [
                rows[0],
                rows[7],
                rows[-1],
            ]
            assert [row["id"] for _, _, row in await changelog(table, len(rows))] == list(
                range(len(rows))
            )


async def test_a_tablet_server_of_its_own_commits_with_its_coordinator(
    tmp_path: Path, locations: list[Path]
) -> None:
    remote = {"remote.data.dirs": ",".join(map(str, locations))}
    coordinator = RoleServer("coordinator", tmp_path, remote)
    address = {"zufluss.coordinator.address": coordinator.bootstrap}
    server = RoleServer("tablet", tmp_path, {**SERVER, **address})
    with coordinator, server:
        async with connected(server.bootstrap) as conn:
            table = await make(conn)
            path = table.get_table_path()
            await write(table, 0, BATCHES)
            await until_old_segments_are_remote_only(server)
            assert min(remote_segments(locations)) > 0
            assert await read(table) == list(range(BATCHES * ROWS))
        server.kill()
        server.start()
        async with connected(server.bootstrap) as conn:
            assert await read(await conn.get_table(path)) == list(range(BATCHES * ROWS))
