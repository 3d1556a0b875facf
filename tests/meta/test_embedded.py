"""The embedded store: the conformance suite, and what is special to SQLite in a directory."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.conformance import MetaStoreConformance
from zufluss.meta.api import (
    ConflictError,
    Create,
    Delete,
    MetaStore,
    MetaStoreError,
    Op,
    Put,
    StoreOwnedError,
)
from zufluss.meta.embedded import DATABASE_FILE, ROWS_AT_ONCE, EmbeddedStore

WRITER = Path(__file__).with_name("writer.py")


class TestEmbeddedStore(MetaStoreConformance):
    async def open_store(self, directory: Path) -> MetaStore:
        return await EmbeddedStore.open(directory)


async def test_a_version_is_never_given_twice_even_after_deletion(tmp_path: Path) -> None:
    """Stronger than the protocol: a stale version cannot meet a path that was created again."""
    store = await EmbeddedStore.open(tmp_path)
    first = await store.compare_and_set("/a", b"1", None)
    await store.transact([Put("/a", b"2", first)])
    await store.close()
    again = await EmbeddedStore.open(tmp_path)
    assert await again.compare_and_set("/b", b"1", None) > first + 1
    await again.close()


async def test_a_transaction_of_more_operations_than_a_statement_takes(tmp_path: Path) -> None:
    store = await EmbeddedStore.open(tmp_path)
    paths = [f"/é{i:05}" for i in range(2 * ROWS_AT_ONCE + 1)]
    await store.transact([Create(path, b"") for path in paths])
    ops: list[Op] = [Put(path, b"1") for path in paths[:-1]]
    with pytest.raises(ConflictError) as refused:
        await store.transact([*ops, Delete("/unknown"), Delete(paths[-1])])
    assert refused.value.index == len(ops)
    assert {entry.value for entry in await store.tree("/")} == {b""}
    await store.transact([*ops, Delete(paths[-1])])
    assert [(entry.path, entry.value) for entry in await store.tree("/")] == [
        (path, b"1") for path in paths[:-1]
    ]
    await store.transact([Delete(path) for path in paths[:-1]])
    assert await store.tree("/") == []
    await store.close()


async def test_a_second_store_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    """Two owners of one file would each believe in their own epoch."""
    store = await EmbeddedStore.open(tmp_path)
    with pytest.raises(StoreOwnedError, match=f"open in process {os.getpid()}"):
        await EmbeddedStore.open(tmp_path)
    await store.transact([Create("/still", b"works")])
    await store.close()
    again = await EmbeddedStore.open(tmp_path)
    await again.close()


async def test_a_store_that_another_process_owns_is_refused(tmp_path: Path) -> None:
    """The lock holds between processes, and names the owner."""
    with _start_writer(tmp_path) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(StoreOwnedError, match=f"process {child.pid}"):
            await EmbeddedStore.open(tmp_path)
        child.kill()
    store = await EmbeddedStore.open(tmp_path)
    await store.close()


@pytest.mark.parametrize("seed", range(8))
async def test_every_acknowledged_transaction_survives_sigkill(tmp_path: Path, seed: int) -> None:
    """Acknowledged metadata survives kills of the writer at random points."""
    chance = random.Random(seed)
    acknowledged = -1
    for _ in range(2):
        acknowledged = max(acknowledged, _write_until_killed(tmp_path, chance.randint(1, 40)))
        store = await EmbeddedStore.open(tmp_path)
        pairs = [{int(name) for name in await store.children(side)} for side in ("/left", "/right")]
        counter = await store.read("/next")
        await store.close()
        assert pairs[0] == pairs[1], "a transaction was torn apart"
        assert pairs[0] == set(range(len(pairs[0])))
        assert len(pairs[0]) > acknowledged
        assert counter is not None
        assert int(counter.value) == len(pairs[0])


def _start_writer(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WRITER), str(directory)], stdout=subprocess.PIPE, text=True
    )


def _write_until_killed(directory: Path, lines: int) -> int:
    """Kill the writer after a number of acknowledgements; returns the last one."""
    with _start_writer(directory) as child:
        assert child.stdout is not None
        seen = "".join(child.stdout.readline() for _ in range(lines))
        child.send_signal(signal.SIGKILL)
        seen += child.stdout.read()
    return int(seen.split("\n")[-2])


async def test_a_damaged_value_is_an_error_and_never_an_answer(tmp_path: Path) -> None:
    """SQLite has no checksums of its own; a flipped bit must not become a table schema."""
    store = await EmbeddedStore.open(tmp_path)
    await store.transact([Create("/a", b"good"), Create("/b", b"good")])
    await store.close()
    with sqlite3.connect(tmp_path / DATABASE_FILE) as connection:
        connection.execute("UPDATE entry SET value = x'00' WHERE path = '/a'")
    connection.close()
    store = await EmbeddedStore.open(tmp_path)
    with pytest.raises(MetaStoreError, match=r"/a .* is damaged"):
        await store.read("/a")
    with pytest.raises(MetaStoreError, match=r"/a .* is damaged"):
        await store.tree("/")
    assert await store.read("/b") is not None
    await store.close()


async def test_a_file_that_is_no_database_is_refused_and_given_free(tmp_path: Path) -> None:
    """A failed start names the file, leaves it as it is and does not keep the lock."""
    (tmp_path / DATABASE_FILE).write_bytes(b"this is not a database, whatever its name" * 50)
    for _ in range(2):
        with pytest.raises(MetaStoreError, match=r"metadata\.sqlite cannot be used"):
            await EmbeddedStore.open(tmp_path)


async def test_a_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """An older zufluss must not guess at a layout it does not know."""
    await (await EmbeddedStore.open(tmp_path)).close()
    with sqlite3.connect(tmp_path / DATABASE_FILE) as connection:
        connection.execute("UPDATE store SET format = 99")
    connection.close()
    with pytest.raises(MetaStoreError, match="has format 99, this zufluss reads format 1"):
        await EmbeddedStore.open(tmp_path)
