"""`zufluss dev --tablet-servers N`, with real processes: started, killed, stopped, refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import zufluss
from tests.cluster_of import ClusterServer
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.values import MIB, Endpoint
from zufluss.errors import ConfigError
from zufluss.local_cluster import SERVERS_MAX, process_configurations, server_count
from zufluss.system import usable_cores
from zufluss.tablet_servers import known_servers
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import descendants

Own = Callable[[DevServer], None]


def write(server: DevServer, table: str, rows: int, buckets: int) -> None:
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table(table, "id BIGINT", bucket_count=buckets)
        with connection.table(table).append() as writer:
            writer.write({"id": list(range(rows))})


def read(server: DevServer, table: str) -> list[int]:
    with zufluss.connect(server.bootstrap) as connection:
        return sorted(connection.table(table).scan().to_arrow()["id"].to_pylist())


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_plain_dev_grows_into_three_servers_and_its_tables_stay(
    own_servers: Own, tmp_path: Path
) -> None:
    plain = WarmServer(tmp_path)
    own_servers(plain)
    write(plain, "old", 100, 2)
    plain.stop()
    cluster = ClusterServer(tmp_path, 3)
    own_servers(cluster)
    assert read(cluster, "old") == list(range(100))
    write(cluster, "new", 100, 3)
    assert set(cluster.leaders("fluss", "old").values()) == {1}
    assert set(cluster.leaders("fluss", "new").values()) == {1, 2, 3}
    assert (tmp_path / "tablet.2").is_dir()
    ports = cluster.ports()
    assert cluster.stop() == 0
    refused = WarmServer(tmp_path)
    with pytest.raises(RuntimeError, match="has the buckets of 3 tablet servers"):
        refused.start()
    with pytest.raises(RuntimeError, match="the servers 3 would be missing"):
        ClusterServer(tmp_path, 2).start()
    cluster.start()
    assert cluster.ports() == ports, "addresses stay"
    assert read(cluster, "old") == read(cluster, "new") == list(range(100))


def test_processes_that_die_are_started_again_and_end_with_their_supervisor(
    own_servers: Own, tmp_path: Path
) -> None:
    cluster = ClusterServer(tmp_path, 2)
    own_servers(cluster)
    write(cluster, "rows", 100, 4)
    for child in ("tablet server 2", "coordinator"):
        os.kill(cluster.child(child), signal.SIGKILL)
        cluster.await_start(child, 2)
        assert read(cluster, "rows") == list(range(100))
    assert "SIGKILL" in cluster.log()
    children = [cluster.child(c) for c in ("coordinator", "tablet server 1", "tablet server 2")]
    cluster.kill()
    cluster.start()  # waits for the children of the supervisor that was killed
    assert all(map(is_gone, children))
    assert read(cluster, "rows") == list(range(100))
    children = descendants(cluster.pid)
    cluster.process.send_signal(signal.SIGINT)  # type: ignore[union-attr]
    assert cluster.wait() == 0
    eventually(lambda: all(map(is_gone, children)), "the end of all processes")


def test_a_child_with_a_wrong_configuration_ends_the_start(tmp_path: Path) -> None:
    with socket.socket() as taker:
        taker.bind(("localhost", 0))
        taker.listen()
        taken = taker.getsockname()[1]
        server = ClusterServer(tmp_path, 2, {"zufluss.metrics.port": str(taken)})
        with pytest.raises(RuntimeError, match="exited with 2 before it was ready") as failure:
            server.start()
    assert "cannot serve metrics" in str(failure.value)


def test_a_second_supervisor_does_not_touch_the_directory(own_servers: Own, tmp_path: Path) -> None:
    plain = WarmServer(tmp_path)
    own_servers(plain)
    with pytest.raises(RuntimeError, match="is in use by another server"):
        ClusterServer(tmp_path, 2).start()
    assert known_servers(tmp_path) == {}, "nothing was changed"


def test_the_memory_of_a_machine_is_shared_out(tmp_path: Path) -> None:
    conf = Configuration.of(
        {
            "data.dir": str(tmp_path),
            "bind.listeners": "FLUSS://0.0.0.0:9123",
            "advertised.listeners": "FLUSS://box:9123",
            "zufluss.kv.memory": "900mb",
            "zufluss.net.receive-memory": "800mb",
            "zufluss.metrics.port": "9249",
        }
    )
    listeners = conf.get(options.BIND_LISTENERS)
    ports = {i: {"FLUSS": 20_000 + i} for i in (1, 2, 3)}
    coordinator, *tablets = process_configurations(conf, listeners, ports).values()
    assert [t.get(options.TABLET_SERVER_ID) for t in tablets] == [1, 2, 3]
    assert {t.get(options.ZUFLUSS_KV_MEMORY) for t in tablets} == {300 * MIB}
    shares = [c.get(options.ZUFLUSS_NET_RECEIVE_MEMORY) for c in (coordinator, *tablets)]
    assert shares == [200 * MIB] * 4
    assert [c.get(options.ZUFLUSS_METRICS_PORT) for c in (coordinator, *tablets)] == [
        9249, 9250, 9251, 9252,
    ]  # fmt: skip
    assert tablets[1].get(options.ADVERTISED_LISTENERS) == (Endpoint("FLUSS", "box", 20_002),)
    assert tablets[1].get(options.ZUFLUSS_COORDINATOR_ADDRESS) == "127.0.0.1:9123"
    assert tablets[1].get(options.DATA_DIR) == str(tmp_path / "tablet.2")


def test_auto_is_a_server_per_core_and_never_fewer_than_before(tmp_path: Path) -> None:
    assert server_count("auto", tmp_path) == min(usable_cores(), SERVERS_MAX)
    many = {"tablet_servers": {str(i): {"FLUSS": 20_000 + i} for i in range(1, 61)}}
    (tmp_path / "tablet-servers.json").write_text(str(many).replace("'", '"'))
    assert server_count("auto", tmp_path) >= 60
    assert server_count("3", tmp_path) == 3
    for wrong in ("0", "-1", "65", "many", "²"):
        with pytest.raises(ConfigError, match="give a number from 1 to 64, or auto"):
            server_count(wrong, tmp_path)


def test_a_supervisor_imports_nothing_that_must_not_be_forked_on_macos() -> None:
    code = "import sys, zufluss.local_cluster; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
