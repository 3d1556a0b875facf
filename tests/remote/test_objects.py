"""The promises of every kind of location: a directory, memory, or an S3 server."""

import asyncio
import os
import uuid
from pathlib import Path

import pytest
from crc32c import crc32c
from obstore.exceptions import GenericError

from zufluss.remote import cloud, local
from zufluss.remote.cloud import CloudDirectory
from zufluss.remote.objects import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    ObjectForbiddenError,
    ObjectInfo,
    ObjectMissingError,
    Objects,
    RemoteStorageError,
)
from zufluss.remote.transfer import SentFile
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

LARGE = 20 << 20
"""More than two parts of an upload."""

AWKWARD = "log/db/t-1/a$b=c-p7/0/x y%20z&.log"
"""Characters of names that stores like to encode."""


@pytest.fixture(scope="module")
def s3(s3_server: S3Server) -> S3Server:
    s3_server.bucket("objects")
    return s3_server


@pytest.fixture(params=["file", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "file":
        return Objects(parse_location(str(tmp_path / "location"), "test"))
    if request.param == "memory":
        return Objects(parse_location(f"memory://{uuid.uuid4()}/root", "test"))
    server = request.getfixturevalue("s3")
    return Objects(parse_location(f"s3://objects/{uuid.uuid4()}", "test"), server.properties)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 20) * (LARGE >> 20) + b"end")
    return source


async def listed(objects: Objects, prefix: str = "") -> list[ObjectInfo]:
    return [found async for page in objects.list(prefix) for found in page]


async def test_what_was_put_can_be_read(objects: Objects) -> None:
    assert await objects.put(AWKWARD, b"hello") == crc32c(b"hello")
    assert await objects.get(AWKWARD, limit=5) == b"hello"
    assert await objects.get_range(AWKWARD, 1, 4) == b"ell"
    assert await objects.get_range(AWKWARD, 2, 2) == b""
    found = await objects.head(AWKWARD)
    assert found == (AWKWARD, 5, found.modified_ms)
    assert await listed(objects) == [found]


async def test_a_put_takes_any_buffer_and_replaces(objects: Objects) -> None:
    await objects.put("a", memoryview(b"xabcx")[1:4])
    assert await objects.get("a", limit=9) == b"abc"
    assert await objects.put("a", b"") == 0
    assert await objects.get("a", limit=0) == b""


async def test_an_object_is_created_from_pieces(objects: Objects) -> None:
    await objects.create("pieces", [b"one", b"", b"2" * 100_000, b"three"])
    assert await objects.get("pieces", limit=1 << 20) == b"one" + b"2" * 100_000 + b"three"
    with pytest.raises(ObjectExistsError):
        await objects.create("pieces", [b"an", b"other"])


async def test_only_one_of_many_creates_an_object(objects: Objects) -> None:
    async def create(data: bytes) -> bytes | None:
        try:
            await objects.put("dir/once", data, if_absent=True)
        except ObjectExistsError:
            return None
        return data

    done = await asyncio.gather(*(create(bytes([n]) * 10) for n in range(8)))
    winners = [data for data in done if data is not None]
    assert len(winners) == 1
    assert await objects.get("dir/once", limit=10) == winners[0]


async def test_an_object_that_was_there_is_not_created_even_with_the_same_bytes(
    objects: Objects,
) -> None:
    await objects.put("a", b"same", if_absent=True)
    with pytest.raises(ObjectExistsError, match="/a: the object exists already"):
        await objects.put("a", b"same", if_absent=True)


async def test_a_large_file_goes_there_and_back(
    objects: Objects, large: Path, tmp_path: Path
) -> None:
    data = large.read_bytes()
    expected = (len(data), crc32c(data))
    assert await objects.put_file("kv/large", large) == expected
    assert (await objects.head("kv/large")).size == len(data)
    target = tmp_path / "target"
    assert await objects.get_file("kv/large", target) == expected
    assert target.read_bytes() == data
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["source", "target"]


async def test_small_and_empty_files_go_there_and_back(objects: Objects, tmp_path: Path) -> None:
    for data in (b"", b"small"):
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(data)
        assert await objects.put_file("f", source) == (len(data), crc32c(data))
        assert await objects.get_file("f", target) == (len(data), crc32c(data))
        assert target.read_bytes() == data


@pytest.mark.parametrize("start", [0, 1, (8 << 20) + 3, LARGE + 3, LARGE + 99])
async def test_a_stream_begins_anywhere(objects: Objects, large: Path, start: int) -> None:
    await objects.put_file("large", large)
    pieces = [bytes(piece) async for piece in objects.stream("large", start)]
    assert b"".join(pieces) == large.read_bytes()[start:]


async def test_a_missing_object_is_named(objects: Objects, tmp_path: Path) -> None:
    await objects.put("other", b"")
    target = tmp_path / "target"

    async def streamed() -> None:
        async for _ in objects.stream("a/b"):
            pass

    for ask in (
        lambda: objects.get("a/b", limit=1),
        lambda: objects.get_range("a/b", 0, 1),
        lambda: objects.head("a/b"),
        lambda: objects.get_file("a/b", target),
        streamed,
    ):
        with pytest.raises(ObjectMissingError) as caught:
            await ask()
        assert f"{objects.uri.text}/a/b" in caught.value.message
        assert not caught.value.retriable
    assert not [p for p in tmp_path.iterdir() if p.is_file()]


async def test_a_directory_is_no_object(objects: Objects) -> None:
    await objects.put("a/b", b"x")
    with pytest.raises(ObjectMissingError):
        await objects.get("a", limit=1)


async def test_an_object_over_the_limit_is_not_read(objects: Objects) -> None:
    await objects.put("a", b"12345")
    with pytest.raises(RemoteStorageError, match="the object has 5 bytes; at most 4 are read"):
        await objects.get("a", limit=4)


@pytest.mark.parametrize(("start", "end"), [(3, 6), (5, 6), (7, 9)])
async def test_a_range_behind_the_end_says_that_the_object_is_too_short(
    objects: Objects, start: int, end: int
) -> None:
    await objects.put("a", b"12345")
    with pytest.raises(ObjectCorruptError, match="the object ends after"):
        await objects.get_range("a", start, end)


async def test_deleting_takes_what_is_there(objects: Objects) -> None:
    for name in ("a/x", "a/y", "b"):
        await objects.put(name, b"1")
    await objects.delete(["a/x", "missing", "a/missing", "b"])
    assert [found.path for found in await listed(objects)] == ["a/y"]
    await objects.delete(["a/x", "missing"])
    await objects.delete([])


async def test_a_listing_is_of_a_directory_and_comes_in_pages(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cloud, local):
        monkeypatch.setattr(module, "PAGE_OBJECTS", 10)
    names = [f"log/t/{n:04d}" for n in range(25)]
    await asyncio.gather(*(objects.put(name, b"") for name in names))
    await objects.put("log/t2/x", b"")
    pages = [page async for page in objects.list("log/t/")]
    assert [len(page) for page in pages] == [10, 10, 5]
    assert sorted(found.path for page in pages for found in page) == names
    assert [found.path for found in await listed(objects, "log/t2")] == ["log/t2/x"]
    assert await listed(objects, "log/none") == []


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\x00", "a\nb", "\x7f", "\ud800"]
)
async def test_a_path_that_leaves_the_location_is_refused(objects: Objects, path: str) -> None:
    with pytest.raises(RemoteStorageError, match="not a path below a location"):
        await objects.put(path, b"")


async def test_an_unreadable_source_is_not_the_fault_of_the_location(
    objects: Objects, tmp_path: Path
) -> None:
    with pytest.raises(RemoteStorageError, match="cannot read the local file") as caught:
        await objects.put_file("a", tmp_path / "none")
    assert not isinstance(caught.value, (LocationUnavailableError, ObjectMissingError))
    assert await listed(objects) == []


async def test_a_target_that_cannot_be_written_is_not_the_fault_of_the_location(
    objects: Objects, tmp_path: Path
) -> None:
    await objects.put("a", b"x")
    with pytest.raises(RemoteStorageError, match="cannot write the local file") as caught:
        await objects.get_file("a", tmp_path / "none" / "target")
    assert not isinstance(caught.value, (LocationUnavailableError, ObjectMissingError))


async def test_an_address_for_clients_is_the_location_and_the_path(objects: Objects) -> None:
    assert objects.full_path("log/a") == f"{objects.uri.text}/log/a"


def test_objects_are_used_from_several_loops_and_threads(objects: Objects) -> None:
    async def use(name: str) -> bytes:
        await objects.put(name, name.encode())
        return await objects.get(name, limit=99)

    async def together() -> list[bytes]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, use(n)) for n in "abcd"))

    assert asyncio.run(together()) == [b"a", b"b", b"c", b"d"]
    assert asyncio.run(use("e")) == b"e"


async def test_all_users_of_a_memory_address_share_one_store() -> None:
    name = uuid.uuid4()
    outer, inner, other = (
        Objects(parse_location(f"memory://{authority}", "test"))
        for authority in (f"{name}/a", f"{name}/a/b", f"{uuid.uuid4()}/a")
    )
    await outer.put("b/c", b"1")
    assert await inner.get("c", limit=1) == b"1"
    assert await listed(other) == []


async def test_wrong_credentials_are_told_apart_from_a_missing_object(s3: S3Server) -> None:
    objects = Objects(parse_location("s3://objects/x", "test"), s3.properties)
    s3.refuse_credentials(True)
    try:
        with pytest.raises(ObjectForbiddenError, match=r"s3://objects/x/a: .*InvalidAccessKeyId"):
            await objects.put("a", b"")
        with pytest.raises(ObjectForbiddenError) as caught:
            await objects.get("a", limit=1)
        assert not caught.value.retriable
        with pytest.raises(ObjectForbiddenError):
            await listed(objects)
        with pytest.raises(ObjectForbiddenError):
            await objects.delete(["a"])
    finally:
        s3.refuse_credentials(False)
    await objects.put("a", b"")


async def test_a_missing_bucket_is_named(s3: S3Server) -> None:
    objects = Objects(parse_location("s3://nobody-made-it/x", "test"), s3.properties)
    with pytest.raises(ObjectMissingError, match="NoSuchBucket"):
        await objects.put("a", b"")
    with pytest.raises(ObjectMissingError, match="NoSuchBucket"):
        await listed(objects)


@pytest.mark.parametrize(
    ("reason", "kind", "throttled"),
    [
        ("DeleteObjects request failed for key a: no (code: AccessDenied)", "Forbidden", False),
        ("DeleteObjects request failed for key a: no (code: SlowDown)", "Unavailable", True),
        ("DeleteObjects request failed for key a: no (code: InternalError)", "Unavailable", False),
        ("Server returned non-2xx status code: 501 Not Implemented", "Storage", False),
        ("Server returned non-2xx status code: 400 Bad Request", "Storage", False),
        ("Server returned non-2xx status code: 429 Too Many Requests", "Unavailable", True),
        ("HTTP error: error sending request", "Unavailable", False),
        ("something new", "Storage", False),
    ],
)
def test_the_texts_of_obstore_become_typed_errors(reason: str, kind: str, throttled: bool) -> None:
    directory = CloudDirectory(parse_location("memory://texts", "test"), {}, 1000)
    error = directory.typed("a", GenericError(f"Generic S3 error: {reason}\n\nDebug source: x"))
    assert kind in type(error).__name__
    assert error.message == f"memory://texts/a: Generic S3 error: {reason}"
    assert error.retriable is (kind == "Unavailable")
    assert getattr(error, "throttled", False) is throttled


def test_a_signed_address_is_not_repeated_in_an_error() -> None:
    directory = CloudDirectory(parse_location("memory://texts", "test"), {}, 1000)
    text = "Error performing GET https://a.blob/c/x?sv=1&sig=secret in 1ms - status code: 500"
    error = directory.typed("a", GenericError(text))
    assert "secret" not in error.message
    assert "https://a.blob/c/x in 1ms" in error.message


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_source_that_grows_meanwhile_is_not_taken_for_a_copy(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(size))

    def growing(name: str) -> None:
        real = getattr(SentFile, name)

        def read(sent: SentFile, wanted: object) -> object:
            with source.open("ab") as file:
                file.write(b"more" if source.stat().st_size == size else b"")
            return real(sent, wanted)

        monkeypatch.setattr(SentFile, name, read)

    growing("read")
    growing("read_into")
    with pytest.raises(RemoteStorageError, match=rf"source were read, it had {size} before"):
        await objects.put_file("a", source)
