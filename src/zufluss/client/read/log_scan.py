"""Reading a log: what to read (`AsyncLogScan`) and a run of it (`AsyncLogScanner`).

The log of a table without primary key holds its rows; the log of a primary-key table holds its
changes, each with its kind (`read/decode.py` has the columns). Both are read in the same way.

A scan is a description that can be run many times; each run is a scanner with its own positions. A
bounded scan takes the end of every bucket when it starts and stops there; an unbounded one follows
the log. Rows of one bucket come in order, buckets in the order of arrival.

| start | meaning |
|---|---|
| `"earliest"`, `"latest"` | the first existing record; only records that arrive from now on |
| `"unbroken"` | as `"earliest"`, or behind the last records that were lost with a disk |
| epoch ms, `datetime` | the first record committed at or after that time |
| `{bucket: offset}` | exactly these offsets, and no other buckets |

The keys of `{bucket: offset}` are bucket numbers, or `TableBucket`s as `positions()` returns them.

`stop` takes the same values, and None to follow. A scan that follows all partitions picks up later
partitions from their beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from zufluss.client.core.catalog import list_partitions, table_schema
from zufluss.client.core.keys import check_primary_key
from zufluss.client.core.offsets import (
    BucketPlace,
    Position,
    check_buckets,
    list_offsets,
    places_of,
)
from zufluss.client.core.partition_filter import possible_partitions
from zufluss.client.core.partitions import partition_names
from zufluss.client.read.decode import DecodedRows, LogDecoder
from zufluss.client.read.fetcher import FetchPlan, LogFetcher, ReadyChunk
from zufluss.client.read.scan import AsyncScan, AsyncScanner, Offsets, Start, Stop
from zufluss.errors import InvalidTableError, PartitionNotExistError, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.wire.predicates import predicate_to_proto

PARTITION_DISCOVERY_MS: Final = 10_000
"""Time between two listings of the partitions by a scan that follows all of them."""


@dataclass(frozen=True, slots=True, repr=False)
class AsyncLogScan(AsyncScan):
    """What to read of a log; `table.scan(…)` or `table.changelog(…)` makes it.

    >>> scan = table.scan(columns=["id"], filter=col("id") > 5)  # doctest: +SKIP
    >>> (await scan.to_arrow()).num_rows  # doctest: +SKIP
    >>> async for batch in table.scan(start="latest", stop=None):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """

    start: Start = "earliest"
    """Where to begin; see the module's docstring."""
    stop: Stop = "latest"
    """Where to end; None follows the log."""
    with_offsets: bool = False
    """Add `__offset`, `__timestamp` and `__bucket`."""
    changelog: bool = False
    """Read the changes of a primary-key table, with `_change_type` and so on."""

    def __post_init__(self) -> None:
        if self.info.has_primary_key and not self.changelog:
            raise InvalidTableError(
                f"table {self.info.path} has a primary key, and its log has changes, not rows; use "
                "table.changelog() for these, table.scan() for all rows, table.lookup(keys) for "
                "rows by key, table.head(n) for some rows"
            )
        if self.changelog:
            check_primary_key(self.info, "changelog", "table.scan()")
        self.check_limit()
        self.decoder()

    @property
    def follows(self) -> bool:
        """Whether the scan has no stop."""
        return self.stop is None

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self.decoder().schema

    def decoder(self) -> LogDecoder:
        """A new decoder for the answers of a run."""
        return LogDecoder(
            self.info,
            self.columns,
            self.filter,
            changelog=self.changelog,
            with_offsets=self.with_offsets,
            with_cuts=self.limit is not None,
            check_crc=self.connection.options.check_crc,
        )

    async def open(self) -> AsyncLogScanner:
        """Start a run that can be polled and has positions."""
        scanner = AsyncLogScanner(self)
        try:
            await scanner.start()
        except BaseException:
            await scanner.close()
            raise
        return scanner

    def options(self) -> dict[str, str]:
        """What was chosen, by name, for people."""
        stop = "never, the log is followed" if self.stop is None else str(self.stop)
        what = {"reads": "changelog" if self.changelog else "log"}
        return what | super(AsyncLogScan, self).options() | {"start": str(self.start), "stop": stop}


class AsyncLogScanner(AsyncScanner):
    """A run of a scan: iterate it, or `poll` it; `positions` says where it is.

    >>> async with await table.scan(stop=None).open() as scanner:  # doctest: +SKIP
    ...     batch = await scanner.poll(timeout_ms=1000)
    ...     resume = scanner.positions()
    """

    def __init__(self, scan: AsyncLogScan) -> None:
        self.scan = scan
        """The scan of this run."""
        self.schema = scan.schema
        """The Arrow schema of the rows."""
        self._connection = scan.connection
        self._left = scan.limit
        self._positions: dict[TableBucket, int] = {}
        self._parts: list[tuple[ReadyChunk, DecodedRows]] = []
        self._closed = False
        self._discovery: asyncio.Task[None] | None = None
        self._fetcher = LogFetcher(self._connection, self._plan())

    def _plan(self) -> FetchPlan:
        info, filter_ = self.scan.info, self.scan.filter
        decoder = self.scan.decoder()
        predicate = None
        if filter_ is not None and not self.scan.changelog:
            predicate = predicate_to_proto(filter_.resolve(info.schema), info.schema)
        push = not decoder.reads_all and info.log_format == "ARROW"

        async def schema_of(schema_id: int) -> Any:
            return await table_schema(self.scan.connection, info.path, schema_id)

        return FetchPlan(info, decoder, predicate, push, self._follows_partitions, schema_of)

    # -- start ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the buckets and their offsets, and start fetching."""
        scan = self.scan
        names = await partition_names(self._connection, scan.info, scan.partitions, scan.filter)
        places = await self._places(names)
        if self.scan.buckets is not None:
            check_buckets(self.scan.buckets, self.scan.info)
            places = [p for p in places if p.bucket.bucket_id in self.scan.buckets]
        starts = await self._offsets(places, self.scan.start)
        places = [place for place in places if place.bucket in starts]
        stops = {} if self.scan.stop is None else await self._offsets(places, self.scan.stop)
        for place in places:
            start = starts[place.bucket]
            self._positions[place.bucket] = start
            self._fetcher.add(place, start, stops.get(place.bucket, self._default_stop(start)))
        self._fetcher.start()
        if self._follows_partitions:
            self._discovery = asyncio.get_running_loop().create_task(self._discover())

    async def _places(self, names: Sequence[str | None]) -> list[BucketPlace]:
        """The buckets; refreshes partitions that may have been created again."""
        info = self.scan.info
        places = await places_of(self._connection, info, names)
        starts: Mapping[Any, int] = self.scan.start if isinstance(self.scan.start, Mapping) else {}
        buckets = {bucket for bucket in starts if isinstance(bucket, TableBucket)}
        if info.is_partitioned and buckets - {place.bucket for place in places}:
            for name in names:
                self._connection.metadata.forget_partition(info.table_id, name or "")
            places = await places_of(self._connection, info, names)
        return places

    def _default_stop(self, start: int) -> int | None:
        """The stop of a bucket without one: a bounded scan does not read it."""
        return None if self.scan.stop is None else start

    @property
    def _follows_partitions(self) -> bool:
        scan = self.scan
        return scan.info.is_partitioned and scan.partitions is None and scan.stop is None

    async def _offsets(
        self, places: Sequence[BucketPlace], at: Position | Offsets
    ) -> dict[TableBucket, int]:
        if not isinstance(at, Mapping):
            return await list_offsets(self._connection, self.scan.info, places, at)
        by_key: Mapping[Any, int] = at
        offsets = {}
        for place in places:
            offset = by_key.get(place.bucket, by_key.get(place.bucket.bucket_id))
            if offset is not None:
                offsets[place.bucket] = offset
        return offsets

    async def _discover(self) -> None:
        """Refresh the partitions from time to time."""
        while True:
            await asyncio.sleep(PARTITION_DISCOVERY_MS / 1000)
            try:
                await self.refresh_partitions()
            except ZuflussError as e:
                self._fetcher.fail(e)
                return

    async def refresh_partitions(self) -> None:
        """Add partitions that were created, and remove partitions that were dropped."""
        partitions = await list_partitions(self._connection, self.scan.info.path)
        names = {partition.name for partition in partitions}
        known = self._fetcher.partitions
        gone = {name for name in known if name not in names}
        self._fetcher.remove_partitions(gone)
        new = possible_partitions(self.scan.info, self.scan.filter, names - known)
        try:
            places = await places_of(self._connection, self.scan.info, sorted(new))
        except PartitionNotExistError:
            return  # a partition was dropped meanwhile; the next refresh notices
        chosen = self.scan.buckets
        places = [p for p in places if chosen is None or p.bucket.bucket_id in chosen]
        for bucket, start in (await self._offsets(places, "earliest")).items():
            place = next(p for p in places if p.bucket == bucket)
            self._positions[bucket] = start
            self._fetcher.add(place, start, None)
        self._fetcher.start()

    # -- reading -------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True when all rows of a bounded scan were handed out."""
        if self._closed or self._left == 0:
            return True
        fetcher = self._fetcher
        return not self._parts and not fetcher.ready and fetcher.done and not fetcher.failure

    def positions(self) -> dict[TableBucket, int]:
        """Return the next offset of each bucket: a `start` to continue from."""
        return dict(self._positions)

    async def next_batch(self) -> pa.RecordBatch | None:
        """Return the next rows; None at the end. May be cancelled and called again."""
        while not self._closed and self._left != 0:
            if (rows := self.at_hand()) is not None:
                return rows
            if not await self._next_chunk():
                return None
        return None

    def at_hand(self) -> pa.RecordBatch | None:
        """Return the next rows of the current chunk; None if it is used up."""
        while self._parts and not self._closed and self._left != 0:
            rows = self._hand_out(*self._parts.pop(0))
            if rows.num_rows:
                return rows
        return None

    async def _next_chunk(self) -> bool:
        """Wait for the next chunk; returns False if none will come."""
        fetcher = self._fetcher
        while True:
            if fetcher.ready:
                break
            if fetcher.failure is not None:
                raise fetcher.failure
            if fetcher.done:
                return False
            fetcher.arrived.clear()
            await fetcher.arrived.wait()
        item = fetcher.ready[0]
        parts = await asyncio.shield(item.rows)
        fetcher.ready.popleft()
        fetcher.release(item.size)
        self._parts = [(item, part) for part in parts]
        return True

    def _hand_out(self, item: ReadyChunk, part: DecodedRows) -> pa.RecordBatch:
        rows, position = part.rows, part.next_offset
        if self._left is not None:
            if rows.num_rows > self._left:
                rows = rows.slice(0, self._left)
                assert part.offsets is not None
                position = part.offsets[rows.num_rows - 1].as_py() + 1
            self._left -= rows.num_rows
        self._positions[item.bucket] = position
        return rows

    async def close(self) -> None:
        """Stop fetching. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
        await self._fetcher.close()

    def __repr__(self) -> str:
        places = ", ".join(f"{b.bucket_id}: {o}" for b, o in sorted(self._positions.items())[:8])
        return f"<AsyncLogScanner {self.scan.info.path} at {{{places}}}>"
