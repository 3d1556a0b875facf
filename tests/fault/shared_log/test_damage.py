"""Damaged objects of the shared log, and disks that have something else than it.

Promises A2 and A7: a damaged object refuses exactly the buckets in it, naming offsets, and others
are served; rows of a stale or longer log on a disk are never shown.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.end_to_end.raw import ConnectionEndedError, RawClient
from tests.fault.load import Target, create_target, encode, rows
from tests.fault.shared_log.load import Traffic, at_leader
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.remote.wal import WalKind, WalName, decode
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server, properties
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-20])


def remove(path: Path) -> None:
    path.unlink()


def append(servers: SharedServers, target: Target, first: int, count: int = 3) -> None:
    """Append rows with consecutive keys; returns when they are acknowledged."""

    def write(client: RawClient) -> int:
        entry = client.produce(target.table_id, encode(rows(first, count, 20)))
        if entry.error_code:
            raise ConnectionEndedError  # not served yet
        return int(entry.base_offset)

    at_leader(servers, target.name, 0, write)


def end_of(servers: SharedServers, target: Target) -> int:
    """The end of a table of one bucket, once it is served."""
    return at_leader(servers, target.name, 0, lambda client: client.end_offset(target.table_id))


def objects_of(servers: SharedServers, table_id: int) -> list[Path]:
    """The objects of the shared log that have rows of this table and no other, oldest first."""
    found = []
    for path in sorted((servers.location / "wal").glob("*/*")):
        name = WalName(int(path.parent.name, 16), int(path.name, 16))
        data = path.read_bytes()
        read = decode(data, name, "the location")
        tables = {entry.bucket.table_id for entry in read.entries}
        if read.header.kind is WalKind.DATA and tables == {table_id}:
            found.append(path)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "sealed"),
    [(flip, True), (cut, True), (remove, True), (remove, False)],
    ids=["flipped", "cut", "removed", "removed before the seal"],
)
def test_a_damaged_object_refuses_the_bucket_in_it_by_its_offsets_and_others_are_served(
    own_servers: Own, tmp_path: Path, damage: Callable[[Path], None], sealed: bool
) -> None:
    servers = SharedServers(tmp_path, own_servers, servers=(1,))
    port = servers.coordinator.port
    hurt, whole = (create_target(port, name, 1) for name in ("hurt", "whole"))
    for number in range(4):
        for target in (hurt, whole):
            append(servers, target, 3 * number)
    servers.lose(1)
    if sealed:
        servers.start(1, "wal-recover#1")
        assert servers.tablets[1].wait() != 0
        servers.lose(1)
    path = objects_of(servers, hurt.table_id)[1]
    damage(path)
    servers.start(1)
    assert end_of(servers, whole) == 12
    append(servers, whole, 12)

    def refusal() -> str:
        with RawClient(servers.tablets[1].port) as client:
            entry = client.produce(hurt.table_id, encode(rows(12, 3, 20)))
            assert entry.error_code, "rows are missing, and it goes on"
            return str(entry.error_message)

    message = eventually(lambda: "offsets from 3 on" in (text := refusal()) and text)
    assert path.name in message, message
    with RawClient(servers.tablets[1].port) as client:
        entry = client.fetch(hurt.table_id, 0)
        assert entry.error_code
        assert not entry.records


@pytest.mark.slow
def test_an_old_copy_of_a_disk_shows_only_what_the_shared_log_has(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """Others have led the buckets since the copy was made, and have written other rows."""
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=2, keyed=2)
    with traffic:
        traffic.progress()
        for number in range(rounds(2, 60)):
            victim = rng.choice(traffic.leading())
            copy, disk = tmp_path / f"copy-{number}", servers.tablets[victim].data_dir
            servers.lose(victim, disk=False)
            shutil.copytree(disk, copy)
            if rng.random() < 0.5:
                servers.start(victim)
            traffic.progress()
            servers.lose(victim)
            shutil.copytree(copy, disk)
            traffic.progress()
            servers.start(victim)
            servers.await_registered(*SERVERS)
            for other in SERVERS:  # so that it leads what the copy has
                if other != victim:
                    servers.lose(other)
            traffic.progress()
            for other in SERVERS:
                if other != victim:
                    servers.start(other)
    traffic.check()


@pytest.mark.slow
def test_rows_that_only_a_disk_has_were_never_acknowledged_and_are_never_shown(
    own_servers: Own,
    tmp_path: Path,
    s3: S3Server,
    proxy: FaultProxy,
    rng: random.Random,
) -> None:
    """Its session could not be written any more, the server was killed, and its disk came back."""
    uri = s3.bucket(f"b{rng.randrange(1 << 48):x}")
    location = {"remote.data.dir": f"{uri}/zufluss", **properties(proxy.endpoint)}
    servers = SharedServers(tmp_path, own_servers, location)
    traffic = Traffic(servers, rng, logs=2, keyed=2, clients=())
    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 60)):
            victim = rng.choice(traffic.leading())
            before = last_failure(servers, victim)
            proxy.set([Fault("reset", methods=("PUT",), path_contains="/wal/")])
            eventually(
                lambda v=victim, b=before: last_failure(servers, v) != b,  # type: ignore[misc]
                "it has rows that it cannot write",
            )
            servers.lose(victim, disk=False)
            proxy.set()
            if rng.random() < 0.5:
                traffic.progress()
            servers.start(victim)
            servers.await_registered(*SERVERS)
            for other in SERVERS:
                if other != victim:
                    servers.lose(other)
            traffic.progress()
            for other in SERVERS:
                if other != victim:
                    servers.start(other)
    traffic.check()


def last_failure(servers: SharedServers, server_id: int) -> str:
    """The last line about a put that failed; its rows are on the disk of the server only."""
    lines = servers.tablets[server_id].log().splitlines()
    return next((line for line in reversed(lines) if "wal_put_failed" in line), "")


@pytest.mark.slow
def test_a_data_directory_of_another_cluster_is_refused(own_servers: Own, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    servers = SharedServers(one, own_servers, servers=(1,))
    append(servers, create_target(servers.coordinator.port, "t", 1), 0)
    strangers = SharedServers(other, own_servers, servers=(2,))
    stranger = strangers.tablets[2]
    stranger.kill()
    disk = servers.tablet(2, "stray")
    shutil.copytree(stranger.data_dir, disk.data_dir)
    with pytest.raises(RuntimeError, match="cluster"):
        disk.start()
    assert not disk.running


@pytest.mark.slow
def test_a_second_server_with_the_same_id_ends_the_first_and_has_all_its_rows(
    own_servers: Own, tmp_path: Path
) -> None:
    servers = SharedServers(tmp_path, own_servers, servers=(1,))
    target = create_target(servers.coordinator.port, "t", 1)
    append(servers, target, 0)
    first, second = servers.tablets[1], servers.tablet(1, "twin")
    own_servers(second)
    assert first.wait() == 2
    assert "give each server a tablet-server.id of its own" in first.log()
    servers.tablets[1] = second
    append(servers, target, 3)
    assert end_of(servers, target) == 6
