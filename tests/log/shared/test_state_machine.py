"""Servers, coordinators and a bad network at random, against the real shared log.

The machine plays what the log does not do itself: the metadata (who leads, which session has what
of a bucket, floors, ends), segments, recovery. Each row is its offset and the epoch of the server
that wrote it, so two servers that write different rows at one offset are told apart. After every
step, whatever was acknowledged once must still be what the present leader has, or what a new leader
would read.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.counts import rounds
from tests.log.shared.network import Network, Request
from tests.log.shared.virtual import VirtualLoop
from zufluss.log.shared import ending
from zufluss.log.shared.api import Session, SessionFencedError
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.log.shared.tails import SessionTails
from zufluss.log.shared.writer import ObjectWriter
from zufluss.model.table import TableBucket
from zufluss.remote.errors import RemoteStorageError
from zufluss.remote.wal import EntryKind, WalName, decode, session_directory

BUCKETS = [TableBucket(1, None, 0), TableBucket(1, None, 1)]
ROW = struct.Struct("<qq")
SETTINGS = WalSettings(interval_seconds=0.1, object_bytes=4 * ROW.size, in_flight=3)

picks = st.integers(0, 2**16)


def encoded(first: int, writers: list[int]) -> bytes:
    """The bytes of rows from an offset on, by the epochs of their writers."""
    return b"".join(ROW.pack(first + n, writer) for n, writer in enumerate(writers))


def decoded(first: int, batches: memoryview) -> list[int]:
    """The writers of rows."""
    rows = list(ROW.iter_unpack(batches))
    assert [offset for offset, _ in rows] == list(range(first, first + len(rows)))
    return [writer for _, writer in rows]


@dataclass
class SessionRecord:
    """What the metadata has of a session."""

    session: Session
    floor: int = 0
    closing: bool = False
    end: int | None = None


@dataclass
class BucketRecord:
    """What the metadata and the segments have of a bucket."""

    source: int
    """The server epoch whose session has what segments do not have."""
    segments_end: int = 0
    acknowledged: list[int] = field(default_factory=list)
    """The writers of all rows that somebody was told are durable."""


class Server:
    """A registration of a server, with its local log."""

    def __init__(self, machine: SharedLogMachine, epoch: int) -> None:
        self.machine = machine
        self.epoch = epoch
        self.alive = True
        self.rows: dict[TableBucket, list[int]] = {bucket: [] for bucket in BUCKETS}
        self.durable = dict.fromkeys(BUCKETS, 0)
        self.adopted: set[TableBucket] = set()
        """Buckets whose pointer was changed to this session; their clients hear of durable rows."""
        self.writer: ObjectWriter = machine.log.begin(
            machine.sessions[epoch].session, self._on_durable, self._on_fenced
        )

    def leads(self, bucket: TableBucket) -> bool:
        """Whether the server believes that it may take writes."""
        return self.alive and bucket in self.adopted

    def _on_durable(self, ends: list[tuple[TableBucket, int]]) -> None:
        if not self.alive:
            return
        for bucket, end in ends:
            self.durable[bucket] = max(end, self.durable[bucket])
            if bucket in self.adopted:
                self._acknowledge(self.machine.buckets[bucket], self.rows[bucket][:end])

    def _acknowledge(self, record: BucketRecord, rows: list[int]) -> None:
        known = len(record.acknowledged)
        assert rows[:known] == record.acknowledged[: len(rows)], "two contents at one offset"
        if len(rows) > known:
            assert record.source == self.epoch, "acknowledged by a server that was replaced"
            record.acknowledged += rows[known:]

    def _on_fenced(self, error: SessionFencedError) -> None:
        assert self.machine.sessions[self.epoch].closing, "fenced by its own object"
        self.alive = False


class SharedLogMachine(RuleBasedStateMachine):
    """The cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._note)
        self.errors: list[BaseException] = []
        """What was raised where nobody waits for it, such as in a callback of the log."""
        self.network = Network()
        numbers = Random(1)
        self.log = ObjectLog(
            self.network,
            SETTINGS,
            clock=self.loop.time,
            random=Random(2),
            nonce=lambda: numbers.randbytes(16),
        )
        self.sessions: dict[int, SessionRecord] = {}
        self.buckets = {bucket: BucketRecord(1) for bucket in BUCKETS}
        self.servers: list[Server] = []
        self.sealings: list[tuple[int, asyncio.Task[int]]] = []
        self.others: list[asyncio.Task[int]] = []
        self._register()
        self.present.adopted.update(BUCKETS)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception", AssertionError(context["message"]))
        if not isinstance(error, RemoteStorageError):  # a trim may fail, and is repeated
            self.errors.append(error)

    # What the coordinator does

    @property
    def present(self) -> Server:
        return self.servers[-1]

    @property
    def record(self) -> SessionRecord:
        return self.sessions[self.present.epoch]

    def _register(self) -> None:
        epoch = len(self.sessions) + 1
        self.sessions[epoch] = SessionRecord(Session("ab" * 16, 1, epoch))

        async def begin() -> Server:
            return Server(self, epoch)

        self.servers.append(self.loop.finish(begin()))

    def _sealed(self) -> bool:
        return self.record.end is not None

    @rule()
    @precondition(lambda self: not self.record.closing)
    def close_session(self) -> None:
        """From here on the session gets no floor."""
        self.record.closing = True

    @rule()
    @precondition(lambda self: self.record.closing and len(self.sealings) < 2)
    def begin_to_seal(self) -> None:
        """Also again after it was sealed: another coordinator may still be at it."""
        record = self.record
        work = self.log.seal(record.session, record.floor, 1)
        self.sealings.append((self.present.epoch, self.loop.create_task(work)))
        self.loop.settle()

    @rule(pick=picks)
    @precondition(lambda self: self.sealings)
    def kill_sealer(self, pick: int) -> None:
        self.sealings.pop(pick % len(self.sealings))[1].cancel()
        self.loop.settle()

    @rule()
    @precondition(lambda self: self._sealed())
    def take_over(self) -> None:
        """A new leader reads what the sources have, and carries it into its own session."""
        self._register()
        leader = self.present
        starts = {b: record.segments_end for b, record in self.buckets.items()}
        for epoch in {record.source for record in self.buckets.values()}:
            mine = {b: starts[b] for b in BUCKETS if self.buckets[b].source == epoch}
            self.loop.finish(self._recover(leader, self.sessions[epoch], mine))
        for bucket, rows in leader.rows.items():
            start = starts[bucket]
            if len(rows) > start:
                batches = encoded(start, rows[start:])
                leader.writer.append(
                    bucket, leader.epoch, start, len(rows), batches, EntryKind.CARRY
                )
        self.loop.settle()

    async def _recover(
        self, leader: Server, record: SessionRecord, starts: dict[TableBucket, int]
    ) -> None:
        assert record.end is not None
        tails = SessionTails(starts)
        for bucket, start in starts.items():
            leader.rows[bucket] = self.buckets[bucket].acknowledged[:start]
        async for read in self.log.read(record.session, record.floor, record.end):
            for piece in tails.add(read):
                rows = leader.rows[piece.bucket]
                rows += decoded(piece.first_offset, piece.batches)[len(rows) - piece.first_offset :]
        assert tails.lost == {}

    @rule()
    @precondition(lambda self: self.present.alive and not self.record.closing)
    def commit_take_over(self) -> None:
        """The pointer is changed once the carried tail is durable."""
        leader = self.present
        for bucket, record in self.buckets.items():
            rows = leader.rows[bucket]
            carried = len(rows) in (leader.durable[bucket], record.segments_end)
            if bucket not in leader.adopted and carried:
                record.source = leader.epoch
                leader.adopted.add(bucket)
                record.acknowledged += rows[len(record.acknowledged) :]

    @rule()
    def sweep(self) -> None:
        """Sealed sessions that no bucket needs any more are deleted."""
        needed = {record.source for record in self.buckets.values()}
        for epoch, record in self.sessions.items():
            if record.end is not None and epoch not in needed:
                work = self.log.trim(record.session, record.end)
                self.others.append(self.loop.create_task(work))
        self.loop.settle()

    # What servers do

    @rule(pick=picks, bucket=st.sampled_from(BUCKETS), count=st.integers(1, 3))
    def append(self, pick: int, bucket: TableBucket, count: int) -> None:
        """Any server that believes to lead, the present one or one that was replaced."""
        server = self.servers[-1 - pick % min(2, len(self.servers))]
        if not server.leads(bucket) or server.writer.full:
            return
        rows = server.rows[bucket]
        first = len(rows)
        new = [server.epoch] * count
        rows += new
        server.writer.append(bucket, server.epoch, first, first + count, encoded(first, new))
        self.loop.settle()

    @rule(bucket=st.sampled_from(BUCKETS))
    def upload_segment(self, bucket: TableBucket) -> None:
        """Acknowledged rows go into segments; only the present leader's commits count."""
        if self.present.leads(bucket) and not self.record.closing:
            record = self.buckets[bucket]
            record.segments_end = len(record.acknowledged)

    @rule(bucket=st.sampled_from(BUCKETS))
    def carry(self, bucket: TableBucket) -> None:
        server, start = self.present, self.buckets[bucket].segments_end
        rows = server.rows[bucket]
        if server.leads(bucket) and len(rows) > start:
            batches = encoded(start, rows[start:])
            server.writer.append(bucket, server.epoch, start, len(rows), batches, EntryKind.CARRY)
            self.loop.settle()

    @rule(pick=picks)
    @precondition(lambda self: self.present.alive and not self.record.closing)
    def record_floor(self, pick: int) -> None:
        """A floor is recorded if what it gives up is in segments or was carried."""
        durable, record = self.present.writer.durable_number, self.record
        floor = record.floor + pick % (durable - record.floor + 1)
        ours = self.present.adopted
        tails = SessionTails({b: self.buckets[b].segments_end for b in ours})
        for number in range(floor, durable):
            name = WalName(self.present.epoch, number)
            for _ in tails.add(decode(self.network.objects[name.path], name, "x")):
                pass
        ends = tails.end_offsets
        if len(ours) == 2 and all(
            ends[b] >= len(self.buckets[b].acknowledged) and b not in tails.lost for b in ours
        ):
            record.floor = floor

    @rule(pick=picks)
    def trim(self, pick: int) -> None:
        """A server deletes below the floor that it knows, also one that was replaced."""
        server = self.servers[pick % len(self.servers)]
        if server.alive:
            record = self.sessions[server.epoch]
            self.others.append(self.loop.create_task(self.log.trim(record.session, record.floor)))
            self.loop.settle()

    @rule(pick=picks)
    def kill_server(self, pick: int) -> None:
        """What it sent is still on its way."""
        server = self.servers[-1 - pick % min(2, len(self.servers))]
        server.alive = False
        self.loop.finish(server.writer.stop())

    # What the network does

    def _request(self, pick: int) -> Request:
        return self.network.sent[pick % len(self.network.sent)]

    @rule(pick=picks)
    @precondition(lambda self: self.network.sent)
    def deliver(self, pick: int) -> None:
        self.network.deliver(self._request(pick))
        self.loop.settle()

    @rule()
    @precondition(lambda self: self.network.sent)
    def deliver_everything(self) -> None:
        """As a good network does most of the time."""
        for request in self.network.sent[:]:
            self.network.deliver(request)
        self.loop.settle()

    @rule(pick=picks)
    @precondition(lambda self: self.network.sent)
    def lose_answer(self, pick: int) -> None:
        self.network.deliver(self._request(pick), answer=False)
        self.loop.settle()

    @rule(pick=picks)
    @precondition(lambda self: self.network.sent)
    def time_out(self, pick: int) -> None:
        """The client gives up; the request arrives later, or never."""
        self._request(pick).fail()
        self.loop.settle()

    @rule(pick=picks)
    @precondition(lambda self: self.network.sent)
    def drop(self, pick: int) -> None:
        request = self._request(pick)
        self.network.sent.remove(request)
        request.fail(throttled=bool(pick & 1))
        self.loop.settle()

    @rule(pick=picks)
    @precondition(lambda self: any(request.data for request in self.network.sent))
    def answer_conflict(self, pick: int) -> None:
        creates = [request for request in self.network.sent if request.data]
        self.network.conflict(creates[pick % len(creates)])
        self.loop.settle()

    @rule(fail=st.booleans())
    def reads(self, fail: bool) -> None:
        if self._sealed() or not fail:  # a take-over here reads at once
            self.network.reads_fail = False
        else:
            self.network.reads_fail = True

    @rule(seconds=st.sampled_from([0.05, 0.1, 1.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.settle(seconds)

    # What must hold

    @invariant()
    def nothing_was_raised(self) -> None:
        if self.errors:
            raise self.errors[0]

    @invariant()
    def sealers_agree(self) -> None:
        for epoch, sealing in self.sealings[:]:
            if not sealing.done():
                continue
            self.sealings.remove((epoch, sealing))
            if isinstance(sealing.exception(), RemoteStorageError):
                continue
            record = self.sessions[epoch]
            assert record.end in (None, sealing.result())
            record.end = sealing.result()
            self.network.reads_fail = False

    @invariant()
    def the_leader_has_what_was_acknowledged(self) -> None:
        for bucket, record in self.buckets.items():
            known = len(record.acknowledged)
            if self.present.epoch > 1 or self.present.leads(bucket):
                assert self.present.rows[bucket][:known] == record.acknowledged

    def teardown(self) -> None:
        """Let everything arrive, seal, and have a last leader read it all."""
        try:
            self._end()
        finally:
            self.loop.end()

    def _end(self) -> None:
        self.network.reads_fail = False
        self.record.closing = True
        self.kill_server(0)
        for _ in range(2):
            while self.network.sent:
                self.deliver_everything()
            self.loop.settle(100)
        if not self._sealed():
            work = self.log.seal(self.record.session, self.record.floor, 9)
            self.sealings.append((self.present.epoch, self.loop.create_task(work)))
        while not self._sealed():
            self.loop.settle(1)
            self.deliver_everything()
            self.sealers_agree()
        self.take_over()
        self.the_leader_has_what_was_acknowledged()
        self.nothing_was_raised()


def run(examples: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        SharedLogMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None, phases=phases
        ),
    )


def test_nothing_acknowledged_is_lost_whatever_happens() -> None:
    run(rounds(60, 5_000))


def _acknowledge_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ObjectWriter._sent

    def sent(self: ObjectWriter, sent: Any) -> None:
        if self._error is None and not sent.task.cancelled() and sent.task.result():
            self._on_durable(sent.written.ends)
        real(self, sent)

    monkeypatch.setattr(ObjectWriter, "_sent", sent)


def _take_every_object_for_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_ours(self: ObjectWriter, path: str, data: bytes) -> bool:
        return True

    monkeypatch.setattr(ObjectWriter, "_is_ours", is_ours)


def _believe_that_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_ours(self: ObjectWriter, path: str, data: bytes) -> bool:
        return False

    monkeypatch.setattr(ObjectWriter, "_is_ours", is_ours)


def _seal_from_the_lowest_object_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ending._list

    async def listing(store: Any, session: Session, floor: int) -> Any:
        lowest = 0
        async for page in store.list(session_directory(session.server_epoch)):
            names = [WalName.parse(info.path) for info in page]
            lowest = min((name.number for name in names if name), default=0)
        return await real(store, session, lowest)

    monkeypatch.setattr(ending, "_list", listing)


@pytest.mark.parametrize(
    "bug",
    [
        _acknowledge_out_of_order,
        _take_every_object_for_ones_own,
        _believe_that_it_exists,
        _seal_from_the_lowest_object_on,
    ],
)
def test_a_planted_bug_is_found(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the machine would be green because it looks at nothing."""
    bug(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run(600, (Phase.generate,))
