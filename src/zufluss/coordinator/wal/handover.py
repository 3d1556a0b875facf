"""Moving the leadership of a bucket from one live tablet server to another.

A hand-over is a take-over whose former leader ends its part itself, so no session is sealed:

| step | who | what | if it fails or somebody dies here |
|---|---|---|---|
| 1 prepare | target | copies the bucket so far and builds its state (`tablet/shared/prepare.py`), as long as it takes | the bucket goes on where it is |
| 2 release | leader | holds new writes, has everything durable, writes a release, closes the bucket (`tablet/shared/release.py`) | an error means that it goes on there; no answer within `RELEASE_SECONDS` fences its session, and others take its buckets over |
| 3 assign | coordinator | transaction: leader, leader epoch + 1, `released`; the session stays the source | the former leader reports what it has released, and the bucket gets a leader (`_claim`) |
| 4 order | coordinator | the order to lead goes out until it arrives (`takeover.py`) | the same; a target that dies is a lost server |
| 5 adopt | target | reads what it lacks, continues it in its own session, commits; serves | after `ADOPT_SECONDS` another server gets the bucket, perhaps the former leader |

Writers wait from 2 to 5. Before 2 a hand-over may be given up at any time; from 3 on the bucket is
looked after by the same rules as one that was taken over from a lost server.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from zufluss.cluster.image import BucketState, PartitionEntry
from zufluss.cluster.wal import ReleasedBucket, WalSession
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.wal.keeper import WalKeeper, is_same_lead, led_by
from zufluss.coordinator.wal.takeover import Takeovers
from zufluss.errors import (
    ErrorCode,
    NetworkError,
    RequestTimeoutError,
    UnknownTableOrBucketError,
    ZuflussError,
    reason_of,
)
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.periodic import log_failure
from zufluss.tasks import end
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_from_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

log = structlog.get_logger(__name__)

RELEASE_SECONDS: Final = 5.0
"""A leader that does not answer for so long is fenced. It gives up by itself after two seconds."""
ADOPT_SECONDS: Final = 30.0
"""So long the new leader may take until it serves the bucket."""


class HandoverError(ZuflussError, code=ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION):
    """A bucket was not moved: it stays with its leader, or another server than asked for gets it.

    The message names the bucket and says which of them.
    """


class Handovers:
    """Moves buckets between live servers."""

    def __init__(
        self,
        keeper: WalKeeper,
        catalog: Catalog,
        tablets: Tablets,
        takeovers: Takeovers,
        fence: Callable[[int, int], None],
        reach: Callable[[str], None],
    ) -> None:
        """`fence` gives a server up, by its id and epoch.

        `reach` is told the name of each step, where tests kill.
        """
        self.count = 0
        """Buckets that were moved."""
        self._keeper = keeper
        self._image = keeper.image
        self._catalog = catalog
        self._tablets = tablets
        self._takeovers = takeovers
        self._fence = fence
        self._reach = reach
        self._moving: set[TableBucket] = set()
        self._ordered: dict[TableBucket, BucketState] = {}
        """Released buckets whose leaders this coordinator has told."""
        self._claims: set[asyncio.Task[None]] = set()
        keeper.on_unclaimed = self._claim

    async def stop(self) -> None:
        """End what is under way; the next coordinator goes on."""
        for claim in tuple(self._claims):
            await end(claim)

    async def move(self, bucket: TableBucket, target: int) -> None:
        """Have another live server lead a bucket; returns when it serves it.

        Raises `HandoverError` if the bucket has another leader than that afterwards, mostly the one
        it had, and `UnknownTableOrBucketError` if it was dropped.
        """
        state = self._checked(bucket, target)
        if bucket in self._moving:
            raise HandoverError(f"{self._name(bucket)} is being moved already; try again later")
        self._moving.add(bucket)
        try:
            session = self._keeper.book.wal_of(target)
            await self._prepare(bucket, state, target)
            state = self._checked(bucket, target)
            if self._keeper.book.wal_of(target) != session:  # its files are gone, and writers wait
                raise HandoverError(
                    f"{self._name(bucket)} stays at tablet server {state.leader}: tablet server "
                    f"{target} registered again while it prepared; try again"
                )
            await self._hand_over(bucket, state, target)
        finally:
            self._moving.discard(bucket)
        self.count += 1

    async def move_bucket(
        self, request: m.MoveBucketRequest, ctx: RequestContext
    ) -> m.MoveBucketResponse:
        """MOVE_BUCKET (30063)."""
        await self.move(bucket_from_proto(request.bucket), request.server_id)
        return m.MoveBucketResponse()

    def _checked(self, bucket: TableBucket, target: int) -> BucketState:
        """The state of a bucket that can be moved to a server; raises why it cannot."""
        state = self._image.bucket_state(bucket)
        if state is None:
            raise UnknownTableOrBucketError(f"{self._name(bucket)} does not exist any more")
        why = ""
        live = self._keeper.book.live(state.leader)
        nodes = self._tablets.answering(self._image.tablets.values())
        if state.leader == target:
            why = f"tablet server {target} leads it already"
        elif self._keeper.book.live(target) is None or target not in {x.node_id for x in nodes}:
            why = f"tablet server {target} is not there, or is about to leave"
        elif live is None or live.session.server_epoch != state.wal or state.released is not None:
            why = f"tablet server {state.leader} has not taken it over itself yet; try again later"
        if why:
            raise HandoverError(f"{self._name(bucket)} is not moved: {why}")
        return state

    async def _prepare(self, bucket: TableBucket, state: BucketState, target: int) -> None:
        self._reach("handover-prepare")
        order = self._keeper.preparation(self._path(bucket), bucket, state)
        try:
            await self._tablets.prepare_bucket(target, order)
        except (ZuflussError, OSError) as problem:
            raise HandoverError(
                f"{self._name(bucket)} stays at tablet server {state.leader}: tablet server "
                f"{target} could not prepare to lead it ({reason_of(problem)})"
            ) from problem

    async def _hand_over(self, bucket: TableBucket, state: BucketState, target: int) -> None:
        self._reach("handover-release")
        number = await self._release(bucket, state)
        self._reach("handover-assign")
        assigned = await self._assign(bucket, state, target, number)
        await self._await_adoption(bucket, assigned, target)

    async def _release(self, bucket: TableBucket, state: BucketState) -> int:
        """Have the leader of a bucket release it; fence its session if it does not answer."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                return await self._tablets.release_bucket(state.leader, bucket, state.leader_epoch)
        except (TimeoutError, NetworkError, RequestTimeoutError) as problem:
            # It may have released the bucket or not. Its session tells, once it has ended.
            log.warning("release_not_answered", bucket=str(bucket), server_id=state.leader)
            assert state.wal is not None
            self._fence(state.leader, state.wal)
            raise HandoverError(
                f"{self._name(bucket)} was not moved: tablet server {state.leader} did not answer "
                f"within {RELEASE_SECONDS:g} s ({reason_of(problem)}), so all its buckets are "
                "taken over by others"
            ) from problem
        except ZuflussError as problem:
            raise HandoverError(
                f"{self._name(bucket)} stays at tablet server {state.leader}: {problem.message}"
            ) from problem

    async def _assign(
        self, bucket: TableBucket, state: BucketState, leader: int, number: int
    ) -> BucketState:
        """Give a bucket that was released at a number of its session to a server, and order it.

        `state` was checked before the release; its standbys may be others by now.
        """

        def to_leader() -> Mapping[TableBucket, BucketState]:
            now = self._image.bucket_state(bucket)
            if now is None or not is_same_lead(state, now) or now.wal != state.wal:
                return {}
            return {bucket: replace(led_by(now, leader), released=number)}

        async def in_turn() -> BucketState | None:
            done, changes = await self._catalog.states.change(to_leader)
            assigned = self._image.bucket_state(bucket)
            if not done or assigned is None:
                return None
            self._reach("handover-assigned")
            telling = asyncio.ensure_future(self._catalog.tell(changes))
            await asyncio.sleep(0)  # the news are on their way before the order
            self._order(bucket, assigned)
            await telling
            return assigned

        assigned = await self._catalog.exclusive(in_turn)
        if assigned is None:
            raise HandoverError(
                f"{self._name(bucket)} was not moved to tablet server {leader}: it was dropped, or "
                f"its leader registered again meanwhile"
            )
        return assigned

    def _order(self, bucket: TableBucket, state: BucketState) -> None:
        """Tell the next leader of a released bucket, again and again until it has heard it."""
        self._ordered[bucket] = state
        self._takeovers.hand_over(self._keeper.order(self._path(bucket), bucket, state))

    async def _await_adoption(
        self, bucket: TableBucket, assigned: BucketState, target: int
    ) -> None:
        """Wait until the target has continued a bucket; give it to another one if it does not."""
        while self._is_awaited(bucket, assigned):
            continued = self._keeper.continued(bucket)
            done, _ = await asyncio.wait([continued], timeout=ADOPT_SECONDS)
            if not done and self._is_awaited(bucket, assigned):
                order = self._keeper.order(self._path(bucket), bucket, assigned)
                await self._takeovers.give_up(order)
                break
        self._ordered.pop(bucket, None)
        state = self._image.bucket_state(bucket)
        if state is None:
            raise UnknownTableOrBucketError(f"{self._name(bucket)} was dropped while it was moved")
        if (state.leader, state.leader_epoch) != (target, assigned.leader_epoch):
            raise HandoverError(
                f"{self._name(bucket)} was not taken over by tablet server {target}; tablet server "
                f"{state.leader} leads it"
            )
        if state.released is not None:
            raise HandoverError(
                f"{self._name(bucket)} was given to tablet server {target}, which does not serve "
                "it yet and goes on trying"
            )
        self._reach("handover-adopted")

    def _is_awaited(self, bucket: TableBucket, assigned: BucketState) -> bool:
        """Whether the leader that a bucket was given to has not continued it yet."""
        state = self._image.bucket_state(bucket)
        return state is not None and is_same_lead(assigned, state) and state.released is not None

    def _claim(self, session: WalSession, released: ReleasedBucket) -> None:
        """Go on with a bucket of which only the server knows that released it.

        The coordinator that asked for that is gone. If it named no leader, the server gets the
        bucket back; if it did, that one is told.
        """
        bucket, state = released.bucket, self._image.bucket_state(released.bucket)
        if bucket in self._moving or state is None:
            return
        if state.released is not None:
            ordered = self._ordered.get(bucket)
            if ordered is None or not is_same_lead(ordered, state):
                self._order(bucket, state)
            return

        async def claim() -> None:
            try:
                state = self._image.bucket_state(released.bucket)
                named = session.server_id, released.leader_epoch
                if state is not None and (state.leader, state.leader_epoch) == named:
                    await self._assign(released.bucket, state, session.server_id, released.end)
            except ZuflussError as problem:
                log_failure("released_bucket_not_claimed", problem)
            finally:
                self._moving.discard(released.bucket)

        self._moving.add(released.bucket)
        task = asyncio.create_task(claim())
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    def _path(self, bucket: TableBucket) -> PhysicalTablePath:
        """The table or partition of a bucket."""
        holder = self._image.holder(bucket)
        table = self._image.table_by_id(bucket.table_id)
        if table is None or holder is None:
            raise UnknownTableOrBucketError(f"{self._name(bucket)} does not exist any more")
        if isinstance(holder, PartitionEntry):
            return PhysicalTablePath(*table.info.path, holder.name)
        return holder.physical_path

    def _name(self, bucket: TableBucket) -> str:
        return self._image.name_of(bucket)

    def __repr__(self) -> str:
        return f"Handovers({self.count} moved, {len(self._moving)} under way)"
