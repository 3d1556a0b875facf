"""Open databases: a bounded number of them, closed when idle, opened again on demand."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rocksdict import AccessType, Rdict, SstFileWriter

from zufluss.errors import ErrorCode, StorageBackpressureError, ZuflussError
from zufluss.kv.cold import open_databases, rocks
from zufluss.kv.cold.open_databases import OF_DATABASE, OpenDatabases
from zufluss.kv.cold.rocks import ColdTier, table_options

ROOM_FOR_FOUR = 4 * (OF_DATABASE + 1)


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> OpenDatabases:
    monkeypatch.setattr(open_databases, "descriptors_max", lambda: ROOM_FOR_FOUR)
    return OpenDatabases()


def write_table(table: Path, value: bytes) -> None:
    """Write a table file with one row."""
    writer = SstFileWriter(table_options())
    writer.open(str(table))
    writer[b"key"] = value
    writer.finish()


def filled(directory: Path, number: int, databases: OpenDatabases) -> ColdTier:
    """A cold tier with one row, which has its number as the value."""
    table = directory / f"{number}.sst"
    write_table(table, b"%d" % number)
    tier = ColdTier(directory / f"database-{number}", databases)
    tier.ingest(table)
    return tier


def open_files(directory: Path) -> int:
    """Descriptors of this process below a directory."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            count += directory in descriptor.readlink().parents
    return count


def test_databases_that_nobody_uses_are_closed_and_answer_all_the_same(
    tmp_path: Path, databases: OpenDatabases
) -> None:
    tiers = [filled(tmp_path, i, databases) for i in range(12)]
    for _ in range(2):
        for i, tier in enumerate(tiers):
            assert tier.get([b"key", b"none"]) == [b"%d" % i, None]
            assert tier.keys_from(b"", None, 10) == [b"key"]
            assert open_files(tmp_path) <= databases.descriptors <= ROOM_FOR_FOUR
    for tier in tiers:
        tier.close()
    assert databases.descriptors == open_files(tmp_path) == 0


def test_a_database_in_use_stays_open(tmp_path: Path, databases: OpenDatabases) -> None:
    tiers = [filled(tmp_path, i, databases) for i in range(12)]

    def look_at_the_others(database: Rdict) -> Any:
        for tier in tiers[1:]:
            tier.get([b"key"])
        return database.get(b"key")

    assert tiers[0]._use(look_at_the_others) == b"0"
    for tier in tiers:
        tier.close()


def test_a_database_that_finds_no_descriptor_takes_those_of_idle_ones(
    tmp_path: Path, databases: OpenDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [filled(tmp_path, i, databases) for i in range(3)]
    tiers[2].close()

    def scarce(*arguments: Any) -> Rdict:
        if databases.descriptors:
            raise Exception(f"IO error: {os.strerror(errno.EMFILE)}")
        return Rdict(*arguments)

    monkeypatch.setattr(rocks, "Rdict", scarce)
    assert tiers[2].get([b"key"]) == [b"2"]
    assert tiers[0].get([b"key"]) == [b"0"]
    for tier in tiers:
        tier.close()


def test_a_process_without_descriptors_refuses_and_serves_again_when_it_has_some(
    tmp_path: Path, databases: OpenDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = filled(tmp_path, 0, databases)
    tier.close()

    def none_left(*_: Any) -> Rdict:
        raise Exception(f"IO error: {os.strerror(errno.EMFILE)}")

    monkeypatch.setattr(rocks, "Rdict", none_left)
    with pytest.raises(StorageBackpressureError, match="no descriptor left") as refusal:
        tier.get([b"key"])
    assert refusal.value.code == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
    monkeypatch.undo()
    assert tier.get([b"key"]) == [b"0"]
    tier.close()


def test_a_database_whose_change_failed_is_opened_anew(
    tmp_path: Path, databases: OpenDatabases
) -> None:
    """RocksDB refuses all changes after an error in the background, until it is opened again."""
    tier = filled(tmp_path, 0, databases)
    with pytest.raises(Exception, match="No such file"):
        tier.ingest(tmp_path / "missing.sst")
    assert open_files(tmp_path) == 0
    assert tier.get([b"key"]) == [b"0"]
    tier.close()


def test_a_database_is_read_on_a_full_disk_and_changed_when_there_is_space(
    tmp_path: Path, databases: OpenDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB writes files when it opens a database for changes; this needs space."""
    tier = filled(tmp_path, 0, databases)
    tier.close()
    table = tmp_path / "later.sst"

    def full(path: str, options: Any, columns: Any, *access: AccessType) -> Rdict:
        if not access:
            raise Exception(f"IO error: {os.strerror(errno.ENOSPC)}")
        return Rdict(path, options, columns, *access)

    monkeypatch.setattr(rocks, "Rdict", full)
    assert tier.get([b"key"]) == [b"0"]
    assert tier.keys_from(b"", None, 10) == [b"key"]
    write_table(table, b"1")
    with pytest.raises(ZuflussError, match="free space") as refusal:
        tier.ingest(table)
    assert refusal.value.code is ErrorCode.KV_STORAGE_EXCEPTION
    assert refusal.value.retriable
    assert tier.get([b"key"]) == [b"0"]
    monkeypatch.undo()
    tier.ingest(table)
    assert tier.get([b"key"]) == [b"1"]
    tier.close()
    assert open_files(tmp_path) == 0


def test_a_database_whose_closing_failed_harms_no_other_and_serves_again(
    tmp_path: Path, databases: OpenDatabases
) -> None:
    """RocksDB reports an error when it closes without descriptors, and is closed all the same."""
    tiers = [filled(tmp_path, i, databases) for i in range(5)]
    assert tiers[0].get([b"key"]) == [b"0"]
    assert tiers[0]._opened is not None
    tiers[0]._opened.close()  # so that closing it once more raises
    for i, tier in enumerate(tiers[1:], 1):
        assert tier.get([b"key"]) == [b"%d" % i]
    assert tiers[0].get([b"key"]) == [b"0"]
    for tier in tiers:
        tier.close()
    assert databases.descriptors == open_files(tmp_path) == 0


def test_a_database_left_open_by_a_bucket_that_was_given_up_is_closed_for_the_next_one(
    tmp_path: Path, databases: OpenDatabases
) -> None:
    """Memory may run out when it is to be closed; then the bucket would never take a put again."""
    left = filled(tmp_path, 1, databases)
    tier = ColdTier(left.directory, databases)
    assert tier.get([b"key"]) == [b"1"]
    write_table(tmp_path / "next.sst", b"next")
    tier.ingest(tmp_path / "next.sst")
    assert tier.get([b"key"]) == [b"next"]
    tier.close()
    assert databases.descriptors == open_files(tmp_path) == 0
