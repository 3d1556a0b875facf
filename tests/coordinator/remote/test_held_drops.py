"""Dropped tables and partitions that leases hold: their files count as live."""

from __future__ import annotations

from zufluss.coordinator.records import Drop
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.model.table import PhysicalTablePath, TablePath
from zufluss.remote.files import Usage

PATH = TablePath("d", "t")
TABLE = Drop(PhysicalTablePath(*PATH), 7)
PARTITION = Drop(PhysicalTablePath(*PATH, "2024"), 8, 3)


def test_files_count_from_their_listing_until_the_drop_goes_on() -> None:
    held = HeldDrops()
    held.add("/table", TABLE)
    held.add("/partition", PARTITION)
    assert (held.live_usage(), held.counted_owners) == ({}, set())
    held.set_usage("/table", {1: Usage(2, 20)})
    held.set_usage("/partition", {1: Usage(1, 5), 2: Usage(3, 30)})
    assert held.live_usage() == {1: Usage(3, 25), 2: Usage(3, 30)}
    assert held.counted_owners == {(7, None), (8, 3)}
    held.remove("/partition")
    assert (held.live_usage(), held.counted_owners) == ({1: Usage(2, 20)}, {(7, None)})


def test_a_listing_that_ends_after_the_drop_went_on_counts_nothing() -> None:
    held = HeldDrops()
    held.add("/table", TABLE)
    held.remove("/table")
    held.set_usage("/table", {1: Usage(2, 20)})
    assert not held.is_counted("/table")
    assert held.live_usage() == {}


def test_a_drop_that_waits_again_stays_counted() -> None:
    held = HeldDrops()
    held.add("/table", TABLE)
    held.set_usage("/table", {1: Usage(2, 20)})
    held.add("/table", TABLE)
    assert held.is_counted("/table")


def test_leased_tables_are_found_by_the_name_they_had() -> None:
    held = HeldDrops()
    held.add("/table", TABLE)
    held.add("/partition", PARTITION)
    assert held.leased_tables(PATH) == [7, 8]
    assert held.leased_tables(TablePath("d", "other")) == []
