"""Scans of primary-key tables: every row once, with the state of each bucket at one moment.

| source | rows of a bucket | `log_offsets` |
|---|---|---|
| `"live"` | its state at one moment, pinned on the server | the offset of the pin |
| `"snapshot"` | its newest key-value snapshot in remote storage | the offset of the snapshot |

Rows of a bucket come in the order of their encoded keys, buckets in the order of arrival. The
changelog from `log_offsets` on has exactly the changes that the rows do not contain, so the rows
and then the changes are a copy of the table. `at={bucket: offset}` reads the state at given
offsets, as long as the server can rebuild it.

A run pins its buckets when it is opened, as many as the servers have room for, and the others while
it advances. So a bucket shows one moment, at the opening of the run or later, and a table of any
number of buckets can be scanned. Filters on partition columns leave out partitions.

Four buckets are read at a time, each one page ahead of the consumer. With a `limit`, or with
`prefetch=0` for engines that read ahead themselves, one bucket is read at a time and no page is
read ahead.

`keyed/live_rows.py` and `keyed/stored_rows.py` are the two sources of rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.keys import check_primary_key
from zufluss.client.core.offsets import LISTINGS_MAX, BucketPlace
from zufluss.client.core.partition_filter import possible_partitions
from zufluss.client.core.partitions import chosen_places, offsets_at
from zufluss.client.keyed.cursor import ScanPiece, decode_cursor, encode_cursor
from zufluss.client.keyed.live_rows import ContinuedRows, LiveRows
from zufluss.client.keyed.rows import BucketRows, KvScanShape, RowPage, RowSource
from zufluss.client.keyed.split import split_states
from zufluss.client.keyed.stored_rows import StoredRows
from zufluss.client.read.scan import AsyncScan, AsyncScanner, Offsets
from zufluss.errors import InvalidScanRequestError, PartitionNotExistError
from zufluss.model.table import TableBucket, TableInfo

CURSORS_MAX: Final = 10_000
"""The largest number of cursors that a scan is split into."""
BUCKETS_AT_ONCE: Final = 4
"""Buckets that are read at the same time."""


@dataclass(frozen=True, slots=True, repr=False)
class AsyncKvScan(AsyncScan):
    """What to read of a primary-key table; `table.scan(…)` makes it.

    >>> await table.scan(["id"], col("id") > 5).to_arrow()  # doctest: +SKIP
    >>> async with await table.scan().open() as scanner:  # doctest: +SKIP
    ...     rows = [batch async for batch in scanner]
    ...     changes = table.changelog(start=scanner.log_offsets, stop=None)
    """

    source: Literal["live", "snapshot"] = "live"
    """The source of the rows."""
    at: Offsets | None = None
    """Read the state at these offsets and no other buckets; None reads the present state."""
    prefetch: int = 1
    """Pages of a bucket to read ahead, 0 or 1."""
    resume: bool = True
    """Open a state that the server lost again, at the same offset."""
    cursor: str | None = None
    """Read what another run has left; None reads all rows."""
    stop: Literal["latest"] = field(default="latest", init=False)
    """A scan of rows always ends."""

    def __post_init__(self) -> None:
        check_primary_key(self.info, "scan of its state", "table.scan()")
        self.check_limit()
        if self.prefetch not in (0, 1):
            raise ValueError(f"prefetch {self.prefetch!r} is neither 0 nor 1")
        self.check_choice()
        self.shape()
        if self.cursor is not None:
            self._check_cursor(self.cursor)

    def _check_cursor(self, cursor: str) -> None:
        decode_cursor(self.info, cursor)
        others = {"at": self.at, "partitions": self.partitions, "buckets": self.buckets}
        given = [name for name, value in others.items() if value is not None]
        if self.source != "live" or given:
            raise InvalidScanRequestError(
                f"a cursor has its own partitions, buckets and offsets of the live rows; leave out "
                f"{', '.join(given) or f'source={self.source!r}'}"
            )

    @property
    def follows(self) -> bool:
        """False: a scan of rows always ends."""
        return False

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self.shape().schema

    def shape(self) -> KvScanShape:
        """The columns and the filter of the scan."""
        return KvScanShape(self.info, self.columns, self.filter)

    async def open(self) -> AsyncKvScanner:
        """Pin the state of every bucket and start a run."""
        scanner = AsyncKvScanner(self, self._rows())
        try:
            await scanner.start()
        except BaseException:
            await scanner.close()
            raise
        return scanner

    async def split(self, count: int) -> list[str]:
        """Pin the table, and divide its rows into cursors that other processes can read.

        Each row is behind exactly one cursor, and all show the same state of each bucket. Buckets
        are divided first; with more cursors than buckets, ranges of keys of about the same width.
        A cursor may have no rows. The pins wait for the idle limit (`kv.scanner.ttl`).

        >>> cursors = await orders.scan().split(8)  # doctest: +SKIP
        >>> rows = await orders.scan(cursor=cursors[0]).to_arrow()  # doctest: +SKIP
        """
        if self.cursor is not None or self.source != "live":
            raise InvalidScanRequestError("only a scan of all live rows can be split")
        if type(count) is not int or not 1 <= count <= CURSORS_MAX:
            raise InvalidScanRequestError(
                f"a scan cannot be split into {count!r:.40} parts; give 1 to {CURSORS_MAX}"
            )
        places, at = await chosen_states(self)
        pieces = await split_states(self.connection, self.info, places, at or {}, count)
        return [encode_cursor(self.info, part) for part in pieces]

    def _rows(self) -> RowSource:
        if self.cursor is not None:
            pieces = decode_cursor(self.info, self.cursor)
            return ContinuedRows(
                self.connection, self.info, self.shape(), pieces, resume=self.resume
            )
        if self.source == "live":
            return LiveRows(self.connection, self.info, self.shape(), resume=self.resume)
        return StoredRows(self.connection, self.info, self.shape())

    def options(self) -> dict[str, str]:
        """What was chosen, by name, for people."""
        what = {"reads": f"{self.source} rows"} | super(AsyncKvScan, self).options()
        return what if self.at is None else what | {"at": str(dict(self.at))}


class AsyncKvScanner(AsyncScanner):
    """A run of a scan: iterate it, or `poll` it; `log_offsets` is the moment it shows.

    The run releases its pins or its lease at its end, on an error, and when it is closed. A
    partition that is dropped while it is read raises `PartitionNotExistError` once; the next call
    continues with the other partitions. A partition that is dropped before its first bucket was
    opened is left out, unless the scan names it.
    """

    def __init__(self, scan: AsyncKvScan, rows: RowSource) -> None:
        self.scan = scan
        """The scan of this run."""
        self.schema = scan.schema
        """The Arrow schema of the rows."""
        self._rows = rows
        self._left = scan.limit
        self._ahead = scan.prefetch > 0 and scan.limit is None
        self._waiting: deque[TableBucket] = deque()
        self._lanes: list[_Lane] = []
        self._read = 0
        self._total = 0
        self._partitions: dict[int | None, str | None] = {}
        self._after: dict[TableBucket, bytes] = {}
        self._left_over: list[ScanPiece] | None = None
        self._failure: BaseException | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the buckets and open their states."""
        scan = self.scan
        whole = scan.partitions is None and scan.at is None and scan.cursor is None
        tries = LISTINGS_MAX if whole else 1
        for _ in range(tries - 1):
            try:
                return await self._open()
            except PartitionNotExistError:  # dropped after it was listed
                await self._rows.close()
        return await self._open()

    async def _open(self) -> None:
        scan = self.scan
        if scan.cursor is None:
            places, at = await chosen_states(scan)
        else:
            places, at = await places_of_cursor(scan.connection, scan.info, scan.cursor), None
        self._partitions = {place.bucket.partition_id: place.partition for place in places}
        self._waiting = deque(await self._rows.open(places, at))
        self._total = len(self._waiting)

    @property
    def log_offsets(self) -> dict[TableBucket, int]:
        """Where the changelog continues behind the rows: a `start` for `table.changelog`.

        Raises `InvalidScanRequestError` while buckets of a large table are still to be pinned.
        """
        missing = self._total - len(self._rows.offsets)
        if missing:
            raise InvalidScanRequestError(
                f"{missing} of {self._total} buckets of {self.scan.info.path} are not pinned yet, "
                "so where their changelog continues is not known; read the scan to its end first, "
                "or scan fewer partitions or buckets"
            )
        return dict(self._rows.offsets)

    def positions(self) -> dict[TableBucket, int]:
        """Return `log_offsets`, because rows have no positions."""
        return self.log_offsets

    @property
    def progress(self) -> float:
        """The share of the buckets that was read, 0 to 1."""
        return 1.0 if self.finished or not self._total else self._read / self._total

    @property
    def finished(self) -> bool:
        """True when all rows were handed out; never after a failure."""
        done = self._left == 0 or not (self._waiting or self._lanes)
        return done and self._failure is None

    # -- cursors -------------------------------------------------------------------------------

    async def cursor(self) -> str:
        """Return a text with which `table.scan(cursor=…)` reads the rows not handed out yet.

        Another process may use it, also after this one has died, as long as the states can be
        opened again at their offsets; `detach` leaves them on the servers. The run goes on.
        """
        return encode_cursor(self.scan.info, self._pieces())

    async def detach(self) -> str:
        """End the run, and return its cursor; its pins wait on the servers for another process."""
        pieces = self._pieces()
        lanes, self._lanes = self._lanes, []
        self._waiting.clear()
        for lane in lanes:
            await lane.stop()
        assert isinstance(self._rows, LiveRows), "other runs have no pieces"
        await self._rows.detach()
        await self.close()
        self._left_over = pieces
        return encode_cursor(self.scan.info, pieces)

    def _pieces(self) -> list[ScanPiece]:
        """What is left of each bucket that was not read to its end."""
        if self._failure is not None:
            raise self._failure
        if not isinstance(self._rows, LiveRows):
            raise InvalidScanRequestError(
                f"only a run of live rows has a cursor, not one of source {self.scan.source!r}; "
                "take a lease and read its snapshots, which have a last_key"
            )
        if self._left_over is not None:
            return self._left_over
        left = [*(lane.bucket for lane in self._lanes), *self._waiting]
        return [self._rows.piece(bucket, self._after.get(bucket)) for bucket in left]

    # -- reading -------------------------------------------------------------------------------

    async def next_batch(self) -> pa.RecordBatch | None:
        """Return the next rows; None at the end. May be cancelled and called again."""
        if self._failure is not None:
            raise self._failure
        while not self.finished:
            lane = await self._ready()
            if lane is None:
                break
            try:
                page = await self._take(lane)
            except PartitionNotExistError as e:
                await self._leave(lane, e)
                continue
            except Exception as e:
                self._failure = e
                await self.close()
                raise
            if page.rows.num_rows:
                return self._limited(page.rows)
        await self.close()
        return None

    def _fill(self) -> None:
        """Start reading as many buckets as allowed, each one page."""
        width = BUCKETS_AT_ONCE if self._ahead else 1
        while self._waiting and len(self._lanes) < width:
            bucket = self._waiting.popleft()
            self._lanes.append(_Lane(bucket, self._rows.bucket(bucket)))
        for lane in self._lanes:
            lane.start(self._left)

    async def _ready(self) -> _Lane | None:
        """Wait for a bucket with a page or an error; None if the run was closed meanwhile."""
        self._fill()
        await asyncio.wait([lane.task for lane in self._lanes], return_when=asyncio.FIRST_COMPLETED)
        return next((lane for lane in self._lanes if lane.task.done()), None)

    async def _take(self, lane: _Lane) -> RowPage:
        """Take the page of a bucket and move the bucket behind the others."""
        self._lanes.remove(lane)
        page = lane.take()
        if page.last_key is not None:
            self._after[lane.bucket] = page.last_key
        if page.done:
            self._read += 1
            await lane.rows.close()
        else:
            self._lanes.append(lane)
        if self._ahead:
            self._fill()
        return page

    def _limited(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self._left is not None:
            rows = rows.slice(0, self._left)
            self._left -= rows.num_rows
        return rows

    async def _leave(self, lane: _Lane, cause: PartitionNotExistError) -> None:
        """Leave out a dropped partition; raises if the scan opened a bucket of it or names it."""
        partition_id, offsets = lane.bucket.partition_id, self._rows.offsets
        gone = [each for each in self._lanes if each.bucket.partition_id == partition_id]
        unread = [each for each in self._waiting if each.partition_id == partition_id]
        self._lanes = [each for each in self._lanes if each not in gone]
        self._waiting = deque(each for each in self._waiting if each.partition_id != partition_id)
        for each in (lane, *gone):
            await each.close()
        buckets = [*unread, *(each.bucket for each in (lane, *gone))]
        self._total -= sum(bucket not in offsets for bucket in buckets)
        opened = any(bucket.partition_id == partition_id for bucket in offsets)
        if opened or self.scan.partitions is not None:
            raise PartitionNotExistError(
                f"partition {self._partitions.get(partition_id)!r} of table {self.scan.info.path} "
                "was dropped during the scan, and its rows were not all read; the next call "
                "continues with the other partitions"
            ) from cause

    async def close(self) -> None:
        """Stop reading. Closing twice is no error; a cancelled caller does not stop the closing."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._failure is None and isinstance(self._rows, LiveRows):
            self._left_over = [piece._replace(pin_id=None) for piece in self._pieces()]
        lanes, self._lanes = self._lanes, []
        self._waiting.clear()
        for lane in lanes:
            await lane.close()
        await self._rows.close()

    def __repr__(self) -> str:
        done = f"{self._read} of {self._total} buckets read"
        return f"<AsyncKvScanner {self.scan.info.path}, {self.scan.source}, {done}>"


class _Lane:
    """A bucket that is being read, one page at a time."""

    def __init__(self, bucket: TableBucket, rows: BucketRows) -> None:
        self.bucket = bucket
        self.rows = rows
        self._task: asyncio.Task[RowPage] | None = None

    @property
    def task(self) -> asyncio.Task[RowPage]:
        assert self._task is not None
        return self._task

    def start(self, limit: int | None) -> None:
        if self._task is None:
            self._task = asyncio.ensure_future(self.rows.next_page(limit))

    def take(self) -> RowPage:
        task, self._task = self.task, None
        return task.result()

    async def stop(self) -> None:
        """End the page under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self.rows.close()


async def chosen_states(
    scan: AsyncKvScan,
) -> tuple[list[BucketPlace], dict[TableBucket, int] | None]:
    """The buckets of a scan, and the offsets that it names for them."""
    info = scan.info
    filter = scan.filter if scan.at is None else None  # `at` may name any bucket
    places = await chosen_places(scan.connection, info, scan.partitions, scan.buckets, filter)
    if scan.at is None:
        return places, None
    at = offsets_at(info, places, scan.at, scan.partitions, scan.buckets)
    names = {place.partition for place in places if place.partition is not None}
    left = {None, *possible_partitions(info, scan.filter, names)}
    return [p for p in places if p.bucket in at and p.partition in left], at


async def places_of_cursor(
    connection: ClusterConnection, info: TableInfo, cursor: str
) -> list[BucketPlace]:
    """The buckets of a cursor; their leaders are known then."""
    places = [piece.place for piece in decode_cursor(info, cursor)]
    names = [*dict.fromkeys(p.partition for p in places if p.partition is not None)]
    known = await chosen_places(connection, info, names or None, None) if places else []
    gone = [place for place in places if place not in known]
    if gone:
        raise PartitionNotExistError(
            f"{gone[0].bucket} of the cursor does not exist in {info.path}, or not any more: "
            f"partition {gone[0].partition!r} was dropped"
        )
    return places
