"""The registry of RPCs against the tables and against what real servers advertise."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.paths import FIXTURES
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, EXTENSION_KEY_MIN, ApiKey
from zufluss.wire.codec import decode

RPCS: dict[int, Any] = yaml.safe_load((FIXTURES / "messages.yaml").read_text())["rpcs"]


def test_all_65_rpcs_are_declared_as_the_tables_say() -> None:
    assert len(RPCS) == 65
    ours = {
        key: {
            "name": api.name,
            "versions": [api.min_version, api.max_version],
            "visibility": "public" if api.public else "private",
            "request": api.request.DESCRIPTOR.name,
            "response": api.response.DESCRIPTOR.name,
        }
        for key, api in APIS.items()
        if key < EXTENSION_KEY_MIN
    }
    tables = {
        key: {name: value for name, value in rpc.items() if name != "pyfluss"}
        for key, rpc in RPCS.items()
    }
    assert ours == tables


@pytest.mark.parametrize(
    ("fixture", "role"), [("coordinator", "coordinator"), ("tablet-server", "tablet")]
)
def test_roles_and_versions_are_those_a_real_server_advertises(fixture: str, role: str) -> None:
    body = (FIXTURES / "api-versions" / f"{fixture}.bin").read_bytes()
    expected = json.loads((FIXTURES / "api-versions" / f"{fixture}.json").read_text())["expected"]
    answer = decode(m.ApiVersionsResponse, body)
    advertised = [(v.api_key, v.min_version, v.max_version) for v in answer.api_versions]
    assert advertised == [tuple(v.values()) for v in expected["api_versions"]]
    ours = [
        (key, api.min_version, api.max_version)
        for key, api in APIS.items()
        if role in api.roles and key < EXTENSION_KEY_MIN
    ]
    assert sorted(advertised) == sorted(ours)


def test_extensions_have_keys_of_their_own_and_clients_get_the_administrations_only() -> None:
    extensions = {key for key in ApiKey if key >= EXTENSION_KEY_MIN}
    leases = {*range(30020, 30024), *range(30030, 30035)}
    producers = {*range(30040, 30044), 30046}
    for_clients = {*range(30010, 30015), 30016, 30050, 30051, 30070} | leases | producers
    assert extensions == {*range(30000, 30010), 30044, 30045, *range(30060, 30064), *for_clients}
    assert not any(APIS[key].public for key in extensions)
    assert {key for key in extensions if APIS[key].for_clients} == for_clients
    assert APIS[30000].request is m.RegisterTabletServerRequest
