"""An S3 server that fails: retries are bounded, errors typed, unknown outcomes resolved."""

import asyncio
import os
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from crc32c import crc32c

from zufluss.remote import cloud, transfer
from zufluss.remote.objects import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    Objects,
    RemoteStorageError,
)
from zufluss.remote.uri import parse_location
from zufluss.testing.proxy import Fault, FaultProxy, Kind
from zufluss.testing.s3 import S3Server, properties

BUCKET = "faults"
LARGE = (20 << 20) + 7

pytestmark = pytest.mark.usefixtures("no_backoff")

BROKEN: list[Kind] = ["status_503", "reset", "error_after_success"]
"""Ways in which a request fails at once."""


@pytest.fixture(scope="module")
def s3(s3_server: S3Server) -> S3Server:
    s3_server.bucket(BUCKET)
    return s3_server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3.port) as proxy:
        yield proxy


@pytest.fixture
def objects(proxy: FaultProxy) -> Objects:
    uri = parse_location(f"s3://{BUCKET}/{uuid.uuid4()}", "test")
    return Objects(uri, properties(proxy.endpoint), timeout_ms=10_000)


@pytest.fixture
def impatient(objects: Objects, proxy: FaultProxy) -> Objects:
    return Objects(objects.uri, properties(proxy.endpoint), timeout_ms=200)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


async def listed(objects: Objects) -> list[str]:
    return [found.path async for page in objects.list("") for found in page]


async def streamed(objects: Objects, path: str) -> bytes:
    return b"".join([bytes(piece) async for piece in objects.stream(path)])


@pytest.mark.parametrize("kind", BROKEN)
async def test_two_failures_in_a_row_are_survived(
    kind: Kind, objects: Objects, proxy: FaultProxy, tmp_path: Path
) -> None:
    def twice() -> None:
        proxy.set([Fault(kind, count=2)])

    twice()
    await objects.put("a", b"hello")
    twice()
    assert await objects.get("a", limit=5) == b"hello"
    twice()
    assert await objects.get_range("a", 1, 3) == b"el"
    twice()
    assert (await objects.head("a")).size == 5
    twice()
    assert await objects.get_file("a", tmp_path / "a") == (5, crc32c(b"hello"))
    twice()
    assert await streamed(objects, "a") == b"hello"
    twice()
    assert await listed(objects) == ["a"]
    twice()
    await objects.delete(["a"])
    proxy.set()
    assert await listed(objects) == []


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_location_that_fails_is_asked_three_times_and_then_unavailable(
    kind: Kind, objects: Objects, proxy: FaultProxy, tmp_path: Path, large: Path
) -> None:
    proxy.set([Fault(kind)])
    for attempt in (
        lambda: objects.put("a", b"hello"),
        lambda: objects.put("b", b"hello", if_absent=True),
        lambda: objects.put_file("c", large),
        lambda: objects.get("a", limit=5),
        lambda: objects.get_range("a", 1, 3),
        lambda: objects.head("a"),
        lambda: objects.get_file("a", tmp_path / "target"),
        lambda: objects.delete(["a"]),
        lambda: listed(objects),
    ):
        proxy.seen.clear()
        with pytest.raises(LocationUnavailableError) as caught:
            await attempt()
        assert len(proxy.seen) == 3
        assert objects.uri.text in caught.value.message
        assert caught.value.retriable
        assert caught.value.throttled is (kind == "status_503")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


async def test_creating_succeeds_when_the_answer_was_lost_and_the_bytes_are_ours(
    objects: Objects, proxy: FaultProxy
) -> None:
    proxy.set([Fault("error_after_success", methods=("PUT",), count=1)])
    assert await objects.put("a", b"mine", if_absent=True) == crc32c(b"mine")
    assert await objects.get("a", limit=4) == b"mine"


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_single_request_is_not_repeated(
    kind: Kind, objects: Objects, proxy: FaultProxy
) -> None:
    """The shared log repeats its puts itself, and must know of each failure."""
    proxy.set([Fault(kind, methods=("PUT",), count=1)])
    with pytest.raises(LocationUnavailableError) as caught:
        await objects.create("a", b"mine")
    assert caught.value.throttled is (kind == "status_503")
    assert len(proxy.seen) == 1
    if kind == "error_after_success":
        with pytest.raises(ObjectExistsError):
            await objects.create("a", b"mine")
    else:
        await objects.create("a", b"mine")
    assert await objects.get("a", limit=4) == b"mine"


@pytest.mark.parametrize("other", [b"else", b"longer than that"])
async def test_creating_fails_when_a_repeated_try_meets_other_bytes(
    other: bytes, objects: Objects, proxy: FaultProxy
) -> None:
    await objects.put("a", other)
    proxy.set([Fault("reset", methods=("PUT",), count=1)])
    with pytest.raises(ObjectExistsError):
        await objects.put("a", b"mine", if_absent=True)
    assert await objects.get("a", limit=99) == other


async def test_a_conflict_with_another_request_does_not_say_that_the_object_exists(
    objects: Objects, proxy: FaultProxy
) -> None:
    """The other request may be an earlier try of ours that still arrives: nothing is certain."""
    proxy.set([Fault("status_409", methods=("PUT",), count=2)])
    await objects.put("a", b"mine", if_absent=True)
    proxy.set([Fault("status_409", methods=("PUT",))])
    with pytest.raises(LocationUnavailableError, match="ConditionalRequestConflict"):
        await objects.put("b", b"mine", if_absent=True)


async def test_a_server_that_never_answers_is_unavailable_after_the_timeout(
    impatient: Objects, objects: Objects, proxy: FaultProxy, tmp_path: Path, large: Path
) -> None:
    await objects.put("a", b"hello")
    proxy.set([Fault("half_open")])
    for attempt in (
        lambda: impatient.put("a", b"hello"),
        lambda: impatient.get("a", limit=5),
        lambda: impatient.put_file("c", large),
        lambda: impatient.get_file("a", tmp_path / "target"),
        lambda: listed(impatient),
    ):
        proxy.seen.clear()
        with pytest.raises(LocationUnavailableError):
            await attempt()
        assert 1 <= len(proxy.seen) <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


async def test_the_timeout_limits_a_download_with_all_its_tries(
    impatient: Objects, objects: Objects, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Otherwise a reader of a dead location waits three times as long as configured."""
    await objects.put("a", b"hello")
    proxy.set([Fault("half_open")])
    proxy.seen.clear()
    with pytest.raises(LocationUnavailableError):
        await impatient.get_file("a", tmp_path / "target")
    assert len(proxy.seen) == 1


async def test_latency_below_the_timeout_is_no_failure(objects: Objects, proxy: FaultProxy) -> None:
    proxy.set([Fault("latency", seconds=0.05)])
    await objects.put("a", b"hello")
    assert await objects.get("a", limit=5) == b"hello"
    assert len(proxy.seen) == 2


async def test_a_slow_transfer_lasts_longer_than_the_timeout_of_a_request(
    objects: Objects, proxy: FaultProxy, tmp_path: Path
) -> None:
    data = os.urandom(2 << 20)
    await objects.put("a", data)
    slow = Objects(objects.uri, properties(proxy.endpoint), timeout_ms=700)
    proxy.set([Fault("bandwidth", bytes_per_second=2 << 20)])
    assert await slow.get_file("a", tmp_path / "target") == (len(data), crc32c(data))


async def test_a_download_that_is_cut_off_goes_on_where_it_was(
    objects: Objects, proxy: FaultProxy, large: Path, tmp_path: Path
) -> None:
    data = large.read_bytes()
    await objects.put_file("a", large)
    proxy.seen.clear()
    proxy.set([Fault("cut_body", methods=("GET",), count=2)])
    target = tmp_path / "target"
    assert await objects.get_file("a", target) == (LARGE, crc32c(data))
    assert target.read_bytes() == data
    assert len(proxy.seen) == 3


async def test_a_download_that_is_always_cut_off_leaves_no_file(
    objects: Objects, proxy: FaultProxy, tmp_path: Path
) -> None:
    await objects.put("a", b"hello")
    proxy.set([Fault("cut_body", methods=("GET",))])
    with pytest.raises(LocationUnavailableError):
        await objects.get_file("a", tmp_path / "target")
    with pytest.raises(LocationUnavailableError):
        await objects.get("a", limit=5)
    assert list(tmp_path.iterdir()) == []


async def test_an_object_that_was_replaced_during_a_download_is_noticed(
    objects: Objects, proxy: FaultProxy, large: Path
) -> None:
    await objects.put_file("a", large)
    proxy.set([Fault("cut_body", methods=("GET",), count=1)])
    pieces = objects.stream("a")
    await anext(pieces)
    await objects.put("a", bytes(LARGE))
    with pytest.raises(ObjectCorruptError, match="replaced while it was read"):
        async for _ in pieces:
            pass


@pytest.mark.parametrize("kind", BROKEN)
async def test_an_upload_in_parts_survives_failures_of_each_of_its_requests(
    kind: Kind, objects: Objects, proxy: FaultProxy, large: Path
) -> None:
    data = large.read_bytes()
    proxy.set([Fault(kind, once=True)])
    assert await objects.put_file("a", large) == (LARGE, crc32c(data))
    proxy.set()
    assert await streamed(objects, "a") == data


async def test_an_upload_is_done_when_the_answer_to_its_end_was_lost(
    objects: Objects, proxy: FaultProxy, large: Path
) -> None:
    proxy.set([Fault("error_after_success", methods=("POST",), path_contains="uploadId", count=1)])
    assert (await objects.put_file("a", large))[0] == LARGE
    assert (await objects.head("a")).size == LARGE


async def test_an_upload_that_fails_leaves_no_object_and_no_parts(
    objects: Objects, proxy: FaultProxy, large: Path, s3: S3Server
) -> None:
    proxy.set([Fault("status_503", path_contains="partNumber=2")])
    with pytest.raises(LocationUnavailableError):
        await objects.put_file("a", large)
    proxy.set()
    assert await listed(objects) == []
    with urllib.request.urlopen(f"{s3.endpoint}/{BUCKET}?uploads") as answer:
        assert objects.uri.path.strip("/").encode() not in answer.read()


async def test_a_source_that_breaks_during_an_upload_is_not_the_fault_of_the_location(
    objects: Objects, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenFile(FileIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 0:
                raise OSError(5, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(transfer, "FileIO", BrokenFile)
    with pytest.raises(RemoteStorageError, match=r"cannot read the local file .*large: Input") as e:
        await objects.put_file("a", large)
    assert not isinstance(e.value, LocationUnavailableError)
    monkeypatch.undo()
    assert await listed(objects) == []


async def test_a_cancelled_transfer_leaves_nothing(
    objects: Objects, proxy: FaultProxy, large: Path, tmp_path: Path
) -> None:
    await objects.put_file("a", large)
    proxy.set([Fault("bandwidth", bytes_per_second=4 << 20)])
    proxy.seen.clear()
    task = asyncio.create_task(objects.get_file("a", tmp_path / "target"))
    while not proxy.seen:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


async def test_a_port_without_a_listener_is_unavailable(tmp_path: Path) -> None:
    with FaultProxy("127.0.0.1", 1) as gone:
        endpoint = gone.endpoint
    objects = Objects(parse_location("s3://faults/x", "test"), properties(endpoint))
    with pytest.raises(LocationUnavailableError) as caught:
        await objects.get("a", limit=1)
    assert not caught.value.throttled


async def test_a_cancellation_counts_even_if_the_answer_comes_at_that_moment(
    objects: Objects,
) -> None:
    directory = objects._directory
    assert isinstance(directory, cloud.CloudDirectory)
    went_on = False

    async def caller() -> None:
        nonlocal went_on
        await directory._tried("a", answer)
        await asyncio.sleep(0)
        went_on = True

    async def answer() -> None:
        task.cancel()

    task = asyncio.create_task(caller())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not went_on


async def test_a_cancelled_download_has_left_the_target_alone_when_it_is_over(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancelled caller removes the file; it must not appear afterwards."""
    naming, go_on = threading.Event(), threading.Event()
    real = transfer.ReceivedFile.keep

    def slow(target: transfer.ReceivedFile) -> None:
        naming.set()
        go_on.wait()
        real(target)

    await objects.put("a", b"1")
    monkeypatch.setattr(transfer.ReceivedFile, "keep", slow)
    task = asyncio.create_task(objects.get_file("a", tmp_path / "target"))
    await asyncio.to_thread(naming.wait)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert go_on.is_set()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


async def test_an_unknown_host_name_is_unavailable(tmp_path: Path) -> None:
    uri = parse_location("s3://faults/x", "test")
    objects = Objects(uri, properties("http://no-such-host.invalid"), timeout_ms=1000)
    with pytest.raises(LocationUnavailableError):
        await objects.put("a", b"1")
