"""What the coordinator tells tablet servers, and the two ways it gets there.

`TabletGateway` is one tablet server as the coordinator sees it. In one process with both roles
the tablet server object itself is the gateway; apart, `RemoteTablet` puts the same calls on the
wire. `Tablets` knows the gateway of each server and sends every bucket's news to the servers that
hold it.

| call | on the wire | when |
|---|---|---|
| update_metadata | UPDATE_METADATA (1013) | the catalog or the set of servers changed |
| start_replicas | NOTIFY_LEADER_AND_ISR (1018) | buckets were created; returns when they serve |
| stop_replicas | STOP_REPLICA (1019) | buckets were dropped; returns when their disk is free |
| assign | answer of REGISTER_TABLET_SERVER (30000) | a tablet server joined |

`assign` carries everything: the whole picture and all replicas of that server. What the server
has on its disk beyond them belongs to tables that were dropped while it was away, and is deleted.
That is how a drop is finished after a crash. A remote tablet server must hold back the other three
calls from the moment it asks to register until it has applied the answer, because they travel on
another connection and may overtake it.

A server that cannot be told is not retried: it is told everything when it registers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from zufluss.coordinator import codec
from zufluss.coordinator.image import BucketState, ClusterImage, ImageChange
from zufluss.errors import LeaderNotAvailableError, ZuflussError, error
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

log = structlog.get_logger(__name__)

R = TypeVar("R", "ReplicaAssignment", "ReplicaStop")

BUCKETS_PER_REQUEST_MAX = 10_000
"""Buckets in one request to a tablet server; more are sent in several."""


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """A bucket that a tablet server has to hold."""

    table_bucket: TableBucket
    """The bucket."""
    physical_path: PhysicalTablePath
    """The table or partition it belongs to."""
    state: BucketState
    """Who holds it and who leads it."""

    @property
    def leader_epoch(self) -> int:
        """The epoch of its leader."""
        return self.state.leader_epoch


@dataclass(frozen=True, slots=True)
class ReplicaStop:
    """A bucket that a tablet server has to give up."""

    table_bucket: TableBucket
    """The bucket."""
    state: BucketState
    """Who held it until now."""
    delete: bool
    """Its files go as well."""


class TabletGateway(Protocol):
    """One tablet server, told what to do by the coordinator."""

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply these changes to its picture of the cluster."""
        ...

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Hold these buckets; return when each of them serves, raise when one cannot."""
        ...

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and free their disk where it says delete."""
        ...


class LocalTablet(TabletGateway, Protocol):
    """A tablet server in the coordinator's process: it is told everything at once at start."""

    async def assign(self, image: ClusterImage, replicas: Sequence[ReplicaAssignment]) -> None:
        """Take over this picture, hold exactly these buckets, delete every other on the disk."""
        ...


def assignments(image: ClusterImage, server_id: int) -> list[ReplicaAssignment]:
    """Every bucket that one tablet server has to hold."""
    return [
        ReplicaAssignment(bucket, path, state)
        for path, bucket, state in image.buckets()
        if server_id in state.replicas
    ]


class Tablets:
    """The gateways of the tablet servers that are there."""

    def __init__(self) -> None:
        self._gateways: dict[int, TabletGateway] = {}

    def attach(self, server_id: int, gateway: TabletGateway) -> None:
        """Tell this server from now on."""
        self._gateways[server_id] = gateway

    def detach(self, server_id: int) -> None:
        """The server is gone; it is told everything when it comes back."""
        self._gateways.pop(server_id, None)

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Tell every server of changes; one that cannot be told is logged and left out."""
        await self._best_effort(
            "update_metadata",
            {i: gateway.update_metadata(changes) for i, gateway in self._gateways.items()},
        )

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Start buckets where they belong; an error when a leader does not come up."""
        by_server = _by_server(replicas)
        for server_id in sorted({r.state.leader for r in replicas} - set(self._gateways)):
            raise LeaderNotAvailableError(
                f"tablet server {server_id} should lead new buckets but is not there; "
                f"try again when it is back"
            )
        calls = [
            gateway.start_replicas(by_server[i])
            for i, gateway in self._gateways.items()
            if i in by_server
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Stop buckets wherever they are; a server that cannot be told does it when it is back."""
        by_server = _by_server(replicas)
        await self._best_effort(
            "stop_replicas",
            {
                i: gateway.stop_replicas(by_server[i])
                for i, gateway in self._gateways.items()
                if i in by_server
            },
        )

    async def _best_effort(self, what: str, calls: dict[int, Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
        for server_id, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, ZuflussError | OSError):
                log.warning("tablet_not_told", call=what, server_id=server_id, error=str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome


class RpcCaller(Protocol):
    """What a `RemoteTablet` needs of a connection."""

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        """The answer to a request; raises the error it carries."""
        ...


class RemoteTablet:
    """A tablet server in another process. `connect` gives a live connection to it."""

    def __init__(
        self,
        server_id: int,
        coordinator_epoch: int,
        connect: Callable[[], Awaitable[RpcCaller]],
        timeout_ms: int,
    ) -> None:
        self.server_id = server_id
        self._epoch = coordinator_epoch
        self._connect = connect
        self._timeout_ms = timeout_ms

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Send UPDATE_METADATA."""
        await self._call(ApiKey.UPDATE_METADATA, codec.update_request(changes, self._epoch))

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Send NOTIFY_LEADER_AND_ISR; raise what one of the buckets answered."""
        for some in _portions(replicas):
            request = m.NotifyLeaderAndIsrRequest(
                coordinator_epoch=self._epoch,
                notify_buckets_leader_req=[replica_to_proto(r) for r in some],
            )
            response = await self._call(ApiKey.NOTIFY_LEADER_AND_ISR, request)
            _check_buckets(self.server_id, response.notify_buckets_leader_resp)

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Send STOP_REPLICA; raise what one of the buckets answered."""
        for some in _portions(replicas):
            request = m.StopReplicaRequest(
                coordinator_epoch=self._epoch, stop_replicas_req=[_stop_to_proto(s) for s in some]
            )
            response = await self._call(ApiKey.STOP_REPLICA, request)
            _check_buckets(self.server_id, response.stop_replicas_resp)

    async def _call(self, api_key: ApiKey, request: Any) -> Any:
        connection = await self._connect()
        return await connection.call(api_key, request, timeout_ms=self._timeout_ms)

    def __repr__(self) -> str:
        return f"RemoteTablet(server_id={self.server_id}, coordinator_epoch={self._epoch})"


def replica_to_proto(replica: ReplicaAssignment) -> m.PbNotifyLeaderAndIsrReqForBucket:
    """An assignment as it travels."""
    state = replica.state
    return m.PbNotifyLeaderAndIsrReqForBucket(
        physical_table_path=codec.physical_path_to_proto(replica.physical_path),
        table_bucket=codec.bucket_to_proto(replica.table_bucket),
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        replicas=state.replicas,
        isr=state.isr,
        bucket_epoch=state.bucket_epoch,
    )


def replica_from_proto(message: m.PbNotifyLeaderAndIsrReqForBucket) -> ReplicaAssignment:
    """An assignment as it arrived."""
    state = BucketState(
        replicas=tuple(message.replicas),
        leader=message.leader,
        leader_epoch=message.leader_epoch,
        isr=tuple(message.isr),
        bucket_epoch=message.bucket_epoch,
    )
    return ReplicaAssignment(
        codec.bucket_from_proto(message.table_bucket),
        codec.physical_path_from_proto(message.physical_table_path),
        state,
    )


def _stop_to_proto(stop: ReplicaStop) -> m.PbStopReplicaReqForBucket:
    return m.PbStopReplicaReqForBucket(
        table_bucket=codec.bucket_to_proto(stop.table_bucket),
        leader_epoch=stop.state.leader_epoch,
        delete=stop.delete,
    )


def _check_buckets(server_id: int, answers: Iterable[Any]) -> None:
    for answer in answers:
        if answer.error_code:
            bucket = codec.bucket_from_proto(answer.table_bucket)
            raise error(
                answer.error_code, f"tablet server {server_id}, {bucket}: {answer.error_message}"
            )


def _by_server(replicas: Sequence[R]) -> dict[int, list[R]]:
    by_server: dict[int, list[R]] = {}
    for replica in replicas:
        for server_id in replica.state.replicas:
            by_server.setdefault(server_id, []).append(replica)
    return by_server


def _portions(items: Sequence[R]) -> Iterable[Sequence[R]]:
    for at in range(0, len(items), BUCKETS_PER_REQUEST_MAX):
        yield items[at : at + BUCKETS_PER_REQUEST_MAX]
