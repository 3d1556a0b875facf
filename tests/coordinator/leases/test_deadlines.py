"""Leases come up when their time is over, however often it was moved, and leave nothing behind."""

from __future__ import annotations

from zufluss.coordinator.leases.deadlines import STALE_MAX, Deadlines


def test_leases_come_up_at_the_earliest_deadline_they_had_each_once() -> None:
    deadlines = Deadlines()
    for lease_id, at in (("a", 5.0), ("b", 3.0), ("a", 9.0), ("b", 1.0)):
        deadlines.add(lease_id, at)
    assert deadlines.next == 1.0
    assert deadlines.due(0.5) == []
    assert deadlines.due(4.0) == ["b"]
    assert deadlines.due(6.0) == ["a"]
    assert deadlines.due(100.0) == []


def test_a_lease_that_is_gone_does_not_come_up() -> None:
    deadlines = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.discard("a")
    deadlines.discard("unknown")
    assert deadlines.due(2.0) == []
    deadlines.add("a", 3.0)
    assert deadlines.due(3.0) == ["a"]


def test_many_short_leases_with_late_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines()
    deadlines.add("stays", 7.0)
    for i in range(5 * STALE_MAX):
        deadlines.add(f"l{i}", 1e6)
        deadlines.discard(f"l{i}")
    assert len(deadlines._heap) <= STALE_MAX + 4
    assert deadlines.due(8.0) == ["stays"]
