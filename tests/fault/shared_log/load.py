"""Load for servers whose buckets move: writers that look for the leader, lookups at every server.

`Traffic` has log tables and primary-key tables of one bucket each, spread over the servers, and a
log table for pyfluss and our client. Each table has a history of its own, so a test can wait until
all of them go on. At the end every bucket is read at its leader and compared with what was sent.
"""

from __future__ import annotations

import random
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import zufluss
from tests.end_to_end.raw import (
    OFFSET_LATEST,
    ConnectionEndedError,
    RawClient,
)
from tests.fault.history import Content, History, KeyHistory, violations
from tests.fault.kv_load import (
    CODEC,
    PutLane,
    PutWriter,
    SentPut,
    create_keyed_target,
    kv_violations,
)
from tests.fault.load import (
    DATABASE,
    DEADLINE_SECONDS,
    LOST,
    RECONNECT_SECONDS,
    BucketLane,
    Load,
    RawWriter,
    Reader,
    Sent,
    Target,
    Worker,
    ZuflussWriter,
    create_target,
    read_bucket,
)
from tests.fault.remote_load import logs_of
from tests.fault.shared_log.servers import ANSWER_SECONDS, HastyClient, SharedServers
from tests.kv.model import Change
from tests.waiting import WAIT_SECONDS
from zufluss.errors import RETRIABLE, ErrorCode, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

T = TypeVar("T")

PACE_SECONDS = 0.02
"""Pause of a writer between batches: the machine is small, and has several servers."""
LOOKUP_SECONDS = 0.05
"""Time between two lookups that are sent to a server, answered or not."""
LOOKUPS_AHEAD = 200
"""Lookups that a server may leave unanswered."""
LOOKUP_KEYS = 20

Client = Callable[[Load, int, Target], Worker]


class ServersLoad(Load):
    """Workers on a table of a cluster."""

    def __init__(self, servers: SharedServers) -> None:
        super().__init__(servers.coordinator.port, History())
        self.servers = servers
        self.keys = KeyHistory(self.history)
        self.pace_seconds = PACE_SECONDS


class Routed(Worker):
    """A worker of the one bucket of a table that looks for its leader whenever it connects."""

    load: ServersLoad
    target: Target

    def connect(self) -> RawClient | None:
        while not self.load.given_up.is_set():
            port = self.load.servers.leader_port(DATABASE, self.target.name)
            if port is not None:
                try:
                    return HastyClient(port)
                except OSError:
                    pass
            self.load.given_up.wait(RECONNECT_SECONDS)
        return None

    def converse(self, client: RawClient) -> None:
        """As the writer does; a refusal makes it look for the leader again."""
        try:
            super().converse(client)  # type: ignore[misc]  # the writer's
        except ZuflussError as problem:
            if problem.code not in RETRIABLE:
                raise
            self.refused()

    def wait_a_little(self) -> None:
        self.load.given_up.wait(self.load.pace_seconds)


class Appender(Routed, RawWriter):
    """Appends rows, idempotently."""

    def new_batch(self, lane: BucketLane) -> Sent:
        self.wait_a_little()
        return super().new_batch(lane)


class Upserter(Routed, PutWriter):
    """Puts and deletes rows; its history knows the row of each key after each batch."""

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed, target)
        self.numbers: deque[dict[int, int]] = deque()
        """For each batch under way the keys in it, with the numbers of their rows."""

    def new_batch(self, lane: PutLane) -> SentPut:
        self.wait_a_little()
        sent = super().new_batch(lane)
        keys = {put.key for put in sent.puts}
        history = self.load.keys
        self.numbers.append({k[0]: history.sent(k[0], lane.model.rows.get(k)) for k in keys})
        return sent

    def take_answer(self, client: RawClient, pending: dict[int, PutLane]) -> bool:
        done = super().take_answer(client, pending)
        if done:
            for key, number in self.numbers.popleft().items():
                self.load.keys.acknowledged(key, number)
        return done


class Follower(Routed, Reader):
    """Reads the log at its leader continuously."""

    def is_elsewhere(self, error_code: int) -> bool:
        if error_code and ErrorCode(error_code) in RETRIABLE:
            self.load.given_up.wait(RECONNECT_SECONDS)
            raise ConnectionEndedError
        return super().is_elsewhere(error_code)


class HastyWriter(ZuflussWriter):
    """Our client, which does not wait long for a server that was stopped."""

    settings: ClassVar[dict[str, str]] = {"client.request-timeout": f"{ANSWER_SECONDS:g}s"}


class Asked(NamedTuple):
    """A lookup, or a question for the end of the log, that was sent."""

    keys: list[int]
    least: list[int]
    """What `KeyHistory.begin` said; for the end of the log, the end that was acknowledged."""


class DirectLooker(Worker):
    """Sends lookups to one server, whether it leads the table or not, and waits for no answer.

    So a server that was stopped finds lookups that came while another one led. Each answer is
    judged by when its lookup was sent; refusals are right.
    """

    load: ServersLoad

    def __init__(self, load: ServersLoad, seed: int, target: Target, server_id: int) -> None:
        super().__init__(load, seed)
        self.target = target
        self.server_id = server_id
        self.answers = 0
        self.refusals_seen = 0

    def work(self) -> None:
        while not self.finishing:
            try:
                with RawClient(self.load.servers.tablets[self.server_id].port) as client:
                    client.alive()  # so that what comes from now on are answers to lookups
                    self.look(client)
            except (*LOST, OSError):
                self.load.given_up.wait(LOOKUP_SECONDS)

    def look(self, client: RawClient) -> None:
        asked: dict[int, Asked] = {}
        due = time.monotonic()
        answers = select.poll()  # unlike `select`, it takes descriptors above 1023
        answers.register(client.socket, select.POLLIN)
        while not self.finishing:
            if answers.poll(1000 * max(0.0, due - time.monotonic())):
                self.judge(client, asked)
            if time.monotonic() >= due:
                due = time.monotonic() + LOOKUP_SECONDS
                known = self.load.keys.keys()
                if known and len(asked) < LOOKUPS_AHEAD:
                    self.ask(client, asked, known)

    def ask(self, client: RawClient, asked: dict[int, Asked], known: Sequence[int]) -> None:
        if self.rng.random() < 0.2:
            end = max(lane.end for lane in self.lanes())
            request = m.ListOffsetsRequest(
                follower_server_id=-1,
                offset_type=OFFSET_LATEST,
                table_id=self.target.table_id,
                bucket_id=[0],
            )
            asked[client.begin(ApiKey.LIST_OFFSETS, request)] = Asked([], [end])
            return
        keys = self.rng.sample(known, min(LOOKUP_KEYS, len(known)))
        lookup = m.LookupRequest(table_id=self.target.table_id)
        lookup.buckets_req.add(bucket_id=0, keys=[CODEC.key((key,)) for key in keys])
        least = self.load.keys.begin(keys)
        asked[client.begin(ApiKey.LOOKUP, lookup, 1)] = Asked(keys, least)

    def lanes(self) -> Iterator[PutLane]:
        for worker in self.load.workers:
            if isinstance(worker, PutWriter):
                yield from worker.lanes

    def judge(self, client: RawClient, asked: dict[int, Asked]) -> None:
        frame = client.receive()
        assert frame.request_id is not None
        was = asked.pop(frame.request_id)
        if frame.error is not None:
            self.refused_with(frame.error.code)
            return
        kind: Any = m.LookupResponse if was.keys else m.ListOffsetsResponse
        (entry,) = kind.FromString(bytes(frame.body)).buckets_resp
        if entry.error_code:
            self.refused_with(entry.error_code)
            return
        self.answers += 1
        who = f"server {self.server_id}"
        if was.keys:
            rows = [CODEC.value(value.values) for value in entry.values]
            self.load.keys.end(was.keys, was.least, rows, who)
        elif entry.offset < was.least[0]:
            self.history.problem(f"{who} says the end is {entry.offset}, not {was.least[0]}")

    def refused_with(self, code: int) -> None:
        self.refusals_seen += 1
        if ErrorCode(code) not in RETRIABLE:
            raise AssertionError(f"a lookup at {self.server_id}: error {code}")


class Table(NamedTuple):
    """A table of one bucket with its load."""

    target: Target
    load: ServersLoad
    keyed: bool


class Traffic:
    """Tables of all kinds under load; a context.

    `clients` write a table of six buckets, `lookers` has lookups sent to all servers.
    """

    def __init__(
        self,
        servers: SharedServers,
        rng: random.Random,
        *,
        logs: int = 3,
        keyed: int = 3,
        clients: Sequence[Client] = (HastyWriter,),
        lookers: bool = True,
        readers: bool = True,
        properties: dict[str, str] | None = None,
    ) -> None:
        self.servers = servers
        self.tables: list[Table] = []
        self.lookers: list[DirectLooker] = []
        port = servers.coordinator.port
        for number in range(logs):
            load = self._add(create_target(port, f"log{number}", 1, properties), keyed=False)
            load.add(Appender, rng.randrange(1 << 32), self.tables[-1].target)
            if readers:
                load.add(Follower, rng.randrange(1 << 32), self.tables[-1].target)
        for number in range(keyed):
            target = create_keyed_target(port, f"keyed{number}", 1, properties)
            load = self._add(target, keyed=True)
            load.add(Upserter, rng.randrange(1 << 32), target)
            for server_id in servers.tablets if lookers else ():
                looker = DirectLooker(load, rng.randrange(1 << 32), target, server_id)
                load.workers.append(looker)
                self.lookers.append(looker)
        self.clients: ServersLoad | None = None
        if clients:
            self.spread = create_target(port, "spread", 6, properties)
            self.clients = ServersLoad(servers)
            for make in clients:
                self.clients.add(make, rng.randrange(1 << 32), self.spread)

    def _add(self, target: Target, *, keyed: bool) -> ServersLoad:
        load = ServersLoad(self.servers)
        self.tables.append(Table(target, load, keyed))
        return load

    def add_log(self, target: Target) -> ServersLoad:
        """Add a log table, whose workers the test makes."""
        return self._add(target, keyed=False)

    @property
    def loads(self) -> list[ServersLoad]:
        return [each.load for each in self.tables] + ([self.clients] if self.clients else [])

    @property
    def acked_rows(self) -> int:
        return sum(load.history.acked_rows for load in self.loads)

    @property
    def problems(self) -> list[str]:
        return [text for load in self.loads for text in load.history.problems]

    def leaders(self) -> dict[str, int | None]:
        """Who leads each table of one bucket."""
        names = [each.target.name for each in self.tables]
        return {name: self.servers.leader(DATABASE, name) for name in names}

    def leading(self) -> list[int]:
        """The servers that lead a table of one bucket."""
        return sorted({leader for leader in self.leaders().values() if leader is not None})

    def __enter__(self) -> Self:
        for load in self.loads:
            load.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for load in self.loads:
            load.finish.set()
        for load in self.loads:
            load.__exit__(kind, value, trace)

    def progress(self, rows: int = 10) -> None:
        """Return when so many more rows of every table were acknowledged."""
        targets = [(load.history, load.history.acked_rows + rows) for load in self.loads]
        for history, target in targets:
            done = history.wait(lambda h=history, t=target: h.acked_rows >= t, DEADLINE_SECONDS)  # type: ignore[misc]
            assert not self.problems, self.problems
            assert done, f"a table stands still; leaders: {self.leaders()}"

    def check(self, *, remote: bool = False) -> None:
        """Compare all tables with what was sent; once the load has ended.

        `remote` is for logs that may lie in remote storage: they are read with our client, and what
        readers were given under way is not compared.
        """
        assert self.problems == []
        for table in self.tables:
            if table.keyed:
                self._check_rows(table, remote)
            else:
                self._check_log(table.target, table.load.history, remote)
        if self.clients:
            self._check_log(self.spread, self.clients.history, remote)

    def _check_rows(self, table: Table, remote: bool) -> None:
        name = table.target.name
        writers = [w for w in table.load.workers if isinstance(w, PutWriter)]

        def read(client: RawClient) -> list[str]:
            port = client.socket.getpeername()[1]
            return kv_violations(port, table.target, writers, self.changes(name, remote))

        assert at_leader(self.servers, name, 0, read) == [], name
        expected = sum(len(lane.model.rows) for writer in writers for lane in writer.lanes)
        assert count_rows(self.servers, name) == expected, name

    def changes(self, table: str, remote: bool) -> Callable[[int], list[Change]] | None:
        """How the changelog of a table is read; None for that at the leader."""

        def read(bucket: int) -> list[Change]:
            with zufluss.connect(self.servers.coordinator.bootstrap) as connection:
                log = connection.table(f"{DATABASE}.{table}").changelog(buckets=[bucket])
                return [
                    Change(r["_log_offset"], r["_change_type"], (r["id"], r["batch"], r["text"]))
                    for r in log.to_arrow().to_pylist()
                ]

        return read if remote else None

    def _check_log(self, target: Target, history: History, remote: bool) -> None:
        contents: dict[TableBucket, Content] = {}
        if remote:
            with zufluss.connect(self.servers.coordinator.bootstrap) as connection:
                contents = dict(logs_of(connection, target))
            assert all(content.start == 0 for content in contents.values())
        else:
            for bucket in target.all_buckets:
                contents[bucket] = at_leader(
                    self.servers,
                    target.name,
                    bucket.bucket_id,
                    lambda client, b=bucket: read_bucket(client, b),  # type: ignore[misc]
                )
        assert violations(history, contents) == []


def at_leader(servers: SharedServers, table: str, bucket: int, read: Callable[[RawClient], T]) -> T:
    """Read something at the leader of a bucket, again while that moves or is too busy to say."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            port = servers.leader_port(DATABASE, table, bucket)
            if port is None:
                raise ConnectionEndedError
            with RawClient(port) as client:
                return read(client)
        except (*LOST, ZuflussError, AssertionError):
            if time.monotonic() > deadline:
                raise
        time.sleep(RECONNECT_SECONDS)


def count_rows(servers: SharedServers, table: str) -> int:
    """The number of rows of a primary-key table."""
    with zufluss.connect(servers.coordinator.bootstrap) as connection:
        return connection.table(f"{DATABASE}.{table}").count()
