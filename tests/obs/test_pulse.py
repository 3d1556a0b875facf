"""What a server says of itself: starting, recovering, ready, unready, stopping, stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from zufluss.obs.pulse import (
    STUCK_SECONDS,
    STUCK_SECONDS_APART,
    WARNINGS_MAX,
    PartState,
    Pulse,
)


class Server:
    """A server whose state a test sets, and its pulse."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stopping = False
        self.part = PartState()
        loop: Any = None
        self.pulse = Pulse(loop, lambda: self.stopping, lambda: self.now)
        self.pulse.watch(lambda: self.part)

    def state(self) -> tuple[bool, str]:
        """What `/ready` answers after the loop noted the present state."""
        self.pulse.note()
        answer = self.pulse.ready()
        return answer.ok, answer.status


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_server_is_ready_from_the_first_accepted_request_until_it_stops(server: Server) -> None:
    assert server.state() == (False, "starting")
    server.part = PartState("recovering", ("1 of 2 buckets are recovered",))
    assert server.state() == (False, "recovering")
    assert server.pulse.ready().reasons == ("1 of 2 buckets are recovered",)
    server.part = PartState()
    assert server.state() == (False, "starting")
    server.pulse.accepting()
    assert server.state() == (True, "ready")
    server.stopping = True
    assert server.state() == (False, "stopping")
    assert server.pulse.health().ok


def test_a_lost_part_makes_a_server_unready_until_it_is_back(server: Server) -> None:
    server.pulse.accepting()
    server.part = PartState("unready", ("the metadata store does not answer",))
    assert server.state() == (False, "unready")
    server.part = PartState()
    assert server.state() == (True, "ready")


def test_sick_buckets_are_reported_by_a_ready_server(server: Server) -> None:
    server.pulse.accepting()
    sick = tuple(f"bucket {number}" for number in range(WARNINGS_MAX + 3))
    server.part = PartState(warnings=sick, numbers={"unavailable_buckets": len(sick)})
    assert server.state() == (True, "ready")
    answer = server.pulse.ready()
    assert answer.warnings == (*sick[:WARNINGS_MAX], "and 3 more")
    assert answer.numbers["unavailable_buckets"] == len(sick)


def test_a_loop_that_does_not_run_is_neither_alive_nor_ready(server: Server) -> None:
    server.pulse.accepting()
    server.now += STUCK_SECONDS - 1
    assert server.pulse.health().ok, "a busy loop is not a stuck one"
    assert server.pulse.ready().ok
    server.now += 2
    assert not server.pulse.health().ok
    assert server.pulse.ready().status == "stuck"
    server.pulse.note()
    assert server.pulse.health().ok


def test_a_server_that_starts_or_stops_has_more_time(server: Server) -> None:
    """Otherwise an orchestrator would kill it in the middle of a long recovery, again and again."""
    server.now += 60
    assert server.pulse.health().ok
    server.pulse.accepting()
    server.stopping = True
    server.now += 60
    assert server.pulse.health().ok
    server.now += STUCK_SECONDS_APART
    assert not server.pulse.health().ok


async def test_a_loop_notes_the_state_by_itself() -> None:
    noted = asyncio.Event()
    states = iter([PartState(), PartState("unready", ("x",))])

    def read() -> PartState:
        state = next(states)
        if state.reasons:
            noted.set()
        return state

    pulse = Pulse(asyncio.get_running_loop(), lambda: False)
    pulse.watch(read)
    pulse.start()
    await noted.wait()
    pulse.stop()
    assert pulse.ready().status == "unready"
