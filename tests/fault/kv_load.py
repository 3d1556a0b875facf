"""Upserts, deletes and partial updates on a server that may be killed at any moment.

Every writer owns a range of keys, so it knows the expected row of each key: that of the last
acknowledged batch, or of a batch in flight. Writers number their batches and send unacknowledged
ones again, so that at the end all are acknowledged. Each row carries the number of its batch, so a
batch that was applied twice or not at all shows in the changelog.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.end_to_end.kv import (
    PUT_VERSION,
    Codec,
    kv_batch,
    limit_values,
    put_request,
    raw_changelog,
    values_of,
)
from tests.end_to_end.raw import RawClient, table_path
from tests.fault.history import Ack
from tests.fault.load import DATABASE, INFLIGHT_MAX, LOST, Load, Target, Worker
from tests.kv.model import Change, Model, Put, Rules, fold
from zufluss.errors import RETRIABLE, ErrorCode
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

SCHEMA = Schema.of("id BIGINT NOT NULL, batch BIGINT, text STRING", primary_key=["id"])
CODEC = Codec(SCHEMA)
RULES = Rules(3, (0,))
_DAILY_COLUMNS = "id BIGINT NOT NULL, batch BIGINT, text STRING, day STRING NOT NULL"
WRITER_SHIFT = 32
"""A key is the writer's number above these bits."""
LOOKUP_KEYS = 500
"""Keys per lookup."""


class Form(NamedTuple):
    """Rows of a primary-key table under load."""

    schema: Schema
    codec: Codec
    rules: Rules
    targets: tuple[tuple[int, ...], ...]
    """Columns that batches write, one of them drawn for each batch; empty for all."""

    @classmethod
    def of(cls, target: Target) -> Form:
        return PLAIN if target.day is None else DAILY


PLAIN = Form(SCHEMA, CODEC, RULES, ((), (), (), (0, 1), (0, 1, 2)))
DAILY = Form(
    Schema.of(_DAILY_COLUMNS, primary_key=["id", "day"]),
    Codec(Schema.of(_DAILY_COLUMNS, primary_key=["id"])),  # keys leave the partition out
    Rules(4, (0, 3)),
    ((), (), (), (0, 1, 3), (0, 1, 2, 3)),
)


def create_keyed_target(
    port: int,
    name: str,
    buckets: int = 2,
    properties: dict[str, str] | None = None,
    *,
    daily: bool = False,
) -> Target:
    """Create a primary-key table for the load; a `daily` one has a partition per day."""
    options = {"table.replication.factor": "1", **(properties or {})}
    schema, partition_keys = (DAILY.schema, ("day",)) if daily else (SCHEMA, ())
    descriptor = TableDescriptor(schema, None, partition_keys, ("id",), buckets, options, {})
    with RawClient(port) as client:
        client.call(
            ApiKey.CREATE_DATABASE,
            m.CreateDatabaseRequest(database_name=DATABASE, ignore_if_exists=True),
        )
        client.call(
            ApiKey.CREATE_TABLE,
            m.CreateTableRequest(
                table_path=table_path(DATABASE, name),
                table_json=descriptor.to_json(),
                ignore_if_exists=False,
            ),
        )
        return Target(name, client.table_id(DATABASE, name), buckets)


class SentPut(NamedTuple):
    """A batch that is not acknowledged yet."""

    puts: tuple[Put, ...]
    targets: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class PutLane:
    """One bucket as a writer sees it: the expected rows of the writer's keys."""

    bucket: int
    model: Model
    """The expected rows after all batches that were sent."""
    sequence: int = 0
    unacknowledged: deque[SentPut] = field(default_factory=deque)
    end: int = 0
    """End offset of the log after the last acknowledged batch."""


class PutWriter(Worker):
    """An idempotent, pipelined writer with raw frames; sends unacknowledged batches again."""

    keys = 40
    """Keys per bucket."""
    text_bytes: Sequence[int] = (0, 10, 10, 100, 1000)

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.number = self.history.lane(gapless=True).number
        self.writer_id = -1
        self.batch = 0
        self.form = Form.of(target)
        self.lanes = [PutLane(b, Model(self.form.rules)) for b in range(target.buckets)]

    @property
    def waiting(self) -> bool:
        return any(lane.unacknowledged for lane in self.lanes)

    def work(self) -> None:
        while not self.finishing or self.waiting:
            client = self.connect()
            if client is None:
                return
            with client:
                try:
                    self.converse(client)
                except LOST:
                    continue

    def converse(self, client: RawClient) -> None:
        """Send batches and receive answers until all is done, or the connection breaks."""
        if self.writer_id < 0:
            request = m.InitWriterRequest(table_path=[table_path(DATABASE, self.target.name)])
            self.writer_id = int(client.call(ApiKey.INIT_WRITER, request).writer_id)
            self.history.new_writer_id(self.writer_id)
        pending: dict[int, PutLane] = {}
        for lane in self.lanes:
            for sent in lane.unacknowledged:
                pending[self.send(client, lane, sent)] = lane
        while not self.finishing or pending:
            if not self.finishing:
                for lane in self.lanes:
                    if len(lane.unacknowledged) < INFLIGHT_MAX:
                        pending[self.send(client, lane, self.new_batch(lane))] = lane
            if not self.take_answer(client, pending):
                return

    def new_batch(self, lane: PutLane) -> SentPut:
        """Some rows or deletes of own keys, whole or in part."""
        self.batch += 1
        targets, codec = self.rng.choice(self.form.targets), self.form.codec
        puts = tuple(self.new_put(lane) for _ in range(self.rng.randint(1, 20)))
        records = [codec.delete(p.key) if p.row is None else codec.put(p.row) for p in puts]
        data = kv_batch(records, writer_id=self.writer_id, sequence=lane.sequence)
        lane.sequence += 1
        lane.model.put(puts, targets)
        sent = SentPut(puts, targets, data)
        lane.unacknowledged.append(sent)
        return sent

    def new_put(self, lane: PutLane) -> Put:
        number = self.rng.randrange(self.keys) * self.target.buckets + lane.bucket
        key, fixed = (self.number << WRITER_SHIFT) + number, self.target.fixed_values
        if self.rng.random() < 0.25:
            return Put((key, *fixed), None)
        text = "." * self.rng.choice(self.text_bytes) if self.rng.random() < 0.9 else None
        return Put((key, *fixed), (key, self.batch, text, *fixed))

    def send(self, client: RawClient, lane: PutLane, sent: SentPut) -> int:
        request = put_request(
            self.target.table_id,
            sent.data,
            lane.bucket,
            targets=sent.targets,
            partition_id=self.target.partition_id,
        )
        return client.begin(ApiKey.PUT_KV, request, PUT_VERSION)

    def take_answer(self, client: RawClient, pending: dict[int, PutLane]) -> bool:
        """Note one answer; False when the batches have to be sent again."""
        frame = client.receive()
        if frame.error is not None:
            raise frame.error
        assert frame.request_id is not None
        lane = pending.pop(frame.request_id)
        (entry,) = m.PutKvResponse.FromString(bytes(frame.body)).buckets_resp
        if entry.error_code:
            if ErrorCode(entry.error_code) not in RETRIABLE:
                raise AssertionError(f"{lane.bucket}: {entry.error_code} {entry.error_message}")
            self.refused()
            return False
        sent = lane.unacknowledged.popleft()
        if entry.log_end_offset <= lane.end:
            self.history.problem(f"acknowledged up to {entry.log_end_offset} after {lane.end}")
        lane.end = entry.log_end_offset
        self.history.acknowledged(Ack(0, len(sent.puts)))
        return True


class BigPutWriter(PutWriter):
    """Writes many large rows, so that a small memory is flushed and evicted under load."""

    keys = 2_000
    text_bytes = (1000, 3000)


class Looker(Worker):
    """Looks up keys continuously; asserts that each answer is a valid row of its key, or none."""

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target

    def work(self) -> None:
        while not self.finishing:
            client = self.connect()
            if client is None:
                return
            with client:
                try:
                    while not self.finishing:
                        self.look(client)
                except LOST:
                    continue

    def look(self, client: RawClient) -> None:
        bucket = self.rng.randrange(self.target.buckets)
        wanted = [
            (self.rng.randint(1, 8) << WRITER_SHIFT) + self.rng.randrange(40) * 2 + bucket
            for _ in range(20)
        ]
        request = m.LookupRequest(table_id=self.target.table_id)
        request.buckets_req.add(bucket_id=bucket, keys=[CODEC.key((key,)) for key in wanted])
        (entry,) = client.call(ApiKey.LOOKUP, request, 1).buckets_resp
        if entry.error_code:
            if ErrorCode(entry.error_code) in RETRIABLE:
                return  # a server that listens already and has not opened the bucket yet
            raise AssertionError(f"lookup: {entry.error_code} {entry.error_message}")
        for key, value in zip(wanted, entry.values, strict=True):
            row = CODEC.value(value.values)
            if row is not None and row[0] != key:
                self.history.problem(f"asked for {key}, got {row}")


# -- what must hold ---------------------------------------------------------------------------


def kv_violations(
    port: int,
    target: Target,
    writers: Sequence[PutWriter],
    changelog: Callable[[int], Sequence[Change]] | None = None,
) -> list[str]:
    """Everything that is wrong with the table, once all writers are done.

    `changelog` reads that of a bucket if it is not all on the server.
    """
    found: list[str] = []
    with RawClient(port) as client:
        read = changelog or (lambda bucket: _changelog(client, target.bucket(bucket)))
        for bucket in target.all_buckets:
            changes = read(bucket.bucket_id)
            found += _bucket_violations(client, bucket, Form.of(target), writers, changes)
    return found


def _changelog(client: RawClient, where: TableBucket) -> list[Change]:
    table_id, partition_id, bucket = where
    schema = SCHEMA if partition_id is None else DAILY.schema
    records = raw_changelog(client, table_id, schema, bucket, partition_id=partition_id)
    return [Change(*record) for record in records]  # type: ignore[arg-type]


def _bucket_violations(
    client: RawClient,
    bucket: TableBucket,
    form: Form,
    writers: Sequence[PutWriter],
    changes: Sequence[Change],
) -> list[str]:
    found: list[str] = []
    try:
        state = fold(changes, form.rules)
    except AssertionError as e:
        return [f"bucket {bucket}: the changelog contradicts itself: {e}"]
    if looked_up(client, bucket, changes, form) != state:
        found.append(f"bucket {bucket}: the state is not the fold of the changelog")
    if _scanned(client, bucket, form) != state:
        found.append(f"bucket {bucket}: a scan does not give the fold of the changelog")
    for writer in writers:
        lane = writer.lanes[bucket.bucket_id]
        mine = [c for c in changes if c.row[0] >> WRITER_SHIFT == writer.number]
        expected = [(c.kind, c.row) for c in lane.model.changes]
        if [(c.kind, c.row) for c in mine] != expected:
            found.append(
                f"bucket {bucket}, writer {writer.number}: {len(mine)} changes, sent were "
                f"{len(expected)}: {_first_difference([(c.kind, c.row) for c in mine], expected)}"
            )
    return found


def _first_difference(found: list[Any], expected: list[Any]) -> str:
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"at {i} there is {str(one)[:80]}, sent was {str(other)[:80]}"
    return "one ends before the other"


def looked_up(
    client: RawClient, where: TableBucket, changes: Sequence[Change], form: Form = PLAIN
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The rows of all keys that ever existed, by lookups."""
    table_id, partition_id, bucket = where
    keys = list({key_of(form, change.row) for change in changes})
    found = {}
    for at in range(0, len(keys), LOOKUP_KEYS):
        part = keys[at : at + LOOKUP_KEYS]
        encoded = [form.codec.key(key) for key in part]
        values = values_of(client, table_id, encoded, bucket, partition_id)
        for key, value in zip(part, values, strict=True):
            row = form.codec.value(value)
            if row is not None:
                found[key] = row
    return found


def _scanned(
    client: RawClient, where: TableBucket, form: Form
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    table_id, partition_id, bucket = where
    request = m.LimitScanRequest(
        table_id=table_id, partition_id=partition_id, bucket_id=bucket, limit=1_000_000
    )
    values = limit_values(client.call(ApiKey.LIMIT_SCAN, request).records)
    rows = [form.codec.value(value) for value in values]
    return {key_of(form, row): row for row in rows if row is not None}


def key_of(form: Form, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a row."""
    return tuple(row[i] for i in form.rules.keys)
