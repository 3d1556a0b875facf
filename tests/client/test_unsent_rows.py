"""No row is lost quietly: scripts end in every way with rows that no server has acknowledged.

Each script is a process of its own. Afterwards either all of its rows are in the table, or its
stderr says that they may be missing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core import unsent
from zufluss.client.sync.connection import Connection
from zufluss.client.write.rows import RowChunk
from zufluss.errors import (
    ErrorCode,
    PartitionNotExistError,
    RecordTooLargeError,
    UnsentRowsError,
    UnsentRowsWarning,
    ZuflussError,
)
from zufluss.testing.server import DevServer

LATE = {"client.writer.batch-timeout": "1h"}
"""Rows are not sent before somebody flushes."""

DRIVER = """
import asyncio, json, os, signal, sys, threading, zufluss, zufluss.client.write.append, uvloop
scenarios = json.loads(sys.argv[1])
children = {}
for name, text in scenarios.items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(name + ".stderr", os.O_CREAT | os.O_WRONLY), 2)
        bootstrap, table = sys.argv[2], "fluss." + name
        exec(text)
        break
    children[child] = name
else:
    codes = {children[child]: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
             for child in children}
    print(json.dumps(codes))
"""
"""Imports once, and forks a child for each script, which then ends as any interpreter does."""
OPTIONS = """
options = {"client.writer.batch-timeout": "1h", "client.request-timeout": "30s"}
"""
WRITE = """
conn = zufluss.connect(bootstrap, **options)
writer = conn.table(table).append()
for i in range(20):
    writer.write({"id": i})
writer.write({"id": list(range(20, 40))})
"""
WRITE_ASYNC = """
async def main():
    global conn
    conn = await zufluss.connect_async(bootstrap, **options)
    writer = (await conn.table(table)).append()
    for i in range(20):
        await writer.write({"id": i})
    await writer.write({"id": list(range(20, 40))})
"""
THREAD = """
conn = zufluss.connect(bootstrap, **options)
def work():
    threading.main_thread().join()
    writer = conn.table(table).append()
    for i in range(20):
        writer.write({"id": i})
    writer.write({"id": list(range(20, 40))})
threading.Thread(target=work).start()
"""
ENDINGS = {
    "last_line": (WRITE, 0),
    "exception": (WRITE + "raise ValueError('mine')", 1),
    "sys_exit": (WRITE + "sys.exit(3)", 3),
    "sigterm": (WRITE + "os.kill(os.getpid(), signal.SIGTERM); signal.pause()", 143),
    "sigint": (WRITE + "os.kill(os.getpid(), signal.SIGINT); signal.pause()", -signal.SIGINT),
    "dropped_writer": (WRITE + "del writer", 0),
    "dropped_connection": (WRITE + "del writer, conn", 0),
    "block_of_the_connection": (WRITE + "with conn: pass", 0),
    "exception_in_the_block": (WRITE + "with conn: raise ValueError('mine')", 1),
    "thread_that_outlives_main": (THREAD, 0),
    "asyncio_run": (WRITE_ASYNC + "asyncio.run(main())", 0),
    "asyncio_exception": (WRITE_ASYNC + "    raise ValueError('mine')\nasyncio.run(main())", 1),
    "loop_never_closed": (WRITE_ASYNC + "asyncio.new_event_loop().run_until_complete(main())", 0),
}
SAID = {"loop_never_closed"}
"""Endings after which nothing can be sent any more."""


class Scripts:
    """Scripts that run beside each other in children of one process."""

    def __init__(self, directory: Path, texts: dict[str, str], bootstrap: str) -> None:
        self._directory = directory
        scripts = json.dumps({name: OPTIONS + text for name, text in texts.items()})
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, scripts, bootstrap],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ended(self) -> dict[str, tuple[int, str]]:
        """Wait for all scripts; returns the exit code and the stderr of each."""
        output, _ = self.process.communicate(timeout=WAIT_SECONDS)
        return {
            name: (code, (self._directory / f"{name}.stderr").read_text())
            for name, code in json.loads(output.splitlines()[-1]).items()
        }


@pytest.fixture(scope="module")
def endings(
    conn: Connection, dev_server: DevServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    for name in ENDINGS:
        conn.admin.create_table(f"fluss.{name}", "id BIGINT")
    texts = {name: text for name, (text, _) in ENDINGS.items()}
    return Scripts(tmp_path_factory.mktemp("endings"), texts, dev_server.bootstrap).ended()


def ids(conn: Connection, table: str) -> list[int]:
    """All ids in a table, sorted."""
    return sorted(conn.table(table).scan().to_arrow()["id"].to_pylist())


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_ends_has_its_rows_in_the_table_or_says_that_it_has_not(
    conn: Connection, endings: dict[str, tuple[int, str]], ending: str
) -> None:
    code, stderr = endings[ending]
    assert code == ENDINGS[ending][1], stderr
    if ending in SAID:
        assert f"UnsentRowsWarning: 40 rows written to table fluss.{ending}" in stderr
    else:
        assert ids(conn, ending) == list(range(40))
        assert "UnsentRowsWarning" not in stderr
    assert ("mine" in stderr) == ("exception" in ending)


KILLED = """
import sys, zufluss
bootstrap, table = sys.argv[1:]
conn = zufluss.connect(bootstrap, **options)
writer = conn.table(table).append()
i = 0
while True:
    writer.write({"id": i})
    i += 1
    print(i, flush=True)
    if i % 700 == 0:
        writer.flush()
        print("flushed", i, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_killed_at_any_point_keeps_its_promise(
    conn: Connection, dev_server: DevServer, rng: random.Random, number: signal.Signals
) -> None:
    table = f"fluss.killed_by_{number.name.lower()}"
    conn.admin.create_table(table, "id BIGINT")
    kill_at = rng.randrange(1, 3_000)
    command = [sys.executable, "-c", OPTIONS + KILLED, dev_server.bootstrap, table]
    written = flushed = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            *mark, count = line.split()
            written = int(count)
            flushed = written if mark else flushed
            if written >= kill_at:
                process.send_signal(number)
                break
        rest, stderr = process.communicate(timeout=WAIT_SECONDS)
    lines = [line for line in rest.split("\n")[:-1] if line]  # a print may have been interrupted
    written = max([written, *(int(line.split()[-1]) for line in lines)])
    found = ids(conn, table)
    assert found == list(range(len(found)))
    if number is signal.SIGKILL:
        assert len(found) >= flushed
    else:
        assert len(found) >= written, stderr
        assert "UnsentRowsWarning" not in stderr


GONE = (
    WRITE
    + """
print("written", flush=True)
sys.stdin.read()  # ends when the server is dead
"""
)
GONE_ENDINGS = {
    "end": (GONE, 0, "UnsentRowsWarning"),
    "close": (GONE + "conn.close()", 1, "UnsentRowsError"),
    "block": (GONE + "with conn: sys.exit(3)", 3, "UnsentRowsWarning"),
    "loop": (
        WRITE_ASYNC + "    print('written', flush=True); sys.stdin.read()\nasyncio.run(main())",
        0,
        "UnsentRowsWarning",
    ),
}


def test_rows_that_a_dead_server_did_not_get_are_named(tmp_path: Path) -> None:
    with WarmServer(tmp_path / "data") as server:
        with zufluss.connect(server.bootstrap) as conn:
            for name in GONE_ENDINGS:
                conn.admin.create_table(f"fluss.{name}", "id BIGINT")
        brief = 'options["client.request-timeout"] = "250ms"\n'
        texts = {name: brief + text for name, (text, _, _) in GONE_ENDINGS.items()}
        scripts = Scripts(tmp_path, texts, server.bootstrap)
        for _ in texts:
            assert scripts.process.stdout is not None
            scripts.process.stdout.readline()
        server.kill()
        ended = scripts.ended()
    for name, (_, expected, kind) in GONE_ENDINGS.items():
        code, stderr = ended[name]
        assert code == expected, stderr
        assert kind in stderr
        assert f"40 rows written to table fluss.{name} may be missing" in stderr
        assert server.bootstrap in stderr


# -- forked processes -----------------------------------------------------------------------------

FORKED = """
import os, sys, zufluss
bootstrap, table = sys.argv[1:]
conn = zufluss.connect(bootstrap, **options)
with conn.table(table).append() as writer:
    for i in range(20):
        writer.write({"id": i})
    if os.fork() == 0:
        refused = []
        for call in (
            lambda: writer.write({"id": 100}),
            lambda: writer.write({"id": list(range(100, 120))}),
            lambda: writer.write({"id": 101}),
            lambda: conn.table(table),
        ):
            try:
                call()
            except zufluss.ZuflussError as problem:
                refused.append(problem.message)
        with zufluss.connect(bootstrap) as own, own.table(table).append() as mine:
            mine.write({"id": 20})
        print(*refused, sep="\\n")
        sys.exit(0)
    assert os.wait()[1] == 0
"""


def test_a_forked_process_cannot_write_with_the_writers_of_its_parent(
    conn: Connection, dev_server: DevServer
) -> None:
    conn.admin.create_table("fluss.forked", "id BIGINT")
    done = subprocess.run(
        [sys.executable, "-c", OPTIONS + FORKED, dev_server.bootstrap, "fluss.forked"],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_SECONDS,
    )
    row, columns, another_row, call = done.stdout.splitlines()
    for message in (row, another_row):
        assert "this writer of table fluss.forked belongs to the process that forked" in message
    for message in (columns, call):
        assert "the connection belongs to the process that forked" in message
    assert "UnsentRowsWarning" not in done.stderr
    assert ids(conn, "fluss.forked") == list(range(21))


# -- connections and writers in this process ------------------------------------------------------


@pytest.fixture
def no_unsettled_writers() -> Iterator[None]:
    yield
    assert not unsent.UNSETTLED


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_closing_a_connection_names_the_rows_that_the_server_refuses(
    cluster: FakeCluster,
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.create("u", "id BIGINT")
    cluster.produce_fault = lambda *_: ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    connection = await connect_async(cluster.bootstrap, **FAST | LATE)
    for name, rows in (("t", 3), ("u", 1)):
        await (await connection.table(name)).append().write({"id": list(range(rows))})
    with pytest.raises(UnsentRowsError) as caught:
        await connection.close()
    assert "3 rows written to table fluss.t may be missing" in caught.value.message
    assert "1 row written to table fluss.u may be missing" in caught.value.message
    assert caught.value.code is ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    assert connection.closed
    await connection.close()


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_a_failure_that_nobody_flushed_is_told_by_the_next_write(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    writer = (await connection.table("t")).append()
    await writer.write({"id": [1, 2]})
    writer._seal_all()
    while writer._pending:
        await asyncio.wait([batch.done for batch in writer._pending])
    with pytest.raises(RecordTooLargeError) as caught:
        await writer.write({"id": [3]})
    assert "2 rows for table fluss.t were not written" in caught.value.__notes__
    await writer.close()


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_a_failure_of_a_dropped_writer_is_told_by_its_connection(
    cluster: FakeCluster,
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    connection = await connect_async(cluster.bootstrap, **FAST)
    writer = (await connection.table("t")).append()
    await writer.write({"id": [1, 2]})
    writer._seal_all()
    while writer._pending:
        await asyncio.wait([batch.done for batch in writer._pending])
    del writer
    gc.collect()
    with pytest.raises(UnsentRowsError, match=r"2 rows written to table fluss\.t"):
        await connection.close()


async def test_a_writer_of_a_closed_connection_refuses_rows(cluster: FakeCluster) -> None:
    cluster.create("t", "id BIGINT")
    connection = await connect_async(cluster.bootstrap, **FAST)
    writer = (await connection.table("t")).append()
    await connection.close()
    with pytest.raises(ZuflussError, match=r"the writer of table fluss\.t is closed"):
        await writer.write({"id": 1})
    await writer.close()


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_a_writer_without_unsent_rows_is_not_kept_alive(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    writer = (await connection.table("t")).append()
    await writer.write({"id": 1})
    await writer.flush()
    assert writer not in unsent.UNSETTLED


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_rows_survive_an_interrupted_flush(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    writer = (await connection.table("t")).append()
    await writer.write({"id": 1})
    flush = asyncio.ensure_future(writer.flush())
    await asyncio.sleep(0)
    flush.cancel()
    await writer.close()
    [log] = cluster.logs.values()
    assert log.end == 1


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_an_interrupted_close_names_the_rows(cluster: FakeCluster) -> None:
    cluster.create("t", "id BIGINT")
    reached = asyncio.Event()

    def never_answers(*_: object) -> str:
        reached.set()
        return "drop"

    cluster.produce_fault = never_answers
    connection = await connect_async(cluster.bootstrap, **FAST | LATE)
    writer = (await connection.table("t")).append()
    await writer.write({"id": [1, 2]})
    closing = asyncio.ensure_future(writer.close())
    await reached.wait()
    with warnings.catch_warnings(record=True) as told:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
    assert [w.category for w in told] == [UnsentRowsWarning]
    assert "2 rows written to table fluss.t" in str(told[0].message)
    await connection.close()


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_rows_whose_routing_is_interrupted_are_counted(
    cluster: FakeCluster, connection: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of `asyncio.run` cancels the tasks that send rows."""
    cluster.create("t", "id BIGINT")
    writer = (await connection.table("t")).append()
    waits = asyncio.Event()

    async def never() -> int:
        waits.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    monkeypatch.setattr(writer._sender, "new_writer_id", never)
    for number in range(10):
        await writer.write({"id": number})
    sealing = asyncio.ensure_future(writer._seal_rows())
    await waits.wait()
    sealing.cancel()
    await asyncio.gather(sealing, return_exceptions=True)
    assert writer in unsent.UNSETTLED
    with pytest.raises(UnsentRowsError, match=r"10 rows written to table fluss\.t may be missing"):
        await writer.end(None)


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_a_writer_that_waits_for_its_number_ends_in_time(
    cluster: FakeCluster, connection: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t", "id BIGINT")
    writer = (await connection.table("t")).append()

    async def never() -> int:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    monkeypatch.setattr(writer._sender, "new_writer_id", never)
    await writer.write({"id": 1})
    with pytest.raises(UnsentRowsError, match=r"1 row written to table fluss\.t may be missing"):
        await writer.end(1)


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_rows_of_other_partitions_are_written_when_one_is_missing(
    cluster: FakeCluster, connection: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t", "id BIGINT")
    writer = (await connection.table("t")).append()
    routed = []

    async def route(partition: str | None, chunk: RowChunk) -> None:
        if partition == "bad":
            raise PartitionNotExistError("no partition 'bad'")
        routed.append(partition)

    def split(rows: pa.RecordBatch, _info: object) -> Iterator[tuple[str, pa.RecordBatch]]:
        for number, name in enumerate(("a", "bad", "b")):
            yield name, rows.slice(number, 1)

    monkeypatch.setattr(writer, "_route_partition", route)
    monkeypatch.setattr("zufluss.client.write.writer.split_partitions", split)
    for number in range(3):
        await writer.write({"id": number})
    with pytest.raises(PartitionNotExistError) as caught:
        await writer.flush()
    assert routed == ["a", "b"]
    assert not hasattr(caught.value, "__notes__")  # one row: the error names it
    await writer.close()


@pytest.mark.usefixtures("no_unsettled_writers")
async def test_an_exception_leaves_the_block_of_a_connection_with_a_note_on_lost_rows(
    cluster: FakeCluster,
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: "drop"

    async def body() -> None:
        async with await connect_async(cluster.bootstrap, **FAST | LATE) as connection:
            await (await connection.table("t")).append().write({"id": [1, 2]})
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        await body()
    assert "2 rows written to table fluss.t may be missing" in caught.value.__notes__[0]
