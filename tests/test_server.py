"""A server process starts on systems that refuse it something it can do without."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from structlog.testing import capture_logs

from zufluss import resources, server, system
from zufluss.config.load import Configuration


async def test_a_host_without_the_name_localhost_starts_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    served = []

    async def serve(*_: Any) -> None:
        served.append(True)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    await server._until_signal(Configuration.load(), serve)
    assert served


@pytest.mark.parametrize(
    ("allowed", "promised", "warnings"), [(1024, 4096, 1), (4096, 4096, 0), (8192, 0, 0)]
)
def test_fewer_open_files_than_the_system_promised_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, allowed: int, promised: int, warnings: int
) -> None:
    monkeypatch.setattr(system, "raise_open_files_limit", lambda: allowed)
    monkeypatch.setattr(system, "open_files_promised", lambda: promised)
    with capture_logs() as logged:
        resources.allow_open_files()
    assert [each["event"] for each in logged] == ["open_files_limited"] * warnings
