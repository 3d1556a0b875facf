"""The files of a warehouse that a `HadoopCatalog` keeps: versions of tables, hints, directories.

A version is created whole and only if nobody else created it. That one operation decides who wins
a commit, so only file systems are used on which it is atomic and durable:

| warehouse | creating a version | it fails if |
|---|---|---|
| a directory (`file:///path`) | a synced temporary file is linked, `link(2)` | the name exists |
| S3 (`s3://`, `s3a://`, `s3n://`) | PUT with `If-None-Match: *` | the object exists |

Other file systems are refused, and so are stores that ignore the condition. A rename is not used:
on a POSIX file system it replaces what is there. A hard link of a synced file is never half
written; the temporary file that a crash leaves has the name `<uuid>.metadata.json`, as those of the
Iceberg runtime, and is removed by the sweep.

Paths are relative to the warehouse. Everything else of a table, its manifests and data, is read and
written by pyiceberg.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from pyiceberg.exceptions import BadRequestError, CommitStateUnknownException

from zufluss import system
from zufluss.errors import ConfigError
from zufluss.lake.base import LakeError
from zufluss.lake.iceberg.files import local_path
from zufluss.remote.errors import ObjectExistsError, ObjectMissingError, RemoteStorageError
from zufluss.remote.local import make_directories
from zufluss.remote.stores import store_properties
from zufluss.remote.transfer import write_all
from zufluss.remote.uri import parse_location
from zufluss.threads import Threads

T = TypeVar("T")

METADATA_BYTES_MAX: Final = 256 << 20
"""The largest metadata file that is read."""
TIMEOUT_MS: Final = 30_000
"""How long a request to an object store may take, its repetitions included."""
THREADS: Final = 4
TEMPORARY_HINT: Final = "-version-hint.temp"
"""How the names of hints end that are being written."""

_S3_SCHEMES: Final = ("s3", "s3a", "s3n")
_STORE_KEYS: Final = {
    "s3.access-key-id": "s3.access-key",
    "s3.secret-access-key": "s3.secret-key",
    "client.access-key-id": "s3.access-key",
    "client.secret-access-key": "s3.secret-key",
    "client.session-token": "s3.session-token",
    "client.region": "s3.region",
}
"""pyiceberg's names of properties that our object stores call differently."""
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class Warehouse(Protocol):
    """The operations that a catalog needs. A missing file is a `FileNotFoundError`."""

    def names(self, directory: str, after: str) -> list[str]:
        """The names of files in a directory that sort behind `after`; none without directory."""

    def directories(self, directory: str) -> list[str]:
        """The names of the directories in a directory; none if it does not exist."""

    def is_directory(self, directory: str) -> bool:
        """Whether there is such a directory."""

    def make_directory(self, directory: str) -> None:
        """Create a directory and its parents, if they do not exist."""

    def remove_directory(self, directory: str) -> None:
        """Remove a directory; OSError if it is not empty."""

    def read(self, path: str) -> bytes:
        """All bytes of a file."""

    def create(self, path: str, data: bytes) -> None:
        """Create a file durably in an existing directory.

        FileExistsError if another writer created it, `CommitStateUnknownException` if the file does
        not exist and may still appear.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Write a file that may exist, without promise that it survives a power failure."""

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files; missing ones are ignored."""

    def remove_tree(self, directory: str) -> None:
        """Remove a directory with everything in it."""


def check_warehouse(location: str) -> None:
    """Refuse a location in which versions cannot be created atomically."""
    path = local_path(location)
    if path is not None or location.partition("://")[0] in _S3_SCHEMES:
        parse_location(location if path is None else str(path), "datalake.iceberg.warehouse")
        return
    raise ConfigError(
        f"datalake.iceberg.warehouse is {location}; a catalog of type hadoop needs a file system "
        "that creates a file only if it does not exist: a directory (file:///path) or S3 "
        "(s3://bucket/path, s3a://bucket/path). For other file systems use a catalog of type rest "
        "or sql"
    )


def open_warehouse(location: str, properties: Mapping[str, str]) -> Warehouse:
    """The warehouse at a location; `properties` are those of the catalog."""
    check_warehouse(location)
    path = local_path(location)
    return LocalWarehouse(path) if path is not None else CloudWarehouse(location, properties)


class LocalWarehouse:
    """A directory, possibly of a file system that several machines have mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, directory: str, after: str) -> list[str]:
        """The names of files in a directory that sort behind `after`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            paths = (self._root / directory).iterdir()
            return [path.name for path in paths if path.name > after]
        return []

    def directories(self, directory: str) -> list[str]:
        """The names of the directories in a directory."""
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._root / directory) as entries,
        ):
            return sorted(entry.name for entry in entries if entry.is_dir())
        return []

    def is_directory(self, directory: str) -> bool:
        """Whether there is such a directory."""
        return (self._root / directory).is_dir()

    def make_directory(self, directory: str) -> None:
        """Create a directory and its parents, durably."""
        make_directories(self._root / directory)

    def remove_directory(self, directory: str) -> None:
        """Remove an empty directory."""
        (self._root / directory).rmdir()

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return (self._root / path).read_bytes()

    def create(self, path: str, data: bytes) -> None:
        """Write and sync a temporary file, and give it its name if nothing has that name."""
        target = self._root / path
        temporary = target.with_name(f"{uuid.uuid4()}.metadata.json")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_all(fd, data, 0)
                system.sync_data(fd)
            finally:
                os.close(fd)
            _link(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        system.sync_directory(target.parent)

    def replace(self, path: str, data: bytes) -> None:
        """Write a temporary file and rename it.

        The checksum that Hadoop's local file system keeps beside a file is removed first: it would
        not be that of the new content.
        """
        target = self._root / path
        temporary = target.with_name(f"{uuid.uuid4()}{TEMPORARY_HINT}")
        try:
            temporary.write_bytes(data)
            target.with_name(f".{target.name}.crc").unlink(missing_ok=True)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files."""
        for path in paths:
            (self._root / path).unlink(missing_ok=True)

    def remove_tree(self, directory: str) -> None:
        """Remove a directory with everything in it."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root / directory)


def _link(temporary: Path, target: Path) -> None:
    """Link a file to a second name; FileExistsError if another file has that name."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        # A network file system repeats a request whose answer was lost, and finds its own link.
        if not (target.exists() and target.samefile(temporary)):
            raise
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise
        raise LakeError(
            f"{target} cannot be created as a hard link ({problem.strerror}), and a catalog of "
            "type hadoop needs hard links on this file system; nothing was committed. Move the "
            "warehouse, or use a catalog of type sql or rest"
        ) from problem


class CloudWarehouse:
    """A prefix of an S3 bucket. It has no directories: one exists while an object is below it."""

    def __init__(self, location: str, properties: Mapping[str, str]) -> None:
        from zufluss.remote.cloud import CloudDirectory  # slow, and directories do not need it

        uri = parse_location(location, "datalake.iceberg.warehouse")
        settings = store_properties(_store_settings(properties), uri)
        self._directory = CloudDirectory(uri, settings, TIMEOUT_MS)
        self._threads = Threads(THREADS, "zufluss-warehouse", may_hang=True)
        self._is_conditional = False

    def names(self, directory: str, after: str) -> list[str]:
        """The names of objects directly below a prefix."""
        skipped = len(directory) + 1

        async def listed() -> list[str]:
            pages = self._directory.list(directory, after)
            return [path[skipped:] async for page in pages for path, _, _ in page]

        return [name for name in self._wait(listed()) if "/" not in name]

    def directories(self, directory: str) -> list[str]:
        """The next parts of the prefixes below a prefix."""
        return sorted(self._wait(self._directory.directories(directory)))

    def is_directory(self, directory: str) -> bool:
        """Whether any object is below the prefix."""

        async def found() -> bool:
            async for _ in self._directory.list(directory):
                return True
            return False

        return self._wait(found())

    def make_directory(self, directory: str) -> None:
        """Nothing: the first object below makes the directory."""

    def remove_directory(self, directory: str) -> None:
        """OSError: a prefix that exists has objects."""
        raise OSError(errno.ENOTEMPTY, "there are objects below this prefix", directory)

    def read(self, path: str) -> bytes:
        """All bytes of an object."""
        try:
            return self._wait(self._directory.get(path, METADATA_BYTES_MAX))
        except ObjectMissingError as problem:
            raise FileNotFoundError(errno.ENOENT, str(problem), path) from problem

    def create(self, path: str, data: bytes) -> None:
        """Create an object; after an error, look whether it is there."""
        self._check_conditional(path.rpartition("/")[0])
        try:
            self._wait(self._directory.put(path, data, if_absent=True))
        except ObjectExistsError as problem:
            raise FileExistsError(errno.EEXIST, str(problem), path) from problem
        except RemoteStorageError as problem:
            if not self._is_there(path, data, problem):
                raise CommitStateUnknownException(
                    f"{problem}; the object does not exist and may still appear"
                ) from problem

    def _check_conditional(self, directory: str) -> None:
        """`BadRequestError` if the store replaces an object that was to be created only.

        Not every store that speaks S3 knows the condition. Those that ignore it would lose commits
        without a word, so an object is created twice before the first commit.
        """
        if self._is_conditional:
            return
        probe = f"{directory}/{uuid.uuid4()}.metadata.json"  # the sweep removes what a crash leaves
        try:
            self._wait(self._directory.put(probe, b"1", if_absent=True))
            self._wait(self._directory.put(probe, b"2", if_absent=True))
        except ObjectExistsError:
            self._is_conditional = True
        finally:
            with suppress(RemoteStorageError):
                self.delete([probe])
        if not self._is_conditional:
            raise BadRequestError(
                f"the object store of {self._directory.uri} replaces objects in spite of "
                "If-None-Match, so concurrent commits to a catalog of type hadoop would be lost; "
                "nothing was committed. Use another store, or a catalog of type sql or rest"
            )

    def _is_there(self, path: str, data: bytes, problem: RemoteStorageError) -> bool:
        """Whether the object has these bytes; FileExistsError if it has others."""
        try:
            actual = self.read(path)
        except (FileNotFoundError, RemoteStorageError):
            return False
        if actual != data:
            raise FileExistsError(errno.EEXIST, "another writer created it", path) from problem
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Write an object."""
        self._wait(self._directory.put(path, data, if_absent=False))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects."""
        if paths:
            self._wait(self._directory.delete(paths))

    def remove_tree(self, directory: str) -> None:
        """Remove every object below a prefix."""

        async def removed() -> None:
            async for page in self._directory.list(directory):
                await self._directory.delete([path for path, _, _ in page])

        self._wait(removed())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a thread of its own; the caller may be on an event loop itself."""
        result: T = self._threads.submit(asyncio.run, work).result()
        return result


def _store_settings(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties of a catalog under the names of our object stores."""
    # Sorted in reverse, so that `s3.` comes before `client.`, which is used for what it lacks.
    settings: dict[str, str] = {}
    for key in sorted(properties, reverse=True):
        settings.setdefault(_STORE_KEYS.get(key, key), properties[key])
    virtual = properties.get("s3.force-virtual-addressing")
    if virtual is not None:
        settings.setdefault("s3.path-style-access", str(virtual.lower() != "true").lower())
    return settings
