"""Work beside the requests: a shortage between two rounds does not end it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from zufluss.tablet.tasks import BackgroundTasks


async def test_periodic_work_goes_on_after_memory_ran_out_between_two_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retention, uploads and snapshots would otherwise stop until the next start, unnoticed."""
    sleep, failures, done = asyncio.sleep, [MemoryError()], asyncio.Event()

    async def short(seconds: float) -> Any:
        if seconds and failures:
            raise failures.pop()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", short)
    tasks = BackgroundTasks()
    tasks.repeat(60, done.set)
    await done.wait()
    assert failures == []
    tasks.cancel()
