"""Buckets that lost their files and get them back from remote storage, or are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed, keyed, many
from tests.tablet.support import TABLE
from zufluss.errors import ZuflussError
from zufluss.model.schema import dump_object
from zufluss.model.table import TableBucket
from zufluss.remote.seal import sealed
from zufluss.remote.snapshot import KvSnapshot

LOCATIONS = ("a", "b", "c")
SMALL_SEGMENTS = {"log.segment.file-size": "1kb"}


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def filled(root: Path, gateway: Gateway, **options: Any) -> dict[int, str]:
    """A bucket with two snapshots and nothing after them; its rows."""
    async with keyed(root, LOCATIONS, gateway=gateway, **options) as tablet:
        await tablet.put(*many(0, 100))
        await tablet.snapshot()
        await tablet.put(*many(50, 120, "changed"), *((i, None) for i in range(10)))
        await tablet.snapshot()
        return await tablet.rows()


def lose(root: Path, *kinds: str) -> None:
    for kind in kinds:
        shutil.rmtree(root / "data" / "db" / f"t-{TABLE}" / f"{kind}-0")


def damage(root: Path, gateway: Gateway, snapshot: KvSnapshot) -> None:
    """Change one byte of a table file that this snapshot alone has."""
    others = {f for s in gateway.snapshots if s is not snapshot for f in s.shared}
    file = next(f.file for f in snapshot.shared if f not in others)
    path = root / LOCATIONS[file.location_id - 1] / file.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def refusal(tablet: Keyed) -> ZuflussError:
    with pytest.raises(ZuflussError) as refused:
        tablet.replica()
    return refused.value


async def copied_log(tablet: Keyed) -> int:
    """Copy the closed segments of the log to remote storage; the offset after them."""
    done = asyncio.get_running_loop().create_future()
    tablet.server.logs._flusher.flush(tablet.server.logs.logs, done.set_result)
    await done
    tablet.server.remote_logs.begin()
    await tablet.server.remote_logs.settled()
    return tablet.gateway.commits[-1].end_offset


async def test_a_bucket_without_any_files_comes_back_as_its_newest_snapshot(
    tmp_path: Path, gateway: Gateway
) -> None:
    rows = await filled(tmp_path, gateway)
    end = gateway.snapshots[-1].log_offset
    lose(tmp_path, "log", "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        log = tablet.replica().log
        assert (log.log_start_offset, log.log_end_offset) == (end, end)
        assert await tablet.rows() == rows
        assert tablet.replica().tablet.row_count == len(rows) == 110
        await tablet.put((1, "back"), (60, None))
        assert log.log_end_offset == end + 2
        snapshot = await tablet.snapshot()
        assert snapshot is not None
        assert snapshot.snapshot_id == 2
        assert set(gateway.snapshots[1].shared) <= set(snapshot.shared), "nothing is sent again"
        rows = {**rows, 1: "back"}
        del rows[60]
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows


async def test_the_files_of_a_snapshot_may_lie_in_several_locations(
    tmp_path: Path, gateway: Gateway
) -> None:
    await filled(tmp_path, gateway)
    assert len({f.file.location_id for f in gateway.snapshots[-1].shared}) > 1


async def test_lost_state_comes_back_from_snapshot_and_log(
    tmp_path: Path, gateway: Gateway
) -> None:
    await filled(tmp_path, gateway)
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        await tablet.put((500, "later"), (60, None))
        rows = await tablet.rows()
    lose(tmp_path, "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows
        assert tablet.replica().tablet.row_count == len(rows)


async def test_a_lost_log_goes_on_where_the_state_ends(tmp_path: Path, gateway: Gateway) -> None:
    await filled(tmp_path, gateway)
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        await tablet.put((500, "later"))
        rows, end = await tablet.rows(), tablet.replica().log.log_end_offset
    lose(tmp_path, "log")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows
        assert tablet.replica().log.log_start_offset == end


async def test_the_remote_log_is_replayed_after_the_snapshot(
    tmp_path: Path, gateway: Gateway
) -> None:
    await filled(tmp_path, gateway, conf=SMALL_SEGMENTS)
    options: dict[str, Any] = {"gateway": gateway, "conf": SMALL_SEGMENTS}
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        for i in range(30):
            await tablet.put(*many(2 * i, 2 * i + 5, f"round {i}"), (200 + i, "new"), (i, None))
        tablet.replica().log.roll()
        end = await copied_log(tablet)
        rows = await tablet.rows()
        count = tablet.replica().tablet.row_count
        assert end == tablet.replica().log.log_end_offset
    lose(tmp_path, "log", "kv")
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        log = tablet.replica().log
        assert (log.log_start_offset, log.log_end_offset) == (end, end)
        assert await tablet.rows() == rows
        assert tablet.replica().tablet.row_count == count == len(rows)
        assert not [*tablet.kv_directory().glob("changelog/*")]


async def test_idempotent_writers_are_known_after_a_log_came_back(
    tmp_path: Path, gateway: Gateway
) -> None:
    options: dict[str, Any] = {"gateway": gateway, "conf": SMALL_SEGMENTS}
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        for sequence in range(12):
            await tablet.put((sequence, "row"), writer_id=5, sequence=sequence)
        tablet.replica().log.roll()
        end = await copied_log(tablet)
    lose(tmp_path, "log", "kv")
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        await tablet.put((11, "row"), writer_id=5, sequence=11)
        assert tablet.replica().log.log_end_offset == end, "a copy is not appended again"
        await tablet.put((12, "row"), writer_id=5, sequence=12)
        assert tablet.replica().log.log_end_offset == end + 1


async def sent(tablet: Keyed, sequence: int) -> int:
    """Put the batch of this number of writer 5; how many records that added to the changelog."""
    log = tablet.replica().log
    before = log.log_end_offset
    await tablet.put((sequence, f"row {sequence}"), writer_id=5, sequence=sequence)
    return log.log_end_offset - before


async def beyond_the_remote_log(root: Path, gateway: Gateway) -> int:
    """Batches 0 to 3 are in the remote log, up to 12 in a snapshot, 13 and 14 nowhere.

    The disk is lost. Returns the offset of the snapshot.
    """
    async with keyed(root, LOCATIONS, gateway=gateway, conf=SMALL_SEGMENTS) as tablet:
        for sequence in range(15):
            await sent(tablet, sequence)
            if sequence == 3:
                tablet.replica().log.roll()
                assert await copied_log(tablet) == 4
            if sequence == 12:
                snapshot = await tablet.snapshot()
    assert snapshot is not None
    lose(root, "log", "kv")
    return snapshot.log_offset


async def test_writers_are_known_as_the_snapshot_has_them_when_it_is_beyond_the_remote_log(
    tmp_path: Path, gateway: Gateway
) -> None:
    """Else what is sent again would be merged a second time: it is in the rows, not in the log."""
    end = await beyond_the_remote_log(tmp_path, gateway)
    async with keyed(tmp_path, LOCATIONS, gateway=gateway, conf=SMALL_SEGMENTS) as tablet:
        log = tablet.replica().log
        assert log.log_end_offset == end == 13
        assert [await sent(tablet, sequence) for sequence in range(8, 13)] == [0] * 5
        with pytest.raises(AssertionError, match="sequence"):
            await sent(tablet, 14)
        assert [await sent(tablet, sequence) for sequence in (13, 14, 13)] == [1, 1, 0]
        assert len(await tablet.rows()) == 15
        assert log.writers.last_timestamp <= log.last_timestamp


async def test_a_changelog_goes_on_behind_lost_changes_and_is_never_replayed_across_them(
    tmp_path: Path, gateway: Gateway
) -> None:
    options: dict[str, Any] = {"gateway": gateway, "conf": SMALL_SEGMENTS}
    end = await beyond_the_remote_log(tmp_path, gateway)
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        assert [await sent(tablet, sequence) for sequence in (13, 14)] == [1, 1]
        tablet.replica().log.roll()
        assert await copied_log(tablet) == 15
        remote = tablet.replica().remote
        assert remote is not None
        assert remote.losses == [(4, end - 1)]
        rows = await tablet.rows()
        assert len(rows) == 15
    lose(tmp_path, "log", "kv")
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        assert await tablet.rows() == rows, "the snapshot, and the changes behind it"
        assert tablet.replica().log.log_end_offset == 15
    lose(tmp_path, "kv")
    damage(tmp_path, gateway, gateway.snapshots[-1])
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        assert f"its changelog begins at offset {end}" in refusal(tablet).message


async def test_writers_are_those_of_the_snapshot_also_after_restarts_and_idle_snapshots(
    tmp_path: Path, gateway: Gateway
) -> None:
    """A flush at a clean stop leaves nothing to flush for the next snapshot."""
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert [await sent(tablet, sequence) for sequence in range(3)] == [1, 1, 1]
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.snapshot() is not None
    lose(tmp_path, "log", "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert [await sent(tablet, sequence) for sequence in (1, 2, 3)] == [0, 0, 1]


async def test_a_snapshot_of_an_earlier_version_brings_back_the_writers_of_the_remote_log(
    tmp_path: Path, gateway: Gateway
) -> None:
    await beyond_the_remote_log(tmp_path, gateway)
    for path in tmp_path.glob("*/kv/**/_METADATA"):
        document = json.loads(path.read_bytes())
        del document["zufluss_writers"], document["zufluss_crc32c"]
        path.write_bytes(sealed(dump_object(document)))
    async with keyed(tmp_path, LOCATIONS, gateway=gateway, conf=SMALL_SEGMENTS) as tablet:
        assert len(await tablet.rows()) == 13
        assert [await sent(tablet, sequence) for sequence in (3, 4)] == [0, 2]


@pytest.mark.parametrize("gone", [True, False])
async def test_writers_that_cannot_be_read_do_not_keep_the_rows_back(
    tmp_path: Path, gateway: Gateway, gone: bool
) -> None:
    end = await beyond_the_remote_log(tmp_path, gateway)
    file = gateway.snapshots[-1].writers
    assert file is not None
    path = tmp_path / LOCATIONS[file.location_id - 1] / file.path
    if gone:
        path.unlink()
    else:
        path.write_bytes(bytes(file.size))
    with capture_logs() as logs:
        async with keyed(tmp_path, LOCATIONS, gateway=gateway, conf=SMALL_SEGMENTS) as tablet:
            assert tablet.replica().log.log_end_offset == end
            assert len(await tablet.rows()) == 13
    assert "kv_snapshot_writers_unusable" in [line["event"] for line in logs]


async def test_a_damaged_file_is_noticed_and_an_older_snapshot_used(
    tmp_path: Path, gateway: Gateway
) -> None:
    rows = await filled(tmp_path, gateway)
    damage(tmp_path, gateway, gateway.snapshots[1])
    lose(tmp_path, "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows, "the older one, and the log from there on"
        assert tablet.replica().tablet.row_count == len(rows)


async def test_a_bucket_is_refused_when_serving_it_would_hide_rows(
    tmp_path: Path, gateway: Gateway
) -> None:
    await filled(tmp_path, gateway)
    damage(tmp_path, gateway, gateway.snapshots[1])
    lose(tmp_path, "log", "kv")
    for _ in range(2):
        async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
            message = refusal(tablet).message
            assert "with checksum" in message, "why the newest one is of no use"
            assert "snapshot 0 ends at offset 100" in message, "and why the older one is not"


async def test_a_bucket_is_refused_while_the_lake_is_ahead_of_remote_storage(
    tmp_path: Path, gateway: Gateway
) -> None:
    tiered = {"properties": {"table.datalake.enabled": "true"}}
    rows = await filled(tmp_path, gateway, **tiered)
    end = gateway.snapshots[-1].log_offset
    gateway.lake_offsets[TableBucket(TABLE, None, 0)] = end + 5
    lose(tmp_path, "log", "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway, **tiered) as tablet:
        refused = refusal(tablet)
        assert f"up to offset {end + 4}" in refused.message
        assert "table.datalake.enabled=false" in refused.message
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows, "as the message says"


async def test_without_any_readable_snapshot_a_whole_changelog_is_enough(
    tmp_path: Path, gateway: Gateway
) -> None:
    rows = await filled(tmp_path, gateway)
    for name in LOCATIONS:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    lose(tmp_path, "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows


async def test_a_snapshot_that_lacks_a_table_file_is_not_installed(
    tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await filled(tmp_path, gateway)
    whole = KvSnapshot.from_json

    def lacking(data: bytes) -> KvSnapshot:
        found = whole(data)
        if found.snapshot_id == 0:
            return found
        return dataclasses.replace(found, shared=found.shared[1:])

    monkeypatch.setattr(KvSnapshot, "from_json", lacking)
    lose(tmp_path, "kv")
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows
        assert not (tablet.kv_directory() / "incoming").exists()


async def test_files_that_are_there_are_never_replaced(tmp_path: Path, gateway: Gateway) -> None:
    rows = await filled(tmp_path, gateway)
    for name in LOCATIONS:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    async with keyed(tmp_path, LOCATIONS, gateway=gateway) as tablet:
        assert await tablet.rows() == rows


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_lost_the_rows_and_offsets_are_those_of_before(
    tmp_path: Path, gateway: Gateway, seed: int
) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"gateway": gateway, "conf": SMALL_SEGMENTS}
    rows: dict[int, str] = {}
    for _ in range(4):
        async with keyed(tmp_path, LOCATIONS, **options) as tablet:
            assert await tablet.rows() == rows
            for _ in range(rng.randrange(1, 12)):
                keys = rng.sample(range(60), 8)
                batch = [(k, rng.choice([None, f"{rng.random()}"])) for k in keys]
                await tablet.put(*batch)
                rows |= {k: t for k, t in batch if t is not None}
                for k in (k for k, t in batch if t is None):
                    rows.pop(k, None)
                if rng.random() < 0.3:
                    await tablet.snapshot()
                if rng.random() < 0.3:
                    tablet.replica().log.roll()
                    await copied_log(tablet)
            await tablet.snapshot()
            end = tablet.replica().log.log_end_offset
            assert tablet.replica().tablet.row_count == len(rows)
        lose(tmp_path, *rng.choice([(), ("kv",), ("log",), ("log", "kv")]))
    async with keyed(tmp_path, LOCATIONS, **options) as tablet:
        assert await tablet.rows() == rows
        assert tablet.replica().tablet.row_count == len(rows)
        assert tablet.replica().log.log_end_offset == end
