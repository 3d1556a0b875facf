"""States of exactly-once writers: a stored state is restored, other bytes are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.client.producer.state import ProducerState, state_of
from zufluss.errors import ProducerStateError
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath

PATH = TablePath("fluss", "views")
SCHEMA = Schema.of("page STRING, day STRING, views BIGINT, PRIMARY KEY (page, day)")
STATE = ProducerState(PATH, 7, "job", 2, 3, (2, 4), 5, {TableBucket(7, None, 0): 10})

ids = st.integers(0, 2**31 - 1)
buckets = st.builds(TableBucket, st.just(7), st.none() | st.integers(0, 2**40), ids)
states = st.builds(
    ProducerState,
    st.just(PATH),
    st.just(7),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    ids,
    ids,
    st.lists(ids, max_size=5).map(tuple),
    ids,
    st.dictionaries(buckets, st.integers(0, 2**62), max_size=20),
)


def info(buckets: int = 2, partitioned: bool = False, table_id: int = 7) -> TableInfo:
    keys = ("day",) if partitioned else ()
    descriptor = TableDescriptor(SCHEMA, partition_keys=keys, bucket_count=buckets)
    return TableInfo(PATH, table_id, 1, descriptor, 0, 0)


def at(**offsets: int) -> dict[TableBucket, int]:
    """`p100b1=5`: bucket 1 of partition 100 at 5; `b0=3`: bucket 0 of a table without."""
    found = {}
    for name, offset in offsets.items():
        partition, bucket = name.removeprefix("p").split("b")
        found[TableBucket(7, int(partition) if partition else None, int(bucket))] = offset
    return found


@given(states)
@settings(max_examples=100)
def test_a_state_that_was_stored_is_the_same_state(state: ProducerState) -> None:
    assert ProducerState.from_bytes(state.to_bytes()) == state
    assert state_of(state.to_bytes()) == state_of([state, state.to_bytes()]) == state


@given(states, st.data())
@settings(max_examples=100)
def test_a_damaged_state_is_never_taken_for_another_one(
    state: ProducerState, data: st.DataObject
) -> None:
    text = bytearray(state.to_bytes())
    position = data.draw(st.integers(0, len(text) - 1))
    text[position] ^= data.draw(st.integers(1, 255))
    try:
        assert ProducerState.from_bytes(bytes(text)) == state
    except ProducerStateError:
        pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty; a producer that starts without one is given state=None"),
        (b"\x00\x01", "no state of a producer"),
        (b"[]", "zufluss_producer_state is missing"),
        (b"{}", "zufluss_producer_state is missing"),
        (b'{"zufluss_producer_state":0}', "version 0, this client reads 1"),
        (b'{"zufluss_producer_state":2}', "a newer one"),
        (b'{"zufluss_producer_state":1,"producer_id":"x"}', "'x' is damaged: its checksum"),
        (STATE.to_bytes()[:-5], "damaged"),
    ],
)
def test_bytes_that_are_not_a_state_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(ProducerStateError, match=message):
        ProducerState.from_bytes(data)


def test_a_state_that_lacks_something_is_refused_though_its_checksum_fits() -> None:
    document = json.loads(STATE.to_bytes())
    del document["crc32c"], document["epoch"]
    text = json.dumps(document, separators=(",", ":")).encode()
    document["crc32c"] = crc32c(text)
    with pytest.raises(ProducerStateError, match="lacks something: KeyError\\('epoch'\\)"):
        ProducerState.from_bytes(json.dumps(document, separators=(",", ":")).encode())


def test_pieces_of_one_checkpoint_are_merged() -> None:
    pieces = [replace(STATE, offsets=at(b0=10)), replace(STATE, offsets=at(b1=20, b0=10))]
    assert ProducerState.merge(pieces) == replace(STATE, offsets=at(b0=10, b1=20))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(STATE, offsets={TableBucket(7, None, 0): 11}), "offset 10 and at 11"),
        (replace(STATE, checkpoint=6), "checkpoint 6 of producer job .* not of the same"),
        (replace(STATE, producer_id="other"), "not of the same"),
        (replace(STATE, number=4), "not of the same"),
        (replace(STATE, epoch=4), "not of the same"),
        (replace(STATE, table_id=8), "not of the same"),
        (replace(STATE, column_ids=(2,)), "not of the same"),
    ],
)
def test_pieces_that_do_not_belong_together_are_refused(other: ProducerState, message: str) -> None:
    with pytest.raises(ProducerStateError, match=message):
        ProducerState.merge([STATE, other])


def test_merging_no_pieces_is_refused() -> None:
    with pytest.raises(ProducerStateError, match="given state=None"):
        ProducerState.merge([])


def test_a_complete_state_fits_its_table() -> None:
    replace(STATE, offsets=at(b0=1, b1=2)).check(info())
    replace(STATE, offsets=at(p100b0=1, p100b1=2)).check(info(partitioned=True))
    replace(STATE, offsets={}).check(info(partitioned=True))  # there was no partition yet


def test_a_state_of_a_table_that_was_created_again_is_refused() -> None:
    with pytest.raises(ProducerStateError, match=r"table id 7, but fluss\.views has id 9"):
        replace(STATE, offsets=at(b0=1, b1=2)).check(info(table_id=9))


@pytest.mark.parametrize(
    ("offsets", "partitioned", "missing"),
    [
        (at(b0=1), False, r"fluss\.views, bucket 1 is missing"),
        ({}, False, r"fluss\.views, bucket 0 is missing"),
        (at(p100b0=1, p100b1=1, p101b1=1), True, "partition id 101, bucket 0 is missing"),
    ],
)
def test_a_state_without_all_buckets_is_refused(
    offsets: dict[TableBucket, int], partitioned: bool, missing: str
) -> None:
    with pytest.raises(ProducerStateError, match=missing):
        replace(STATE, offsets=offsets).check(info(partitioned=partitioned))
