"""Carries out a plan of moves, a few at a time, whoever dies in between.

One rebalance is carried out at a time. Its plan is stored before the first move, so that it can be
looked at and is resumed by the next coordinator. Who leads a bucket is in the catalog, and the
moves change it there. So how far a rebalance got is never in doubt: a move that has not ended for
all that the store knows is done if its target leads the bucket by now. States of moves are
therefore stored only every few seconds.

| a move | is |
|---|---|
| whose target leads the bucket and serves it | completed |
| whose bucket was dropped, or is led by a third server | skipped: cancelled, with the reason |
| whose source or target is not there, or whose target got a tag | skipped |
| that the mover refuses for the moment (after a restart) | tried again for `RETURN_SECONDS` |
| that it refuses for good | failed, with the reason; the others go on |

A rebalance with a failed move has failed when all its moves have ended; another one plans anew what
is left. One that is cancelled begins no move any more, and those under way are finished.

A coordinator that starts waits for the servers of the moves, since they have to register first.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import structlog

from zufluss.cluster.examination import Finding, Severity
from zufluss.cluster.image import BucketState, ClusterImage
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.rebalance.planner import Move, holders_of, plan, servers_of
from zufluss.coordinator.rebalance.task import MoveState, Rebalance, StoredRebalance
from zufluss.coordinator.tasks import PendingTasks
from zufluss.errors import (
    ErrorCode,
    NoRebalanceError,
    RebalanceFailureError,
    ZuflussError,
    reason_of,
)
from zufluss.meta.api import Delete
from zufluss.model.rebalance import FINAL, RebalanceStatus
from zufluss.model.table import TableBucket
from zufluss.periodic import log_failure, pause
from zufluss.tasks import end

log = structlog.get_logger(__name__)

MOVES_AT_ONCE: Final = 5
"""Moves under way at a time."""
SAVE_SECONDS: Final = 2.0
"""How old the stored states of moves may be."""
RETURN_SECONDS: Final = 30.0
"""So long a coordinator that starts waits for the servers of the moves, and a move for its own."""
TRY_AGAIN_SECONDS: Final = 0.2
"""Pause before a move that was refused is tried again."""
_FAILED: Final = RebalanceStatus.FAILED
DROPPED: Final = "the bucket was dropped"
SKIPS_AT_ONCE: Final = 500
"""Moves that are skipped before others get a turn of the event loop."""


class BucketMover(Protocol):
    """Moves a bucket between two live servers."""

    async def move(self, bucket: TableBucket, target: int) -> None:
        """Have another server lead a bucket; raises `ZuflussError` if it does not."""


class Rebalances:
    """The newest rebalance, and the next one."""

    def __init__(
        self,
        ledger: Ledger,
        image: ClusterImage,
        stored: StoredRebalance,
        clock: Callable[[], float],
        mover: BucketMover | None = None,
    ) -> None:
        """`clock` never jumps. Without a mover every rebalance is refused."""
        self.newest = stored.newest
        """The rebalance that is carried out, or was carried out last."""
        self._ledger = ledger
        self._image = image
        self._leftover = stored.leftover
        self._clock = clock
        self._mover = mover
        self._turn = asyncio.Lock()
        """Held while the newest rebalance changes, or its status."""
        self._changes = PendingTasks("rebalance")
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with the rebalance of the coordinator before."""
        if self._leftover:
            self._changes.later(self._ledger.commit_in_portions(map(Delete, self._leftover)))
        newest = self.newest
        if newest is not None and not newest.has_ended and self._mover is not None:
            log.info("rebalance_resumed", id=newest.id, moves=len(_pending(newest)))
            self._run(self._mover, newest, resumed=True)

    async def stop(self) -> None:
        """Begin no more moves, and interrupt those under way; the next coordinator goes on."""
        await end(self._runner)
        await self._changes.settle()

    async def plan(self) -> list[Move]:
        """The moves that a rebalance would make now."""
        return await asyncio.to_thread(plan, holders_of(self._image), servers_of(self._image))

    async def begin(self) -> str:
        """Plan a rebalance, store the plan and begin with it; returns its id."""
        return await self._changes.undisturbed(self._begin())

    async def _begin(self) -> str:
        async with self._turn:
            mover = self._mover
            if mover is None:
                raise RebalanceFailureError(
                    "without the shared log (zufluss.log.durability = remote) a bucket stays with "
                    "the disk that has its rows, so nothing was rebalanced; new tables and "
                    "partitions are spread over all tablet servers without a tag"
                )
            former = self.newest
            if former is not None and self._runner is not None and not self._runner.done():
                raise RebalanceFailureError(
                    f"Rebalance task already exists, current rebalance id is '{former.id}'. Please "
                    "wait for it to finish or cancel it first. Of a cancelled one the moves under "
                    "way are finished."
                )
            moves = [MoveState(move) for move in await self.plan()]
            done = RebalanceStatus.REBALANCING if moves else RebalanceStatus.COMPLETED
            rebalance = Rebalance(str(uuid.uuid4()), moves, done)
            await self._ledger.commit_in_portions(rebalance.creation())
            await self._ledger.commit([rebalance.head(done, first=former is None)])
            self.newest = rebalance
            log.info("rebalance_began", id=rebalance.id, moves=len(moves))
            self._run(mover, rebalance, resumed=False)
            if former is not None:
                self._changes.later(self._ledger.commit_in_portions(former.deletion()))
            return rebalance.id

    async def cancel(self, rebalance_id: str | None) -> None:
        """Begin no more moves; those under way are finished. Nothing if it has ended."""
        await self._changes.undisturbed(self._cancel(rebalance_id))

    async def _cancel(self, rebalance_id: str | None) -> None:
        async with self._turn:
            newest = self.of(rebalance_id)
            if newest is None or newest.has_ended:
                return
            await self._ledger.commit([newest.head(RebalanceStatus.CANCELED)])
            newest.cancel()
            log.info("rebalance_cancelled", id=newest.id)

    def of(self, rebalance_id: str | None) -> Rebalance | None:
        """The newest rebalance, None if there was none; `NoRebalanceError` for another id."""
        newest = self.newest
        if newest is not None and rebalance_id is not None and rebalance_id != newest.id:
            raise NoRebalanceError(
                f"Rebalance task id {rebalance_id} is not the current rebalance task id "
                f"{newest.id}. Only the newest rebalance is known."
            )
        return newest

    def findings(self) -> Iterable[Finding]:
        """The rebalance under way, and one with moves that failed."""
        newest = self.newest
        if newest is None or newest.status not in (RebalanceStatus.REBALANCING, _FAILED):
            return
        failed, count = newest.counts[_FAILED], len(newest.moves)
        ended = sum(newest.counts[status] for status in FINAL)
        yield Finding(
            Severity.WARNING if failed else Severity.FINE,
            "rebalance",
            f"{ended} of {count} moves have ended, {failed} of them failed"
            + ("; zufluss cluster rebalance status says why" if failed else ""),
        )

    # Carrying it out

    def _run(self, mover: BucketMover, rebalance: Rebalance, *, resumed: bool) -> None:
        run = _Run(self._ledger, self._image, self._clock, mover, rebalance, self._turn)
        self._runner = asyncio.create_task(run.to_its_end(resumed=resumed), name="rebalance")
        self._runner.add_done_callback(_log_end)

    def __repr__(self) -> str:
        newest = self.newest
        return f"Rebalances({None if newest is None else (newest.id, newest.status.name)})"


class _Run:
    """One rebalance that is carried out."""

    def __init__(
        self,
        ledger: Ledger,
        image: ClusterImage,
        clock: Callable[[], float],
        mover: BucketMover,
        rebalance: Rebalance,
        turn: asyncio.Lock,
    ) -> None:
        self._ledger, self._image, self._clock, self._mover = ledger, image, clock, mover
        self._rebalance = rebalance
        self._turn = turn
        self._under_way: dict[asyncio.Task[None], int] = {}
        """Moves that have begun, by their tasks."""
        self._saved = clock()

    async def to_its_end(self, *, resumed: bool) -> None:
        """Make all moves, and note the end."""
        try:
            if resumed:
                await self._servers_return()
            await self._move_all()
            await self._end()
        finally:
            for task in self._under_way:
                await end(task)

    async def _servers_return(self) -> None:
        """Wait until the servers of all moves are there, or for a while."""
        until = self._clock() + RETURN_SECONDS
        moves = _pending(self._rebalance)
        servers = {i for state in moves for i in (state.move.source, state.move.target)}
        while servers - self._image.tablets.keys() and self._clock() < until:
            if self._rebalance.has_ended:
                return
            await pause(0.1)

    async def _move_all(self) -> None:
        pending = iter(range(len(self._rebalance.moves)))
        more = True
        while more or self._under_way:
            if more and len(self._under_way) < MOVES_AT_ONCE:
                more = await self._begin_some(pending)
            if self._under_way:
                await asyncio.wait(
                    self._under_way, timeout=SAVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            self._note_ended()
            if self._clock() - self._saved >= SAVE_SECONDS:
                await self._save()

    async def _begin_some(self, pending: Iterator[int]) -> bool:
        """Begin as many moves as may be under way; whether there may be more of them."""
        rebalance, skipped = self._rebalance, 0
        for number in pending:
            state = rebalance.moves[number]
            if state.status is not RebalanceStatus.NOT_STARTED:
                continue  # it has ended, or was cancelled
            outcome = outcome_without_move(self._image, state.move)
            if outcome is not None:
                rebalance.note(number, *outcome)
                skipped += 1
                if skipped % SKIPS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                continue
            rebalance.note(number, RebalanceStatus.REBALANCING)
            self._under_way[asyncio.create_task(self._make(state.move))] = number
            if len(self._under_way) == MOVES_AT_ONCE:
                return True
        return False

    async def _make(self, move: Move) -> None:
        """Make a move; one that is refused for the moment is tried again for a while."""
        until = self._clock() + RETURN_SECONDS
        while True:
            try:
                return await self._mover.move(move.bucket, move.target)
            except ZuflussError as problem:
                hopeless = outcome_without_move(self._image, move) is not None
                if not problem.retriable or hopeless or self._rebalance.has_ended:
                    raise
                if self._clock() >= until:
                    raise
            await pause(TRY_AGAIN_SECONDS)

    def _note_ended(self) -> None:
        for task in [task for task in self._under_way if task.done()]:
            number = self._under_way.pop(task)
            self._rebalance.note(number, *self._outcome(task, self._rebalance.moves[number].move))

    def _outcome(self, task: asyncio.Task[None], move: Move) -> tuple[RebalanceStatus, str]:
        problem = asyncio.CancelledError() if task.cancelled() else task.exception()
        if problem is None:
            return RebalanceStatus.COMPLETED, ""
        if not isinstance(problem, Exception):
            return RebalanceStatus.FAILED, "it was interrupted"
        log_failure("bucket_not_moved", problem)
        state = self._image.bucket_state(move.bucket)
        if state is None:
            return RebalanceStatus.CANCELED, DROPPED
        if state.leader == move.target and _serves(state):  # by another try
            return RebalanceStatus.COMPLETED, ""
        return RebalanceStatus.FAILED, reason_of(problem)

    async def _save(self) -> None:
        """Store the states of moves; what cannot be stored now is stored later."""
        rebalance = self._rebalance
        changed, rebalance.changed = rebalance.changed, set()
        self._saved = self._clock()
        try:
            await self._ledger.commit_in_portions(rebalance.update(changed))
        except ZuflussError as problem:
            rebalance.changed |= changed
            if problem.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION:
                raise
            log_failure("rebalance_not_saved", problem)

    async def _end(self) -> None:
        """Store the last states, and that it has ended."""
        rebalance = self._rebalance
        while rebalance.changed:
            await self._save()
            if rebalance.changed:
                await pause(SAVE_SECONDS)
        while not await self._has_ended():
            await pause(SAVE_SECONDS)
        log.info("rebalance_ended", id=rebalance.id, status=rebalance.status.name)

    async def _has_ended(self) -> bool:
        """Store that it has ended, unless it was cancelled; whether that worked."""
        rebalance = self._rebalance
        async with self._turn:
            if rebalance.has_ended:
                return True
            status = _FAILED if rebalance.counts[_FAILED] else RebalanceStatus.COMPLETED
            try:
                await self._ledger.commit([rebalance.head(status)])
            except ZuflussError as problem:
                if problem.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION:
                    raise
                log_failure("rebalance_not_saved", problem)
                return False
            rebalance.status = status
            return True


def outcome_without_move(image: ClusterImage, move: Move) -> tuple[RebalanceStatus, str] | None:
    """The outcome of a move that is not to be made, or not any more; None if it is."""
    state = image.bucket_state(move.bucket)
    if state is not None and state.leader == move.target:
        return (RebalanceStatus.COMPLETED, "") if _serves(state) else None
    reason = _hindrance(image, move, None if state is None else state.leader)
    return None if reason is None else (RebalanceStatus.CANCELED, reason)


def _serves(state: BucketState) -> bool:
    """Whether the leader of a bucket has continued it after a hand-over."""
    return state.released is None


def _hindrance(image: ClusterImage, move: Move, leader: int | None) -> str | None:
    if leader is None:
        return DROPPED
    if leader != move.source:
        return f"tablet server {leader} leads the bucket by now"
    for server_id in (move.source, move.target):
        if server_id not in image.tablets:
            return f"tablet server {server_id} is not there"
    tag = image.tags.get(move.target)
    return None if tag is None else f"tablet server {move.target} has the tag {tag.name}"


def _pending(rebalance: Rebalance) -> list[MoveState]:
    return [s for s in rebalance.moves if s.status is RebalanceStatus.NOT_STARTED]


def _log_end(runner: asyncio.Task[None]) -> None:
    problem = None if runner.cancelled() else runner.exception()
    if isinstance(problem, Exception):
        log_failure("rebalance_interrupted", problem)
