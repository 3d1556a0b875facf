"""Orders and news of the coordinator for tablet servers.

`TabletGateway` is one tablet server as the coordinator sees it. In a process with both roles the
tablet server object itself is the gateway; otherwise `RemoteTablet` sends the same calls over the
network. `Tablets` has the gateway of each server, and sends each call to the servers that hold the
buckets in question.

| call | on the wire | when |
|---|---|---|
| update_metadata | UPDATE_METADATA (1013) | the catalog or the set of servers changed |
| start_replicas | NOTIFY_LEADER_AND_ISR (1018) | buckets were created; returns when they serve |
| release_bucket | RELEASE_BUCKET (30060) | a bucket is handed over: its leader writes nothing any more |
| prepare_bucket | PREPARE_BUCKET (30061) | before that, at the server that is to lead it |
| stop_replicas | STOP_REPLICA (1019) | buckets were dropped; returns when their disk is free |
| notify_lake_offsets | NOTIFY_LAKE_TABLE_OFFSET (1031) | a lake snapshot was committed, or the server joined |
| notify_kv_snapshot_offset | NOTIFY_KV_SNAPSHOT_OFFSET (1029) | a key-value snapshot was committed and an older one let go |
| update_locations | UPDATE_LOCATIONS (30004) | the remote locations changed |
| update_configs | UPDATE_CONFIGS (30006) | options were changed in the running cluster |
| update_producers | UPDATE_PRODUCERS (30044) | producers of a table changed, or buckets of it are about to start |
| producer_idle_ms | GET_PRODUCER_ACTIVITY (30045) | somebody wants columns of a producer |
| end_offsets | LIST_OFFSETS (1021) | a producer begins; a commit claims a new offset |
| assign | answer of REGISTER_TABLET_SERVER (30000) | a tablet server joined |

`assign` carries the whole image and all replicas of the server. Other buckets on its disk belong to
tables that were dropped while it was away; the server deletes them. That is how a drop is finished
after a crash. The other calls use another connection and may overtake the answer of a registration,
so a remote tablet server holds them back while it registers, and refuses those with a server epoch
that is not its own (`tablet/link.py`).

A call that does not reach a server is not repeated: the server learns everything when it registers
again. Only calls about producers must reach all leaders of a table, or they fail.

News of the catalog are waited for only a moment. A server that opens its buckets after it registered
takes orders in their turn when it is done, and a machine that vanished answers nothing; neither
holds up every change and every other registration.

Offsets that a lake snapshot, a manifest or a key-value snapshot claims are checked in one place,
`Tablets.unreached`: the leader is asked for its high watermark after the claim has arrived. The
high watermark of a log never goes back, so a true claim is never refused because of an answer that
is out of date. While a leader is away, a claim of a new offset is refused with a retriable error.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from zufluss.cluster import codec
from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.image import ClusterImage, ClusterNode, ImageChange
from zufluss.cluster.producers import TableProducers, producers_to_proto
from zufluss.cluster.replicas import (
    KvSnapshotOffset,
    LakeOffsets,
    ReplicaAssignment,
    ReplicaStop,
    RpcCaller,
    TabletGateway,
    kv_snapshot_offset_to_proto,
    lake_offsets_to_proto,
    replica_to_proto,
    stop_to_proto,
)
from zufluss.errors import (
    LeaderNotAvailableError,
    NetworkError,
    ZuflussError,
    error,
    reason_of,
)
from zufluss.model.table import TableBucket
from zufluss.pacing import paced
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import bucket_from_proto, bucket_to_proto

if TYPE_CHECKING:
    from zufluss.remote.locations import Locations

log = structlog.get_logger(__name__)

R = TypeVar("R", "ReplicaAssignment", "ReplicaStop", "LakeOffsets", "KvSnapshotOffset")
T = TypeVar("T")

BUCKETS_PER_REQUEST_MAX = 10_000
"""Buckets in one request to a tablet server; more are sent in several."""
OFFSETS_AT_ONCE: Final = 4096
"""Offsets of producers that are encoded on the event loop; more are encoded in a thread."""
TOLD_SECONDS: Final = 1.0
"""How long a change of the catalog waits for the tablet servers to confirm it."""
PREPARE_TIMEOUT_MS: Final = 600_000
"""How long a tablet server may take to make ready to lead a bucket: its state may be built anew."""
_NO_FOLLOWER: Final = -1
_LATEST: Final = 1


class Tablets:
    """The gateways of the tablet servers that have joined."""

    def __init__(self) -> None:
        self._gateways: dict[int, TabletGateway] = {}
        self._silent: set[int] = set()
        self._leaving: set[int] = set()
        """Servers that hand over their buckets in order to stop."""
        self._telling: dict[int, set[asyncio.Task[None]]] = {}
        """News of the catalog that are under way to each server."""

    def attach(self, server_id: int, gateway: TabletGateway) -> None:
        """Send calls to a server from now on."""
        self._gateways[server_id] = gateway
        self._silent.discard(server_id)
        self._leaving.discard(server_id)

    def heard_of(self, server_id: int) -> None:
        """Note a sign of life of a server, which may get new buckets then."""
        self._silent.discard(server_id)

    def answering(self, nodes: Collection[ClusterNode]) -> list[ClusterNode]:
        """The servers that new buckets can go to.

        A server that died is among the registered ones until its session ends. It is left out from
        its first failure to start a bucket until its next sign of life.
        """
        away = self._silent | self._leaving
        return [node for node in nodes if node.node_id not in away]

    def leaves(self, server_id: int) -> None:
        """Give a server no more buckets before it registers again: it is about to stop."""
        self._leaving.add(server_id)

    def detach(self, server_id: int) -> None:
        """Send nothing to a server that has left; it learns everything when it registers."""
        self._gateways.pop(server_id, None)

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Send changes to every server; a failure is logged.

        Waits a moment until servers have them, but not for a server that is late with earlier ones.
        """
        late = {server_id for server_id, under_way in self._telling.items() if under_way}
        prompt: list[asyncio.Task[None]] = []
        for server_id, gateway in self._gateways.items():
            telling = asyncio.ensure_future(gateway.update_metadata(changes))
            self._telling.setdefault(server_id, set()).add(telling)
            telling.add_done_callback(partial(self._told, server_id))
            if server_id not in late:
                prompt.append(telling)
        done = (await asyncio.wait(prompt, timeout=TOLD_SECONDS))[0] if prompt else ()
        for told in done:
            problem = told.exception()
            if problem is not None and not isinstance(problem, ZuflussError | OSError):
                raise problem

    def _told(self, server_id: int, telling: asyncio.Task[None]) -> None:
        """Log why a server was not told."""
        self._telling[server_id].discard(telling)
        problem = None if telling.cancelled() else telling.exception()
        if problem is not None:
            _log_not_told("update_metadata", server_id, problem)

    async def start_replicas(
        self, replicas: Sequence[ReplicaAssignment], producers: Sequence[TableProducers] = ()
    ) -> None:
        """Start buckets at their leaders; raises unless every leader started.

        Servers learn the producers of the tables before they start buckets. Standbys are ordered
        by `order_standbys`: nobody waits for them.
        """
        by_server: dict[int, list[ReplicaAssignment]] = {}
        for replica in replicas:
            by_server.setdefault(replica.state.leader, []).append(replica)
        for server_id in sorted({r.state.leader for r in replicas} - set(self._gateways)):
            raise LeaderNotAvailableError(
                f"tablet server {server_id} should lead new buckets but is not there; "
                f"try again when it is back"
            )
        gateways = {i: gateway for i, gateway in self._gateways.items() if i in by_server}
        calls = [_start(gateway, by_server[i], producers) for i, gateway in gateways.items()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for server_id, outcome in zip(gateways, outcomes, strict=True):
            if isinstance(outcome, NetworkError):
                self._silent.add(server_id)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def release_bucket(self, server_id: int, bucket: TableBucket, leader_epoch: int) -> int:
        """Have the leader of a bucket release it; the number of its session behind the release."""
        return await self._there(server_id).release_bucket(bucket, leader_epoch)

    async def prepare_bucket(self, server_id: int, assignment: ReplicaAssignment) -> None:
        """Have a server make ready to lead a bucket."""
        await self._there(server_id).prepare_bucket(assignment)

    async def order_standbys(
        self, server_id: int, orders: Sequence[ReplicaAssignment], stops: Sequence[ReplicaStop]
    ) -> None:
        """Have a server follow some buckets, and others no longer."""
        gateway = self._there(server_id)
        if stops:
            await gateway.stop_replicas(stops)
        if orders:
            await gateway.start_replicas(orders)

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Stop buckets at their servers; a server that is away does it when it registers."""
        await self._tell_holders("stop_replicas", replicas, lambda g, some: g.stop_replicas(some))

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Send lake offsets to the holders of buckets; a server that is away learns them later."""
        await self._tell_holders(
            "notify_lake_offsets", offsets, lambda g, some: g.notify_lake_offsets(some)
        )

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Send the holders of buckets the offsets from which their changelogs are needed."""
        await self._tell_holders(
            "notify_kv_snapshot_offset", offsets, lambda g, some: g.notify_kv_snapshot_offset(some)
        )

    async def update_locations(self, locations: Locations) -> None:
        """Send the remote locations to every server; a server that is away learns them later."""
        await self._best_effort(
            "update_locations",
            {i: gateway.update_locations(locations) for i, gateway in self._gateways.items()},
        )

    async def update_configs(self, configs: DynamicConfigs) -> None:
        """Send changed options to every server; a server that is away learns them later."""
        await self._best_effort(
            "update_configs",
            {i: gateway.update_configs(configs) for i, gateway in self._gateways.items()},
        )

    async def update_producers(self, table: TableProducers, servers: Collection[int]) -> None:
        """Send the producers of a table; `LeaderNotAvailableError` unless all servers got them."""
        await self._strictly(servers, lambda _, gateway: gateway.update_producers([table]))

    async def producer_idle_ms(
        self, table_id: int, numbers: Sequence[int], servers: Collection[int]
    ) -> list[int]:
        """Milliseconds since each producer wrote to any of the servers, -1 for never.

        `LeaderNotAvailableError` unless all servers answer.
        """
        answers = await self._strictly(
            servers, lambda _, gateway: gateway.producer_idle_ms(table_id, numbers)
        )
        by_number = zip(*answers, strict=True) if answers else [()] * len(numbers)
        return [min((ms for ms in idle if ms >= 0), default=-1) for idle in by_number]

    async def end_offsets(
        self, leaders: Mapping[int, Sequence[TableBucket]]
    ) -> dict[TableBucket, int]:
        """The end offsets of the logs of buckets, given by leader; raises if one is missing."""
        offsets: dict[TableBucket, int] = {}
        for answer in await self._strictly(leaders, lambda i, g: g.end_offsets(leaders[i])):
            offsets |= answer
        return offsets

    async def unreached(
        self,
        image: ClusterImage,
        known: Mapping[TableBucket, int],
        claimed: Mapping[TableBucket, int],
    ) -> dict[TableBucket, int]:
        """The high watermarks of the buckets whose claimed offset is above it.

        Offsets that are not above `known` are true, and their leaders are not asked. Buckets
        without a leader, such as those of dropped partitions, are left out.
        """
        leaders: dict[int, list[TableBucket]] = {}
        async for bucket, offset in paced(claimed.items()):
            leader = image.leader(bucket)
            if leader is not None and offset > known.get(bucket, 0):
                leaders.setdefault(leader[0], []).append(bucket)
        ends = await self.end_offsets(leaders)
        return {bucket: end for bucket, end in ends.items() if claimed[bucket] > end}

    def _there(self, server_id: int) -> TabletGateway:
        if server_id not in self._gateways:
            raise LeaderNotAvailableError(
                f"tablet server {server_id} leads buckets of the table but is not there; try "
                f"again when it is back"
            )
        return self._gateways[server_id]

    async def _strictly(
        self, servers: Iterable[int], call: Callable[[int, TabletGateway], Awaitable[T]]
    ) -> list[T]:
        """The answers of all servers. Raises after all calls have ended if one failed."""
        gateways = {i: self._there(i) for i in servers}
        calls = [call(i, gateway) for i, gateway in gateways.items()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for server_id, outcome in zip(gateways, outcomes, strict=True):
            if isinstance(outcome, ZuflussError | OSError):
                raise LeaderNotAvailableError(
                    f"tablet server {server_id}, which leads buckets of the table, does not "
                    f"answer: {outcome}; try again"
                ) from outcome
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def _tell_holders(
        self,
        what: str,
        items: Sequence[R],
        call: Callable[[TabletGateway, list[R]], Awaitable[None]],
    ) -> None:
        """Send each item to the servers that hold its bucket; failures are logged."""
        by_server = _by_server(items)
        servers = by_server.keys() & self._gateways.keys()
        await self._best_effort(what, {i: call(self._gateways[i], by_server[i]) for i in servers})

    async def _best_effort(self, what: str, calls: dict[int, Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
        for server_id, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, ZuflussError | OSError):
                _log_not_told(what, server_id, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome


def _log_not_told(what: str, server_id: int, problem: BaseException) -> None:
    log.warning("tablet_not_told", call=what, server_id=server_id, error=reason_of(problem))


class RemoteTablet:
    """One registration of a tablet server in another process.

    `connect` returns an open connection to the server. Every request carries the epochs, so that a
    server that has registered again since refuses it.
    """

    def __init__(
        self,
        server_id: int,
        coordinator_epoch: int,
        server_epoch: int,
        connect: Callable[[], Awaitable[RpcCaller]],
        timeout_ms: int,
    ) -> None:
        self.server_id = server_id
        self.server_epoch = server_epoch
        self._epoch = coordinator_epoch
        self._connect = connect
        self._timeout_ms = timeout_ms
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Send UPDATE_METADATA."""
        request = codec.update_request(changes, self._epoch, self.server_epoch)
        await self._call(ApiKey.UPDATE_METADATA, request)

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Send NOTIFY_LEADER_AND_ISR; raises the error of the first bucket that has one."""
        for some in _portions(replicas):
            request = m.NotifyLeaderAndIsrRequest(
                coordinator_epoch=self._epoch,
                server_epoch=self.server_epoch,
                notify_buckets_leader_req=[replica_to_proto(r) for r in some],
            )
            response = await self._call(ApiKey.NOTIFY_LEADER_AND_ISR, request)
            _check_buckets(self.server_id, response.notify_buckets_leader_resp)

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Send STOP_REPLICA; raises the error of the first bucket that has one."""
        for some in _portions(replicas):
            request = m.StopReplicaRequest(
                coordinator_epoch=self._epoch,
                server_epoch=self.server_epoch,
                stop_replicas_req=[stop_to_proto(s) for s in some],
            )
            response = await self._call(ApiKey.STOP_REPLICA, request)
            _check_buckets(self.server_id, response.stop_replicas_resp)

    async def release_bucket(self, bucket: TableBucket, leader_epoch: int) -> int:
        """Send RELEASE_BUCKET."""
        request = m.ReleaseBucketRequest(
            coordinator_epoch=self._epoch,
            server_epoch=self.server_epoch,
            bucket=bucket_to_proto(bucket),
            leader_epoch=leader_epoch,
        )
        return int((await self._call(ApiKey.RELEASE_BUCKET, request)).end)

    async def prepare_bucket(self, assignment: ReplicaAssignment) -> None:
        """Send PREPARE_BUCKET."""
        request = m.PrepareBucketRequest(
            coordinator_epoch=self._epoch,
            server_epoch=self.server_epoch,
            bucket=replica_to_proto(assignment),
        )
        await self._call(ApiKey.PREPARE_BUCKET, request, PREPARE_TIMEOUT_MS)

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Send NOTIFY_LAKE_TABLE_OFFSET."""
        for some in _portions(offsets):
            request = m.NotifyLakeTableOffsetRequest(
                coordinator_epoch=self._epoch,
                server_epoch=self.server_epoch,
                notify_buckets_req=[lake_offsets_to_proto(o) for o in some],
            )
            await self._call(ApiKey.NOTIFY_LAKE_TABLE_OFFSET, request)

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Send NOTIFY_KV_SNAPSHOT_OFFSET, which is one request per bucket."""
        for offset in offsets:
            request = kv_snapshot_offset_to_proto(offset, self._epoch)
            await self._call(ApiKey.NOTIFY_KV_SNAPSHOT_OFFSET, request)

    async def update_locations(self, locations: Locations) -> None:
        """Send UPDATE_LOCATIONS."""
        request = m.UpdateLocationsRequest(
            coordinator_epoch=self._epoch,
            server_epoch=self.server_epoch,
            locations=locations.to_proto(),
        )
        await self._call(ApiKey.UPDATE_LOCATIONS, request)

    async def update_configs(self, configs: DynamicConfigs) -> None:
        """Send UPDATE_CONFIGS."""
        request = m.UpdateConfigsRequest(
            coordinator_epoch=self._epoch,
            server_epoch=self.server_epoch,
            configs=configs.to_proto(),
        )
        await self._call(ApiKey.UPDATE_CONFIGS, request)

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        """Send UPDATE_PRODUCERS."""
        request = m.UpdateProducersRequest(
            coordinator_epoch=self._epoch,
            server_epoch=self.server_epoch,
            tables=await producer_messages(tables),
        )
        await self._call(ApiKey.UPDATE_PRODUCERS, request)

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        """Send GET_PRODUCER_ACTIVITY."""
        request = m.GetProducerActivityRequest(table_id=table_id, producer_numbers=numbers)
        response = await self._call(ApiKey.GET_PRODUCER_ACTIVITY, request)
        return list(response.idle_ms)

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        """Send LIST_OFFSETS for each table and partition; raises the error of the first bucket."""
        owners: dict[tuple[int, int | None], list[TableBucket]] = {}
        for bucket in buckets:
            owners.setdefault(bucket[:2], []).append(bucket)
        offsets: dict[TableBucket, int] = {}
        for (table_id, partition_id), owned in owners.items():
            for some in _portions(owned):
                request = m.ListOffsetsRequest(
                    follower_server_id=_NO_FOLLOWER,
                    offset_type=_LATEST,
                    table_id=table_id,
                    partition_id=partition_id,
                    bucket_id=[bucket.bucket_id for bucket in some],
                )
                response = await self._call(ApiKey.LIST_OFFSETS, request)
                for answer in response.buckets_resp:
                    bucket = TableBucket(table_id, partition_id, answer.bucket_id)
                    _check_bucket(self.server_id, bucket, answer)
                    offsets[bucket] = answer.offset
        return offsets

    def end(self) -> None:
        """End the registration: calls under way fail now, and every later one."""
        if not self._over.done():
            self._over.set_result(None)

    async def _call(self, api_key: ApiKey, request: Any, timeout_ms: int | None = None) -> Any:
        timeout_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        call = asyncio.ensure_future(self._send(api_key, request, timeout_ms))
        try:
            await asyncio.wait({call, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise NetworkError(
                f"tablet server {self.server_id} left, or registered again after epoch "
                f"{self.server_epoch}; try again"
            )
        finally:
            call.cancel()

    async def _send(self, api_key: ApiKey, request: Any, timeout_ms: int) -> Any:
        connection = await self._connect()
        return await connection.call(api_key, request, timeout_ms=timeout_ms)

    def __repr__(self) -> str:
        return (
            f"RemoteTablet(server_id={self.server_id}, server_epoch={self.server_epoch}, "
            f"coordinator_epoch={self._epoch})"
        )


def _check_buckets(server_id: int, answers: Iterable[Any]) -> None:
    for answer in answers:
        _check_bucket(server_id, bucket_from_proto(answer.table_bucket), answer)


def _check_bucket(server_id: int, bucket: TableBucket, answer: Any) -> None:
    if answer.error_code:
        raise error(
            answer.error_code, f"tablet server {server_id}, {bucket}: {answer.error_message}"
        )


async def _start(
    gateway: TabletGateway,
    replicas: Sequence[ReplicaAssignment],
    producers: Sequence[TableProducers],
) -> None:
    """Start buckets at a server, after it learned which producers to fence."""
    if producers:
        await gateway.update_producers(producers)
    await gateway.start_replicas(replicas)


async def producer_messages(tables: Sequence[TableProducers]) -> list[m.PbTableProducers]:
    """Encode producers, in a thread if there are many offsets."""
    size = sum(len(entry.baseline) for table in tables for entry in table.producers)
    if size <= OFFSETS_AT_ONCE:
        return [producers_to_proto(table) for table in tables]
    return await asyncio.to_thread(lambda: [producers_to_proto(table) for table in tables])


def _by_server(replicas: Sequence[R]) -> dict[int, list[R]]:
    by_server: dict[int, list[R]] = {}
    for replica in replicas:
        for server_id in replica.replicas:
            by_server.setdefault(server_id, []).append(replica)
    return by_server


def _portions(items: Sequence[T]) -> Iterable[Sequence[T]]:
    for at in range(0, len(items), BUCKETS_PER_REQUEST_MAX):
        yield items[at : at + BUCKETS_PER_REQUEST_MAX]
