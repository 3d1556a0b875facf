"""`zufluss doctor` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from zufluss.testing.server import DevServer

from .conftest import Result

pytestmark = pytest.mark.timeout(120)


def test_a_healthy_server_has_no_problem(run: Callable[..., Result], dev_server: DevServer) -> None:
    result = run("doctor", "-o", "json", "--bootstrap", dev_server.bootstrap)
    assert result.code == 0, result
    findings = {each["subject"]: each for each in json.loads(result.out)}
    assert {"descriptors", "disk", "clock", "buckets", "connections"} <= set(findings)
    assert findings["clock"]["state"] == "ok"
    confirmed = run("doctor", "--confirm-clock", "--bootstrap", dev_server.bootstrap)
    assert confirmed.code == 0
    assert "the wall clock is believed" in confirmed.out
