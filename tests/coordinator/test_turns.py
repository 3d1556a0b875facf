"""One at a time has a turn, in the order in which they came, whoever gives up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from zufluss.coordinator.turns import Turns
from zufluss.meta.api import StoreClosedError


def new_turns() -> Turns[str]:
    async def read_again(key: str) -> None:
        raise AssertionError("nothing is in doubt")

    return Turns(read_again)


async def begun(turns: Turns[str], key: str) -> asyncio.Task[None]:
    task = asyncio.create_task(turns.begin(key))
    await asyncio.sleep(0)
    return task


async def test_a_free_turn_is_taken_once_and_another_one_beside_it() -> None:
    turns = new_turns()
    assert turns.take("a")
    assert not turns.take("a")
    assert turns.take("b")
    assert turns.busy == ["a", "b"]
    turns.end("a")
    assert not turns.is_taken("a")
    assert turns.take("a")


async def test_who_came_first_is_served_first_and_nobody_gets_in_between() -> None:
    turns = new_turns()
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
    turns = new_turns()
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


async def test_a_block_has_the_turn_until_its_end() -> None:
    turns = new_turns()
    with suppress(ValueError):
        async with turns.turn("a"):
            assert turns.is_taken("a")
            raise ValueError("broken")
    assert not turns.is_taken("a")


async def test_a_key_in_doubt_is_read_again_once() -> None:
    read: list[str] = []

    async def read_again(key: str) -> None:
        read.append(key)

    turns = Turns(read_again)
    assert turns.failed("a", OSError("no answer"))
    assert turns.is_doubtful("a")
    await turns.settle("b")
    await turns.settle("a")
    await turns.settle("a")
    assert read == ["a"]
    assert not turns.is_doubtful("a")


async def test_a_key_that_cannot_be_read_stays_in_doubt() -> None:
    async def read_again(key: str) -> None:
        raise OSError("no answer")

    turns = Turns(read_again)
    turns.failed("a", OSError("no answer"))
    with pytest.raises(OSError, match="no answer"):
        await turns.settle("a")
    assert turns.is_doubtful("a")


def test_a_write_that_certainly_changed_nothing_leaves_no_doubt() -> None:
    turns = new_turns()
    assert not turns.failed("a", StoreClosedError("closed"))
    assert not turns.is_doubtful("a")
