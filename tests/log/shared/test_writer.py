"""A session's puts: when they start, what is sent again, and what is acknowledged when."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.log.shared.network import Network, Request
from tests.log.shared.virtual import VirtualLoop
from zufluss.log.shared.api import Session, SessionFencedError
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.log.shared.writer import WRITTEN_MAX, ObjectWriter
from zufluss.model.table import TableBucket
from zufluss.remote.wal import EntryKind, WalName, decode

SESSION = Session("ab" * 16, 1, 7)
BUCKET, OTHER = TableBucket(1, None, 0), TableBucket(1, None, 1)


class Writer:
    """A session over a network, and what it heard."""

    def __init__(self, loop: VirtualLoop, **settings: float) -> None:
        self.loop = loop
        self.network = Network()
        self.durable: list[tuple[TableBucket, int]] = []
        self.fenced: list[SessionFencedError] = []
        numbers = Random(1)
        log = ObjectLog(
            self.network,
            WalSettings(**settings),  # type: ignore[arg-type]
            clock=loop.time,
            random=Random(2),
            nonce=lambda: numbers.randbytes(16),
        )

        async def begin() -> ObjectWriter:
            return log.begin(SESSION, self.durable.extend, self.fenced.append)

        self.log = log
        self.session = loop.finish(begin())
        self.end = 0

    def append(self, count: int = 1, size: int = 10, bucket: TableBucket = BUCKET) -> None:
        start, self.end = self.end, self.end + count
        self.session.append(bucket, 1, start, self.end, b"x" * size)

    def settle(self, seconds: float = 0.0) -> None:
        self.loop.settle(seconds)

    @property
    def sent(self) -> list[int]:
        """The numbers of the requests under way."""
        return [number(request) for request in self.network.sent]

    def request(self, number_: int) -> Request:
        return next(r for r in self.network.sent if number(r) == number_)

    def deliver(self, number_: int, *, answer: bool = True) -> None:
        self.network.deliver(self.request(number_), answer=answer)
        self.settle()


def number(request: Request) -> int:
    name = WalName.parse(request.path)
    assert name is not None
    return name.number


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.end()


def test_the_first_object_after_a_pause_starts_at_once_and_the_next_after_the_interval(
    loop: VirtualLoop,
) -> None:
    writer = Writer(loop, interval_seconds=0.1)
    writer.settle(5)
    writer.append()
    writer.append()
    writer.settle()
    assert writer.sent == [0]
    writer.append()
    writer.settle(0.09)
    assert writer.sent == [0]
    writer.settle(0.02)
    assert writer.sent == [0, 1]


def test_a_full_object_starts_before_the_interval_is_over(loop: VirtualLoop) -> None:
    writer = Writer(loop, interval_seconds=10, object_bytes=100)
    for _ in range(4):
        writer.append(size=60)
        writer.settle()
    assert writer.sent == [0, 1]
    objects = [decode(r.data or b"", WalName(7, number(r)), "x") for r in writer.network.sent]
    assert [(o.entries[0].first_offset, o.entries[0].end_offset) for o in objects] == [
        (0, 1),
        (1, 3),
    ]


def test_only_so_many_objects_are_under_way(loop: VirtualLoop) -> None:
    writer = Writer(loop, interval_seconds=0, in_flight=2)
    for _ in range(5):
        writer.append()
        writer.settle()
    assert writer.sent == [0, 1]
    writer.deliver(1)
    assert writer.sent == [0, 2]
    for each in (2, 3, 4, 5, 6, 7):
        writer.append()
        writer.settle()
        writer.deliver(each)
    assert writer.sent == [0], "object 0 holds up those that are too far above it"


def test_objects_are_acknowledged_in_order(loop: VirtualLoop) -> None:
    writer = Writer(loop, interval_seconds=0)
    for _ in range(3):
        writer.append()
        writer.settle()
    writer.deliver(2)
    writer.deliver(1)
    assert writer.durable == []
    writer.deliver(0)
    assert writer.durable == [(BUCKET, 1), (BUCKET, 2), (BUCKET, 3)]


def test_a_put_that_fails_is_sent_again_with_the_same_bytes_for_ever(loop: VirtualLoop) -> None:
    writer = Writer(loop)
    writer.append()
    writer.settle()
    first = writer.network.sent[0].data
    for _ in range(20):
        request = writer.network.sent.pop()
        assert request.data == first
        request.fail()
        writer.settle(10)
    writer.deliver(0)
    assert writer.durable == [(BUCKET, 1)]


def test_pauses_between_tries_grow_up_to_a_limit(loop: VirtualLoop) -> None:
    writer = Writer(loop)
    writer.append()
    writer.settle()
    for _ in range(12):
        writer.network.sent.pop().fail()
        writer.settle(7.6)
        assert writer.sent == [0]


def test_a_lost_answer_is_found_to_be_ones_own_object(loop: VirtualLoop) -> None:
    writer = Writer(loop)
    writer.append()
    writer.settle()
    writer.deliver(0, answer=False)
    writer.settle(1)
    writer.deliver(0)
    assert writer.durable == [(BUCKET, 1)]
    assert writer.fenced == []


def test_exists_is_not_believed_on_the_first_try(loop: VirtualLoop) -> None:
    """S3 answers 409 when requests meet, and object_store reports that as "exists"."""
    writer = Writer(loop)
    writer.append()
    writer.settle()
    writer.network.conflict(writer.request(0))
    writer.settle(1)
    assert writer.fenced == []
    assert writer.sent == [0]
    writer.deliver(0)
    assert writer.durable == [(BUCKET, 1)]


def test_a_foreign_object_fences_the_session_and_nothing_is_acknowledged_any_more(
    loop: VirtualLoop,
) -> None:
    writer = Writer(loop, interval_seconds=0)
    for _ in range(3):
        writer.append()
        writer.settle()
    writer.deliver(0)
    writer.network.objects[WalName(7, 1).path] = b"somebody else's" * 100
    writer.deliver(2)
    writer.deliver(1)
    assert writer.durable == [(BUCKET, 1)]
    assert len(writer.fenced) == 1
    assert "wal/0000000000000007/0000000000000001 is not ours" in str(writer.fenced[0])
    with pytest.raises(SessionFencedError):
        writer.append()
    writer.network.deliver_all()
    writer.settle(100)
    assert writer.durable == [(BUCKET, 1)]
    assert writer.sent == []


def test_an_object_too_short_for_a_header_is_foreign(loop: VirtualLoop) -> None:
    writer = Writer(loop)
    writer.network.objects[WalName(7, 0).path] = b"short"
    writer.append()
    writer.settle()
    writer.deliver(0)
    assert len(writer.fenced) == 1


def test_a_look_that_fails_is_repeated(loop: VirtualLoop) -> None:
    writer = Writer(loop)
    writer.append()
    writer.settle()
    writer.network.objects[WalName(7, 0).path] = writer.network.sent[0].data or b""
    writer.network.reads_fail = True
    writer.deliver(0)
    assert (writer.durable, writer.fenced) == ([], [])
    writer.network.reads_fail = False
    writer.settle(1)
    writer.deliver(0)
    assert writer.durable == [(BUCKET, 1)]


def _with_quick_puts(loop: VirtualLoop, count: int = 10) -> Writer:
    """A session whose puts took 20 ms so far."""
    writer = Writer(loop, interval_seconds=0)
    for each in range(count):
        writer.append()
        writer.settle(0.02)
        writer.deliver(each)
    return writer


def test_a_slow_put_is_sent_a_second_time(loop: VirtualLoop) -> None:
    writer = _with_quick_puts(loop)
    writer.append()
    writer.settle(0.055)
    assert writer.sent == [10]
    writer.settle(0.01)
    assert writer.sent == [10, 10]
    late, second = writer.network.sent
    assert late.data == second.data
    writer.network.deliver(second)
    writer.settle()
    assert writer.durable[-1] == (BUCKET, 11)
    writer.network.deliver(late)
    writer.settle(10)
    assert writer.fenced == []
    assert writer.sent == []


def test_starts_are_spread_over_the_time_of_a_put(loop: VirtualLoop) -> None:
    """Otherwise what comes behind a burst of small objects waits for a whole put."""
    writer = _with_quick_puts(loop)
    writer.append()
    writer.settle()
    writer.append()
    writer.settle(0.004)
    assert writer.sent == [10]
    writer.settle(0.002)
    assert writer.sent == [10, 11]
    writer.deliver(10)
    writer.deliver(11)
    writer.append()
    writer.settle()
    assert writer.sent == [12], "nothing is under way"


def test_one_of_two_requests_may_fail(loop: VirtualLoop) -> None:
    writer = _with_quick_puts(loop)
    writer.append()
    writer.settle(0.1)
    first, second = writer.network.sent
    second.fail()
    writer.settle()
    writer.network.deliver(first)
    writer.settle()
    assert writer.durable[-1] == (BUCKET, 11)


def test_throttling_lowers_the_number_of_puts_and_success_raises_it_again(
    loop: VirtualLoop,
) -> None:
    writer = Writer(loop, interval_seconds=0, in_flight=4)
    for _ in range(8):
        writer.append()
        writer.settle()
    assert writer.sent == [0, 1, 2, 3]
    for request in writer.network.sent[:]:
        writer.network.sent.remove(request)
        request.fail(throttled=True)
    writer.settle(1)
    assert sorted(writer.sent) == [0, 1, 2, 3]
    for each in (0, 1, 2):
        writer.deliver(each)
    writer.settle(1)
    assert writer.sent == [3, 4], "one wave of refusals halves it once"
    for each in range(3, 20):
        writer.append()
        writer.settle(1)
        writer.deliver(each)
    for _ in range(6):
        writer.append()
        writer.settle(1)
    assert sorted(set(writer.sent)) == [20, 21, 22, 23]


def test_objects_that_are_not_trimmed_for_long_are_described_together(
    loop: VirtualLoop,
) -> None:
    writer = Writer(loop, interval_seconds=0)
    writer.network.at_once = True
    count = 3 * WRITTEN_MAX
    for each in range(count):
        writer.append(bucket=BUCKET if each < 10 else OTHER)
        writer.settle(1)
        writer.end = 0 if each == 9 else writer.end
    written = writer.session.written
    assert len(written) <= WRITTEN_MAX
    numbers = [n for each in written for n in range(each.first_number, each.number + 1)]
    assert numbers == list(range(count)), "they follow each other without a gap"
    assert sum(each.length for each in written) == 10 * count
    ends = {bucket: end for each in written for bucket, end in each.ends}
    assert ends == {BUCKET: 10, OTHER: count - 10}
    writer.session.trimmed(count - 1)
    assert written[-1].number == count - 1
    assert len(writer.session.written) == 1


def test_a_session_says_when_too_much_waits(loop: VirtualLoop) -> None:
    writer = Writer(loop, in_flight=1, gathered_bytes=1000, object_bytes=500)
    writer.append(size=100)
    writer.settle()
    for _ in range(10):
        writer.append(size=100)
    assert writer.session.full
    writer.session.append(OTHER, 1, 0, 1, b"x")  # it lies in the local log already
    room = loop.create_task(writer.session.room())
    writer.settle(10)
    assert not room.done()
    writer.deliver(0)
    assert room.done()
    assert not writer.session.full


def test_a_session_knows_what_its_objects_have_until_they_are_trimmed(loop: VirtualLoop) -> None:
    writer = Writer(loop, in_flight=2)
    for _ in range(2):
        writer.append(size=10)
        writer.settle(1)
    writer.deliver(1)
    assert list(writer.session.written) == [], "object 0 is not known to be ours"
    writer.deliver(0)
    assert [(each.number, each.length) for each in writer.session.written] == [(0, 10), (1, 10)]
    [(bucket, end)] = writer.session.written[1].ends
    assert end == writer.session.end_offset(bucket)
    writer.session.trimmed(1)
    assert [each.number for each in writer.session.written] == [1]


def test_a_fenced_session_keeps_nobody_waiting(loop: VirtualLoop) -> None:
    writer = Writer(loop, in_flight=1, gathered_bytes=10)
    writer.append(size=10)
    writer.settle()
    writer.append(size=10)
    waiting = [loop.create_task(writer.session.room()), loop.create_task(writer.session.close())]
    writer.network.objects[WalName(7, 0).path] = b"seal" * 100
    writer.settle()
    writer.deliver(0)
    assert [task.done() for task in waiting] == [True, True]
    assert isinstance(waiting[1].exception(), SessionFencedError)


def test_closing_waits_for_everything_and_writes_a_close(loop: VirtualLoop) -> None:
    writer = Writer(loop, interval_seconds=10)
    writer.append()
    writer.settle()
    writer.append()
    closing = loop.create_task(writer.session.close())
    writer.settle()
    assert writer.sent == [0, 1]
    writer.network.deliver_all()
    writer.settle()
    assert writer.durable == [(BUCKET, 1), (BUCKET, 2)]
    assert writer.sent == [2]
    assert not closing.done()
    writer.deliver(2)
    assert closing.exception() is None
    writer.network.at_once = True
    assert loop.finish(writer.log.seal(SESSION, 0, 1)) == 2
    with pytest.raises(ValueError, match="was closed"):
        writer.append()


def test_a_session_that_stops_sends_nothing_any_more(loop: VirtualLoop) -> None:
    writer = Writer(loop, interval_seconds=1)
    writer.append()
    writer.settle()
    writer.append()
    loop.finish(writer.session.stop())
    writer.settle(100)
    assert writer.sent == [0]
    writer.deliver(0)
    assert writer.durable == []
    assert writer.sent == []


def test_offsets_that_do_not_follow_are_refused(loop: VirtualLoop) -> None:
    """A reader knows a lost object by the gap that it leaves, so there must be no other gaps."""
    session = Writer(loop).session
    session.append(BUCKET, 2, 5, 8, b"x")
    for epoch, first, end, kind in (
        (2, 9, 10, EntryKind.BATCHES),
        (2, 7, 10, EntryKind.BATCHES),
        (1, 8, 10, EntryKind.BATCHES),
        (2, 3, 7, EntryKind.CARRY),
        (2, 8, 8, EntryKind.BATCHES),
        (2, 9, 8, EntryKind.BATCHES),
    ):
        with pytest.raises(ValueError, match="table 1, bucket 0"):
            session.append(BUCKET, epoch, first, end, b"x", kind)
    session.append(BUCKET, 2, 3, 8, b"x", EntryKind.CARRY)
    session.append(BUCKET, 2, 8, 9, b"x")
    session.append(BUCKET, 2, 9, 9, b"", EntryKind.RELEASE)
    with pytest.raises(ValueError, match="leader epoch 2 after 2"):
        session.append(BUCKET, 2, 9, 10, b"x")
    session.append(BUCKET, 4, 20, 21, b"x")


def test_a_carry_does_not_share_an_object_with_what_was_appended_before_it(
    loop: VirtualLoop,
) -> None:
    writer = Writer(loop)
    writer.session.append(BUCKET, 2, 5, 8, b"batches")
    writer.session.append(OTHER, 2, 0, 8, b"carried", EntryKind.CARRY)
    writer.session.append(BUCKET, 2, 3, 8, b"carried", EntryKind.CARRY)
    writer.session.append(BUCKET, 2, 8, 9, b"behind")
    writer.network.at_once = True
    writer.settle(1)
    objects = [
        decode(data, WalName.parse(path) or WalName(0, 0), "x")
        for path, data in writer.network.objects.items()
    ]
    assert [[(e.bucket, e.kind.name, e.end_offset) for e in o.entries] for o in objects] == [
        [(BUCKET, "BATCHES", 8), (OTHER, "CARRY", 8)],
        [(BUCKET, "CARRY", 8), (BUCKET, "BATCHES", 9)],
    ]


def test_a_session_is_drained_when_everything_appended_before_is_durable(loop: VirtualLoop) -> None:
    writer = Writer(loop, interval_seconds=10, object_bytes=100)
    assert loop.finish(writer.session.drained()) == 0
    writer.append()
    writer.settle()
    writer.append(size=100)
    writer.append()  # objects 0 (under way), 1 and 2 (gathering)
    drained = loop.create_task(writer.session.drained())
    writer.settle(20)
    writer.append()
    for each in (2, 1):
        writer.deliver(each)
        assert not drained.done()
    writer.deliver(0)
    assert drained.result() == 3
    assert writer.session.durable_number == 3
    assert writer.durable[-1] == (BUCKET, 3)


@pytest.mark.parametrize("ending", ["fenced", "stopped"])
def test_a_session_that_ends_is_never_drained(loop: VirtualLoop, ending: str) -> None:
    writer = Writer(loop, interval_seconds=10)
    writer.append()
    writer.settle()
    writer.append()
    drained = loop.create_task(writer.session.drained())
    writer.settle()
    if ending == "stopped":
        loop.finish(writer.session.stop())
    else:
        writer.network.objects[WalName(7, 0).path] = b"seal" * 100
        writer.deliver(0)
    writer.settle()
    assert isinstance(drained.exception(), SessionFencedError)
    with pytest.raises(SessionFencedError):
        loop.finish(writer.session.drained())


def test_a_session_that_was_stopped_before_it_sent_anything_is_not_drained(
    loop: VirtualLoop,
) -> None:
    writer = Writer(loop)
    writer.append()
    loop.finish(writer.session.stop())
    with pytest.raises(SessionFencedError, match="was stopped"):
        loop.finish(writer.session.drained())


def test_the_end_of_a_bucket_is_the_end_of_what_was_appended(loop: VirtualLoop) -> None:
    writer = Writer(loop)
    assert writer.session.end_offset(BUCKET) is None
    writer.append(3)
    assert writer.session.end_offset(BUCKET) == 3
    writer.network.at_once = True
    writer.settle(1)
    assert writer.session.end_offset(BUCKET) == 3
    assert writer.session.end_offset(OTHER) is None
