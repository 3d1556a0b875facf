"""The state of a bucket at exactly one offset, made again from snapshots and the changelog."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.end_to_end.kv import records_of
from tests.kv.model import AFTER, BEFORE, DELETE, INSERT
from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed, keyed, many
from tests.tablet.remote.test_restore import copied_log, damage
from tests.tablet.scan.test_states import directories, opened, rows_of
from zufluss.errors import (
    InvalidScanRequestError,
    KvPinGoneError,
    NetworkError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.kv import replay
from zufluss.kv.scan.pins import PinDirectory
from zufluss.kv.store import KvStore
from zufluss.log.holds import Holder
from zufluss.tablet.changelog_reader import ChangelogReader
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.scan import rebuild
from zufluss.tablet.scan.states import PinnedState

SMALL_SEGMENTS = {"log.segment.file-size": "1kb"}
ONE_SEGMENT = {"table.log.tiered.local-segments": "1"}


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


class History:
    """Every change of a bucket, as its changelog had it when it was written."""

    def __init__(self) -> None:
        self.end = 0
        self.changes: list[tuple[int, str, tuple[Any, ...]]] = []

    def follow(self, tablet: Keyed) -> None:
        """Read what is new."""
        changelog = tablet.replica().log
        while self.end < changelog.high_watermark:
            read = changelog.read(self.end, replay.READ_BYTES, at_least_one=True, nowait=False)
            self.changes += records_of(bytes(read.records), tablet.codec.schema)
            self.end = read.end_offset

    def at(self, offset: int) -> dict[int, str]:
        """The rows that the changes below an offset lead to."""
        rows: dict[int, str] = {}
        for at, kind, row in self.changes:
            if at >= offset or kind == BEFORE:
                continue
            if kind in (INSERT, AFTER):
                rows[row[0]] = row[1]
            else:
                assert kind == DELETE
                del rows[row[0]]
        return rows


async def written(tablet: Keyed, history: History, rng: random.Random, puts: int) -> None:
    """Some puts that overwrite, delete and insert again."""
    for _ in range(puts):
        keys = rng.sample(range(40), 6)
        await tablet.put(*((k, rng.choice([None, f"{rng.random()}"])) for k in keys))
    history.follow(tablet)


async def rebuilt(tablet: Keyed, log_offset: int) -> PinnedState:
    return await tablet.server.pin_states.rebuild_state(tablet.replica(), log_offset)


async def check_at(tablet: Keyed, history: History, log_offset: int) -> None:
    """What is rebuilt is what the changelog says."""
    state = await rebuilt(tablet, log_offset)
    assert state.log_offset == log_offset
    rows = history.at(log_offset)
    found = await rows_of(tablet, state)
    assert (dict(found), len(found)) == (rows, len(rows))
    assert state.rows == len(rows)
    assert directories(tablet) == [str(log_offset)]
    await state.release()
    assert directories(tablet) == []


async def test_without_a_snapshot_a_whole_changelog_is_enough(tmp_path: Path) -> None:
    history = History()
    async with keyed(tmp_path) as tablet:
        await written(tablet, history, random.Random(1), 4)
        for offset in range(history.end + 1):  # also in the middle of a batch
            await check_at(tablet, history, offset)


async def test_a_snapshot_and_the_changelog_behind_it_are_enough(
    tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, rng = History(), random.Random(2)
    installed: list[int] = []
    install = Restorer.install

    async def noted(self: Any, handle: Any, directory: Path) -> None:
        installed.append(handle.log_offset)
        await install(self, handle, directory)

    monkeypatch.setattr(Restorer, "install", noted)
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await written(tablet, history, rng, 5)
        await tablet.snapshot()
        first = history.end
        await written(tablet, history, rng, 5)
        await tablet.snapshot()
        second = history.end
        await written(tablet, history, rng, 5)
        for offset in (second - 1, first, second, history.end - 1, first - 1):
            await check_at(tablet, history, offset)
    assert installed == [first, first, second, second], "the newest one, and none before the first"


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_here_and_whatever_is_in_remote_storage_the_state_is_that_of_then(
    tmp_path: Path, gateway: Gateway, seed: int
) -> None:
    history, rng = History(), random.Random(seed)
    options: dict[str, Any] = {"conf": SMALL_SEGMENTS, "properties": ONE_SEGMENT}
    async with keyed(tmp_path, ("a", "b"), gateway=gateway, **options) as tablet:
        for _ in range(4):
            await written(tablet, history, rng, rng.randrange(3, 12))
            tablet.replica().log.roll()
            await copied_log(tablet)
            if rng.random() < 0.5:
                await tablet.snapshot()
            await tablet.server.kv.call(tablet.replica().tablet.flush)
            tablet.server.logs.expire(1 << 60)
        await written(tablet, history, rng, 3)
        assert tablet.replica().log.log_start_offset > 0
        for offset in {*rng.sample(range(history.end), 8), history.end}:
            await check_at(tablet, history, offset)
        assert not [*tablet.kv_directory().rglob("changelog")]


async def test_a_state_of_a_bucket_with_little_memory_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit into memory is flushed on the way."""
    monkeypatch.setattr(rebuild, "MEMORY_BYTES", 8 << 20)
    monkeypatch.setattr(replay, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(rebuild, "LARGEST_VALUES", 0)
    async with keyed(tmp_path) as tablet:
        for i in range(0, 20_000, 1_000):
            await tablet.put(*many(i, i + 1_000, "x" * 500))
        middle = tablet.replica().log.high_watermark
        await tablet.put(*((i, None) for i in range(10_000)))
        state = await rebuilt(tablet, middle)
        assert len(await rows_of(tablet, state)) == state.rows == 20_000


async def test_the_state_is_gone_where_neither_snapshot_nor_changelog_reaches(
    tmp_path: Path, gateway: Gateway
) -> None:
    history, rng = History(), random.Random(3)
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await written(tablet, history, rng, 10)
        early = history.end
        await tablet.snapshot()
        await written(tablet, history, rng, 10)
        await tablet.snapshot()
        late = history.end
    shutil.rmtree(tmp_path / "data")
    gateway.retained = 1
    remote = gateway.remotes[next(iter(gateway.remotes))]
    object.__setattr__(remote, "snapshots", remote.snapshots[1:])
    async with keyed(tmp_path, gateway=gateway) as tablet:
        with pytest.raises(KvPinGoneError) as gone:
            await rebuilt(tablet, early)
        assert f"changelog begins at offset {late}" in gone.value.message
        assert f"snapshots: {late}" in gone.value.message
        assert directories(tablet) == []
        await check_at(tablet, history, late)


async def test_a_damaged_snapshot_is_passed_over(tmp_path: Path, gateway: Gateway) -> None:
    history, rng = History(), random.Random(4)
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await written(tablet, history, rng, 3)
        await tablet.snapshot()
        await written(tablet, history, rng, 3)
        await tablet.snapshot()
        await written(tablet, history, rng, 3)
        damage(tmp_path, gateway, gateway.snapshots[1])
        with capture_logs() as logs:
            await check_at(tablet, history, history.end - 1)
        assert [e["snapshot"] for e in logs if e["event"] == "kv_snapshot_unusable"] == [1]


async def test_a_coordinator_that_does_not_answer_is_an_error_that_passes(
    tmp_path: Path, gateway: Gateway
) -> None:
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 10))
        gateway.silent = True
        with pytest.raises(NetworkError):
            await rebuilt(tablet, 9)
        gateway.silent = False
        assert len(await rows_of(tablet, await rebuilt(tablet, 9))) == 9
        assert directories(tablet) == ["9"]


async def test_what_is_there_at_the_high_watermark_is_not_rebuilt(
    tmp_path: Path, gateway: Gateway
) -> None:
    """Nobody wrote since the scan lost its server: it goes on at once."""
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 10))
        gateway.silent = True
        assert len(await rows_of(tablet, await rebuilt(tablet, 10))) == 10


@pytest.mark.parametrize("offset", [-1, 11, 1 << 40])
async def test_an_offset_that_is_not_there_yet_is_refused(tmp_path: Path, offset: int) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        with pytest.raises(InvalidScanRequestError, match="allowed: 0 to 10"):
            await rebuilt(tablet, offset)


async def test_a_state_that_is_open_is_not_rebuilt(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        state = await opened(tablet)
        await tablet.put(*many(0, 10, "changed"))
        assert await rebuilt(tablet, 10) is state
        assert state.users == 2


async def test_the_changelog_may_expire_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"conf": SMALL_SEGMENTS, "properties": ONE_SEGMENT}
    history, rng = History(), random.Random(5)
    async with keyed(tmp_path, **options) as tablet:
        await written(tablet, history, rng, 30)
        tablet.replica().log.roll()
        await copied_log(tablet)
        await tablet.server.kv.call(tablet.replica().tablet.flush)
        read = ChangelogReader._read

        async def late(self: ChangelogReader, replica: Any, offset: int) -> Any:
            monkeypatch.undo()
            await asyncio.to_thread(tablet.replica().tablet.store.flush_wait)
            replica.log.holds.set(Holder.KV_STATE, None)
            tablet.server.logs.expire(1 << 60)
            return await read(self, replica, offset)

        monkeypatch.setattr(ChangelogReader, "_read", late)
        assert tablet.replica().log.log_start_offset == 0
        await check_at(tablet, history, history.end - 1)
        assert tablet.replica().log.log_start_offset > 0


@pytest.mark.parametrize("how", ["drop", "stop"])
async def test_a_bucket_that_ends_while_its_state_is_rebuilt_ends_that_too(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 1_000))
        reading = asyncio.Event()
        read = ChangelogReader._read

        async def late(self: ChangelogReader, replica: Any, offset: int) -> Any:
            reading.set()
            await asyncio.sleep(0)
            return await read(self, replica, offset)

        monkeypatch.setattr(ChangelogReader, "_read", late)
        making = asyncio.create_task(rebuilt(tablet, 900))
        await reading.wait()
        if how == "drop":
            await tablet.drop(0)
    with pytest.raises(UnknownTableOrBucketError, match="stopped"):
        await making
    assert directories(tablet) == []


@pytest.mark.parametrize(
    "properties",
    [
        {"table.changelog.image": "WAL"},
        {"table.merge-engine": "first_row"},
        {"table.log.format": "INDEXED"},
        {"table.log.format": "COMPACTED"},
    ],
    ids=lambda properties: "-".join(properties.values()),
)
async def test_what_was_pinned_is_rebuilt_whatever_the_table_is_made_of(
    tmp_path: Path, properties: dict[str, str]
) -> None:
    rng = random.Random(7)
    deletes = "first_row" not in properties.values()
    async with keyed(tmp_path, properties=properties) as tablet:
        pinned: dict[int, list[tuple[int, str]]] = {}
        for turn in range(8):
            keys = rng.sample(range(12), 5)
            gone = {key for key in keys if deletes and rng.random() < 0.4}
            await tablet.put(*((k, None if k in gone else f"text {turn}") for k in keys))
            state = await opened(tablet)
            pinned[state.log_offset] = await rows_of(tablet, state)
            await state.release()
        for offset, rows in pinned.items():
            state = await rebuilt(tablet, offset)
            assert (state.log_offset, await rows_of(tablet, state)) == (offset, rows)
            await state.release()


async def test_states_opened_beside_writers_are_exact_and_go_on_with_the_changelog(
    tmp_path: Path,
) -> None:
    history = History()
    states: list[PinnedState] = []

    async with keyed(tmp_path) as tablet:

        async def write(seed: int) -> None:
            rng = random.Random(seed)
            while len(states) < 8:
                keys = rng.sample(range(200), 20)
                await tablet.put(*((k, rng.choice([None, f"{rng.random()}"])) for k in keys))

        async def open_some() -> None:
            for _ in range(8):
                states.append(await opened(tablet))

        async def disturb() -> None:
            store = tablet.replica().tablet.store
            for _ in range(5):
                await tablet.server.kv.call(tablet.replica().tablet.flush)
                await tablet.snapshot()
                await tablet.server.kv.call(lambda: store.evict(1 << 30))
                await tablet.server.kv.call(store._cold.rewrite)

        await asyncio.gather(write(1), write(2), open_some(), disturb())
        history.follow(tablet)
        assert history.at(history.end) == await tablet.rows()
        assert len({state.log_offset for state in states}) > 2
        for state in states:
            rows = history.at(state.log_offset)
            found = await rows_of(tablet, state, rows=17)
            assert (dict(found), len(found)) == (rows, len(rows))
            await state.release()
        for offset in {state.log_offset for state in states}:
            await check_at(tablet, history, offset)


async def test_errors_of_the_rebuild_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> Any:
        raise ZuflussError("the disk does not answer")

    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        monkeypatch.setattr(ChangelogReader, "_read", broken)
        with pytest.raises(ZuflussError, match="does not answer"):
            await rebuilt(tablet, 9)
        assert directories(tablet) == []
        assert not tablet.server.pin_states._states


async def test_nothing_is_fetched_any_more_when_the_files_of_a_failed_rebuild_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    batches, discard = ChangelogReader.batches, PinDirectory.discard

    def watched(self: ChangelogReader, *args: Any) -> Any:
        try:
            yield from batches(self, *args)
        finally:
            ended.append("fetched")

    def removed(self: PinDirectory, fresh: Path) -> None:
        ended.append("removed")
        discard(self, fresh)

    def broken(*_: object, **__: object) -> Any:
        raise ZuflussError("memory is full")

    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        monkeypatch.setattr(ChangelogReader, "batches", watched)
        monkeypatch.setattr(PinDirectory, "discard", removed)
        monkeypatch.setattr(KvStore, "put", broken)
        with pytest.raises(ZuflussError, match="memory is full"):
            await rebuilt(tablet, 9)
        assert ended == ["fetched", "removed"]


async def test_a_log_that_has_it_all_needs_no_remote_storage(
    tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    async with keyed(tmp_path, gateway=gateway, conf=SMALL_SEGMENTS) as tablet:
        await written(tablet, history, random.Random(5), 30)
        tablet.replica().log.roll()
        await copied_log(tablet)

        async def away(*_: object, **__: object) -> Any:
            raise NetworkError("remote storage does not answer")

        monkeypatch.setattr(tablet.server.storage, "read_at", away)
        assert tablet.replica().log.log_start_offset == 0
        await check_at(tablet, history, history.end - 1)
