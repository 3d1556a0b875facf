"""What a server tells of itself: version, role, uptime, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zufluss.wire import messages as m


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server of the cluster that answered."""

    server: str
    """The server's address, host:port."""
    version: str
    """The version of zufluss that it runs."""
    role: str
    """The role or roles of the process, in words."""
    uptime_ms: int
    """Milliseconds since it began to start."""
    samples: Mapping[tuple[str, ...], float]
    """The values of its metrics (docs/metrics.md), by name followed by the values of the labels."""

    def value(self, metric: str, *labels: str) -> float | None:
        """The value of a metric; None if the server does not serve it."""
        return self.samples.get((metric, *labels))

    def series(self, metric: str) -> dict[tuple[str, ...], float]:
        """The values of a metric with labels, by the values of the labels."""
        return {key[1:]: value for key, value in self.samples.items() if key[0] == metric}


def server_info(server: str, answer: m.DescribeServerResponse) -> ServerInfo:
    """The answer of a server."""
    samples = {(each.metric, *each.labels): each.value for each in answer.samples}
    return ServerInfo(server, answer.version, answer.role, answer.uptime_ms, samples)
