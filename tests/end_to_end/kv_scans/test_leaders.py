"""A bucket gets another leader, or its pins expire: scans end at once and return no wrong rows.

In process: one server plays the old leader and the new one, and the test sets the clock. Every
state has different rows, so that rows of another state would be noticed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.scans import arrow_of, next_request, open_request, rows_of
from tests.tablet.keyed import KEYED, many
from tests.tablet.scan.test_service import IDLE, Scans, Slow, code_of, scanning
from tests.tablet.support import TABLE
from zufluss.cluster.replicas import ReplicaAssignment, ReplicaStop, assignments
from zufluss.errors import ErrorCode
from zufluss.wire import messages as m

GONE = {
    ErrorCode.SCANNER_EXPIRED,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION,
    ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION,
}
"""Errors of a scan whose bucket has another leader now."""


def assignment(scans: Scans, epoch: int) -> ReplicaAssignment:
    (first,) = assignments(scans.tablet.image, 1)
    return replace(first, state=replace(first.state, leader_epoch=epoch))


async def lead(scans: Scans, epoch: int) -> None:
    """Make the server leader of the bucket, with this epoch."""
    await scans.tablet.server.start_replicas([assignment(scans, epoch)])


async def lose(scans: Scans, epoch: int) -> None:
    """Make another server leader of the bucket."""
    bucket = scans.tablet.replica().bucket
    await scans.tablet.server.stop_replicas([ReplicaStop(bucket, epoch, False)])


def texts(answer: m.ScanKvSnapshotResponse) -> list[Any]:
    return list(arrow_of(answer, KEYED.arrow).column("text").to_pylist())


class Begun:
    """A pin and a SCAN_KV session, each with one row read."""

    def __init__(self, pin: m.PbPin, session: m.ScanKvResponse, read: m.ScanKvSnapshotResponse):
        self.pin, self.session, self.read = pin, session, read

    @classmethod
    async def at(cls, scans: Scans) -> Begun:
        (pin,) = await scans.open()
        session = await scans.scan(open_request(TABLE, size=1))
        return cls(pin, session, await scans.page(pin, limit=1))

    async def codes(self, scans: Scans) -> set[ErrorCode]:
        """The errors of the next call and of the repeated last one; asserts that no row comes."""
        found = {
            await code_of(scans.page(self.pin, after_key=self.read.last_key)),
            await code_of(scans.page(self.pin)),
        }
        for seq in (1, 0):
            answer = await scans.scan(next_request(self.session.scanner_id, seq))
            assert not answer.HasField("records")
            found.add(ErrorCode(answer.error_code))
        return found


async def test_after_another_leader_epoch_no_scan_goes_on_and_nothing_is_held(
    tmp_path: Path,
) -> None:
    async with scanning(tmp_path) as scans:
        begun = await Begun.at(scans)
        await scans.tablet.put(*many(0, 20, "later"))
        await lead(scans, scans.tablet.replica().leader_epoch + 1)
        assert len(scans.pins) == 0
        assert await begun.codes(scans) == {ErrorCode.SCANNER_EXPIRED}
        await scans.settled()
        (again,) = await scans.open(at=[begun.pin.log_offset])
        rest = await scans.page(again, after_key=begun.read.last_key)
        assert texts(begun.read) + texts(rest) == [text for _, text in many(0, 20)]


async def test_who_is_no_leader_any_more_answers_no_rows_and_holds_no_scan(
    tmp_path: Path,
) -> None:
    async with scanning(tmp_path) as scans:
        begun = await Begun.at(scans)
        await lose(scans, begun.pin.leader_epoch)
        assert len(scans.pins) == 0
        assert await begun.codes(scans) <= GONE
        assert await code_of(scans.open()) in GONE
        await scans.close(begun.pin)


@pytest.mark.parametrize("new_leader", ["this server", "another one"])
async def test_a_page_that_is_being_read_then_is_of_its_own_state_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_leader: str
) -> None:
    async with scanning(tmp_path) as scans:
        begun = await Begun.at(scans)
        slow = Slow(monkeypatch)
        going = asyncio.create_task(scans.page(begun.pin))
        while not slow.asked:
            await asyncio.sleep(0)
        epoch = begun.pin.leader_epoch + 1
        await scans.tablet.put(*many(0, 20, "later"))
        await (lead(scans, epoch) if new_leader == "this server" else lose(scans, epoch))
        assert len(scans.pins) == 0
        slow.gate.set()
        if new_leader == "this server":
            assert texts(await going) == [text for _, text in many(0, 20)]
        else:
            assert await code_of(going) in GONE
        assert await begun.codes(scans) <= GONE


async def test_a_leader_that_comes_back_does_not_know_its_old_scans(tmp_path: Path) -> None:
    """Also while the files of their states still exist."""
    async with scanning(tmp_path) as scans:
        begun = await Begun.at(scans)
        await lose(scans, begun.pin.leader_epoch)
        await lead(scans, begun.pin.leader_epoch + 2)
        assert scans.pin_directories() == ["20"], "kept for who asks for this offset"
        assert await begun.codes(scans) == {ErrorCode.SCANNER_EXPIRED}
        await scans.tablet.put(*many(0, 20, "later"))
        assert await begun.codes(scans) == {ErrorCode.SCANNER_EXPIRED}
        (new,) = await scans.open()
        assert new.leader_epoch == begun.pin.leader_epoch + 2
        assert texts(await scans.page(new)) == [text for _, text in many(0, 20, "later")]
        (old,) = await scans.open(at=[20])
        assert old.pin_id != begun.pin.pin_id
        assert texts(await scans.page(old)) == [text for _, text in many(0, 20)]


async def test_epoch_after_epoch_each_scan_ends_with_its_own(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        old: list[Begun] = []
        for epoch in range(5, 10):
            await lead(scans, epoch)
            for begun in old:
                assert await begun.codes(scans) == {ErrorCode.SCANNER_EXPIRED}
            await scans.tablet.put(*many(0, 20, f"epoch {epoch}"))
            old.append(await Begun.at(scans))
            assert len(scans.pins) == 2
            assert old[-1].pin.leader_epoch == epoch
            assert texts(await scans.page(old[-1].pin))[7] == f"epoch {epoch} 7"
            assert rows_of(old[-1].session) == many(0, 1, f"epoch {epoch}")


async def test_readers_of_a_plan_that_was_given_up_get_expired_and_never_other_rows(
    tmp_path: Path,
) -> None:
    """A planner crashes: nobody closes or uses its pins, and another planner opens new ones."""
    async with scanning(tmp_path, buckets=3) as scans:
        for bucket in (1, 2):
            await scans.tablet.put(*many(0, 20), bucket=bucket)
        first = await scans.open(0, 1, 2)
        begun = await scans.page(first[0], limit=5)
        for bucket in range(3):
            await scans.tablet.put(*many(0, 20, "later"), bucket=bucket)
        second = await scans.open(0, 1, 2)
        scans.now += IDLE / 2
        for bucket, each in enumerate(second):
            await scans.page(each, bucket)
        scans.now += IDLE / 2
        for bucket, each in enumerate(first):
            after = begun.last_key if bucket == 0 else None
            work = scans.page(each, bucket, after_key=after)
            assert await code_of(work) is ErrorCode.SCANNER_EXPIRED
        for bucket, each in enumerate(second):
            rows = texts(await scans.page(each, bucket))
            assert rows == [text for _, text in many(0, 20, "later")]
        assert len(scans.pins) == 3
        await scans.settled(str(second[0].log_offset))
