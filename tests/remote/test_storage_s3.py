"""A bucket behind a proxy that misbehaves, and a directory beside it: where uploads end up."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from zufluss.config import Configuration
from zufluss.remote.errors import LocationUnavailableError, ObjectCorruptError, ObjectForbiddenError
from zufluss.remote.locations import Health
from zufluss.remote.objects import Objects
from zufluss.remote.placement import CLUSTER
from zufluss.remote.registry import reconcile
from zufluss.remote.storage import RemoteStorage, Upload
from zufluss.remote.uri import parse_location
from zufluss.testing.proxy import Fault, FaultProxy, Kind
from zufluss.testing.s3 import S3Server, properties

DOCUMENT = b"a document of some length" * 100


@pytest.fixture(scope="module")
def s3(s3_server: S3Server) -> S3Server:
    s3_server.bucket("bucket")
    return s3_server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3.port) as running:
        yield running


@pytest.fixture
def bucket(s3: S3Server) -> Objects:
    """Location 1 as it is, without the proxy."""
    return Objects(parse_location(f"s3://bucket/{uuid.uuid4()}", "test"), s3.properties)


@pytest.fixture
def settings(proxy: FaultProxy, bucket: Objects, tmp_path: Path) -> dict[str, str]:
    return {
        "data.dir": str(tmp_path / "data"),
        "remote.data.dirs": f"{bucket.uri},{tmp_path}/directory",
        "zufluss.remote.probe-interval": "10ms",
        **properties(proxy.endpoint),
    }


def opened(settings: dict[str, str]) -> RemoteStorage:
    conf = Configuration.of(settings)
    return RemoteStorage(conf, reconcile(None, conf, {}), state_file=None)


@pytest.fixture
def storage(settings: dict[str, str]) -> RemoteStorage:
    """It soon gives up requests: for tests in which some are not answered."""
    return opened({**settings, "zufluss.remote.request-timeout": "500ms"})


async def test_a_bucket_and_a_directory_are_used_alike(
    settings: dict[str, str], tmp_path: Path
) -> None:
    storage = opened(settings)
    source = tmp_path / "source"
    source.write_bytes(DOCUMENT)
    files = [(await storage.upload([Upload(f"kv/{x}", source)], CLUSTER))[0] for x in range(4)]
    assert Counter(x.location_id for x in files) == {1: 2, 2: 2}
    for file in files:
        target = tmp_path / "target"
        await storage.download(file, target)
        assert target.read_bytes() == DOCUMENT
    await storage.delete(files)
    for file in files:
        found = [x async for page in storage.objects(file.location_id).list("kv") for x in page]
        assert found == []


@pytest.mark.parametrize("kind", ["reset", "half_open", "status_503", "error_after_success"])
async def test_a_bucket_that_fails_is_left_and_comes_back(
    storage: RemoteStorage, proxy: FaultProxy, bucket: Objects, kind: Kind
) -> None:
    """Nothing is deleted where it may have arrived, and probes decide."""
    proxy.set([Fault(kind, methods=("PUT", "POST"))])
    (file,) = await storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    assert file.location_id == 2
    assert await storage.read(file, limit=10_000) == DOCUMENT
    assert storage.health(1) is Health.SUSPECT
    left = [x.path async for page in bucket.list("kv") for x in page]
    assert left == (["kv/x"] if kind == "error_after_success" else [])
    assert not any(x.method == "DELETE" for x in proxy.seen)
    for _ in range(2):
        with pytest.raises(LocationUnavailableError):
            await storage.probe(1)
    assert storage.health(1) is Health.DOWN
    proxy.set()
    while storage.health(1) is not Health.ACTIVE:
        await storage.probe(1)
    placed = [(await storage.upload([Upload(f"kv/{x}", DOCUMENT)], CLUSTER))[0] for x in range(6)]
    assert 1 in {x.location_id for x in placed}


async def test_refused_credentials_move_nothing_and_are_not_held_against_the_bucket(
    storage: RemoteStorage, s3: S3Server, tmp_path: Path
) -> None:
    s3.refuse_credentials(True)
    try:
        with pytest.raises(ObjectForbiddenError, match="s3://bucket"):
            await storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
        with pytest.raises(ObjectForbiddenError):
            await storage.probe(1)
    finally:
        s3.refuse_credentials(False)
    assert storage.health(1) is Health.ACTIVE
    assert not (tmp_path / "directory").exists()


async def test_a_download_that_is_always_cut_leaves_no_file(
    storage: RemoteStorage, proxy: FaultProxy, tmp_path: Path
) -> None:
    (file,) = await storage.upload([Upload("kv/x", DOCUMENT)], CLUSTER)
    assert file.location_id == 1
    proxy.set([Fault("cut_body", methods=("GET",))])
    with pytest.raises((LocationUnavailableError, ObjectCorruptError)):
        await storage.download(file, tmp_path / "target")
    assert [x.name for x in tmp_path.iterdir() if x.is_file()] == []
