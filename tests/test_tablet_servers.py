"""The tablet servers that a directory remembers: which starts are refused, which ports stay."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from zufluss.config.values import Endpoint
from zufluss.errors import ConfigError
from zufluss.log.files import Files
from zufluss.tablet.identity import FILE as IDENTITY_FILE
from zufluss.tablet_servers import (
    FILE,
    IDENTITY,
    PORTS,
    check_one_server,
    check_servers,
    directory,
    known_servers,
    remember,
)

LISTENERS = (Endpoint("FLUSS", "127.0.0.1", 9123), Endpoint("CLIENT", "127.0.0.1", 9124))


def test_ports_are_remembered_per_server_and_listener(tmp_path: Path) -> None:
    assert known_servers(tmp_path) == {}
    servers = remember(Files(), tmp_path, [1, 2], LISTENERS)
    ports = [port for listeners in servers.values() for port in listeners.values()]
    assert len({*ports} & {*PORTS}) == 4
    assert known_servers(tmp_path) == servers
    more = remember(Files(), tmp_path, [1, 2, 3], LISTENERS)
    assert {i: more[i] for i in (1, 2)} == servers


def test_a_port_that_somebody_took_is_replaced(tmp_path: Path) -> None:
    before = remember(Files(), tmp_path, [1, 2], LISTENERS[:1])
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", before[2]["FLUSS"]))
        taker.listen()
        after = remember(Files(), tmp_path, [1, 2], LISTENERS[:1])
    assert after[1] == before[1]
    assert after[2] != before[2]


def test_a_start_that_would_leave_buckets_without_their_server_is_refused(tmp_path: Path) -> None:
    check_servers(tmp_path, [1, 2, 3])
    check_one_server(tmp_path)
    remember(Files(), tmp_path, [1, 2, 3], LISTENERS)
    check_servers(tmp_path, [1, 2, 3, 4])
    for fewer in ([1], [1, 2], [2, 3, 4]):
        with pytest.raises(ConfigError, match="--tablet-servers 3 or more"):
            check_servers(tmp_path, fewer)
    with pytest.raises(ConfigError, match="buckets of 3 tablet servers"):
        check_one_server(tmp_path)


def test_the_server_of_plain_dev_must_be_the_first(tmp_path: Path) -> None:
    assert IDENTITY == IDENTITY_FILE
    (tmp_path / IDENTITY).write_text(json.dumps({"cluster_id": "x", "server_id": 7}))
    check_servers(tmp_path, [7, 8])
    with pytest.raises(ConfigError, match=r"-D tablet-server\.id=7"):
        check_servers(tmp_path, [1, 2])


def test_the_first_server_has_the_directory_of_plain_dev(tmp_path: Path) -> None:
    assert directory(tmp_path, [5, 6], 5) == tmp_path
    assert directory(tmp_path, [5, 6], 6) == tmp_path / "tablet.6"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    for check in (known_servers, check_one_server):
        with pytest.raises(ConfigError, match="is damaged"):
            check(tmp_path)
