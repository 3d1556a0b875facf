"""The election of one process among several, in ZooKeeper.

Every candidate has an ephemeral node with a number below ROOT/coordinator/leader; whoever has the
lowest number has the turn. The node goes when its process ends, leaves, or has given ZooKeeper no
sign of life for the length of a session.

| node | data |
|---|---|
| ROOT/coordinator/leader/ID-NUMBER | what the candidate tells others about itself |

ZooKeeper gives the turn and nothing else. A process that was paused may believe for a moment that
it still has a turn that is over; what must not happen twice has to be guarded by an epoch in the
metadata store (`coordinator/ledger.py`).

Candidates and observers look at the nodes again and again instead of setting watches: a watch is
lost with each connection, and a look at a few nodes costs ZooKeeper nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final

import structlog
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create, Delete

from zufluss.meta.api import MetaStoreError
from zufluss.meta.znodes import parents_of
from zufluss.meta.zookeeper_client import ZooKeeperClient, is_passing
from zufluss.tasks import end

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.25
"""The pause between two looks at the candidates."""
LEAVE_SECONDS: Final = 2.0
"""How long a candidate that leaves waits for ZooKeeper; afterwards its node goes by itself."""
_EPHEMERAL_WITH_NUMBER: Final = 3
"""ZooKeeper's flags of a node that goes with its session, and that gets a number."""
_DIGITS: Final = 10
"""The length of the number at the end of a node's name."""


def candidates_path(root: str) -> str:
    """The node above those of the candidates."""
    return f"{root}/coordinator/leader"


def first_of(names: Iterable[str]) -> str | None:
    """The candidate that has the turn; None if there is no candidate."""
    return min(names, key=_number, default=None)


def _number(name: str) -> int:
    return int(name[-_DIGITS:])


class Observer:
    """Looks who has the turn."""

    def __init__(self, client: ZooKeeperClient, root: str) -> None:
        self._client = client
        self._path = candidates_path(root)

    async def names(self) -> list[str]:
        """The candidates; raises the exceptions of kazoo."""
        [names] = await self._client.children([self._path])
        return list(names or ())

    async def leader(self) -> bytes | None:
        """What the candidate with the turn tells others; None while there is none."""
        name = first_of(await self.names())
        if name is None:
            return None
        [found] = await self._client.data([f"{self._path}/{name}"])
        return None if found is None else found.data


class Candidacy:
    """This process as a candidate. Its turn comes at most once; afterwards it is over."""

    def __init__(
        self, client: ZooKeeperClient, root: str, data: bytes, on_over: Callable[[], None]
    ) -> None:
        """`on_over` is called once if the turn is over although the candidate did not leave."""
        self.elected = asyncio.Event()
        """Set when the turn has come."""
        self._client = client
        self._path = candidates_path(root)
        self._observer = Observer(client, root)
        self._data = data
        self._id = uuid.uuid4().hex
        self._on_over = on_over
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Become a candidate, and look for the turn from now on."""
        looked = asyncio.Event()
        self._task = asyncio.create_task(self._run(looked), name="candidacy")
        first = asyncio.create_task(looked.wait())
        await asyncio.wait({first, self._task}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._task.done():
            self._task.result()

    async def leave(self) -> None:
        """Give the turn to others, and end the session."""
        await end(self._task)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                for name in await self._own():
                    await self._remove(name)
        except (KazooException, TimeoutError) as problem:
            log.info("candidate_not_removed", reason=repr(problem))
        finally:
            await self._client.close()

    async def _run(self, looked: asyncio.Event) -> None:
        try:
            await self._again(self._prepare)
            while not await self._again(self._is_over):
                looked.set()
                await asyncio.sleep(LOOK_SECONDS)
        except KazooException as problem:
            log.error("election_failed", problem=type(problem).__name__)
            if not looked.is_set():
                raise MetaStoreError(
                    f"ZooKeeper at {self._client.address} does not let this coordinator be a "
                    f"candidate below {self._path} ({type(problem).__name__}); correct the login "
                    "or the rights of the nodes"
                ) from problem
        self._on_over()

    async def _again(self, step: Callable[[], Any]) -> Any:
        """Carry out a step, again while ZooKeeper is away."""
        while True:
            try:
                return await step()
            except KazooException as problem:
                if self._client.is_over or not is_passing(problem):
                    raise
            await asyncio.sleep(LOOK_SECONDS)

    async def _prepare(self) -> None:
        for path in [*parents_of(self._path), self._path]:
            try:
                await self._client.send(Create(path, b"", self._client.acl, 0))
            except NodeExistsError:
                pass

    async def _is_over(self) -> bool:
        """Look once, after seeing to it that there is a node; whether the turn has passed."""
        names = await self._observer.names()
        own = sorted((name for name in names if name.startswith(self._id)), key=_number)
        if not own:
            if self.elected.is_set():
                return True
            create = Create(
                f"{self._path}/{self._id}-", self._data, self._client.acl, _EPHEMERAL_WITH_NUMBER
            )
            await self._client.send(create)
            return await self._is_over()
        for name in own[1:]:  # the answer to a request was lost, and it was sent again
            await self._remove(name)
        if first_of(names) == own[0]:
            self.elected.set()
        return False

    async def _own(self) -> list[str]:
        return [name for name in await self._observer.names() if name.startswith(self._id)]

    async def _remove(self, name: str) -> None:
        try:
            await self._client.send(Delete(f"{self._path}/{name}", -1))
        except NoNodeError:
            pass  # its session has ended

    def __repr__(self) -> str:
        return f"Candidacy({self._path!r}, elected={self.elected.is_set()})"
