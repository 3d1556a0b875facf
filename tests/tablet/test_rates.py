"""Rates of tables: the records of the last minute, by notes that are taken now and then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zufluss.tablet.rates import NOTE_SECONDS, NOTES, TableRates


class Server:
    """Tables with as many records as a test says, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.tables: dict[int, Any] = {}
        buckets: Any = self
        self.rates = TableRates(buckets, lambda: self.now)

    def write(self, table_id: int, *high_watermarks: int) -> None:
        logs = [SimpleNamespace(log=SimpleNamespace(high_watermark=n)) for n in high_watermarks]
        self.tables[table_id] = SimpleNamespace(replicas=dict(enumerate(logs)))

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_a_rate_is_the_difference_to_the_oldest_note() -> None:
    server = Server()
    server.write(1, 10, 20)
    assert server.rates.of(1) == 0, "nothing was noted yet"
    server.rates.note()
    server.passes(10)
    server.write(1, 60, 70)
    assert server.rates.of(1) == 10
    server.rates.note()
    server.passes(10)
    assert server.rates.of(1) == 5


def test_notes_older_than_a_minute_are_forgotten() -> None:
    server = Server()
    server.write(1, 0)
    server.rates.note()
    server.write(1, 1000)
    for _ in range(NOTES):
        server.passes(NOTE_SECONDS)
        server.rates.note()
    server.passes(NOTE_SECONDS)
    assert server.rates.of(1) == 0


def test_a_new_table_and_a_table_that_lost_a_partition_have_rates_too() -> None:
    server = Server()
    server.rates.note()
    server.passes(5)
    server.write(1, 100)
    assert server.rates.of(1) == 0, "its first note is still to come"
    server.rates.note()
    server.passes(5)
    server.write(1, 150)
    assert server.rates.of(1) == 10
    server.write(1, 20)
    assert server.rates.of(1) == 0
    assert server.rates.of(2) == 0
