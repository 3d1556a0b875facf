"""Named listeners: where a server binds, what it tells clients, and how they must log in.

Three options make them: `bind.listeners`, `advertised.listeners` (what metadata answers say, where
it differs) and `security.protocol.map`. A client that came in through one listener is answered
with that listener's addresses only, so that nobody is sent from an authenticated port to an open
one.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.values import Endpoint
from zufluss.errors import ConfigError

_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound listener with what clients are told about it."""

    bind: Endpoint
    """Where the server listens."""
    advertised: Endpoint
    """What metadata answers say."""
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
    """Combine the three listener options into listeners, or say which of them is wrong."""
    bound = conf.get(options.BIND_LISTENERS)
    told = {e.listener: e for e in conf.get(options.ADVERTISED_LISTENERS)}
    protocols = conf.get(options.SECURITY_PROTOCOL_MAP)
    names = [e.listener for e in bound]
    for option, named in (
        (options.ADVERTISED_LISTENERS, told),
        (options.SECURITY_PROTOCOL_MAP, protocols),
    ):
        unknown = sorted(set(named) - set(names))
        if unknown:
            raise ConfigError(
                f"{option.key} names {', '.join(unknown)}, which bind.listeners lacks; "
                f"it has {', '.join(names)}"
            )
    return tuple(
        Listener(e, told.get(e.listener) or _reachable(e), protocols.get(e.listener, "plaintext"))
        for e in bound
    )


def _reachable(endpoint: Endpoint) -> Endpoint:
    """Returns the endpoint for clients; this host's name replaces an address that means any."""
    if endpoint.host in _WILDCARDS:
        return replace(endpoint, host=socket.gethostname())
    return endpoint
