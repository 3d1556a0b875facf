"""Named listeners: the address a server binds, the address for clients, and the kind of login.

Three options define them: `bind.listeners`, `advertised.listeners` (addresses for clients, where
they differ) and `security.protocol.map`. A client of one listener only gets addresses of that
listener, so no client is sent from an authenticated port to an open one.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.values import Endpoint
from zufluss.errors import ConfigError

_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound listener and its address for clients."""

    bind: Endpoint
    """Where the server listens."""
    advertised: Endpoint
    """The address in metadata answers."""
    protocol: str
    """`plaintext` or `sasl`."""

    @property
    def name(self) -> str:
        """The listener's name."""
        return self.bind.listener

    def bound_to(self, port: int) -> Listener:
        """The same listener after the kernel chose `port`."""
        advertised = self.advertised
        if advertised.port == 0:
            advertised = replace(advertised, port=port)
        return replace(self, bind=replace(self.bind, port=port), advertised=advertised)


def resolve_listeners(conf: Configuration) -> tuple[Listener, ...]:
    """Combine the three listener options into listeners; `ConfigError` names a wrong option."""
    bound = conf.get(options.BIND_LISTENERS)
    public = {e.listener: e for e in conf.get(options.ADVERTISED_LISTENERS)}
    protocols = conf.get(options.SECURITY_PROTOCOL_MAP)
    names = [e.listener for e in bound]
    for option, named in (
        (options.ADVERTISED_LISTENERS, public),
        (options.SECURITY_PROTOCOL_MAP, protocols),
    ):
        unknown = sorted(set(named) - set(names))
        if unknown:
            raise ConfigError(
                f"{option.key} names {', '.join(unknown)}, which bind.listeners lacks; "
                f"it has {', '.join(names)}"
            )
    return tuple(
        Listener(e, public.get(e.listener) or _reachable(e), protocols.get(e.listener, "plaintext"))
        for e in bound
    )


def taken_endpoint(endpoints: Iterable[Endpoint]) -> Endpoint | None:
    """Return the first endpoint whose port another process listens on, None if all are free.

    Only says so before a start does anything. Every other problem of an address is left to the
    server, which binds it.
    """
    for endpoint in endpoints:
        try:
            addresses = socket.getaddrinfo(
                endpoint.host or None,
                endpoint.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )
        except OSError:
            continue
        if any(_is_taken(family, address) for family, _, _, _, address in addresses):
            return endpoint
    return None


def _is_taken(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as problem:
        return problem.errno == errno.EADDRINUSE
    return False


def _reachable(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint for clients; this host's name replaces a wildcard address."""
    if endpoint.host in _WILDCARDS:
        return replace(endpoint, host=socket.gethostname())
    return endpoint
