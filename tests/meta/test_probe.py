"""A metadata store that stops answering makes its server unready, until it answers again."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from zufluss.meta import probe
from zufluss.meta.embedded import EmbeddedStore
from zufluss.meta.probe import StoreProbe


async def test_a_store_that_fails_is_noted_until_it_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await EmbeddedStore.open(tmp_path)
    asked = StoreProbe(store)
    await asked.ask()
    assert asked.state().status == "ready"
    with monkeypatch.context() as patch:

        async def fail(path: str) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        patch.setattr(store, "read", fail)
        await asked.ask()
    assert asked.state().status == "unready"
    assert asked.state().reasons == ("the metadata store does not answer: disk I/O error",)
    await asked.ask()
    assert asked.state().status == "ready"
    await store.close()
    await asked.ask()
    assert asked.state().status == "unready"


async def test_a_store_that_hangs_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await EmbeddedStore.open(tmp_path)

    async def hang(path: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "read", hang)
    monkeypatch.setattr(probe, "ANSWER_SECONDS", 0.01)
    asked = StoreProbe(store)
    await asked.ask()
    assert asked.state().status == "unready"
    await store.close()
