"""The binary values of leases: what is written is read again, and damage is noticed."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases.records import Expiry, Head
from zufluss.coordinator.leases.rules import Lease, LeasedTable, SnapshotPin
from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.meta.api import VALUE_BYTES_MAX, Create, Put
from zufluss.model.table import TableBucket

TABLE = 7
NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
PARTITIONS = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 2**62))
BUCKETS = st.builds(
    TableBucket, st.just(TABLE), PARTITIONS, st.one_of(st.integers(0, 9), st.integers(0, 2**31))
)
PINS = st.dictionaries(
    BUCKETS,
    st.tuples(st.integers(0, 2**62), st.integers(0, 2**31)).map(lambda at: SnapshotPin(*at)),
    max_size=40,
)
REVOKED = st.dictionaries(PARTITIONS, st.text(max_size=20), max_size=4)


@settings(max_examples=100, deadline=None)
@given(PINS, REVOKED)
def test_what_a_lease_has_of_a_table_is_read_as_it_was_written(
    pins: dict[TableBucket, SnapshotPin], revoked: dict[int | None, str]
) -> None:
    table = LeasedTable(pins, revoked)
    assert lease_records.decode_table(TABLE, lease_records.encode_table(table)) == table


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.none(), st.text(max_size=30)), NUMBERS, NUMBERS, st.sets(NUMBERS, max_size=9))
def test_heads_and_times_are_read_as_they_were_written(
    owner: str | None, epoch: int, ms: int, tables: set[int]
) -> None:
    head = Head(owner, epoch, ms, tuple(sorted(tables)))
    assert lease_records.decode_head(lease_records.encode_head(head)) == head
    expiry = Expiry(ms, epoch)
    assert lease_records.decode_expiry(lease_records.encode_expiry(expiry)) == expiry


@settings(max_examples=100, deadline=None)
@given(PINS, st.data())
def test_every_flipped_bit_and_every_missing_byte_is_noticed(
    pins: dict[TableBucket, SnapshotPin], data: st.DataObject
) -> None:
    value = bytearray(lease_records.encode_table(LeasedTable(pins, {None: "gone"})))
    at = data.draw(st.integers(0, len(value) - 1))
    with pytest.raises(CorruptRecordError):
        lease_records.decode_table(TABLE, bytes(value[:at]))
    value[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptRecordError):
        lease_records.decode_table(TABLE, bytes(value))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_with_a_right_checksum_are_read_or_refused_and_nothing_else(body: bytes) -> None:
    value = lease_records._sealed(body)
    for decode in (
        lease_records.decode_head,
        lease_records.decode_expiry,
        lambda v: lease_records.decode_table(TABLE, v),
    ):
        with suppress(CorruptRecordError):
            decode(value)


def test_a_value_of_another_version_is_refused() -> None:
    value = lease_records.encode_expiry(Expiry(5, 5))
    later = bytes([2]) + value[1:-4]
    sealed = later + lease_records._CHECKSUM.pack(lease_records.crc32c(later))
    with pytest.raises(CorruptRecordError, match="version 2"):
        lease_records.decode_expiry(sealed)


def test_a_hundred_thousand_buckets_fit_a_value() -> None:
    """As many snapshots as a cluster takes: numbers that differ, in one partition or in many."""
    chance = random.Random(7)
    ids = [chance.randrange(1_000, 50_000) for _ in range(100_000)]
    flat = {TableBucket(TABLE, None, i): SnapshotPin(at, 1 + i % 3) for i, at in enumerate(ids)}
    by_day = {TableBucket(TABLE, i // 4, i % 4): SnapshotPin(at, 1) for i, at in enumerate(ids)}
    for pins in (flat, by_day):
        value = lease_records.encode_table(LeasedTable(pins))
        assert len(value) < 400_000 < VALUE_BYTES_MAX
        assert lease_records.decode_table(TABLE, value).pins == pins


def test_more_than_fits_a_value_is_refused_with_the_way_out() -> None:
    chance = random.Random(7)
    pins = {
        TableBucket(TABLE, None, i): SnapshotPin(chance.getrandbits(62), 1) for i in range(130_000)
    }
    with pytest.raises(ConfigError, match=r"130000 snapshots .* use several leases"):
        lease_records.encode_table(LeasedTable(pins))


def test_a_renewal_writes_the_same_few_bytes_however_much_a_lease_has() -> None:
    op = lease_records.put_expiry("lease", 86_400_000, 86_400_000)
    assert isinstance(op, Put)
    assert len(op.value) < 20
    assert op.path == "/leases/kv-snapshot/lease/expiry"


def stored(lease: Lease) -> dict[str, bytes]:
    values = {i: lease_records.encode_table(t) for i, t in lease.tables.items()}
    return {op.path: op.value for op in lease_records.create(lease, values) if _is_value(op)}


def _is_value(op: object) -> bool:
    return isinstance(op, Create | Put)


def lease_of_two_tables() -> Lease:
    tables = {
        7: LeasedTable({TableBucket(7, None, 1): SnapshotPin(3, 1)}),
        9: LeasedTable({TableBucket(9, 4, 0): SnapshotPin(2, 1)}, {5: "d5"}),
    }
    return Lease("l", "ann", 2, 1000, 60_000, 0.0, tables)


def test_a_lease_is_read_again_from_its_values() -> None:
    lease = lease_of_two_tables()
    found = lease_records.load_lease("l", stored(lease))
    assert found.lease == lease
    assert found.remaining_ms == 60_000


def test_a_missing_or_damaged_part_makes_a_lease_damaged_and_the_others_count() -> None:
    values = stored(lease_of_two_tables())
    base = "/leases/kv-snapshot/l"
    for path in values:
        for left in (
            {p: v for p, v in values.items() if p != path},
            values | {path: values[path][:-1]},
        ):
            lease = lease_records.load_lease("l", left).lease
            assert lease.damage is not None
            assert path in lease.damage
            assert lease.paths == left.keys()
            assert lease.owner_known is (path != base)
            lost = {int(path.rsplit("/", 1)[1])} if "/tables/" in path else set()
            assert lease.unreadable == lost
            assert set(lease.tables) == {7, 9} - lost
            assert not lease.holds_all


def test_of_a_lease_without_head_and_tables_everything_is_possible() -> None:
    values = stored(lease_of_two_tables())
    path = "/leases/kv-snapshot/l/expiry"
    lease = lease_records.load_lease("l", {path: values[path]}).lease
    assert lease.holds_all


def test_a_table_that_the_head_does_not_name_is_damage_and_held() -> None:
    values = stored(lease_of_two_tables())
    other = lease_records.encode_table(LeasedTable({TableBucket(8, None, 0): SnapshotPin(1, 1)}))
    lease = lease_records.load_lease("l", values | {"/leases/kv-snapshot/l/tables/8": other}).lease
    assert lease.damage is not None
    assert set(lease.tables) == {7, 8, 9}
