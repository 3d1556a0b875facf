"""Servers with a listener that asks for passwords, and connections of users to it.

Listener OPEN takes everybody, SECURE asks for a password: that of `alice` is `alice-secret`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack

from tests.end_to_end.raw import RawClient
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.sasl import build_plain


def listener_ports(*names: str) -> dict[str, int]:
    """A free port for each listener, OPEN and SECURE by default."""
    with ExitStack() as stack:  # all are open at once, so that no port is given twice
        sockets = {
            name: stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for name in names or ("OPEN", "SECURE")
        }
        return {name: each.getsockname()[1] for name, each in sockets.items()}


def guarded_properties(ports: Mapping[str, int], *users: str) -> dict[str, str]:
    """The properties of a server with these listeners and users."""
    passwords = " ".join(f'user_{user}="{user}-secret"' for user in users)
    return {
        "bind.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
        "internal.listener.name": "OPEN",
        "security.protocol.map": "SECURE:sasl",
        "security.sasl.plain.jaas.config": (
            f"org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required {passwords};"
        ),
    }


def logged_in(port: int, user: str) -> RawClient:
    """A connection of a user to the listener that asks for passwords."""
    client = RawClient(port)
    token = build_plain(user, f"{user}-secret")
    request = m.AuthenticateRequest(protocol="PLAIN", token=token)
    assert client.error_code(ApiKey.AUTHENTICATE, request) == 0
    return client
