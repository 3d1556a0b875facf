"""One at a time has a turn, in the order in which they came, whoever gives up."""

from __future__ import annotations

import asyncio

import pytest

from zufluss.coordinator.turns import Turns


async def begun(turns: Turns, key: str) -> asyncio.Task[None]:
    task = asyncio.create_task(turns.begin(key))
    await asyncio.sleep(0)
    return task


async def test_a_free_turn_is_taken_once_and_another_one_beside_it() -> None:
    turns = Turns()
    assert turns.take("a")
    assert not turns.take("a")
    assert turns.take("b")
    assert turns.busy == ["a", "b"]
    turns.end("a")
    assert not turns.is_taken("a")
    assert turns.take("a")


async def test_who_came_first_is_served_first_and_nobody_gets_in_between() -> None:
    turns = Turns()
    turns.take("a")
    first, second = await begun(turns, "a"), await begun(turns, "a")
    turns.end("a")
    assert not turns.take("a")
    await first
    assert not second.done()
    turns.end("a")
    await second
    turns.end("a")
    assert turns.busy == []


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "just given the turn"])
async def test_who_gives_up_keeps_nobody_waiting(given: bool) -> None:
    turns = Turns()
    turns.take("a")
    first, second = await begun(turns, "a"), await begun(turns, "a")
    if given:
        turns.end("a")
    first.cancel()
    await asyncio.wait([first])
    if not given:
        turns.end("a")
    await second
    turns.end("a")
    assert first.cancelled()
    assert turns.busy == []
