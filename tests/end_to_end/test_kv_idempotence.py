"""A put sent again is applied once: writer ids and sequences, as for log tables.

The state of a writer is that of the bucket's log: each put is one changelog batch with the put's
writer id and sequence, also the put that changes nothing.
"""

from __future__ import annotations

import fluss
import pytest

from tests.end_to_end.kv import (
    Codec,
    create_by_hand,
    kv_batch,
    put,
    put_request,
    raw_changelog,
    values_of,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.test_idempotence import new_writer
from tests.end_to_end.test_kv_bad_input import SMALL
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

RETAINED = 5
OUT_OF_ORDER, DUPLICATE = 31, 32
CODEC = Codec(SMALL)


class Writer:
    """A writer with explicit sequence numbers; each batch sets key 1 to its number."""

    def __init__(self, raw: RawClient, path: fluss.TablePath, table_id: int) -> None:
        self.raw = raw
        self.table_id = table_id
        self.id = new_writer(raw, path)

    def batch(self, sequence: int) -> bytes:
        records = [CODEC.put((1, f"{self.id}", sequence))]
        return kv_batch(records, writer_id=self.id, sequence=sequence)

    def send(self, sequence: int) -> tuple[int, int]:
        """Error code and log end offset of the answer."""
        entry = put(self.raw, self.table_id, self.batch(sequence))
        return entry.error_code, entry.log_end_offset

    def state(self) -> int | None:
        row = CODEC.value(values_of(self.raw, self.table_id, [CODEC.key((1,))])[0])
        return None if row is None else row[2]


@pytest.fixture
def table_id(raw: RawClient, path: fluss.TablePath) -> int:
    return create_by_hand(raw, path.table_name, SMALL)


@pytest.fixture
def writer(raw: RawClient, path: fluss.TablePath, table_id: int) -> Writer:
    return Writer(raw, path, table_id)


def test_a_repeated_put_is_applied_once_and_gets_its_first_answer(writer: Writer) -> None:
    assert [writer.send(s) for s in range(3)] == [(0, 1), (0, 3), (0, 5)]
    assert [writer.send(s) for s in range(3)] == [(0, 1), (0, 3), (0, 5)]
    assert writer.raw.end_offset(writer.table_id) == 5
    assert writer.state() == 2, "the repeats did not bring back what was older"


def test_a_repeated_put_that_changed_nothing_takes_no_second_offset(
    raw: RawClient, writer: Writer
) -> None:
    nothing = kv_batch([CODEC.delete((9,))], writer_id=writer.id, sequence=0)
    for _ in range(3):
        entry = put(raw, writer.table_id, nothing)
        assert (entry.error_code, entry.log_end_offset) == (0, 1)
    assert writer.send(1) == (0, 2)
    assert raw.end_offset(writer.table_id) == 2


def test_the_last_five_puts_can_be_repeated_and_no_older_one(writer: Writer) -> None:
    ends = [writer.send(sequence) for sequence in range(10)]
    for sequence in range(10 - RETAINED, 10):
        assert writer.send(sequence) == ends[sequence]
    assert writer.send(10 - RETAINED - 1)[0] in (OUT_OF_ORDER, DUPLICATE)
    assert writer.raw.end_offset(writer.table_id) == ends[-1][1]
    assert writer.state() == 9


@pytest.mark.parametrize("first", [1, 5, 2**31 - 1])
def test_a_new_writer_must_begin_with_zero(writer: Writer, first: int) -> None:
    assert writer.send(first)[0] == OUT_OF_ORDER
    assert writer.state() is None
    assert writer.send(0) == (0, 1)


@pytest.mark.parametrize("gap", [3, 4, 100])
def test_a_gap_in_the_sequence_is_refused_and_can_be_filled(writer: Writer, gap: int) -> None:
    for sequence in range(2):
        writer.send(sequence)
    assert writer.send(gap)[0] == OUT_OF_ORDER
    assert writer.state() == 1
    assert writer.send(2) == (0, 5)


def test_a_put_that_is_refused_does_not_take_its_sequence(raw: RawClient, writer: Writer) -> None:
    bad = kv_batch([CODEC.put((1, "a", 1))[:-1]], writer_id=writer.id, sequence=0)
    assert put(raw, writer.table_id, bad).error_code == 14
    assert writer.send(0) == (0, 1)


def test_pipelined_puts_are_applied_in_order(raw: RawClient, writer: Writer) -> None:
    sent = [
        raw.begin(ApiKey.PUT_KV, put_request(writer.table_id, writer.batch(s)), 2)
        for s in range(100)
    ]
    assert all(raw.answer(request).error is None for request in sent)
    records = raw_changelog(raw, writer.table_id, SMALL)
    assert [row[2] for _, kind, row in records if kind != "-U"] == list(range(100))
    assert writer.state() == 99


def test_two_writers_of_one_key_do_not_know_of_each_other(
    raw: RawClient, path: fluss.TablePath, table_id: int
) -> None:
    one, two = Writer(raw, path, table_id), Writer(raw, path, table_id)
    assert [one.send(0), two.send(0), one.send(1), two.send(1)] == [(0, 1), (0, 3), (0, 5), (0, 7)]
    assert one.send(0) == (0, 1)
    assert raw.end_offset(table_id) == 7


def test_a_repeat_on_another_connection_is_recognised(
    raw: RawClient, writer: Writer, dev_server: DevServer
) -> None:
    request = put_request(writer.table_id, writer.batch(0))
    with RawClient(dev_server.port) as other:
        other.begin(ApiKey.PUT_KV, request, 2)
        other.finish()  # the answer is lost, the client comes again
    assert writer.send(0) == (0, 1)
    assert raw.end_offset(writer.table_id) == 1


def test_a_put_without_acknowledgement_is_applied(raw: RawClient, writer: Writer) -> None:
    """With or without an answer, the next put on the connection comes after this one."""
    request = put_request(writer.table_id, writer.batch(0), acks=0)
    raw.begin(ApiKey.PUT_KV, request, 2)
    end = raw.answer(raw.begin(ApiKey.PUT_KV, put_request(writer.table_id, writer.batch(1)), 2))
    assert end.error is None
    assert writer.state() == 1
