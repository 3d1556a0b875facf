"""`zufluss doctor` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import zufluss
from tests.servers import RoleServer
from tests.waiting import eventually
from zufluss.cluster.examination import Finding, Severity
from zufluss.testing.server import DevServer

from .conftest import Result


def test_a_healthy_server_has_no_problem(run: Callable[..., Result], dev_server: DevServer) -> None:
    result = run("doctor", "-o", "json", "--bootstrap", dev_server.bootstrap)
    assert result.code == 0, result
    findings = {each["subject"]: each for each in json.loads(result.out)}
    assert {"descriptors", "disk", "clock", "buckets", "connections"} <= set(findings)
    assert findings["clock"]["state"] == "ok"
    confirmed = run("doctor", "--confirm-clock", "--bootstrap", dev_server.bootstrap)
    assert confirmed.code == 0
    assert "the wall clock is believed" in confirmed.out


def test_a_tablet_server_that_is_gone_is_a_problem(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    """While the coordinator still names it, it does not answer; later the coordinator misses it."""
    coordinator = RoleServer("coordinator", tmp_path, {})
    tablet = RoleServer("tablet", tmp_path, {"zufluss.coordinator.address": coordinator.bootstrap})
    with coordinator, tablet:
        at = ("--bootstrap", coordinator.bootstrap)
        assert run("table", "create", "t", "id INT", *at).code == 0
        assert run("doctor", *at).code == 0
        status = json.loads(run("status", "-o", "json", *at).out)
        assert [each["role"] for each in status["servers"]] == ["coordinator", "tablet server 1"]
        tablet.kill()
        assert run("status", *at).code == 5
        result = run("doctor", "-o", "json", *at)
        assert result.code == 5
        (problem,) = (f for f in json.loads(result.out) if f["state"] == "problem")
        assert problem["subject"] in ("server", "tablet server 1")
        with zufluss.connect(coordinator.bootstrap) as connection:
            missing = Finding(Severity.PROBLEM, "tablet server 1", "it is not there, so 1 buckets")

            def is_missed() -> bool:
                findings = connection.admin.examine_servers()
                return any(
                    (f.severity, f.subject) == missing[:2] and f.text.startswith(missing.text)
                    for f in findings
                )

            eventually(is_missed)
