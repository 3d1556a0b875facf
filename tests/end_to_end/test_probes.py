"""`/health` and `/ready` of real servers: while they start, serve, miss their coordinator, stop."""

from __future__ import annotations

import http.client
import json
import shutil
from pathlib import Path
from typing import Any

import zufluss
from tests.servers import RoleServer, WarmServer, free_port
from tests.waiting import WAIT_SECONDS, eventually
from zufluss.config.options import ZUFLUSS_METRICS_PORT


def probe(server: WarmServer, path: str) -> tuple[int, dict[str, Any]] | None:
    """Status and document; None while nothing listens."""
    port = int(server.properties[ZUFLUSS_METRICS_PORT.key])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except (ConnectionError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def reasons(server: WarmServer) -> list[str]:
    """Why the server is not ready; empty while nothing listens."""
    _, document = probe(server, "/ready") or (0, {"reasons": []})
    return list(document["reasons"])


def test_a_server_is_ready_with_its_buckets_and_reports_the_sick_ones(tmp_path: Path) -> None:
    properties = {ZUFLUSS_METRICS_PORT.key: str(free_port())}
    with WarmServer(tmp_path, properties) as server:
        with zufluss.connect(server.bootstrap) as connection:
            connection.admin.create_table("well", "id INT", bucket_count=2)
            connection.admin.create_table("sick", "id INT", bucket_count=1)
            with connection.table("sick").append() as writer:
                writer.write([{"id": 1}])
        assert probe(server, "/health") == (200, {"status": "alive", "reasons": [], "warnings": []})
        server.stop()
        (directory,) = tmp_path.glob("**/sick-*/*-0")
        shutil.rmtree(directory)
        directory.write_text("a file where a directory should be")
        server.start()
        ready = eventually(lambda: probe(server, "/ready"))
        assert ready[0] == 200, ready
        assert ready[1]["buckets"] == 2
        assert ready[1]["unavailable_buckets"] == 1
        assert "sick" in ready[1]["warnings"][0]


def test_a_tablet_server_is_ready_while_its_coordinator_answers(tmp_path: Path) -> None:
    coordinator = RoleServer("coordinator", tmp_path, {})
    properties = {
        "zufluss.coordinator.address": coordinator.bootstrap,
        ZUFLUSS_METRICS_PORT.key: str(free_port()),
    }
    tablet = RoleServer("tablet", tmp_path, properties)
    with coordinator:
        coordinator.stop()
        tablet.launch()
        try:
            eventually(lambda: "the coordinator has not answered yet" in reasons(tablet))
            status, document = eventually(lambda: probe(tablet, "/ready"))
            assert (status, document["status"]) == (503, "starting")
            assert probe(tablet, "/health")[0] == 200  # type: ignore[index]
            coordinator.start()
            eventually(lambda: (probe(tablet, "/ready") or (0,))[0] == 200)
            coordinator.kill()
            eventually(lambda: (probe(tablet, "/ready") or (0,))[0] == 503)
            _, document = probe(tablet, "/ready") or (0, {})
            assert document["status"] == "unready"
            assert "the coordinator has not answered for" in document["reasons"][0]
            coordinator.start()
            eventually(lambda: (probe(tablet, "/ready") or (0,))[0] == 200)
        finally:
            tablet.kill()


def test_a_server_whose_shared_log_is_away_starts_and_is_ready_when_it_is_back(
    tmp_path: Path,
) -> None:
    location, away = tmp_path / "location", tmp_path / "away"
    properties = {
        ZUFLUSS_METRICS_PORT.key: str(free_port()),
        "zufluss.log.durability": "remote",
        "remote.data.dir": str(location),
    }
    with WarmServer(tmp_path / "data", properties) as server:
        with zufluss.connect(server.bootstrap) as connection:
            connection.admin.create_table("events", "id INT", bucket_count=1)
            with connection.table("events").append() as writer:
                writer.write([{"id": 1}])
        server.stop()
        location.rename(away)
        server.start()
        (reason,) = eventually(lambda: reasons(server))
        assert str(location) in reason, reason
        assert (probe(server, "/ready") or (0,))[0] == 503
        with zufluss.connect(server.bootstrap) as connection:
            assert connection.admin.list_tables("fluss") == ["events"]
        shutil.rmtree(location, ignore_errors=True)
        away.rename(location)
        eventually(lambda: (probe(server, "/ready") or (0,))[0] == 200)
        with zufluss.connect(server.bootstrap) as connection:
            assert connection.table("events").scan().to_arrow().to_pylist() == [{"id": 1}]
