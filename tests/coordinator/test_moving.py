"""Metadata are dumped and restored: whole, into an empty store only, and after any interruption."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.moving import NothingToDumpError, StoreNotEmptyError, dump, restore
from zufluss.meta.api import Create, Op, Put
from zufluss.meta.dump import DumpDamagedError, decode, encode
from zufluss.meta.embedded import EmbeddedStore

BINARY = bytes(range(256))


class DyingStore:
    """A store whose process dies after some transactions."""

    def __init__(self, store: EmbeddedStore, transactions: int) -> None:
        self._store = store
        self._left = transactions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, ops: Sequence[Op]) -> None:
        self._die()
        await self._store.transact(ops)

    async def compare_and_set(self, path: str, value: bytes, version: int | None) -> int:
        self._die()
        return await self._store.compare_and_set(path, value, version)

    def _die(self) -> None:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1


class ChangingStore:
    """A store that others write to during the first readings."""

    def __init__(self, store: EmbeddedStore, changes: int) -> None:
        self._store = store
        self._changes = changes

    async def tree(self, path: str) -> Any:
        entries = await self._store.tree(path)
        if self._changes:
            self._changes -= 1
            await self._store.transact([Put("/counters/table", b"%d" % self._changes)])
        return entries


@pytest_asyncio.fixture
async def source(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    """A store of a cluster, with values that take several transactions."""
    store = await EmbeddedStore.open(tmp_path / "source")
    await Ledger.open(store)
    await store.transact([Create("/counters/table", b"7"), Create("/leases/kv-snapshot/a", BINARY)])
    await store.transact(
        [Create(f"/tables/{i}/remote/0", b'{"n": "\xc3\xa4"}' * 20_000) for i in range(10)]
    )
    yield store
    await store.close()


@pytest_asyncio.fixture
async def target(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    store = await EmbeddedStore.open(tmp_path / "target")
    yield store
    await store.close()


async def values(store: EmbeddedStore) -> dict[str, bytes]:
    return {entry.path: entry.value for entry in await store.tree("/")}


async def test_everything_is_restored_and_epochs_go_on(
    source: EmbeddedStore, target: EmbeddedStore
) -> None:
    before = await values(source)
    dumped = await dump(source)
    assert await restore(target, decode(encode(dumped))) == len(before)
    assert await values(target) == before
    ledger = await Ledger.open(target)
    assert (ledger.epoch, ledger.cluster_id) == (2, dumped.cluster_id)


async def test_a_file_has_a_line_of_json_for_each_path(source: EmbeddedStore) -> None:
    lines = [json.loads(line) for line in encode(await dump(source)).splitlines()]
    assert lines[0]["entries"] == len(lines) - 2
    by_path = {line["path"]: line for line in lines[1:-1]}
    assert by_path["/counters/table"]["text"] == "7"
    assert base64.b64decode(by_path["/leases/kv-snapshot/a"]["base64"]) == BINARY


async def test_a_restore_that_died_at_any_step_goes_on(
    source: EmbeddedStore, target: EmbeddedStore, tmp_path: Path
) -> None:
    dumped, before = await dump(source), await values(source)
    for steps in range(1, 100):
        store = await EmbeddedStore.open(tmp_path / f"died-{steps}")
        try:
            await restore(DyingStore(store, steps), dumped)
            break
        except KeyboardInterrupt:
            with pytest.raises(records.CatalogDamagedError, match="has not finished"):
                await Ledger.open(store)
            with pytest.raises(NothingToDumpError, match="has not finished"):
                await dump(store)
            await restore(store, dumped)
            assert await values(store) == before
        finally:
            await store.close()
    assert steps > 8, "the dump takes several transactions"


async def test_a_store_that_is_not_empty_is_refused_and_stays_as_it_is(
    source: EmbeddedStore, target: EmbeddedStore
) -> None:
    dumped = await dump(source)
    await Ledger.open(target)
    before = await target.tree("/")
    with pytest.raises(StoreNotEmptyError, match="not empty"):
        await restore(target, dumped)
    assert await target.tree("/") == before


async def test_a_restore_of_another_dump_is_not_continued(
    source: EmbeddedStore, target: EmbeddedStore
) -> None:
    with pytest.raises(KeyboardInterrupt):
        await restore(DyingStore(target, 2), await dump(source))
    await source.transact([Put("/counters/table", b"8")])
    with pytest.raises(StoreNotEmptyError, match="another dump"):
        await restore(target, await dump(source))


async def test_a_file_that_was_cut_or_changed_anywhere_is_refused(source: EmbeddedStore) -> None:
    whole = encode(await dump(source))
    lines = whole.splitlines(keepends=True)
    wrong = [
        b"",
        b"\n",
        whole[:-1],
        whole[:-20],
        whole[: len(whole) // 2],
        *(b"".join(lines[:i] + lines[i + 1 :]) for i in (0, 1, len(lines) - 2, len(lines) - 1)),
        whole.replace(b'"text": "7"', b'"text": "8"'),
        whole + b"\n",
        whole + whole,
    ]
    for file in wrong:
        with pytest.raises(DumpDamagedError):
            decode(file)


async def test_a_store_that_changes_is_read_until_it_stands_still(source: EmbeddedStore) -> None:
    dumped = await dump(ChangingStore(source, 3))
    assert dict(dumped.values) == await values(source)
    with pytest.raises(NothingToDumpError, match="stop the coordinator"):
        await dump(ChangingStore(source, 100))


async def test_an_empty_store_has_nothing_to_dump(target: EmbeddedStore) -> None:
    with pytest.raises(NothingToDumpError, match="no metadata"):
        await dump(target)
