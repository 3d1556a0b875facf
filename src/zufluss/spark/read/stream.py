"""The streaming read of `format("fluss")`.

| startup mode | first batch | then |
|---|---|---|
| `full`, primary key | the rows that the table holds | the log from exactly there |
| `full`, log table | the rows in its lake, if there are some | the log from exactly there |
| `full`, `$changelog`; `earliest` | | the log that is there |
| `latest` | | the log from now on |
| `timestamp` | | the log from that time on |

A stream of a primary-key table has each row as an insert or update left it, and no deletes; its
`$changelog` has all changes with their kinds.

A batch is the log between two offsets (`read/stream_offsets.py`), so it has the same rows however
often it is run, by any number of tasks. New partitions join the stream with all their rows. Dropped
partitions leave it; their unread rows are lost, and a warning is logged. If retention removed log
before it was read, the query fails.

Spark 4.1 asks for the end of the next batch without saying where the batch begins. The reader knows
that from the batch before, except for the first batch after a start, whose beginning it learns when
the batch is planned. The end of that batch fits both cases: a new query reads the state of the
table at that end, a restarted query reads the log up to it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from zufluss.client.core.offsets import BucketPlace, Position, list_offsets
from zufluss.client.core.partitions import chosen_places
from zufluss.client.keyed.pins import BucketPin, BucketPins
from zufluss.client.read.union_plan import TailRange, UnionPlan, plan_union
from zufluss.errors import ConfigError, OffsetOutOfRangeError, PartitionNotExistError
from zufluss.model.lake import LakeSnapshot
from zufluss.model.table import TableBucket
from zufluss.spark import source_options as o
from zufluss.spark.cluster import Client, client
from zufluss.spark.read.batch import table_info
from zufluss.spark.read.filters import checked_filter
from zufluss.spark.read.packing import pack, pieces
from zufluss.spark.read.plan import PlanRequest, has_lake, planned_lake_splits
from zufluss.spark.read.plan_pins import PINS_MAX
from zufluss.spark.read.shape import ReadShape, check_schema, parse_time, whole_schema
from zufluss.spark.read.split_read import SplitRead
from zufluss.spark.read.splits import LogSplit, Split, SplitGroup, StateSplit
from zufluss.spark.read.stream_limits import AvailableNow, limit_of, limited, read_limits
from zufluss.spark.read.stream_offsets import Phase, StreamOffset
from zufluss.spark.source_options import SourceOptions, TableView

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

TASKS_MAX: Final = 64
"""The most tasks of a batch; independent of cores, so that a repeated batch has the same tasks."""
ASKED: Final = 3
"""How often the cluster is asked before a dropped partition fails the query."""

Ends = Mapping[TableBucket, int]
R = TypeVar("R")


class FlussStreamReader(DataSourceStreamReader, AvailableNow):  # type: ignore[misc]
    """Reads a table as a stream."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        if options.view is TableView.LAKE:
            raise ConfigError(
                f"{options.path}$lake cannot be read as a stream; a stream of {options.path} "
                "begins with what the lake has"
            )
        info = table_info(options)
        changelog = options.view is TableView.CHANGELOG
        check_schema(info, schema, whole_schema(info, changelog=changelog))
        filter = checked_filter(options.get(o.FILTER), info.schema)
        shape = ReadShape(info, schema, filter, changelog)
        self._info = info
        self._options = options
        self._partitions = options.get(o.PARTITIONS)
        self._read = SplitRead(options.bootstrap, options.client, shape, self._partitions)
        self._default_limit = read_limits(options)
        self._position = _position(options)
        self._pins: BucketPins | None = None
        self._frozen: Ends | None = None
        self._newest: Ends | None = None
        self._last: StreamOffset | None = None

    def _client(self) -> Client:
        return client(self._options.bootstrap, self._options.client)

    # -- offsets -------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """The offset at which a new query begins."""
        last = self._last
        if last is None or not last.state:
            return self._run(self._first).to_json()
        return replace(last, phase="state", state=False).to_json()

    def _run(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Ask the cluster, and again if a partition was dropped meanwhile."""

        async def asked() -> R:
            for _ in range(ASKED - 1):
                try:
                    return await ask()
                except PartitionNotExistError as dropped:
                    log.info("stream.asked_again table=%s cause=%s", self._info.path, dropped)
            return await ask()

        return self._client().run(asked())

    async def _first(self) -> StreamOffset:
        connection, info = self._client().connection, self._info
        full = self._options.get(o.STARTUP_MODE) == "full" and self._position == "earliest"
        if full and self._options.view is TableView.ROWS:
            if info.has_primary_key:
                return await self._pinned()
            if has_lake(info):
                plan = await plan_union(connection, info, self._partitions)
                if plan.lake is not None:
                    starts = {part.bucket: part.start for part in plan.tail}
                    places = [BucketPlace(part.bucket, part.partition) for part in plan.tail]
                    offset = self._at("state", starts, places)
                    return replace(offset, lake=plan.lake.snapshot_id, fresh=plan.fresh)
        return self._at("start", *await self._offsets(self._position, self._partitions))

    async def _offsets(
        self, at: Position, names: Sequence[str] | None
    ) -> tuple[dict[TableBucket, int], list[BucketPlace]]:
        connection = self._client().connection
        places = await chosen_places(connection, self._info, names, None)
        return await list_offsets(connection, self._info, places, at), places

    async def _ends(self) -> tuple[dict[TableBucket, int], list[BucketPlace]]:
        """The end of the log. Chosen partitions may be dropped and created again meanwhile."""
        names = self._partitions
        if names is not None:
            partitions = await self._client().connection.admin.list_partitions(self._info.path)
            there = {partition.name for partition in partitions}
            names = tuple(name for name in names if name in there)
        return await self._offsets("latest", names)

    async def _pinned(self) -> StreamOffset:
        """The current state; some buckets are pinned for the first batch (`plan_pins.py`)."""
        ends, places = await self._offsets("latest", self._partitions)
        few = [place for place in places if ends[place.bucket]][:PINS_MAX]
        await self._let_go()
        self._pins = BucketPins(self._client().connection, self._info, resume=True)
        return self._at("state", {**ends, **await self._pins.open(few, {})}, places)

    def _at(self, phase: Phase, buckets: Ends, places: Sequence[BucketPlace]) -> StreamOffset:
        return StreamOffset(self._info.table_id, phase, buckets, _names(places))

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """The offset at which the next batch ends."""
        before = self._last if start is None else StreamOffset.of(start, self._info)
        if before is None:
            self._last = self._run(self._unknown)
        elif before.phase == "state":
            self._last = replace(before, phase="log", state=True)
        else:
            after = self._run(lambda: self._next(before, limit_of(limit)))
            same = before.phase == "log" and after.buckets == before.buckets
            self._last = before if same else after
        return self._last.to_json()

    async def _unknown(self) -> StreamOffset:
        """The end of a batch whose beginning is not known."""
        first = await self._first()
        if first.phase == "state" and first.lake is None:
            return replace(first, phase="log", state=True)
        ends, places = await self._ends()
        if first.phase == "start":
            return self._at("log", ends, places)
        stops = {bucket: max(start, ends.get(bucket, 0)) for bucket, start in first.buckets.items()}
        return replace(first, phase="log", state=True, buckets=stops, starts=first.buckets)

    async def _next(self, before: StreamOffset, limit: Any) -> StreamOffset:
        connection, info = self._client().connection, self._info
        ends, places = await self._ends()
        self._newest = ends
        if self._frozen is not None:
            last = {**before.buckets, **self._frozen}
            ends = {b: min(at, last[b]) for b, at in ends.items() if b in last}
        for bucket in before.buckets.keys() - {place.bucket for place in places}:
            log.warning("stream.partition_dropped table=%s bucket=%r", info.path, bucket)
        new = [p for p in places if p.bucket in ends and p.bucket not in before.buckets]
        starts = await list_offsets(connection, info, new, "earliest")
        known = {b: at for b, at in before.buckets.items() if b in ends}
        begin = {**known, **starts}
        until = await limited(connection, info, begin, ends, _names(places), limit)
        given_starts = begin if before.phase == "start" else starts
        names = {k: v for k, v in _names(places).items() if k in {b.partition_id for b in until}}
        return StreamOffset(info.table_id, "log", until, names, given_starts)

    def getDefaultReadLimit(self) -> Any:
        """The limit that the options say."""
        return self._default_limit

    def prepareForTriggerAvailableNow(self) -> None:
        """Read up to the current end of the log, and no further."""
        self._frozen, _ = self._run(self._ends)

    def reportLatestOffset(self) -> dict[str, Any]:
        """The end of the log as last asked for, for the progress of the query."""
        ends, self._newest = self._newest, None
        if ends is None:
            ends, _ = self._run(self._ends)
        return {f"{b.partition_id or ''}/{b.bucket_id}": ends[b] for b in sorted(ends)}

    # -- batches -------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch; a batch that is planned again has the same tasks."""
        before = StreamOffset.of(start, self._info)
        self._last = after = StreamOffset.of(end, self._info)
        splits: list[Split] = []
        if after.state and before.phase != "log":
            splits = self._run(lambda: self._state(after))
            before = replace(after, buckets=after.starts or after.buckets)
        elif after.state:
            after = replace(after, starts={})
        parts = self._run(lambda: self._ranges(before, after))
        groups = [[split] for split in splits] + self._packed(parts)
        return [SplitGroup(*group) for group in groups] or [SplitGroup()]

    def _packed(self, parts: Sequence[TailRange]) -> list[list[Split]]:
        """The ranges of each task."""
        records = self._options.get(o.MAX_RECORDS_PER_PARTITION)
        if records is not None:
            return [[LogSplit(piece)] for part in parts for piece in pieces(part, records)]
        groups = pack(parts, TASKS_MAX, split=not self._info.has_primary_key)
        return [[LogSplit(part) for part in group] for group in groups]

    async def _ranges(self, before: StreamOffset, after: StreamOffset) -> list[TailRange]:
        """The log between two offsets, of partitions that still exist."""
        places = {p.bucket: p for p in await self._there(after)}
        starts = {**before.buckets, **after.starts}
        new = [places[bucket] for bucket in places.keys() & after.buckets.keys() - starts.keys()]
        starts |= await self._earliest(new)  # of a query that was restarted, with Spark 4.1
        parts = [
            TailRange(bucket, places[bucket].partition, starts[bucket], stop)
            for bucket, stop in after.buckets.items()
            if bucket in places and starts[bucket] < stop
        ]
        first = await self._earliest([places[part.bucket] for part in parts])
        for part in parts:
            if part.start < first[part.bucket]:
                raise OffsetOutOfRangeError(
                    f"{part.bucket.named(self._info.path, part.partition)}: the query is to go on "
                    f"at offset {part.start}, but the log begins at {first[part.bucket]} by now; "
                    "what lay between was removed by table.log.ttl before it was read. Start the "
                    "query with another checkpointLocation, and a longer table.log.ttl"
                )
        return parts

    async def _earliest(self, places: Sequence[BucketPlace]) -> dict[TableBucket, int]:
        return await list_offsets(self._client().connection, self._info, places, "earliest")

    async def _there(self, after: StreamOffset) -> list[BucketPlace]:
        """The buckets of an offset whose partitions exist."""
        connection, info = self._client().connection, self._info
        if not info.is_partitioned:
            return await chosen_places(connection, info, None, None)
        alive = {p.partition_id for p in await connection.admin.list_partitions(info.path)}
        for gone in after.partitions.keys() - alive:
            log.warning("stream.partition_dropped table=%s partition=%d", info.path, gone)
        names = [name for id_, name in after.partitions.items() if id_ in alive]
        return await chosen_places(connection, info, names, None)

    async def _state(self, after: StreamOffset) -> list[Split]:
        if after.lake is not None:
            return self._lake(after, after.lake)
        places = [place for place in await self._there(after) if place.bucket in after.buckets]
        places = [place for place in places if after.buckets[place.bucket]]
        return [StateSplit(self._pin(place, after)) for place in places]

    def _lake(self, after: StreamOffset, snapshot_id: int) -> list[Split]:
        """Files of the snapshot of the first batch; the cluster may have a newer snapshot now."""
        names = after.partitions.items()
        buckets = [TableBucket(after.table_id, id_, 0) for id_, _ in names]
        tail = [TailRange(b, name, 0, 0) for b, (_, name) in zip(buckets, names, strict=True)]
        lake = LakeSnapshot(after.table_id, snapshot_id, {})
        plan = UnionPlan(self._info, lake, tuple(tail), self._partitions, after.fresh)
        request = PlanRequest(self._info, TableView.ROWS, self._partitions, self._read.shape.prune)
        return planned_lake_splits(request, plan)

    def _pin(self, place: BucketPlace, after: StreamOffset) -> BucketPin:
        """The pin of the state, or a pin that is not open: then the task opens it."""
        bucket, offset = place.bucket, after.buckets[place.bucket]
        if self._pins is not None and self._pins.offset(bucket) == offset:
            return self._pins[bucket]
        return BucketPin.not_opened(place, offset)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        assert isinstance(partition, SplitGroup)
        return self._read.group(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Batches up to this one are not asked for again: close the pins of the state."""
        if self._pins is not None and not StreamOffset.of(end, self._info).state:
            self._client().run(self._let_go())

    def stop(self) -> None:
        """Close the pins when the query ends."""
        self._client().run(self._let_go())

    async def _let_go(self) -> None:
        pins, self._pins = self._pins, None
        if pins is not None:
            await pins.close()


def _names(places: Sequence[BucketPlace]) -> dict[int, str]:
    return {
        place.bucket.partition_id: place.partition
        for place in places
        if place.bucket.partition_id is not None and place.partition is not None
    }


def _position(options: SourceOptions) -> Position:
    """The position at which the log is read from."""
    mode, text = options.get(o.STARTUP_MODE), options.get(o.STARTUP_TIMESTAMP)
    if (mode == "timestamp") != (text is not None):
        raise ConfigError(
            f"table {options.path}: {o.STARTUP_TIMESTAMP.key} is the time of "
            f"{o.STARTUP_MODE.key} = timestamp; give both or none"
        )
    if text is not None:
        return parse_time(o.STARTUP_TIMESTAMP.key, text)
    return "latest" if mode == "latest" else "earliest"
