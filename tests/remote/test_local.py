"""A location that is a directory: what a crash, a full or hung disk and a vanished mount leave."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from zufluss import system
from zufluss.remote import local
from zufluss.remote.local import TEMPORARY, LocalDirectory
from zufluss.remote.objects import (
    LocationUnavailableError,
    ObjectExistsError,
    ObjectForbiddenError,
    ObjectMissingError,
    Objects,
    RemoteStorageError,
)
from zufluss.remote.uri import parse_location


def at(path: Path, timeout_ms: int = 30_000) -> Objects:
    return Objects(parse_location(str(path), "test"), timeout_ms=timeout_ms)


async def paths(objects: Objects) -> list[str]:
    return [found.path async for page in objects.list("") for found in page]


async def test_data_is_synced_before_it_has_a_name_and_the_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def noting(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: object, **options: object) -> object:
            steps.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (os, "write"), (system, "sync_data"), (os, "replace"), (system, "sync_names"),
    ):  # fmt: skip
        noting(module, name)
    objects = at(tmp_path / "new" / "root")
    await objects.put("a/b/c", b"1")
    assert [s for s in steps if s != "sync_names"] == ["write", "sync_data", "replace"]
    assert steps[-1] == "sync_names"
    assert steps.count("sync_names") == 2 + 2 + 1  # of the names new and root, a and b, c
    steps.clear()
    await objects.put("a/b/d", b"1")
    assert steps == ["write", "sync_data", "replace", "sync_names"]
    steps.clear()
    await at(tmp_path / "new" / "root").put("a/b/d", b"1")  # the names may be a crashed one's
    assert steps.count("sync_names") == 1 + 2 + 1
    steps.clear()
    with pytest.raises(ObjectExistsError):  # who hears of it takes the object as durable
        await objects.create("a/b/d", b"1")
    assert steps == ["write", "sync_data", "sync_names"]


async def test_a_put_that_fails_leaves_neither_an_object_nor_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = at(tmp_path)
    await objects.put("a", b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(system, "sync_data", full)
    source = tmp_path.parent / "source"
    source.write_bytes(b"new")
    for attempt in (objects.put("a", b"new"), objects.put_file("a", source)):
        with pytest.raises(LocationUnavailableError, match="No space left"):
            await attempt
    assert await objects.get("a", limit=3) == b"old"
    assert list((tmp_path / TEMPORARY).iterdir()) == []


async def test_files_that_are_being_written_are_no_objects(tmp_path: Path) -> None:
    objects = at(tmp_path)
    await objects.put("a", b"1")
    young, old = tmp_path / TEMPORARY / "young", tmp_path / TEMPORARY / "old"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert await paths(objects) == ["a"]
    await at(tmp_path).put("b", b"1")
    assert young.exists()
    assert not old.exists()


async def test_a_download_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = at(tmp_path / "location")
    await objects.put("a", b"new")
    target = tmp_path / "target"
    target.write_bytes(b"old")

    def broken(fd: int, data: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(
        RemoteStorageError, match=r"cannot write the local file .*target: Input/output"
    ):
        await objects.get_file("a", target)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["target"]


async def test_deleting_removes_directories_that_are_empty(tmp_path: Path) -> None:
    objects = at(tmp_path)
    for name in ("a/b/c/1", "a/b/2", "a/d/3"):
        await objects.put(name, b"")
    await objects.delete(["a/b/c/1", "a/d/3"])
    assert (tmp_path / "a/b/2").exists()
    assert not (tmp_path / "a/b/c").exists()
    assert not (tmp_path / "a/d").exists()
    await objects.put("a/b/c/1", b"again")
    assert await paths(objects) == ["a/b/2", "a/b/c/1"]


async def test_puts_and_deletes_in_one_directory_do_not_hinder_each_other(tmp_path: Path) -> None:
    writer, deleter = at(tmp_path), at(tmp_path)

    async def again(name: str) -> None:
        for _ in range(40):
            await writer.put(f"x/y/{name}", b"1")
            await deleter.delete([f"x/y/{name}"])

    await asyncio.gather(*(again(name) for name in "abcd"))
    assert await paths(writer) == []


async def test_a_location_that_nobody_wrote_to_is_empty_and_not_made_by_readers(
    tmp_path: Path,
) -> None:
    objects = at(tmp_path / "none")
    assert await paths(objects) == []
    await objects.delete(["a"])
    with pytest.raises(LocationUnavailableError, match="does not exist; is its file system"):
        await objects.get("a", limit=1)
    assert not (tmp_path / "none").exists()


async def test_a_root_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    objects = at(root)
    await objects.put("a", b"1")
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(LocationUnavailableError, match="is its file system mounted"):
        await objects.put("b", b"1")
    with pytest.raises(LocationUnavailableError, match="is its file system mounted"):
        await objects.delete(["a"])
    with pytest.raises(LocationUnavailableError, match="is its file system mounted"):
        await paths(objects)
    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    await objects.put("b", b"1")
    assert await paths(objects) == ["a", "b"]


async def test_a_root_that_is_a_file_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_bytes(b"")
    objects = at(root)
    for attempt in (objects.put("a", b""), objects.get("a", limit=1), objects.head("a")):
        with pytest.raises(LocationUnavailableError):
            await attempt
    with pytest.raises(LocationUnavailableError):
        await paths(objects)


async def test_a_hung_disk_is_unavailable_and_makes_no_object_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, asleep, woken = threading.Event(), threading.Event(), threading.Event()
    real = system.sync_data

    def hanging(fd: int) -> None:
        asleep.set()
        awake.wait()
        real(fd)
        woken.set()

    monkeypatch.setattr(system, "sync_data", hanging)
    objects = at(tmp_path, timeout_ms=50)
    try:
        with pytest.raises(LocationUnavailableError, match="no progress within 50 ms"):
            await objects.put("a", b"1")
        assert asleep.is_set()
        monkeypatch.setattr(system, "sync_data", real)
        await objects.put("b", b"1")
    finally:
        awake.set()
    await asyncio.to_thread(woken.wait)
    directory = objects._directory
    assert isinstance(directory, LocalDirectory)
    everyone = threading.Barrier(local.THREADS + 1)
    for _ in range(local.THREADS):
        directory._threads.submit(everyone.wait)
    await asyncio.to_thread(everyone.wait)  # so the one that hung is done
    assert sorted(p.name for p in tmp_path.iterdir()) == [TEMPORARY, "b"]
    assert list((tmp_path / TEMPORARY).iterdir()) == []


async def test_a_slow_disk_that_makes_progress_is_waited_for_even_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "COPY_BYTES", 1)
    monkeypatch.setattr(local, "THREADS", 1)
    real, slow = os.write, threading.Event()

    def writing(fd: int, data: memoryview) -> int:
        slow.wait(0.02)
        return real(fd, data)

    monkeypatch.setattr(os, "write", writing)
    objects = at(tmp_path, timeout_ms=1000)
    await asyncio.gather(objects.put("a", b"x" * 60), objects.put("b", b"x"))
    assert await paths(objects) == ["a", "b"]


async def test_an_object_keeps_its_bytes_when_creating_it_again_is_refused(tmp_path: Path) -> None:
    objects = at(tmp_path)
    await objects.put("a", b"first", if_absent=True)
    with pytest.raises(ObjectExistsError):
        await objects.put("a", b"second", if_absent=True)
    assert await objects.get("a", limit=9) == b"first"
    assert list((tmp_path / TEMPORARY).iterdir()) == []


async def test_a_missing_object_in_a_location_that_is_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError, match=f"{tmp_path}/a/b: there is no such object"):
        await at(tmp_path).head("a/b")


@contextmanager
def nobody(root: Path) -> Iterator[None]:
    """Run as a user whom permissions stop; they do not stop root."""
    me = os.geteuid()
    if me == 0:
        os.chown(root, 65534, 65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


async def test_a_directory_that_became_read_only_is_unavailable_and_can_be_read() -> None:
    """Uploads must move to another location, as they do not for a forbidden object."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        objects = at(root)
        await objects.put("a", b"1")
        await objects.put("secret", b"1")
        (root / "secret").chmod(0)
        (root / TEMPORARY).chmod(0o555)
        root.chmod(0o555)
        with nobody(root):
            with pytest.raises(LocationUnavailableError, match="Permission denied"):
                await objects.put("b", b"1")
            with pytest.raises(LocationUnavailableError, match="Permission denied"):
                await objects.delete(["a"])
            assert await objects.get("a", limit=1) == b"1"
            with pytest.raises(ObjectForbiddenError):
                await objects.get("secret", limit=1)
        root.chmod(0o755)


@pytest.mark.parametrize("path", ["a/b", "directory", "n" * 300])
async def test_an_invalid_file_name_is_not_a_failure_of_the_location(
    tmp_path: Path, path: str
) -> None:
    objects = at(tmp_path)
    await objects.put("a", b"1")
    await objects.put("directory/x", b"1")
    for attempt in (objects.put(path, b"1"), objects.get(path, limit=1)):
        with pytest.raises(RemoteStorageError) as caught:
            await attempt
        assert not isinstance(caught.value, LocationUnavailableError)


async def test_an_operation_cancelled_before_it_began_is_not_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "THREADS", 1)
    objects = at(tmp_path, timeout_ms=500)
    await objects.put("a", b"1")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(LocationUnavailableError):
        await objects.get("fifo", limit=1)
    with pytest.raises(LocationUnavailableError):
        await objects.delete(["a"])
    fifo.write_bytes(b"")  # whoever waited for a writer goes on
    assert await objects.get("a", limit=1) == b"1"


async def test_a_download_that_was_given_up_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "THREADS", 1)
    objects = at(tmp_path / "location", timeout_ms=500)
    await objects.put("a", b"1")
    asleep, real = threading.Event(), system.sync_data

    def hanging(fd: int) -> None:
        asleep.wait()
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(system, "sync_data", hanging)
        with pytest.raises(LocationUnavailableError):
            await objects.get_file("a", tmp_path / "target")
        asleep.set()
        await objects.head("a")  # by the same thread, after it
    assert [path.name for path in tmp_path.iterdir()] == ["location"]


def test_a_hung_disk_does_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = f"""
import asyncio
from zufluss.remote.objects import LocationUnavailableError, Objects
from zufluss.remote.uri import parse_location

async def main():
    try:
        await Objects(parse_location({str(tmp_path)!r}, ""), timeout_ms=500).get("fifo", limit=1)
    except LocationUnavailableError:
        print("unavailable")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert done.stdout == b"unavailable\n"
