"""Orders of an earlier registration, whose buckets may be other servers' by now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.shared.test_takeover import log_of
from tests.tablet.support import TABLE, Tablet
from zufluss.cluster.replicas import replica_from_proto, replica_to_proto
from zufluss.cluster.wal import WalSession
from zufluss.errors import ErrorCode
from zufluss.model.table import TableBucket
from zufluss.replica.replica import Replica

BUCKET = TableBucket(TABLE, None, 1)
"""The second one that is closed when all are given up."""
LATER = WalSession(1, 99, 1)
"""The session of a server that registers again."""


async def lost_its_buckets(tmp_path: Path) -> tuple[SharedCluster, Tablet, Tablet]:
    """A server that does not know yet that another one leads its buckets, and the other one."""
    cluster = SharedCluster(tmp_path)
    former = await cluster.start("one")
    await written(former, 0, 1)
    leader = await cluster.start("two")
    await written(leader, 1)
    cluster.tablet = former
    return cluster, former, leader


async def leads_nothing(cluster: SharedCluster, former: Tablet, leader: Tablet) -> None:
    """The former leader does not open the bucket, and the leader goes on."""
    await until(lambda: former.server.assignments.retries.waiting == 0)
    assert former.server.buckets.find(*BUCKET) is None
    assert former.server.shared is not None
    assert not former.server.shared.session.holds(BUCKET)
    connection, request = await former.produce(1)
    assert [code for _, code in await connection.produced(request)] != [ErrorCode.NONE]
    assert cluster.gateway.wal[BUCKET].server_epoch == 2
    assert log_of(leader, 1).high_watermark == 6
    await killed(former)
    await leader.server.close()


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_bucket_that_fails_while_its_server_registers_again_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It is another server's: two would acknowledge different rows at the same offset."""
    cluster, former, leader = await lost_its_buckets(tmp_path)
    replica = former.server.buckets.replica(*BUCKET)
    shared = former.server.shared
    assert shared is not None
    end, close = shared.end, Replica.close

    async def ending() -> None:
        replica.fail("a sync failed")
        await end()
        await until(lambda: former.server.buckets.find(*BUCKET) is None)

    def closing(self: Replica, **how: object) -> None:
        if self is not replica and replica.failure is None:
            replica.fail("a sync failed")
        close(self, **how)  # type: ignore[arg-type]

    if when == "before":
        monkeypatch.setattr(shared, "end", ending)
    else:
        monkeypatch.setattr(Replica, "close", closing)
    await former.server.assign(former.image, [], (), LATER)
    monkeypatch.undo()
    await leads_nothing(cluster, former, leader)
    assert not former.server.assignments.retries.attempts, "not even the files are opened"


async def test_an_order_of_an_earlier_session_claims_nothing_in_the_next_one(
    tmp_path: Path,
) -> None:
    """Whichever way it comes: without a source nobody asks the coordinator."""
    cluster, former, leader = await lost_its_buckets(tmp_path)
    order = former.server.assignments._orders[BUCKET]
    assert order.source is None
    await former.server.assign(former.image, [], (), LATER)
    with pytest.raises(Exception, match=r"belongs to session 1, this is session 99"):
        await former.server.start_replicas([order])
    await leads_nothing(cluster, former, leader)


async def test_an_order_says_on_the_wire_which_session_has_the_end_of_the_bucket(
    tmp_path: Path,
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start()
    order = tablet.server.assignments._orders[BUCKET]
    assert order.state.wal == 1
    assert replica_from_proto(replica_to_proto(order)) == order
    local = replace(order, state=replace(order.state, wal=None))
    assert replica_from_proto(replica_to_proto(local)) == local
    await tablet.server.close()
