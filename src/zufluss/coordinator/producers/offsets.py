"""Offsets that producers registered, as Fluss's sinks do: the first one wins, until it expires.

A sink that begins without state registers the end offsets of its tables. If it fails before its
first checkpoint, its next start gets these offsets, and undoes the changes after them. The writers
of zufluss use producers instead (`producers/calls.py`), which need no expiry.

| API | answer |
|---|---|
| REGISTER_PRODUCER_OFFSETS (1053) | 0: registered; 1: there were offsets already, which stay |
| GET_PRODUCER_OFFSETS (1054) | the offsets and when they expire (epoch ms); empty without offsets |
| DELETE_PRODUCER_OFFSETS (1055) | nothing, also when there were no offsets |

| path below `/producers/offsets` | value |
|---|---|
| `ID` | an object with `expires` (epoch ms) and `tables`: by table id the number of parts |
| `ID/TABLE_ID/offsets/N` | offsets of a table as in `producers/records.py` |

Expired offsets are never returned; a task deletes them, or new offsets replace them. The store is
read at every call, so no memory can differ from it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from zufluss.cluster.producers import Baseline
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.producers.records import change_parts, decode_parts, part_count
from zufluss.coordinator.records import guarded
from zufluss.coordinator.tasks import PendingTasks
from zufluss.errors import ConfigError
from zufluss.meta.api import Create, Delete, MetaStore, Op, fits_a_transaction
from zufluss.model.producer import check_producer_id
from zufluss.model.schema import dump_object
from zufluss.periodic import repeat
from zufluss.tasks import end
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_key

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

log = structlog.get_logger(__name__)

OFFSETS_PATH: Final = "/producers/offsets"
CREATED: Final = 0
ALREADY_EXISTS: Final = 1
TABLES_MAX: Final = 10_000
"""Tables that one producer may register offsets of."""

TableOffsets = Mapping[int, Baseline]


class RegisteredOffsets(NamedTuple):
    """The offsets of a producer."""

    expires_ms: int
    """When they expire, epoch milliseconds."""
    tables: TableOffsets
    """The offsets by table id."""


class _Head(NamedTuple):
    expires_ms: int
    parts: dict[int, int]


class ProducerOffsets:
    """The offsets that producers registered."""

    def __init__(
        self,
        store: MetaStore,
        ledger: Ledger,
        conf: Configuration,
        clock_ms: Callable[[], int],
        expiry_ms: Callable[[], int],
    ) -> None:
        """`expiry_ms` is the time by which offsets expire (`clock.ExpiryClock`)."""
        self._store = store
        self._ledger = ledger
        self._ttl_ms = conf.get(options.COORDINATOR_PRODUCER_OFFSETS_TTL)
        self._interval_ms = conf.get(options.COORDINATOR_PRODUCER_OFFSETS_CLEANUP_INTERVAL)
        self._clock_ms = clock_ms
        self._expiry_ms = expiry_ms
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._tasks = PendingTasks("producer_offsets")

    def start(self) -> None:
        """Delete expired offsets from now on."""
        seconds = self._interval_ms / 1000
        work = repeat(seconds, self.delete_expired, "producer_offsets_not_deleted")
        self._task = asyncio.create_task(work, name="producer-offsets")

    async def stop(self) -> None:
        """Finish the changes under way, and delete no more."""
        await end(self._task)
        await self._tasks.settle()

    # Handlers

    async def register_producer_offsets(
        self, request: m.RegisterProducerOffsetsRequest, ctx: RequestContext
    ) -> m.RegisterProducerOffsetsResponse:
        """REGISTER_PRODUCER_OFFSETS (1053)."""
        ttl_ms = request.ttl_ms if request.HasField("ttl_ms") else None
        tables = await asyncio.to_thread(_tables, request)
        is_new = await self.add(request.producer_id, tables, ttl_ms)
        return m.RegisterProducerOffsetsResponse(result=CREATED if is_new else ALREADY_EXISTS)

    async def get_producer_offsets(
        self, request: m.GetProducerOffsetsRequest, ctx: RequestContext
    ) -> m.GetProducerOffsetsResponse:
        """GET_PRODUCER_OFFSETS (1054)."""
        registered = await self.get(request.producer_id)
        if registered is None:
            return m.GetProducerOffsetsResponse()
        return m.GetProducerOffsetsResponse(
            producer_id=request.producer_id,
            expiration_time=registered.expires_ms,
            table_offsets=await asyncio.to_thread(_messages, registered.tables),
        )

    async def delete_producer_offsets(
        self, request: m.DeleteProducerOffsetsRequest, ctx: RequestContext
    ) -> m.DeleteProducerOffsetsResponse:
        """DELETE_PRODUCER_OFFSETS (1055)."""
        await self.delete(request.producer_id)
        return m.DeleteProducerOffsetsResponse()

    # Offsets

    async def add(self, producer_id: str, tables: TableOffsets, ttl_ms: int | None) -> bool:
        """Register offsets unless there are some already; returns whether they were registered."""
        path = _path(producer_id)
        if ttl_ms is not None and ttl_ms < 1:
            raise ConfigError(f"ttl_ms {ttl_ms} is not allowed; give 1 or more, or none at all")
        if len(tables) > TABLES_MAX:
            raise ConfigError(
                f"offsets of {len(tables)} tables are given, at most {TABLES_MAX} are allowed; "
                "register some of them under another id"
            )
        return await self._tasks.undisturbed(self._add(path, tables, ttl_ms))

    async def _add(self, path: str, tables: TableOffsets, ttl_ms: int | None) -> bool:
        async with self._lock:
            before = await self._head(path)
            if before is not None:
                if not self._is_over(before):
                    return False
                await self._remove(path, before)
            expires_ms = self._clock_ms() + (self._ttl_ms if ttl_ms is None else ttl_ms)
            ops = await asyncio.to_thread(_create, path, RegisteredOffsets(expires_ms, tables))
            await self._remove_rest(path)  # of a registration or removal that did not finish
            if fits_a_transaction(ops):
                await self._ledger.commit(ops)
            else:  # the head last: there is nothing without it
                await self._ledger.commit_in_portions(ops[1:])
                await self._ledger.commit(ops[:1])
        log.info("producer_offsets_kept", path=path, tables=len(tables))
        return True

    async def get(self, producer_id: str) -> RegisteredOffsets | None:
        """The offsets of a producer; None if there are none, or they have expired."""
        path = _path(producer_id)
        async with self._lock:
            head = await self._head(path)
            if head is None or self._is_over(head):
                return None
            values = {entry.path: entry.value for entry in await self._store.tree(path)}

        def read() -> RegisteredOffsets:
            tables = {i: _read_table(path, i, count, values) for i, count in head.parts.items()}
            return RegisteredOffsets(head.expires_ms, tables)

        return await asyncio.to_thread(read)

    async def delete(self, producer_id: str) -> None:
        """Delete the offsets of a producer, if there are any."""
        await self._tasks.undisturbed(self._delete(_path(producer_id)))

    async def delete_expired(self) -> int:
        """Delete expired offsets; returns of how many producers. The task calls this."""
        names = await self._store.children(OFFSETS_PATH)
        paths = [f"{OFFSETS_PATH}/{name}" for name in names]
        return sum([await self._tasks.undisturbed(self._delete(i, expired=True)) for i in paths])

    async def _delete(self, path: str, *, expired: bool = False) -> bool:
        """Delete offsets, or only expired ones; returns whether there were such offsets."""
        async with self._lock:
            head = await self._head(path)
            if head is None:
                await self._remove_rest(path)
                return False
            if expired and not self._is_over(head):
                return False
            await self._remove(path, head)
            return True

    async def _remove(self, path: str, head: _Head) -> None:
        """Delete offsets; of many the head first."""
        ops = _delete(path, head)
        if fits_a_transaction(ops):
            await self._ledger.commit(ops)
        else:
            await self._ledger.commit(ops[:1])
            await self._ledger.commit_in_portions(ops[1:])

    async def _remove_rest(self, path: str) -> None:
        """Delete what a registration or removal that did not finish has left below a path."""
        rest = [entry for entry in await self._store.tree(path) if entry.path != path]
        await self._ledger.commit_in_portions(Delete(entry.path) for entry in rest)

    async def _head(self, path: str) -> _Head | None:
        stored = await self._store.read(path)
        return None if stored is None else guarded(path, _decode_head, stored.value)

    def _is_over(self, head: _Head) -> bool:
        return self._expiry_ms() >= head.expires_ms

    def __repr__(self) -> str:
        return f"ProducerOffsets(ttl_ms={self._ttl_ms})"


def _path(producer_id: str) -> str:
    return f"{OFFSETS_PATH}/{check_producer_id(producer_id)}"


def _create(path: str, registered: RegisteredOffsets) -> list[Op]:
    parts = {str(i): part_count(offsets) for i, offsets in registered.tables.items()}
    head = {"expires": registered.expires_ms, "tables": parts}
    ops: list[Op] = [Create(path, dump_object(head))]
    for table_id, offsets in registered.tables.items():
        ops += change_parts(f"{path}/{table_id}", 0, offsets)
    return ops


def _delete(path: str, head: _Head) -> list[Op]:
    ops: list[Op] = [Delete(path)]
    for table_id, count in head.parts.items():
        ops += change_parts(f"{path}/{table_id}", count, None)
    return ops


def _decode_head(value: bytes) -> _Head:
    head: dict[str, Any] = json.loads(value)
    return _Head(int(head["expires"]), {int(i): count for i, count in head["tables"].items()})


def _read_table(path: str, table_id: int, parts: int, values: Mapping[str, bytes]) -> Baseline:
    def read(source: Mapping[str, bytes]) -> Baseline:
        below = f"{path}/{table_id}"
        return decode_parts(below, [source[f"{below}/offsets/{at}"] for at in range(parts)])

    return guarded(path, read, values)


def _tables(request: m.RegisterProducerOffsetsRequest) -> dict[int, Baseline]:
    """The offsets of a request; the last offset of a bucket that is named twice."""
    tables: dict[int, dict[tuple[int | None, int], int]] = {}
    for table in request.table_offsets:
        offsets = tables.setdefault(table.table_id, {})
        for each in table.bucket_offsets:
            offsets[bucket_key(each)] = each.log_end_offset
    return dict(tables)


def _messages(tables: TableOffsets) -> list[m.PbProducerTableOffsets]:
    return [
        m.PbProducerTableOffsets(
            table_id=table_id,
            bucket_offsets=[
                m.PbBucketOffset(
                    partition_id=partition_id, bucket_id=bucket_id, log_end_offset=offset
                )
                for (partition_id, bucket_id), offset in offsets.items()
            ],
        )
        for table_id, offsets in tables.items()
    ]
