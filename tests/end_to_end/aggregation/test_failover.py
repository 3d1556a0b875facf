"""Lost acknowledgements, and kills of the coordinator and of the leader.

The roles are separate processes. The only leader comes back with the next leader epoch, as another
leader would. Fences and locks hold at every moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zufluss
from tests.client.relay import Relay
from tests.counts import rounds
from tests.end_to_end.aggregation.producers import Epoch, init
from tests.end_to_end.aggregation.recovery import SUM, column_of, create, put_plain
from tests.end_to_end.raw import ConnectionEndedError, RawClient
from tests.servers import Apart, WarmServer
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ColumnLockedError,
    ErrorCode,
    LeaderNotAvailableError,
    ProducerFencedError,
    ZuflussError,
)
from zufluss.testing.server import DevServer


def again(server: WarmServer) -> None:
    """SIGKILL, and a new start."""
    server.kill()
    server.start()


def begin(server: WarmServer, table: Table, producer_id: str = "job") -> Epoch:
    """Begin an epoch as soon as the coordinator knows all leaders."""
    begun: list[Epoch] = []

    def possible() -> bool:
        try:
            with RawClient(server.port) as raw:
                begun.append(Epoch.begin(raw, table, producer_id))
        except LeaderNotAvailableError:
            return False
        return True

    eventually(possible, "the leader is known")
    return begun[0]


def put(server: WarmServer, epoch: Epoch, *rows: tuple[int, int]) -> ErrorCode:
    """One put over a new connection."""
    with RawClient(server.port) as raw:
        epoch.raw = raw
        return epoch.put(*rows)


def test_a_coordinator_that_was_killed_knows_epochs_and_locks(
    new_apart: Callable[..., Apart],
) -> None:
    coordinator, tablet = new_apart()
    with zufluss.connect(coordinator.bootstrap) as conn:
        table = create(conn, SUM, buckets=1)
        old = begin(coordinator, table)
        assert put(tablet, old, (1, 1)) is ErrorCode.NONE
        now = begin(coordinator, table)
        for _ in range(rounds(1, 10)):
            coordinator.kill()
            assert put(tablet, now, (1, 10)) is ErrorCode.NONE, "who writes goes on without it"
            assert put(tablet, old, (1, 1)) is ErrorCode.PRODUCER_FENCED
            coordinator.start()
            assert put(tablet, old, (1, 1)) is ErrorCode.PRODUCER_FENCED
            with pytest.raises(ColumnLockedError, match="job"):
                put_plain(table, {"page": [1], "views": [1]})
            with RawClient(coordinator.port) as raw, pytest.raises(ColumnLockedError, match="job"):
                init(raw, table, "other")
            old, now = now, begin(coordinator, table)
            assert now.number == old.number
            assert now.epoch > old.epoch
        assert put(tablet, old, (1, 1)) is ErrorCode.PRODUCER_FENCED
        assert put(tablet, now, (1, 100)) is ErrorCode.NONE
        assert column_of(table) == {1: 101 + 10 * rounds(1, 10)}


def test_a_leader_that_was_killed_rejects_the_old_epoch_from_its_first_put_on(
    new_apart: Callable[..., Apart],
) -> None:
    coordinator, tablet = new_apart()
    with zufluss.connect(coordinator.bootstrap) as conn:
        table = create(conn, SUM, buckets=1)
        old = begin(coordinator, table)
        assert put(tablet, old, (1, 1)) is ErrorCode.NONE
        now = begin(coordinator, table)
        assert put(tablet, now, (1, 10)) is ErrorCode.NONE
        for _ in range(rounds(2, 10)):
            again(tablet)
            eventually(lambda: served(tablet, table), "the bucket is served")
            assert put(tablet, old, (1, 1)) is ErrorCode.PRODUCER_FENCED
            assert put(tablet, now, (1, 10)) is ErrorCode.NONE
            with pytest.raises(ColumnLockedError, match="job"):
                put_plain(table, {"page": [1], "views": [1]})
        tablet.kill()
        again(coordinator)
        tablet.start()
        eventually(lambda: served(tablet, table), "the bucket is served")
        assert put(tablet, old, (1, 1)) is ErrorCode.PRODUCER_FENCED, "after both were killed, too"
        following = begin(coordinator, table)
        assert following.epoch > now.epoch
        assert put(tablet, now, (1, 10)) is ErrorCode.PRODUCER_FENCED
        with RawClient(tablet.port) as raw:
            following.raw = raw
            assert following.undo(0).done
        assert column_of(table) == {}


def served(tablet: WarmServer, table: Table) -> bool:
    """Whether the leader serves its bucket, asked without a put."""
    try:
        with RawClient(tablet.port) as raw:
            raw.end_offset(table.info.table_id)
    except (AssertionError, ZuflussError, ConnectionEndedError):
        return False
    return True


def test_an_exactly_once_writer_goes_on_over_both_failovers(
    new_apart: Callable[..., Apart],
) -> None:
    coordinator, tablet = new_apart()
    with zufluss.connect(coordinator.bootstrap) as conn:
        table = create(conn, SUM, buckets=2)
        old = table.exactly_once_writer("job")
        old.write({"page": [1, 2], "views": [1, 1]})
        kept = old.checkpoint()
        old.write({"page": [1, 2], "views": [5, 5]})
        again(tablet)
        old.flush()
        again(coordinator)
        again(tablet)
        writer = table.exactly_once_writer(state=kept)
        again(tablet)
        writer.write({"page": [1, 3], "views": [1, 1]})
        again(coordinator)
        writer.checkpoint()
        old.write({"page": [1], "views": [7]})
        with pytest.raises(ProducerFencedError):
            old.close()
        writer.release()
        assert column_of(table) == {1: 2, 2: 1, 3: 1}


# -- lost acknowledgements -----------------------------------------------------------------------


class Deaf(Relay):
    """A relay that can withhold answers."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write = writer.write

        def unless_deaf(data: bytes) -> None:
            if not self.deaf:
                write(data)

        writer.write = unless_deaf  # type: ignore[method-assign]
        await super()._serve(reader, writer)


@pytest.fixture
def deaf(
    own_servers: Callable[[DevServer], None], tmp_path: Path
) -> Iterator[tuple[Deaf, WarmServer]]:
    """A server whose clients connect through a relay."""
    with Deaf() as relay:
        advertised = {"advertised.listeners": f"FLUSS://{relay.bootstrap}"}
        server = WarmServer(tmp_path / "server", advertised)
        relay.target = server.port
        own_servers(server)
        yield relay, server


def test_a_writer_whose_acknowledgement_is_lost_sends_again_and_counts_once(
    deaf: tuple[Deaf, WarmServer],
) -> None:
    relay, server = deaf
    with zufluss.connect(relay.bootstrap) as conn, RawClient(server.port) as raw:
        table = create(conn, SUM, buckets=1)
        writer = table.exactly_once_writer("job")
        for step in range(1, rounds(3, 30)):
            relay.deaf = True
            end = raw.end_offset(table.info.table_id)
            writer.write({"page": [1], "views": [1]})
            eventually(lambda e=end: raw.end_offset(table.info.table_id) > e, "the put")  # type: ignore[misc]
            relay.cut()
            relay.deaf = False
            relay.mend()
            writer.flush()
            assert column_of(table) == {1: step}
        writer.release()


def test_a_batch_sent_again_after_the_server_was_killed_counts_once(
    deaf: tuple[Deaf, WarmServer],
) -> None:
    _, server = deaf
    with zufluss.connect(server.bootstrap) as conn:
        table = create(conn, SUM, buckets=1)
        epoch = begin(server, table)
        for sequence in range(7):
            assert put(server, epoch, (1, 1)) is ErrorCode.NONE
            if sequence % 3 == 0:
                again(server)
            epoch.sequence -= 1
            assert put(server, epoch, (1, 1)) is ErrorCode.NONE
        epoch.sequence = 0
        assert put(server, epoch, (1, 1)) is ErrorCode.NONE, "the first one, once more"
        assert column_of(table) == {1: 7}
