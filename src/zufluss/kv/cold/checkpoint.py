"""Checkpoints of a bucket's cold tier, and their installation in a bucket that lost its files.

A checkpoint is the cold tier at one flushed offset, as hard links in a directory beside it. The
key-value worker makes it while no flush is under way, so its files hold exactly what the state file
says. The caller removes the directory; opening a bucket removes what a crash left.

Installing replaces the files of a bucket:

    old state file removed → old files removed → new files in place, durable → state file written

A crash in between leaves a bucket without state file, which is installed again.
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
"""Directory of the cold tier in a bucket's directory."""

CHECKPOINT_DIRECTORY = "checkpoint"
"""Directory of a checkpoint that is being uploaded."""

INCOMING_DIRECTORY = "incoming"
"""Directory of files that are being installed."""

CHANGELOG_DIRECTORY = "changelog"
"""Directory of parts of the changelog that were fetched for a replay."""

_LEFT_OVERS = (
    CHECKPOINT_DIRECTORY,
    f"{CHECKPOINT_DIRECTORY}.tmp",
    INCOMING_DIRECTORY,
    CHANGELOG_DIRECTORY,
)
_WRITE_AHEAD_LOG = ".log"
_OF_ROCKSDICT = "rocksdict-config.json"


class Checkpoint(NamedTuple):
    """A copy of a bucket's cold tier in a directory of its own."""

    directory: Path
    state: KvState
    """The state that the files hold."""
    row_count: int | None
    """Number of rows, None if the table does not count them."""
    ids_left: tuple[tuple[int, int], ...]
    """Reserved numbers of the auto-increment column: first, and one after the last."""
    writers: WriterState | None
    """The writers of the changelog at that offset, None if unknown."""

    def tables(self) -> list[Path]:
        """Return the table files; later checkpoints may share them."""
        return sorted(self.directory.glob(f"*{TABLE_SUFFIX}"))

    def others(self) -> list[Path]:
        """Return the other files that RocksDB needs to open the checkpoint.

        Raises `LogStorageError` if a write-ahead log has rows.
        """
        others = []
        for path in sorted(self.directory.iterdir()):
            if path.suffix == _WRITE_AHEAD_LOG:
                _check_empty(path)
            elif path.suffix != TABLE_SUFFIX and path.name != _OF_ROCKSDICT:
                others.append(path)
        return others

    def readable_by_all(self) -> bool:
        """Whether the RocksDB of Fluss's clients reads all files."""
        return all(map(readable_by_all, self.tables()))


def _check_empty(path: Path) -> None:
    if path.stat().st_size:
        raise LogStorageError(
            f"{path} has rows that no table file has: another program wrote to the database of "
            "this bucket. Stop that program; restore the bucket from a snapshot"
        )


def has_state(directory: Path) -> bool:
    """Whether a bucket was ever flushed or installed."""
    return (directory / STATE_FILE).exists()


def remove_left_overs(files: Files, directory: Path) -> None:
    """Remove checkpoints and files to be installed that a crashed process left."""
    for name in _LEFT_OVERS:
        if (directory / name).is_dir():
            files.remove_tree(directory / name)


def incoming_directory(files: Files, directory: Path) -> Path:
    """Create an empty directory for the files that `install` is to install."""
    remove_left_overs(files, directory)
    incoming = directory / INCOMING_DIRECTORY
    for parent in files.make_directories(incoming):
        files.sync_directory(parent)
    return incoming


def install(files: Files, directory: Path, state: KvState) -> None:
    """Make the files in the incoming directory the cold tier of a bucket; durable on return.

    Raises `CorruptRecordError` if they are not a whole database; the bucket stays as it was.
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
