"""A put that is sent again after the disk was lost counts once: snapshots have the writers.

The changelog of the last puts was in no remote segment yet, so only the snapshot has them. Without
the writers in the snapshot, these batches would be accepted again, and sums would be too high.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import zufluss
from tests.end_to_end.kv import Codec, create_by_hand, kv_batch, put, values_of
from tests.end_to_end.raw import RawClient
from tests.waiting import eventually
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer

SUMS = Schema.of("id BIGINT NOT NULL, n BIGINT SUM, PRIMARY KEY (id)")
PLAIN = Codec(Schema.of("id BIGINT NOT NULL, n BIGINT, PRIMARY KEY (id)"))
AGGREGATION = {"table.merge-engine": "aggregation"}
WRITER = 77


def sent(raw: RawClient, table_id: int, sequence: int) -> tuple[int, int]:
    """Add 1 to key 1 as the batch with this number; returns error code and log end offset."""
    batch = kv_batch([PLAIN.put((1, 1))], writer_id=WRITER, sequence=sequence)
    entry = put(raw, table_id, batch)
    return entry.error_code, entry.log_end_offset


def total(raw: RawClient, table_id: int) -> int:
    row = PLAIN.value(values_of(raw, table_id, [PLAIN.key((1,))])[0])
    assert row is not None
    return int(row[1])


def wait_for_snapshot(server: DevServer, offset: int) -> None:
    with zufluss.connect(server.bootstrap) as connection:
        latest = connection.admin.latest_kv_snapshots
        eventually(lambda: [each.log_offset for each in latest("wire.sums")] == [offset])


def test_batches_that_only_a_snapshot_has_are_duplicates_after_the_disk_was_lost(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server({"kv.snapshot.interval": "50ms"})
    with RawClient(server.port) as raw:
        table_id = create_by_hand(raw, "sums", SUMS, AGGREGATION)
        answers = [sent(raw, table_id, sequence) for sequence in range(10)]
        assert {code for code, _ in answers} == {0}
        assert total(raw, table_id) == 10
    wait_for_snapshot(server, answers[-1][1])
    server.kill()
    shutil.rmtree(server.data_dir / "wire")
    server.start()
    with RawClient(server.port) as raw:
        assert total(raw, table_id) == 10
        assert [sent(raw, table_id, sequence) for sequence in range(5, 10)] == answers[5:]
        assert total(raw, table_id) == 10
        assert sent(raw, table_id, 10) == (0, answers[-1][1] + 2)
        assert total(raw, table_id) == 11
