"""The state of a server for operators: shortages, doubts, parts that fail (`zufluss doctor`).

Each part of a server that can run short reports its findings when an operator asks; nothing is
stored for that. The handler answers EXAMINE_SERVER in either role. Only the coordinator knows which
tablet servers are missing (`cluster_findings`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from zufluss.cluster.authority import Authority
from zufluss.cluster.image import ClusterImage
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import AuthorizationError
from zufluss.system import OPEN_FILES, open_files_limit
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.server import NetServer
    from zufluss.net.services import RequestContext

NAMES_MAX = 5
"""Tables that a finding names at most."""
SCARCE = 0.8
"""A resource of which more than this share is in use is worth a look."""


class Severity(IntEnum):
    """How bad a finding is, numbered as on the wire."""

    FINE = 0
    WARNING = 1
    PROBLEM = 2


class Finding(NamedTuple):
    """One observation of a server about itself."""

    severity: Severity
    """How bad it is."""
    subject: str
    """The bucket, the resource or the server that it is about."""
    text: str
    """The state of the subject, and what to do if it is bad."""


Examine = Callable[[], Iterable[Finding]]
"""Returns the findings of one part of a server, on the event loop."""


class DoubtfulClock(Protocol):
    """The clock by which things expire (`expiry.ExpiryClock`)."""

    @property
    def doubted_ms(self) -> int:
        """How far the wall clock is ahead of what is believed; 0 if it is believed."""

    def confirm(self) -> None:
        """Believe the wall clock as it is now."""


class Examination:
    """The handler of EXAMINE_SERVER."""

    def __init__(
        self, conf: Configuration, clock: DoubtfulClock, parts: Sequence[Examine] = ()
    ) -> None:
        self._authority = Authority(conf)
        self._data_dir = Path(conf.get(options.DATA_DIR))
        self._clock = clock
        self._parts = parts

    async def examine_server(
        self, request: m.ExamineServerRequest, context: RequestContext
    ) -> m.ExamineServerResponse:
        """EXAMINE_SERVER (30050): all findings; a super user may confirm the clock."""
        if request.confirm_clock:
            if not self._authority.may_operate(context.principal):
                raise AuthorizationError(
                    f"{context.principal or 'an unknown user'} may not confirm the clock; "
                    f"{options.SUPER_USERS.key} names who may"
                )
            self._clock.confirm()
        response = m.ExamineServerResponse()
        for severity, subject, text in self.findings():
            response.findings.add(severity=severity, subject=subject, text=text)
        return response

    def findings(self) -> Iterable[Finding]:
        """Everything that the server finds, the resources of the process first."""
        yield self._descriptors()
        yield self._disk()
        yield self._time()
        for part in self._parts:
            yield from part()

    def _descriptors(self) -> Finding:
        limit = open_files_limit()
        try:
            used = sum(1 for _ in OPEN_FILES.iterdir())
        except OSError as e:
            if e.errno != errno.EMFILE:
                raise
            used = limit  # not even one for this look
        return share("descriptors", used, limit, "open files", "raise the limit (ulimit -n)")

    def _disk(self) -> Finding:
        usage = shutil.disk_usage(self._data_dir)
        return share(
            "disk", (usage.total >> 20) - (usage.free >> 20), usage.total >> 20, "MiB of data.dir",
            "free space, or shorten table.log.ttl; writes are refused while there is none",
        )  # fmt: skip

    def _time(self) -> Finding:
        ahead = self._clock.doubted_ms
        if not ahead:
            return Finding(Severity.FINE, "clock", "the wall clock is believed")
        return Finding(
            Severity.WARNING,
            "clock",
            f"the wall clock jumped ahead by {ahead / 1000:.0f} s, or the server was away; nothing "
            "expires for an hour. If the time is right: zufluss doctor --confirm-clock",
        )


def share(subject: str, used: int, limit: int, what: str, remedy: str) -> Finding:
    """A finding about a resource of which a part is in use."""
    text = f"{used} of {limit} {what}"
    if limit <= 0 or used <= SCARCE * limit:
        return Finding(Severity.FINE, subject, text)
    severity = Severity.WARNING if used < limit else Severity.PROBLEM
    return Finding(severity, subject, f"{text}; {remedy}")


def net_findings(net: NetServer) -> Examine:
    """The connections of a server."""

    def examine() -> Iterable[Finding]:
        key = options.ZUFLUSS_NET_MAX_CONNECTIONS.key
        limit = net.limits.connections_max
        yield share("connections", len(net.connections), limit, "are open", f"raise {key}")

    return examine


def _tables_by_leader(image: ClusterImage) -> dict[int, list[str]]:
    """The tables and partitions of which each tablet server leads buckets."""
    tables: dict[int, dict[str, None]] = {}
    for path, _, state in image.buckets():
        tables.setdefault(state.leader, {})[str(path)] = None
    return {leader: sorted(names) for leader, names in tables.items()}


def _listed(names: list[str]) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(names[:NAMES_MAX])
    rest = len(names) - NAMES_MAX
    return f"{shown} and {rest} more" if rest > 0 else shown


def cluster_findings(image: ClusterImage) -> Examine:
    """The tablet servers that the coordinator misses."""

    def examine() -> Iterable[Finding]:
        away = sorted((+image.leaders).keys() - image.tablets.keys())
        unserved = _tables_by_leader(image) if away else {}
        for server_id in away:
            yield Finding(
                Severity.PROBLEM,
                f"tablet server {server_id}",
                f"it is not there, so {image.leaders[server_id]} buckets of "
                f"{_listed(unserved[server_id])} are not served; start it again",
            )
        if not away:
            servers = len(image.tablets)
            yield Finding(Severity.FINE, "tablet servers", f"{servers} are there, none is missing")

    return examine
