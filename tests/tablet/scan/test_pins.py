"""Pins of a server: how long they live, whose they are, how many there may be. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from zufluss.errors import (
    AuthorizationError,
    ErrorCode,
    KvPinGoneError,
    KvScanBusyError,
    KvScanExpiredError,
    NotLeaderError,
)
from zufluss.model.table import TableBucket
from zufluss.tablet.scan import pins as module
from zufluss.tablet.scan.pins import PinLimits, StatePin, StatePins

IDLE, GRACE, AGE = 60.0, 5.0, 600.0
BUCKET, OTHER = TableBucket(7, None, 0), TableBucket(7, None, 1)


class Wire:
    """A connection of a client, which can end."""

    peer = "host:1"
    backlogged = short = False
    has_room = True

    def __init__(self) -> None:
        self._gone: list[Callable[[], None]] = []

    async def has_read(self) -> None: ...

    async def room(self) -> None: ...

    def when_gone(self, callback: Callable[[], None]) -> None:
        self._gone.append(callback)

    def end(self) -> None:
        for callback in self._gone:
            callback()


class World:
    """Pins with a clock that stands still, and what they let go of."""

    def __init__(self, per_bucket: int = 8, per_server: int = 200) -> None:
        self.now = 1000.0
        self.free: list[str] = []
        limits = PinLimits(IDLE, GRACE, AGE, per_bucket, per_server)
        self.pins: StatePins[str] = StatePins(limits, self.free.append, lambda: self.now)
        self._made = 0

    def open(
        self, bucket: TableBucket = BUCKET, owner: str | None = None, epoch: int = 1
    ) -> StatePin[str]:
        pin = self.pins.begin(bucket, owner, epoch)
        self._made += 1
        self.pins.complete(pin, f"state {self._made}")
        return pin

    def call(self, pin: StatePin[str], owner: str | None = None) -> str:
        return self.call_on(Wire(), pin, owner)

    def call_on(self, wire: Wire, pin: StatePin[str], owner: str | None = None) -> str:
        """A call that comes in on this connection."""
        with self.pins.use(self.pins.find(pin.pin_id, owner), wire) as content:
            return content

    def code(self, pin_id: bytes) -> ErrorCode:
        with pytest.raises(KvScanExpiredError) as caught:
            self.pins.find(pin_id, None)
        return caught.value.code


@pytest.fixture
def world() -> World:
    return World()


def test_a_pin_lives_as_long_as_it_is_used(world: World) -> None:
    """The time-to-live begins anew with each call: at one second before its end it still works."""
    pin = world.open()
    for _ in range(5):
        world.now += IDLE - 1
        assert world.call(pin) == "state 1"
    world.now += IDLE + 1
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED, "no sweep ran, and none is needed"
    assert world.free == ["state 1"]
    assert len(world.pins) == 0


def test_looking_for_a_pin_is_no_use_of_it(world: World) -> None:
    """A malformed request finds its pin and is refused; it must not keep it alive."""
    pin = world.open()
    world.now += IDLE - 1
    world.pins.find(pin.pin_id, None)
    world.now += 1
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED


def test_a_busy_pin_ends_at_its_age(world: World) -> None:
    pin = world.open()
    while world.now < 1000 + AGE - 30:
        world.now += 30
        world.call(pin)
    world.now += 30
    with pytest.raises(KvScanExpiredError, match=r"600 s, the limit of zufluss\.kv\.scanner\.age"):
        world.pins.find(pin.pin_id, None)


def test_the_age_of_a_pin_begins_when_its_state_is_made(world: World) -> None:
    """Making it may take longer than it may live."""
    pin = world.pins.begin(BUCKET, None, 1)
    world.now += 2 * AGE
    world.pins.complete(pin, "state")
    assert world.call(pin) == "state"


def test_a_long_call_is_not_idle_and_begins_the_time_anew_at_its_end(world: World) -> None:
    pin = world.open()
    with world.pins.use(pin, Wire()):
        world.now += 2 * IDLE
        world.pins.sweep()
    world.now += IDLE - 1
    assert world.call(pin) == "state 1"


def test_nothing_is_let_go_while_a_call_is_under_way(world: World) -> None:
    """A close races its own prefetch: the call under way ends first."""
    pin = world.open()
    with world.pins.use(pin, Wire()) as content:
        with world.pins.use(pin, Wire()):
            world.pins.close(pin.pin_id, None)
            assert len(world.pins) == 0
            assert world.code(pin.pin_id) is ErrorCode.UNKNOWN_SCANNER_ID
        assert world.free == []
        assert content == "state 1"
    assert world.free == ["state 1"]


def test_a_call_that_fails_leaves_the_pin(world: World) -> None:
    pin = world.open()
    with pytest.raises(ZeroDivisionError), world.pins.use(pin, Wire()):
        _ = 1 / 0
    assert world.call(pin) == "state 1"
    assert pin.calls == 0


def test_closing_twice_or_an_unknown_pin_is_fine(world: World) -> None:
    pin = world.open()
    world.pins.close(pin.pin_id, None)
    world.pins.close(pin.pin_id, None)
    world.pins.close(b"never was", None)
    assert world.free == ["state 1"]


def test_a_pin_that_ended_or_never_was_is_one_error_with_two_texts(world: World) -> None:
    expired, closed = world.open(), world.open()
    world.pins.close(closed.pin_id, None)
    world.now += IDLE
    codes = [world.code(i) for i in (expired.pin_id, closed.pin_id, b"x" * 16, b"")]
    assert codes == [ErrorCode.SCANNER_EXPIRED] + [ErrorCode.UNKNOWN_SCANNER_ID] * 3
    with pytest.raises(KvScanExpiredError, match=r"nobody used it for 60 s"):
        world.pins.find(expired.pin_id, None)
    with pytest.raises(KvScanExpiredError, match="is not known here"):
        world.pins.find(closed.pin_id, None)


def test_expired_ids_are_remembered_for_twice_the_time(world: World) -> None:
    pin = world.open()
    world.now += IDLE
    world.pins.sweep()
    world.now += 2 * IDLE - 1
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED
    world.now += 1
    assert world.code(pin.pin_id) is ErrorCode.UNKNOWN_SCANNER_ID


def test_expired_ids_that_are_remembered_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED_MAX", 2)
    known = [world.open() for _ in range(3)]
    world.now += IDLE
    world.pins.sweep()
    codes = [world.code(pin.pin_id) for pin in known]
    assert codes == [ErrorCode.UNKNOWN_SCANNER_ID] + [ErrorCode.SCANNER_EXPIRED] * 2


@pytest.mark.parametrize("stranger", ["bob", None])
def test_a_pin_is_its_owners(world: World, stranger: str | None) -> None:
    pin = world.open(owner="alice")
    for work in (world.pins.find, world.pins.close):
        with pytest.raises(AuthorizationError, match="another user"):
            work(pin.pin_id, stranger)
    assert world.call(pin, "alice") == "state 1"


def test_the_ninth_pin_of_a_bucket_is_refused_until_one_is_closed(world: World) -> None:
    known = [world.open() for _ in range(8)]
    with pytest.raises(KvScanBusyError, match=r"has 8 scans.*max-per-bucket.*retry after 500 ms"):
        world.open()
    world.open(OTHER)
    world.pins.close(known[3].pin_id, None)
    world.open()
    with pytest.raises(KvScanBusyError):
        world.open()


def test_a_full_server_is_refused_until_one_is_closed() -> None:
    world = World(per_bucket=8, per_server=10)
    known = [world.open(TableBucket(7, None, i)) for i in range(10)]
    with pytest.raises(KvScanBusyError, match=r"this server has 10 .*max-per-server"):
        world.open()
    world.pins.close(known[0].pin_id, None)
    world.open()


def test_pins_that_have_expired_are_in_nobodys_way(world: World) -> None:
    """A client that was killed holds its places for the time-to-live, not until the sweep."""
    for _ in range(8):
        world.open()
    world.now += IDLE
    world.open()
    assert world.pins.of_bucket(BUCKET) == len(world.pins) == 1
    assert len(world.free) == 8


def test_a_pin_counts_before_its_state_is_made_and_no_more_when_that_fails(world: World) -> None:
    making = [world.pins.begin(BUCKET, None, 1) for _ in range(8)]
    with pytest.raises(KvScanBusyError):
        world.pins.begin(BUCKET, None, 1)
    world.now += 2 * AGE  # it may take as long as it takes
    world.pins.sweep()
    for pin in making:
        world.pins.abandon(pin)
    assert (len(world.pins), world.pins.of_bucket(BUCKET), world.free) == (0, 0, [])


def test_nobody_finds_a_pin_whose_state_is_being_made(world: World) -> None:
    pin = world.pins.begin(BUCKET, None, 1)
    assert world.code(pin.pin_id) is ErrorCode.UNKNOWN_SCANNER_ID
    world.pins.close(pin.pin_id, None)
    world.pins.complete(pin, "state")
    assert world.call(pin) == "state"


def test_a_bucket_that_stops_ends_its_pins_and_no_others(world: World) -> None:
    mine, other = world.open(), world.open(OTHER)
    with world.pins.use(mine, Wire()):
        world.pins.end_bucket(BUCKET)
        assert world.free == []
    assert world.free == ["state 1"]
    assert world.code(mine.pin_id) is ErrorCode.SCANNER_EXPIRED
    assert world.call(other) == "state 2"


def test_a_state_that_is_made_after_its_bucket_stopped_is_let_go(world: World) -> None:
    pin = world.pins.begin(BUCKET, None, 1)
    world.pins.end_bucket(BUCKET)
    with pytest.raises(NotLeaderError, match="stopped"):
        world.pins.complete(pin, "late")
    assert world.free == ["late"]
    assert len(world.pins) == 0


def test_pins_are_listed_by_age_under_numbers_that_give_no_access(world: World) -> None:
    first = world.open()
    world.now += 10
    second = world.open(OTHER)
    world.pins.begin(OTHER, None, 1)
    assert [pin.number for pin in world.pins] == [first.number, second.number]
    assert [world.pins.age_seconds(pin) for pin in world.pins] == [10, 0]
    assert world.pins.idle_seconds(first) == 10
    with world.pins.use(first, Wire()):
        assert world.pins.idle_seconds(first) == 0
    assert first.peer == "host:1"
    world.now += IDLE
    assert list(world.pins) == []


def test_a_pin_that_was_killed_is_not_to_be_opened_again(world: World) -> None:
    pin = world.open()
    world.pins.kill(pin, "anna")
    for _ in range(2):
        with pytest.raises(KvPinGoneError, match="ended by anna"):
            world.pins.find(pin.pin_id, None)
    assert world.free == ["state 1"]


@dataclass
class Known:
    """What the model knows of a pin."""

    pin: StatePin[str]
    content: str
    opened: float
    used: float
    calls: list[object] = field(default_factory=list)

    def over(self, now: float) -> bool:
        idle = not self.calls and now - self.used >= IDLE
        return idle or now - self.opened >= AGE


class Model:
    """What is open, in the plainest way: looked at anew for each question."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(per_bucket=3, per_server=8)
        self.buckets = [TableBucket(7, None, i) for i in range(4)]
        self.open: list[Known] = []
        self.held: list[Known] = []
        """Ended, and still in use."""
        self.free: set[str] = set()

    def step(self) -> None:
        self.random.choice(
            [self.begin, self.begin, self.enter, self.leave, self.close, self.wait, self.stop]
        )()
        self.check()

    def begin(self) -> None:
        bucket, now = self.random.choice(self.buckets), self.world.now
        alive = [k for k in self.open if not k.over(now)]
        full = len(alive) >= 8 or sum(k.pin.bucket == bucket for k in alive) >= 3
        try:
            pin = self.world.open(bucket)
        except KvScanBusyError:
            assert full
        else:
            assert not full
            self.open.append(Known(pin, pin.content, now, now))

    def enter(self) -> None:
        for known in self.random.sample(self.open, min(1, len(self.open))):
            try:
                pin = self.world.pins.find(known.pin.pin_id, None)
            except KvScanExpiredError:
                assert known.over(self.world.now)
            else:
                assert not known.over(self.world.now)
                use = self.world.pins.use(pin, Wire())
                assert use.__enter__() == known.content
                known.calls.append(use)
                known.used = self.world.now

    def leave(self) -> None:
        busy = [k for k in [*self.open, *self.held] if k.calls]
        for known in self.random.sample(busy, min(1, len(busy))):
            use = known.calls.pop()
            use.__exit__(None, None, None)  # type: ignore[attr-defined]
            known.used = self.world.now

    def close(self) -> None:
        for known in self.random.sample(self.open, min(1, len(self.open))):
            self.world.pins.close(known.pin.pin_id, None)
            self._end(known)

    def wait(self) -> None:
        self.world.now += self.random.choice([1, 20, IDLE, AGE / 3])
        if self.random.random() < 0.5:
            self.world.pins.sweep()

    def stop(self) -> None:
        if self.random.random() < 0.2:
            bucket = self.random.choice(self.buckets)
            self.world.pins.end_bucket(bucket)
            for known in [k for k in self.open if k.pin.bucket == bucket]:
                self._end(known)

    def _end(self, known: Known) -> None:
        self.open.remove(known)
        self.held.append(known)

    def check(self) -> None:
        for known in [k for k in self.open if k.over(self.world.now)]:
            if known.pin.ended:
                self._end(known)
        for known in [k for k in self.held if not k.calls]:
            self.held.remove(known)
            self.free.add(known.content)
        world = self.world
        assert len(world.pins) == len(self.open)
        for bucket in self.buckets:
            assert world.pins.of_bucket(bucket) == sum(k.pin.bucket == bucket for k in self.open)
        assert len(world.free) == len(self.free), "something was let go twice, or early, or never"


def test_ten_thousand_random_opens_closes_and_expiries_leave_the_counts_right() -> None:
    model = Model(8)
    for _ in range(10_000):
        model.step()
    assert set(model.world.free) == model.free
    assert len(model.free) > 1000
    while model.open or model.held:
        model.leave()
        model.close()
        model.check()
    assert len(model.world.pins) == 0
    assert len(model.world.free) == model.world._made


# -- clients that are gone ------------------------------------------------------------------------


def test_a_pin_of_a_killed_client_ends_after_a_grace_and_makes_room(world: World) -> None:
    """Otherwise eight killed clients block a bucket for the whole time-to-live."""
    wires = [Wire() for _ in range(8)]
    for wire in wires:
        world.call_on(wire, world.open())
    with pytest.raises(KvScanBusyError):
        world.open()
    for wire in wires:
        wire.end()
    world.now += GRACE - 0.01
    with pytest.raises(KvScanBusyError):
        world.open()
    world.now += 0.01
    world.open()
    assert len(world.pins) == 1
    assert len(world.free) == 8


def test_a_client_that_connects_again_within_the_grace_keeps_its_pin(world: World) -> None:
    pin, first, second = world.open(), Wire(), Wire()
    world.call_on(first, pin)
    first.end()
    world.now += GRACE - 0.01
    assert world.call_on(second, pin) == "state 1"
    world.now += 3 * GRACE
    assert world.call_on(second, pin) == "state 1"
    second.end()
    world.now += GRACE
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED


def test_a_pin_that_two_processes_use_lives_until_both_are_gone(world: World) -> None:
    pin, driver, task = world.open(), Wire(), Wire()
    world.call_on(driver, pin)
    world.call_on(task, pin)
    driver.end()
    world.now += 2 * GRACE
    assert world.call_on(task, pin) == "state 1"
    task.end()
    world.now += GRACE
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED


def test_a_call_in_progress_outlives_its_connection(world: World) -> None:
    pin, wire = world.open(), Wire()
    with world.pins.use(pin, wire):
        wire.end()
        world.now += 2 * GRACE
        world.pins.sweep()
        assert not world.free
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED


def test_a_detached_pin_waits_for_another_process_and_then_ends_with_it(world: World) -> None:
    pin, first, second = world.open(), Wire(), Wire()
    world.call_on(first, pin)
    world.pins.detach(pin.pin_id, None)
    first.end()
    world.now += IDLE - 1
    assert world.call_on(second, pin) == "state 1"
    second.end()
    world.now += GRACE
    assert world.code(pin.pin_id) is ErrorCode.SCANNER_EXPIRED
    world.pins.detach(pin.pin_id, None)


def test_only_the_owner_detaches_a_pin(world: World) -> None:
    pin = world.open(owner="alice")
    with pytest.raises(AuthorizationError):
        world.pins.detach(pin.pin_id, "bob")
