"""A bucket's rows as files that can leave the server, and such files put in its place again.

A checkpoint is the cold tier at one flushed offset, as hard links in a directory beside it, made by
the key-value worker while nothing is flushed: what the state file says is exactly what the files
hold. Whoever asked for it removes it; what a crash left is removed when the bucket is opened.

Installing goes the other way, when a bucket has lost its files:

    old state file gone → old files gone → new ones in their place, durable → state file written

A crash anywhere in between leaves a bucket without state file, and that is installed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from zufluss.errors import LogStorageError
from zufluss.kv.cold.rocks import TABLE_SUFFIX, check_opens, readable_by_all
from zufluss.kv.cold.state import STATE_FILE, KvState, write_state
from zufluss.log.files import Files
from zufluss.log.writer_state import WriterState

COLD_DIRECTORY = "rocks"
"""Where the cold tier lies in a bucket's directory."""

CHECKPOINT_DIRECTORY = "checkpoint"
"""A checkpoint that is being copied somewhere."""

INCOMING_DIRECTORY = "incoming"
"""Files on their way into the bucket."""

CHANGELOG_DIRECTORY = "changelog"
"""Parts of the changelog that were fetched to be replayed."""

_LEFT_OVERS = (
    CHECKPOINT_DIRECTORY,
    f"{CHECKPOINT_DIRECTORY}.tmp",
    INCOMING_DIRECTORY,
    CHANGELOG_DIRECTORY,
)
_WRITE_AHEAD_LOG = ".log"
_OF_ROCKSDICT = "rocksdict-config.json"


class Checkpoint(NamedTuple):
    """The cold tier of a bucket as it was, in a directory of its own."""

    directory: Path
    state: KvState
    """What its files hold."""
    row_count: int | None
    """The rows in it, None where they are not counted."""
    ids_left: tuple[tuple[int, int], ...]
    """Numbers for the auto-increment column that were reserved: first, and one after the last."""
    writers: WriterState | None
    """The writers of its changelog at that offset, None if they are not known."""

    def tables(self) -> list[Path]:
        """Its table files, which later checkpoints may have too."""
        return sorted(self.directory.glob(f"*{TABLE_SUFFIX}"))

    def others(self) -> list[Path]:
        """What RocksDB needs beside them to open it; `LogStorageError` if rows are elsewhere."""
        found = []
        for path in sorted(self.directory.iterdir()):
            if path.suffix == _WRITE_AHEAD_LOG:
                _check_empty(path)
            elif path.suffix != TABLE_SUFFIX and path.name != _OF_ROCKSDICT:
                found.append(path)
        return found

    def readable_by_all(self) -> bool:
        """Whether the RocksDB of Fluss's clients reads it."""
        return all(map(readable_by_all, self.tables()))


def _check_empty(path: Path) -> None:
    if path.stat().st_size:
        raise LogStorageError(
            f"{path} has rows that no table file has; nothing writes to the database of a bucket "
            "but whole table files. Drop what else opened it"
        )


def has_state(directory: Path) -> bool:
    """Whether a bucket's directory has a state that was flushed once."""
    return (directory / STATE_FILE).exists()


def remove_left_overs(files: Files, directory: Path) -> None:
    """Remove what a process that died left of checkpoints and of files on their way in."""
    for name in _LEFT_OVERS:
        if (directory / name).is_dir():
            files.remove_tree(directory / name)


def incoming_directory(files: Files, directory: Path) -> Path:
    """An empty directory that files for a bucket may be written to, for `install`."""
    remove_left_overs(files, directory)
    incoming = directory / INCOMING_DIRECTORY
    for parent in files.make_directories(incoming):
        files.sync_directory(parent)
    return incoming


def install(files: Files, directory: Path, state: KvState) -> None:
    """Make what lies in the incoming directory the cold tier of a bucket; durable on return.

    `CorruptRecordError` if that is no whole database: the bucket is then as it was.
    """
    cold, incoming = directory / COLD_DIRECTORY, directory / INCOMING_DIRECTORY
    check_opens(incoming)
    for path in incoming.iterdir():
        files.sync_file(path)
    files.unlink_if_there(directory / STATE_FILE)
    files.sync_directory(directory)
    if cold.is_dir():
        files.remove_tree(cold)
    files.sync_directory(incoming)
    files.rename(incoming, cold)
    files.sync_directory(directory)
    write_state(files, directory, state)
