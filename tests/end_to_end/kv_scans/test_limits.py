"""The limits on scans and pins, and counters that never drift."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.counts import rounds
from tests.end_to_end.kv_scans.support import BUSY, TOO_MANY, close_pins, create, open_pins
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    arrow_of,
    call,
    close_request,
    good,
    next_request,
    numbered,
    open_request,
    pin,
    put_rows,
)
from tests.tablet.keyed import KEYED, many
from tests.tablet.scan.test_service import AGE, IDLE, Scans, scanning
from tests.tablet.support import TABLE
from zufluss.errors import ErrorCode, KvScanBusyError, KvScanExpiredError, ZuflussError
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m

PER_BUCKET, PER_SERVER = 8, 200
BUCKETS = PER_SERVER // PER_BUCKET + 1
STEPS = rounds(400, 10_000)


def refused(raw: RawClient, table_id: int, bucket: int, option: str) -> None:
    """Both kinds of scans are refused with a time after which to retry."""
    with pytest.raises(ZuflussError, match="retry after 500 ms") as caught:
        pin(raw, table_id, bucket)
    assert (caught.value.code, caught.value.retriable) == (BUSY, True)
    assert option in caught.value.message
    answer = call(raw, open_request(table_id, bucket, size=1))
    assert answer.error_code == TOO_MANY
    assert "retry after 500 ms" in answer.error_message
    assert option in answer.error_message


def test_the_ninth_scan_of_a_bucket_is_refused_until_one_is_closed(
    server: DevServer, raw: RawClient
) -> None:
    table_id, before = create(raw), open_pins(server)
    put_rows(raw, table_id, numbered(0, 10))
    pins = [pin(raw, table_id)[0].pin_id for _ in range(PER_BUCKET // 2)]
    scans = [good(raw, open_request(table_id, size=1)).scanner_id for _ in pins]
    for _ in range(3):
        refused(raw, table_id, 0, "kv.scanner.max-per-bucket")
    close_pins(raw, pins[0])
    pins[0] = pin(raw, table_id)[0].pin_id
    refused(raw, table_id, 0, "kv.scanner.max-per-bucket")
    good(raw, close_request(scans[0]))
    scans[0] = good(raw, open_request(table_id, size=1)).scanner_id
    refused(raw, table_id, 0, "kv.scanner.max-per-bucket")
    for scan in scans:  # one that is read to its end counts no more
        assert not good(raw, next_request(scan, 1)).has_more_results
    close_pins(raw, *pins)
    assert open_pins(server) == before


def test_the_201st_scan_of_a_server_is_refused_until_one_is_closed(
    server: DevServer, raw: RawClient
) -> None:
    table_id, before = create(raw, buckets=BUCKETS), open_pins(server)
    pins: list[bytes] = []
    for bucket in range(BUCKETS):
        put_rows(raw, table_id, numbered(0, 2), bucket)
    try:
        while len(pins) + before < PER_SERVER:
            pins.append(pin(raw, table_id, len(pins) // PER_BUCKET)[0].pin_id)
        assert open_pins(server) == PER_SERVER
        last = BUCKETS - 1
        refused(raw, table_id, last, "kv.scanner.max-per-server")
        close_pins(raw, pins[0])
        pins[0] = pin(raw, table_id, last)[0].pin_id
        refused(raw, table_id, last, "kv.scanner.max-per-server")
        assert open_pins(server) == PER_SERVER
    finally:
        close_pins(raw, *pins)
    assert open_pins(server) == before
    good(raw, close_request(good(raw, open_request(table_id, size=1)).scanner_id))


class Numbers:
    """Random calls on a real tablet server, and a model of what is open after each call."""

    def __init__(self, scans: Scans, rng: random.Random) -> None:
        self.scans, self.rng = scans, rng
        self.open: dict[bytes, list[float]] = {}
        """By id: the bucket, the time of opening and the time of the last use."""
        self.gone: list[bytes] = []
        self.counts = dict.fromkeys(("opened", "refused", "closed", "expired", "read"), 0)

    def over(self, pin_id: bytes) -> bool:
        _, opened, used = self.open[pin_id]
        return self.scans.now - opened >= AGE or self.scans.now - used >= IDLE

    def forget(self, pin_id: bytes) -> None:
        del self.open[pin_id]
        self.gone.append(pin_id)

    def sweep(self) -> None:
        for pin_id in [p for p in self.open if self.over(p)]:
            self.forget(pin_id)

    async def step(self) -> None:
        work = (self.add, self.add, self.add_session, self.close, self.read, self.read, self.time)
        await self.rng.choice(work)()
        self.check()

    def check(self) -> None:
        pins = self.scans.pins
        assert len(pins) == len(self.open)
        for bucket in range(3):
            where = self.scans.tablet.replica(bucket).bucket
            assert pins.of_bucket(where) == sum(b == bucket for b, _, _ in self.open.values())

    def full(self, *buckets: int) -> bool:
        """Whether the limit is reached, not counting expired scans."""
        open_now = [b for b, _, _ in self.open.values()]
        return len(open_now) + len(buckets) > 12 or any(
            open_now.count(b) + buckets.count(b) > 5 for b in buckets
        )

    def begun(self, pin_id: bytes, bucket: int) -> None:
        self.open[pin_id] = [bucket, self.scans.now, self.scans.now]
        self.counts["opened"] += 1

    async def add(self) -> None:
        buckets = self.rng.sample(range(3), self.rng.randint(1, 3))
        try:
            pins = await self.scans.open(*buckets)
        except KvScanBusyError:
            self.sweep()
            assert self.full(*buckets)
            self.counts["refused"] += 1
            return
        if self.full(*buckets):
            self.sweep()
        assert not self.full(*buckets)
        for bucket, each in zip(buckets, pins, strict=True):
            self.begun(each.pin_id, bucket)

    async def add_session(self) -> None:
        bucket = self.rng.randrange(3)
        answer = await self.scans.scan(open_request(TABLE, bucket, size=1))
        if answer.error_code == ErrorCode.TOO_MANY_SCANNERS:
            self.sweep()
            assert self.full(bucket)
            self.counts["refused"] += 1
            return
        if self.full(bucket):
            self.sweep()
        assert not self.full(bucket)
        self.begun(answer.scanner_id, bucket)

    async def close(self) -> None:
        """A scan that is open, or was ended long ago."""
        known = [*self.open, *self.gone[-3:]]
        if known:
            pin_id = self.rng.choice(known)
            await self.scans.close(m.PbPin(pin_id=pin_id))
            if pin_id in self.open:
                self.forget(pin_id)
                self.counts["closed"] += 1

    async def read(self) -> None:
        if not self.open:
            return
        pin_id = self.rng.choice([*self.open])
        bucket, over = int(self.open[pin_id][0]), self.over(pin_id)
        try:
            answer = await self.scans.page(m.PbPin(pin_id=pin_id), bucket, limit=1)
        except KvScanExpiredError:
            assert over
            self.forget(pin_id)
            self.counts["expired"] += 1
            return
        assert not over
        assert arrow_of(answer, KEYED.arrow).num_rows == 1
        self.open[pin_id][2] = self.scans.now
        self.counts["read"] += 1

    async def time(self) -> None:
        self.scans.now += self.rng.choice((1, IDLE / 3, IDLE / 2))
        if self.rng.random() < 0.3:
            self.scans.pins.sweep()
            self.sweep()
        if self.rng.random() < 0.1:
            await self.scans.tablet.put(*many(0, 3, f"at {self.scans.now}"))


@pytest.mark.timeout(600)
async def test_the_numbers_never_drift_whatever_opens_closes_and_expires(
    tmp_path: Path, rng: random.Random
) -> None:
    limits: dict[str, Any] = {"kv.scanner.max-per-bucket": "5", "kv.scanner.max-per-server": "12"}
    async with scanning(tmp_path, buckets=3, conf=limits) as scans:
        for bucket in (1, 2):
            await scans.tablet.put(*many(0, 5), bucket=bucket)
        numbers = Numbers(scans, rng)
        for _ in range(STEPS):
            await numbers.step()
        assert all(numbers.counts.values()), numbers.counts
        scans.now += AGE
        scans.pins.sweep()
        assert len(scans.pins) == 0
        numbers.open.clear()
        numbers.check()
        await scans.settled()
