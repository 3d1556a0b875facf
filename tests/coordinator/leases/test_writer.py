"""Changes of many leases share transactions, and each caller has its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from zufluss.coordinator.leases.writer import BYTES_MAX, OPS_MAX, LeaseWriter
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.meta.api import ConflictError, Create, Op, Put
from zufluss.meta.embedded import EmbeddedStore


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    store = await EmbeddedStore.open(tmp_path)
    yield store
    await store.close()


@pytest_asyncio.fixture
async def writer(store: EmbeddedStore) -> LeaseWriter:
    return LeaseWriter(await Ledger.open(store))


async def test_ten_thousand_renewals_are_a_few_transactions(
    store: EmbeddedStore, writer: LeaseWriter
) -> None:
    paths = [f"/l/{i}" for i in range(10_000)]
    await store.transact([Create(path, b"0") for path in paths])
    await asyncio.gather(*(writer.write([Put(p, b"1")], renewal=True) for p in paths))
    assert writer.transactions <= 10_000 // OPS_MAX + 2
    assert {entry.value for entry in await store.tree("/l")} == {b"1"}


async def test_an_acquire_overtakes_the_renewals_that_wait(
    store: EmbeddedStore, writer: LeaseWriter
) -> None:
    paths = [f"/l/{i}" for i in range(10_000)]
    await store.transact([Create(path, b"0") for path in paths])
    renewals = [asyncio.ensure_future(writer.write([Put(p, b"1")], renewal=True)) for p in paths]
    await renewals[0]
    before = writer.transactions
    await writer.write([Create("/acquired", b"")])
    assert writer.transactions - before <= 2
    assert not all(task.done() for task in renewals)
    await asyncio.gather(*renewals)


async def test_renewals_are_not_kept_waiting_by_acquires(
    store: EmbeddedStore, writer: LeaseWriter
) -> None:
    large = b"x" * (BYTES_MAX - 100)
    await store.transact([Create("/l/0", b"0")])
    acquires = [asyncio.ensure_future(writer.write([Create(f"/a/{i}", large)])) for i in range(10)]
    await asyncio.sleep(0)
    await writer.write([Put("/l/0", b"1")], renewal=True)
    assert not all(task.done() for task in acquires)
    await asyncio.gather(*acquires)


async def test_of_changes_in_one_transaction_only_the_one_that_does_not_fit_fails(
    store: EmbeddedStore, writer: LeaseWriter
) -> None:
    await store.transact([Create(f"/l/{i}", b"0") for i in range(5)])
    changes: list[list[Op]] = [[Put(f"/l/{i}", b"1")] for i in range(5)]
    changes[3] = [Create("/l/new", b""), Put("/l/unknown", b"1")]
    outcomes = await asyncio.gather(*map(writer.write, changes), return_exceptions=True)
    assert [type(each) for each in outcomes].count(ConflictError) == 1
    assert isinstance(outcomes[3], ConflictError)
    written = {entry.path: entry.value for entry in await store.tree("/l")}
    assert written == {f"/l/{i}": b"0" if i == 3 else b"1" for i in range(5)}


async def test_a_coordinator_that_was_replaced_writes_nothing(
    store: EmbeddedStore, writer: LeaseWriter
) -> None:
    await Ledger.open(store)
    outcomes = await asyncio.gather(
        *(writer.write([Create(f"/l/{i}", b"")]) for i in range(3)), return_exceptions=True
    )
    codes = [each.code for each in outcomes if isinstance(each, ZuflussError)]
    assert codes == [ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION] * 3
    assert await store.tree("/l") == []
