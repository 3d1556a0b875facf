"""The turn of this process to be the coordinator of its cluster, with metadata in ZooKeeper.

The turn comes from an election (`meta/election.py`), the safety from the epoch in the ledger: of
two coordinators that both believe to have the turn, only the later one changes anything.

A turn that is over ends the process, by an error that its supervisor sees: the session in ZooKeeper
was lost, or another coordinator has taken the next epoch. Nothing of a coordinator that has lost
its turn may go on, and the end of a process is the only end that needs no proof; started again, it
is a standby within a second or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog

from zufluss.cluster.examination import Finding, Severity
from zufluss.cluster.image import ClusterNode
from zufluss.cluster.leader import node_from_data, node_to_data
from zufluss.config import zookeeper_options
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.meta.open import open_zookeeper
from zufluss.obs.pulse import PartState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zufluss.coordinator.server import Coordinator
    from zufluss.meta.api import MetaStore
    from zufluss.meta.election import Candidacy, Observer

log = structlog.get_logger(__name__)

LEADER_SECONDS: Final = 2.0
"""How long a standby waits for ZooKeeper when it looks who leads."""


class Turn:
    """Whether it is the turn of this process. Take it with `turn_of`."""

    def __init__(self, node: ClusterNode, on_over: Callable[[], None]) -> None:
        """`on_over` is called when the turn is over: the process has to end."""
        self.node = node
        self.over: ZuflussError | None = None
        """Why the turn is over; None while it is not."""
        self.leads = False
        """Whether this coordinator has loaded the catalog, and answers."""
        self._on_over = on_over
        self._candidacy: Candidacy
        self._observer: Observer
        self._leaving: asyncio.Task[None] | None = None

    def begin(self, candidacy: Candidacy, observer: Observer) -> None:
        """Look after the turn with these."""
        self._candidacy, self._observer = candidacy, observer

    @property
    def has_come(self) -> bool:
        """Whether this process was elected."""
        return self._candidacy.elected.is_set()

    async def come(self) -> None:
        """Wait for the turn."""
        await self._candidacy.elected.wait()
        log.info("coordinator_elected", coordinator=str(self.node.endpoints[0]))

    def session_lost(self) -> None:
        """ZooKeeper has given the turn to others."""
        self._end("its session in ZooKeeper has ended, so another one may lead by now")

    def fenced(self) -> None:
        """Another coordinator has taken the next epoch."""
        self._end("another coordinator has taken the metadata over")

    def _end(self, why: str) -> None:
        if self.over is None and self._leaving is None:
            self.over = error(
                ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION,
                f"this process is not the coordinator any more: {why}; start it again, to have it "
                "as a standby",
            )
            log.error("coordinator_turn_over", reason=why)
            self._on_over()

    async def leader(self) -> ClusterNode | None:
        """The coordinator that has the turn; None if there is none, or ZooKeeper is away."""
        from kazoo.exceptions import KazooException  # an extra, which is there by now

        try:
            async with asyncio.timeout(LEADER_SECONDS):
                data = await self._observer.leader()
        except (KazooException, TimeoutError):
            return None
        return None if data is None else node_from_data(data)

    def leave(self) -> None:
        """Begin to give the turn to others, because this process stops."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._candidacy.leave(), name="leave-election")

    async def left(self) -> None:
        """Give the turn to others; returns when they have it."""
        self.leave()
        assert self._leaving is not None
        await self._leaving

    def state(self) -> PartState:
        """For `/ready`: a standby is ready, and says that it does not lead."""
        return PartState(numbers={"leads": int(self.leads)})

    def findings(self) -> Iterable[Finding]:
        """For `zufluss doctor`."""
        text = "it leads the cluster" if self.leads else "it is a standby, another one leads"
        yield Finding(Severity.FINE, f"coordinator {self.node.node_id}", text)

    def __repr__(self) -> str:
        return f"Turn({self.node.node_id}, leads={self.leads})"


async def stop_in_time(coordinator: Coordinator, store: MetaStore, seconds: float) -> None:
    """Stop a coordinator; what its store has not decided by then is left in doubt.

    A transaction waits for ever while ZooKeeper is away, and most parts wait for theirs. The next
    coordinator finds out what took place, as after a crash.
    """
    stopping = asyncio.ensure_future(coordinator.stop())
    await asyncio.wait({stopping}, timeout=seconds)
    if not stopping.done():
        log.warning("metadata_in_doubt_at_stop", seconds=seconds)
        await store.close()
    try:
        await stopping
    except ZuflussError as problem:
        log.warning("coordinator_not_stopped_cleanly", reason=problem.message)


@asynccontextmanager
async def turn_of(
    conf: Configuration, node: ClusterNode, on_over: Callable[[], None]
) -> AsyncIterator[Turn | None]:
    """Be a candidate for the length of a block; None without ZooKeeper, where no other can be."""
    if not conf.get(zookeeper_options.ZOOKEEPER_ADDRESS):
        yield None
        return
    client = await open_zookeeper(conf)
    from zufluss.meta.election import Candidacy, Observer  # kazoo is an extra

    root = conf.get(zookeeper_options.ZOOKEEPER_PATH_ROOT)
    turn = Turn(node, on_over)
    candidacy = Candidacy(client, root, node_to_data(node), turn.session_lost)
    turn.begin(candidacy, Observer(client, root))
    try:
        await candidacy.start()
        yield turn
    finally:
        await turn.left()
