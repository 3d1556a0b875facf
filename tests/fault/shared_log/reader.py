"""A reader beside the servers: it has the location and the coordinator's records, and no server.

It reads what a new leader would read of every bucket, over and over while the servers write and
trim: the session that has the end of the bucket, from the recorded floor on, behind the segments of
the bucket's manifest. What was acknowledged before it looked must be there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tests.fault.kv_load import PutWriter
from tests.fault.load import Worker
from tests.fault.shared_log.load import ServersLoad, Traffic
from tests.fault.shared_log.servers import SharedServers
from zufluss.coordinator.bucket_remotes import BucketRecord
from zufluss.log.shared.tails import SessionTails
from zufluss.model.table import TableBucket
from zufluss.remote.wal import WalKind, WalName, WalObject, decode, session_directory

PAUSE_SECONDS = 0.2
"""Between two readings."""


class Records(NamedTuple):
    """What the coordinator has on record, at one moment."""

    floors: dict[int, int]
    """Of each session, by server epoch."""
    live: set[int]
    """Sessions that were not sealed."""
    sources: dict[TableBucket, int]
    """The session that has the end of each bucket."""
    segments: dict[TableBucket, int]
    """The end of each bucket's segments in remote storage."""

    @property
    def where(self) -> tuple[dict[int, int], dict[TableBucket, int]]:
        """Where the ends of all buckets are to be found."""
        return self.floors, self.sources

    @classmethod
    def of(cls, servers: SharedServers) -> Records:
        """Read them beside the coordinator."""
        records = cls({}, set(), {}, {})
        for path, value in servers.entries("/").items():
            match path.split("/")[1:]:
                case ["wal", "sessions", epoch]:
                    session = json.loads(value)
                    records.floors[int(epoch)] = session["floor"]
                    if session["state"] == "live":
                        records.live.add(int(epoch))
                case ["tables", table, "buckets"]:
                    for number, row in enumerate(json.loads(value)["buckets"]):
                        records.sources[TableBucket(int(table), None, number)] = row[5]
                case ["tables", table, "remote", number]:
                    manifest = BucketRecord.from_json(value).manifest
                    bucket = TableBucket(int(table), None, int(number))
                    records.segments[bucket] = manifest.end_offset if manifest else 0
        return records


def objects(servers: SharedServers, epoch: int, floor: int) -> Iterator[WalObject]:
    """What a session has from a floor on, up to its end or the first number that is not there."""
    while True:
        name = WalName(epoch, floor)
        try:
            data = (servers.location / name.path).read_bytes()
        except FileNotFoundError:
            return
        read = decode(data, name, "the location")
        if read.header.kind is not WalKind.DATA:
            return
        yield read
        floor += 1


def sizes(servers: SharedServers, epoch: int) -> dict[int, int]:
    """The objects that a session has in the location, trimmed or not, with their lengths."""
    found, directory = {}, servers.location / session_directory(epoch)
    for each in directory.iterdir() if directory.is_dir() else ():
        try:
            found[int(each.name, 16)] = each.stat().st_size
        except (FileNotFoundError, ValueError):
            continue  # deleted meanwhile, or not there yet
    return found


class FloorReader(Worker):
    """Reads all buckets of some traffic; a bucket that needs more than it finds is a violation."""

    def __init__(self, load: ServersLoad, traffic: Traffic) -> None:
        super().__init__(load, 0)
        self.servers, self.traffic = load.servers, traffic
        self.readings = 0
        self.entries = 0
        """Entries of sessions that were read, of all readings."""
        self.largest = 0
        """The most bytes that a live session had."""
        self._read_acks: dict[int, int] = {}
        self._ends: dict[TableBucket, int] = defaultdict(int)

    def work(self) -> None:
        while not self.finishing:
            self.read()
            self.load.given_up.wait(PAUSE_SECONDS)

    def read(self) -> None:
        """Compare what a new leader would have with what was acknowledged before.

        A session may be trimmed while it is read; then a new leader would begin again, too.
        """
        ends = dict(self._acknowledged())
        before = None
        while (records := Records.of(self.servers)).where != before:
            before = records.where
            missing = list(self._missing_by(records, ends))
            if not missing:
                break
        for text in missing:
            self.history.problem(text)
        for epoch in records.live:
            self.largest = max(self.largest, sum(sizes(self.servers, epoch).values()))
        self.readings += 1

    def _missing_by(self, records: Records, ends: dict[TableBucket, int]) -> Iterator[str]:
        for epoch in set(records.sources.values()):
            mine = [b for b in ends if records.sources.get(b) == epoch]
            starts = {bucket: records.segments.get(bucket, 0) for bucket in mine}
            for text in self._missing(epoch, records.floors[epoch], starts, ends):
                yield f"session {epoch}: {text}"

    def _missing(
        self, epoch: int, floor: int, starts: dict[TableBucket, int], ends: dict[TableBucket, int]
    ) -> list[str]:
        tails = SessionTails(starts)
        for each in objects(self.servers, epoch, floor):
            self.entries += len(each.entries)
            for _ in tails.add(each):
                pass
        lost = [error.message for error in tails.lost.values()]
        return lost + [
            f"{bucket} ends at {end} behind segments up to {starts[bucket]} and the floor {floor}; "
            f"{ends[bucket]} was acknowledged"
            for bucket, end in tails.end_offsets.items()
            if end < ends[bucket]
        ]

    def _acknowledged(self) -> dict[TableBucket, int]:
        """The ends of all buckets, as far as writers were told."""
        for number, table in enumerate(self.traffic.tables):
            acks, known = table.load.history.acks, self._read_acks.get(number, 0)
            self._read_acks[number] = len(acks)
            for ack in acks[known : self._read_acks[number]]:
                if ack.bucket is not None and ack.base_offset is not None:
                    end = ack.base_offset + ack.count
                    self._ends[ack.bucket] = max(self._ends[ack.bucket], end)
            for worker in table.load.workers:
                if isinstance(worker, PutWriter):
                    for lane in worker.lanes:
                        self._ends[table.target.bucket(lane.bucket)] = lane.end
        return self._ends
