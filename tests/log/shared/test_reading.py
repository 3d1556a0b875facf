"""What a session has of each bucket when objects are damaged, cut or missing."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.log.shared.network import Network
from tests.log.shared.virtual import VirtualLoop
from zufluss.log.shared.api import LostObject, Session, SharedLog
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.log.shared.tails import SessionTails
from zufluss.model.table import TableBucket
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.wal import EntryKind, WalName, WalObject
from zufluss.testing.shared_log import BUCKETS, WrittenSession, read_back, rows, session

FAST, SLOW, _ = BUCKETS
OF = session()


def path(number: int) -> str:
    return WalName(OF.server_epoch, number).path


async def written(network: Network) -> tuple[SharedLog, WrittenSession]:
    """Objects 0 to 5: all have the fast bucket, 1 and 3 the slow one as well."""
    network.at_once = True
    log = ObjectLog(network, WalSettings(interval_seconds=0))
    session = WrittenSession(log, OF)
    for number in range(6):
        session.append(FAST)
        if number in (1, 3):
            session.append(SLOW)
        await session.settle()
    await session.writer.stop()
    return log, session


async def lost(network: Network, log: SharedLog, floor: int = 0) -> dict[TableBucket, int]:
    """The buckets that must not be served, and the first offset of each that is lost."""
    tails, _ = await read_back(log, OF, floor, 6, {FAST: 3 * floor, SLOW: 0})
    for bucket, error in tails.lost.items():
        assert error.first_offset == tails.end_offsets[bucket]
        assert str(bucket) in error.message
        assert f"offsets from {error.first_offset} on" in error.message
        assert "wal/0000000000000007/" in error.message
    return {bucket: error.first_offset for bucket, error in tails.lost.items()}


async def test_a_damaged_entry_costs_its_bucket_alone() -> None:
    network = Network()
    log, _ = await written(network)
    data = network.objects[path(1)]
    network.objects[path(1)] = data[:-1] + bytes([data[-1] ^ 1])  # of the slow bucket
    assert await lost(network, log) == {SLOW: 0}


async def test_a_cut_object_costs_the_buckets_behind_the_cut() -> None:
    network = Network()
    log, _ = await written(network)
    network.objects[path(3)] = network.objects[path(3)][:-1]
    assert await lost(network, log) == {SLOW: 3}


async def test_a_missing_object_costs_the_buckets_that_do_not_go_on_without_a_gap() -> None:
    network = Network()
    log, _ = await written(network)
    del network.objects[path(2)]  # it has nothing of the slow bucket, as object 3 proves
    assert await lost(network, log) == {FAST: 6}


async def test_the_last_rows_of_a_bucket_may_have_been_in_a_missing_object() -> None:
    network = Network()
    log, _ = await written(network)
    del network.objects[path(4)]  # it has nothing of the slow bucket, but nothing proves it
    assert await lost(network, log) == {FAST: 12, SLOW: 6}


@pytest.mark.parametrize("size", [0, 10, 96, 100])
async def test_an_object_without_its_index_is_as_bad_as_none(size: int) -> None:
    network = Network()
    log, _ = await written(network)
    network.objects[path(2)] = network.objects[path(2)][:size]
    assert await lost(network, log) == {FAST: 6}


async def test_damage_to_what_is_in_segments_costs_nothing() -> None:
    network = Network()
    log, session = await written(network)
    network.objects[path(0)] = network.objects[path(0)][:-1]
    starts = {FAST: 3, SLOW: 0}
    tails, _ = await read_back(log, OF, 0, 6, starts)
    assert (tails.lost, tails.end_offsets[FAST]) == ({}, session.durable[FAST])


async def test_a_carry_replaces_damaged_entries() -> None:
    network = Network()
    network.at_once = True
    log = ObjectLog(network, WalSettings(interval_seconds=0))
    session = WrittenSession(log, OF)
    await session.fill(3)
    session.writer.append(FAST, 1, 0, 9, rows(FAST, 0, 9), EntryKind.CARRY)
    await session.fill(1)
    del network.objects[path(1)]
    tails, _ = await read_back(log, OF, 0, 4, {FAST: 0, SLOW: 0})
    assert tails.end_offsets[FAST] == 12
    assert list(tails.lost) == [SLOW]


async def test_a_bucket_that_came_back_to_its_server_is_read_from_its_carry_on() -> None:
    network = Network()
    network.at_once = True
    log = ObjectLog(network, WalSettings(interval_seconds=0))
    session = WrittenSession(log, OF)
    await session.fill(2)
    session.writer.append(FAST, 1, 6, 6, b"", EntryKind.RELEASE)
    session.writer.append(FAST, 3, 8, 12, rows(FAST, 8, 12), EntryKind.CARRY)
    session.ends[FAST] = 12
    session.append(FAST, leader_epoch=3)
    await session.settle()
    tails, data = await read_back(log, OF, 0, 4, {FAST: 8})
    assert (tails.end_offsets, tails.lost, data[FAST]) == ({FAST: 15}, {}, rows(FAST, 8, 15))
    tails, _ = await read_back(log, OF, 0, 4, {FAST: 0})
    assert tails.lost[FAST].first_offset == 6, "rows 6 and 7 are in another session or segment"


async def test_reading_without_an_end_stops_at_the_first_gap_and_at_a_seal() -> None:
    network = Network()
    log, _ = await written(network)
    seal = await log.seal(OF, 0, 1)
    assert len([read async for read in log.read(OF, 0, None)]) == seal == 6
    del network.objects[path(3)]
    assert len([read async for read in log.read(OF, 0, None)]) == 3


async def test_a_seal_below_the_end_is_no_data() -> None:
    network = Network()
    log, _ = await written(network)
    await log.seal(OF, 0, 1)
    read = [each async for each in log.read(OF, 5, 7)]
    assert isinstance(read[0], WalObject)
    assert read[1] == LostObject(WalName(7, 6), "a SEAL lies below the end of the session")


async def test_objects_of_another_cluster_are_refused() -> None:
    network = Network()
    log, _ = await written(network)
    foreign = Session("f" * 32, OF.server_id, OF.server_epoch)
    read = [each async for each in log.read(foreign, 0, 2)]
    assert all(isinstance(each, LostObject) for each in read)
    assert "is an object of server 1 of cluster 0123456789abcdef" in read[0].reason  # type: ignore[union-attr]


async def test_a_store_that_is_away_is_no_damage() -> None:
    network = Network()
    log, _ = await written(network)
    network.reads_fail = True
    with pytest.raises(LocationUnavailableError):
        await read_back(log, OF, 0, 6, {FAST: 0})


async def test_a_reader_that_leaves_early_leaves_no_tasks() -> None:
    network = Network()
    log, _ = await written(network)
    reading = log.read(OF, 0, 6)
    await anext(reading)
    await reading.aclose()  # type: ignore[attr-defined]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_damaged_seal_is_no_end_but_the_next_one_is() -> None:
    """What cannot be read may have been data: buckets that may have been in it are refused."""
    network = Network()
    log, _ = await written(network)
    await log.seal(OF, 0, 1)
    network.objects[path(6)] = b"\0" + network.objects[path(6)][1:]
    assert await log.seal(OF, 0, 1) == 7
    tails, _ = await read_back(log, OF, 0, 7, {FAST: 0, SLOW: 0})
    assert set(tails.lost) == {FAST, SLOW}


@pytest.mark.parametrize("gone", [(0,), (2,), (1, 2, 3), (4,)])
async def test_an_acknowledged_object_that_is_gone_is_not_taken_for_the_end(
    gone: tuple[int, ...],
) -> None:
    """Otherwise everything behind it would be lost without a word (A1, A7)."""
    network = Network()
    log, session = await written(network)
    for number in gone:
        del network.objects[path(number)]
    end = await log.seal(OF, 0, 1)
    assert end == 6
    tails, _ = await read_back(log, OF, 0, end, {FAST: 0, SLOW: 0})
    assert FAST in tails.lost
    for bucket in (FAST, SLOW):
        assert bucket in tails.lost or tails.end_offsets[bucket] == session.durable[bucket]
    assert await log.seal(OF, 0, 2) == end


async def test_objects_above_one_that_never_arrived_do_not_speak_for_it() -> None:
    network = Network()
    log = ObjectLog(network, WalSettings(interval_seconds=0))
    session = WrittenSession(log, OF)
    for _ in range(3):
        session.append(FAST)
        while session.writer._gathering.waits:
            await asyncio.sleep(0)
    while len(network.sent) < 3:
        await asyncio.sleep(0)
    for request in network.sent[1:3]:
        network.deliver(request)
    network.at_once = True
    assert await log.seal(OF, 0, 1) == 0
    await session.writer.stop()


async def test_an_entry_that_was_reached_before_proves_that_nothing_is_lost() -> None:
    """A warm log has everything; a missing object below its end costs it nothing."""
    network = Network()
    log, session = await written(network)
    del network.objects[path(0)]
    tails, _ = await read_back(log, OF, 0, 6, {FAST: session.durable[FAST], SLOW: 0})
    assert tails.lost == {}


async def test_a_data_object_that_was_cut_to_its_header_is_no_end() -> None:
    """Taking it for a seal would drop everything behind it without a word."""
    network = Network()
    log, _ = await written(network)
    network.objects[path(2)] = network.objects[path(2)][:96]
    assert await log.seal(OF, 0, 1) == 6


async def test_a_seal_is_never_put_below_the_floor() -> None:
    network = Network()
    log, _ = await written(network)
    await log.trim(OF, 6)
    assert await log.seal(OF, 6, 1) == 6


async def test_a_seal_that_nobody_confirmed_is_found_by_the_next_sealer() -> None:
    network = Network()
    log, _ = await written(network)
    network.at_once = False
    sealing = asyncio.create_task(log.seal(OF, 0, 1))
    while len(network.sent) < 8:
        await asyncio.sleep(0)
    for request in network.sent[:]:
        network.deliver(request, answer=False)
    with pytest.raises(LocationUnavailableError):
        await sealing
    network.at_once = True
    assert await log.seal(OF, 0, 2) == 6


ends = st.dictionaries(st.integers(0, 5), st.sampled_from(["cut", "bit", "missing"]), max_size=3)


@given(ends, st.integers(0, 2**32))
def test_whatever_is_damaged_no_row_is_wrong_and_every_missing_row_is_named(
    damage: dict[int, str], seed: int
) -> None:
    """A7: a bucket has all of its rows, or it is refused from its first missing row on."""

    async def check() -> None:
        random, network = Random(seed), Network()
        log, session = await written(network)
        for number, kind in damage.items():
            data = bytearray(network.objects[path(number)])
            if kind == "missing":
                del network.objects[path(number)]
                continue
            if kind == "cut":
                del data[random.randrange(len(data)) :]
            else:
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            network.objects[path(number)] = bytes(data)
        tails, _ = await read_back(log, OF, 0, 6, {FAST: 0, SLOW: 0})
        for bucket in (FAST, SLOW):
            whole = tails.end_offsets[bucket] == session.durable[bucket]
            assert whole or bucket in tails.lost
        if not damage:
            assert tails.lost == {}

    loop = VirtualLoop()
    loop.finish(check())
    loop.end()


def test_a_release_is_no_row() -> None:
    assert SessionTails({FAST: 3}).end_offsets == {FAST: 3}
