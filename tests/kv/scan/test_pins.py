"""Pinned states on the disk: complete or absent, and independent of the rest of the bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv.cold.test_checkpoint import ROWS, checkpoint_of, end, flushed, tablet_of
from tests.kv.kv_samples import open_store, put, small_memory
from zufluss.errors import UnknownTableOrBucketError
from zufluss.kv.cold.checkpoint import COLD_DIRECTORY, remove_left_overs
from zufluss.kv.cold.rocks import ColdTier
from zufluss.kv.cold.state import KvState
from zufluss.kv.scan.pins import PINS_DIRECTORY, UNFINISHED_SUFFIX, PinDirectory, PinnedFiles
from zufluss.kv.store import KvStore
from zufluss.log.files import Files


def pinned(store: KvStore) -> PinnedFiles:
    """A state of everything below the horizon, after whatever it has to wait for."""
    tablet, fresh = tablet_of(store), store.pins.fresh()
    while not isinstance(state := tablet.pin(fresh / COLD_DIRECTORY, store.horizon), KvState):
        state.result()
    return store.pins.finish(fresh, state)


def rows_of(files: PinnedFiles) -> list[bytes | None]:
    assert files.database is not None
    cold = ColdTier(files.database)
    found = cold.get([key for key, _ in ROWS])
    cold.close()
    return found


def write(store: KvStore, value: bytes | None) -> None:
    """Every row changes, and is flushed."""
    offset = store.horizon
    put(store, [key for key, _ in ROWS], [value for _ in ROWS], offset)
    store.horizon = offset + len(ROWS)
    store.flush_begin(store.horizon, len(ROWS))
    store.flush_wait()


def test_a_state_stays_as_it_was_whatever_is_written_later(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    before = pinned(store)
    assert before.directory == store.directory / PINS_DIRECTORY / str(len(ROWS))
    write(store, b"changed")
    changed = pinned(store)
    write(store, None)
    store._cold.rewrite()
    deleted = pinned(store)
    assert rows_of(before) == [value for _, value in ROWS]
    assert rows_of(changed) == [b"changed"] * len(ROWS)
    assert rows_of(deleted) == [None] * len(ROWS)
    assert store.pins.offsets() == [len(ROWS), 2 * len(ROWS), 3 * len(ROWS)]
    store.pins.remove(2 * len(ROWS))
    assert store.pins.offsets() == [len(ROWS), 3 * len(ROWS)]
    assert rows_of(before) == [value for _, value in ROWS]
    end(store)


def test_rows_above_the_horizon_are_in_no_state(tmp_path: Path) -> None:
    """These rows may still be lost, so no reader may see them."""
    store = flushed(tmp_path / "kv-0")
    put(store, [b"key-0001"], [b"not durable"], len(ROWS))
    files = pinned(store)
    assert files.state.flushed_offset == len(ROWS)
    assert rows_of(files) == [value for _, value in ROWS]
    end(store)


def test_a_bucket_without_rows_has_a_state_without_a_database(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv-0", small_memory(100))
    files = pinned(store)
    assert (files.database, files.state) == (None, KvState())
    assert not (store.directory / COLD_DIRECTORY).exists()
    assert store.pins.find(0) == files
    end(store)


def test_states_and_checkpoints_do_not_touch_each_other(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    files = pinned(store)
    made = checkpoint_of(store)
    fresh = store.pins.fresh()
    assert made.directory.is_dir()
    pinned_too = store.pins.find(len(ROWS))
    assert pinned_too == files
    remove_left_overs(store.files, store.directory)
    assert not made.directory.exists()
    assert fresh.is_dir()
    assert rows_of(files) == [value for _, value in ROWS]
    end(store)


def test_the_next_start_finds_whole_states_and_removes_unfinished_ones(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    files, fresh = pinned(store), store.pins.fresh()
    store.checkpoint(fresh / COLD_DIRECTORY)
    end(store)
    again = open_store(tmp_path / "kv-0", small_memory(100))
    assert not fresh.exists()
    assert again.pins.offsets() == [len(ROWS)]
    assert again.pins.find(len(ROWS)) == files
    assert again.pins.find(7) is None
    end(again)


def test_a_crash_while_a_state_is_removed_leaves_no_state_that_looks_whole(tmp_path: Path) -> None:
    class Dying(Files):
        left = 3

        def unlink(self, path: Path) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            super().unlink(path)

    store = flushed(tmp_path / "kv-0")
    pinned(store)
    pins = PinDirectory(store.pins.directory, Dying())
    with pytest.raises(KeyboardInterrupt):
        pins.remove(len(ROWS))
    (left,) = pins.directory.iterdir()
    assert left.suffix == UNFINISHED_SUFFIX
    assert store.pins.find(len(ROWS)) is None
    store.pins.remove_unfinished()
    assert not [*pins.directory.iterdir()]
    end(store)


def test_a_damaged_state_is_not_found_and_removed(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    files = pinned(store)
    (files.directory / COLD_DIRECTORY / "CURRENT").write_bytes(b"MANIFEST-000099\n")
    assert store.pins.find(len(ROWS)) is None
    assert store.pins.offsets() == []
    files = pinned(store)
    (files.directory / "state.json").write_bytes(b"{}")
    assert store.pins.find(len(ROWS)) is None
    assert store.pins.offsets() == []
    end(store)


def test_a_dropped_bucket_takes_its_states_with_it_also_those_in_work(tmp_path: Path) -> None:
    class Busy(Files):
        left = 3

        def rmdir(self, path: Path) -> None:
            if path == fresh and self.left:  # a rebuild has not heard of it yet
                self.left -= 1
                (path / "file").write_bytes(b"rows")
            super().rmdir(path)

    store = flushed(tmp_path / "kv-0")
    pinned(store)
    memory = store._memory
    end(store)
    store = KvStore.open(tmp_path / "kv-0", memory, Busy())
    fresh = store.pins.fresh()
    store.destroy()
    assert not (tmp_path / "kv-0").exists()
    store.pins.remove(len(ROWS))
    store.pins.discard(fresh)
    with pytest.raises(UnknownTableOrBucketError):
        store.pins.fresh()
    assert not (tmp_path / "kv-0").exists()


def test_a_state_created_while_its_bucket_was_dropped_is_removed(tmp_path: Path) -> None:
    store = flushed(tmp_path / "kv-0")
    fresh = store.pins.fresh()
    store.destroy()
    with pytest.raises(UnknownTableOrBucketError, match="gone with its bucket"):
        store.pins.finish(fresh, KvState(len(ROWS), len(ROWS), {}))
    assert not (tmp_path / "kv-0").exists()
