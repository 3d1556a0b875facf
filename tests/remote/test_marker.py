"""The marker file in the root of a location that names the owning cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zufluss.config.load import Configuration
from zufluss.remote import marker
from zufluss.remote.errors import ForeignLocationError, LocationUnavailableError, NotOursError
from zufluss.remote.files import RemoteFile
from zufluss.remote.layout import CLUSTER
from zufluss.remote.locations import Health, Location, Locations
from zufluss.remote.objects import Objects
from zufluss.remote.placement import parse_policy
from zufluss.remote.storage import NoLocationError, RemoteStorage, Upload
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

ANYWHERE = parse_policy("cluster")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as running:
        running.bucket("marked")
        yield running


@pytest.fixture(params=["file", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """An empty location of each kind."""
    if request.param == "file":
        return Objects(parse_location(f"{tmp_path}/deep/root", "test"))
    server = request.getfixturevalue("s3")
    uri = parse_location(f"s3://marked/{tmp_path.name}", "test")
    return Objects(uri, server.properties)


async def test_the_first_cluster_has_it_and_the_second_learns_whose_it_is(
    objects: Objects,
) -> None:
    await marker.claim(objects, "one")
    await marker.claim(objects, "one")
    await marker.check(objects, "one")
    for look in (marker.claim, marker.check):
        with pytest.raises(ForeignLocationError, match="cluster one, this is cluster two; use an"):
            await look(objects, "two")
    assert await objects.get(CLUSTER, limit=100) == b'{"version":1,"cluster_id":"one"}'


async def test_a_check_does_not_write_a_missing_marker(objects: Objects) -> None:
    await objects.put("log/x", b"")
    with pytest.raises(NotOursError, match=r'not mounted; mount it, .*"cluster_id":"one"'):
        await marker.check(objects, "one")
    assert [each.path async for page in objects.list("") for each in page] == ["log/x"]


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b'{"version":1}', b'{"version":2}', b"\xff"])
async def test_a_damaged_marker_is_nobodys_and_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    objects = Objects(parse_location(str(tmp_path), "test"))
    (tmp_path / CLUSTER).write_bytes(data)
    for look in (marker.claim, marker.check):
        with pytest.raises(NotOursError, match="cannot be read"):
            await look(objects, "one")
    assert (tmp_path / CLUSTER).read_bytes() == data


async def test_a_bucket_that_is_not_there_cannot_be_marked(s3: S3Server) -> None:
    objects = Objects(parse_location("s3://no-such-bucket/x", "test"), s3.properties)
    with pytest.raises(NotOursError, match="cannot be written"):
        await marker.claim(objects, "one")


def two_locations(tmp_path: Path) -> RemoteStorage:
    conf = Configuration.of({"data.dir": str(tmp_path / "data")})
    known = (Location(1, f"file://{tmp_path}/1"), Location(2, f"file://{tmp_path}/2"))
    locations = Locations(1, known, explicit=True)
    return RemoteStorage(conf, locations, state_file=None, cluster_id="ours")


async def test_nothing_is_put_or_deleted_in_a_location_of_others(tmp_path: Path) -> None:
    storage = two_locations(tmp_path)
    await storage.settle(storage.locations.get(1))
    await marker.claim(storage.objects(2), "theirs")
    for number in range(4):
        [file] = await storage.upload([Upload(f"log/{number}", b"x")], ANYWHERE)
        assert file.location_id == 1
    assert storage.health(2) is Health.DOWN
    [_, report] = storage.reports()
    assert "belongs to cluster theirs, this is cluster ours" in (report.last_error or "")
    await storage.objects(2).put("log/0", b"theirs")
    with pytest.raises(ForeignLocationError):
        await storage.delete([RemoteFile(2, "log/0", 6, 0)])
    with pytest.raises(ForeignLocationError):
        await storage.probe(2)
    names = {p.name for p in (tmp_path / "2").rglob("*") if p.is_file()}
    assert names == {CLUSTER, "0"}


async def test_a_directory_that_became_empty_gets_nothing_until_it_is_back(tmp_path: Path) -> None:
    storage = two_locations(tmp_path)
    for location in storage.locations.locations:
        await storage.settle(location)
        await storage.check(location.location_id)
    for name in "12":
        (tmp_path / name).rename(tmp_path / f"away-{name}")
        (tmp_path / name).mkdir()
    with pytest.raises(NoLocationError, match="not mounted"):
        await storage.upload([Upload("log/x", b"x")], ANYWHERE)
    with pytest.raises(LocationUnavailableError):
        await storage.probe(1)
    assert list((tmp_path / "1").iterdir()) == []
    (tmp_path / "1").rmdir()
    (tmp_path / "away-1").rename(tmp_path / "1")
    await storage.probe(1)
