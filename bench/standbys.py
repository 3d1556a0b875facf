"""What a warm standby costs, and what it saves when its leader is lost.

A coordinator and two tablet servers in front of the store of `bench/store.py`; a primary-key table
of one bucket with two replicas. First upserts of rows that exist: the processor time of the standby
until it has them all, against that of the leader. Then the leader is killed: from the order of the
coordinator until the bucket is served, with `--keys` keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.keyed import KEY, kv_batches, put_frames, random_keys
from bench.report import Measure, compared
from bench.store import Store
from bench.wal import REMOTE, SHORT_LATENCY_SECONDS, Cluster, Role, _leader, _seconds, _times
from bench.work import Target, cpu_seconds, new_table
from zufluss.client.sync.connection import Connection
from zufluss.model.table import TableInfo

KEYS = 1_000_000
KEYS_QUICK = 100_000
PUT_ROWS = 500
PUTS = 256
UPSERTS = {"connections": 4, "window": 2}
TWO = {"table.replication.factor": "2"}
QUIET_SECONDS = 1.0
"""A standby that used almost no processor time for so long has everything."""
QUIET_SHARE = 0.05
WAIT_SECONDS = 600.0


def run(directory: Path, rounds: int, quick: bool, keys: int | None = None) -> Iterator[Measure]:
    """The processor time of a standby, and a take-over by one."""
    count = keys or (KEYS_QUICK if quick else KEYS)
    with Store() as store, Cluster(directory, store.settings("standbys") | REMOTE) as cluster:
        store.latency(SHORT_LATENCY_SECONDS)
        for server_id in (1, 2):
            cluster.start(server_id)
        with closing(cluster.connect()) as connection:
            info = new_table(connection, "followed", primary_key=KEY, buckets=1, properties=TWO)
            leader = cluster.tablets[_leader(connection, info)]
            (standby,) = (each for each in cluster.tablets.values() if each is not leader)
            _fill(info, leader, count)
            _quiet(standby)
            yield _processor_time(info, leader, standby, count, rounds, 1.0 if quick else 3.0)
            yield _take_over(cluster, connection, info, leader, standby)


def _fill(info: TableInfo, leader: Role, keys: int) -> None:
    """Each key once."""
    for begin in range(0, keys, 200_000):
        ids = np.arange(begin, min(begin + 200_000, keys))
        frames = put_frames(info, kv_batches(info, ids, PUT_ROWS))
        Target(leader.bootstrap, (leader.pid,)).load(frames, connections=1, count=len(frames))


def _quiet(server: Role) -> None:
    """Wait until a server uses almost no processor time, which only a pause can show."""
    end = time.monotonic() + WAIT_SECONDS
    before = cpu_seconds((server.pid,))
    while time.monotonic() < end:
        time.sleep(QUIET_SECONDS)
        after = cpu_seconds((server.pid,))
        if after - before < QUIET_SHARE * QUIET_SECONDS:
            return
        before = after
    raise RuntimeError(f"the standby is always busy:\n{server.log()}")


def _processor_time(
    info: TableInfo, leader: Role, standby: Role, keys: int, rounds: int, seconds: float
) -> Measure:
    ids = random_keys(PUTS * PUT_ROWS, keys, 1)
    frames = put_frames(info, kv_batches(info, ids, PUT_ROWS))
    rows = len(ids) / len(frames)
    followed, led = [], []
    for _ in range(rounds):
        before = cpu_seconds((standby.pid,))
        load = Target(leader.bootstrap, (leader.pid,)).load(frames, **UPSERTS, seconds=seconds)
        _quiet(standby)
        followed.append((cpu_seconds((standby.pid,)) - before) / (load.answered * rows) * 1e6)
        led.append(load.cpu_seconds / (load.answered * rows) * 1e6)
    return compared(
        "standby.cpu",
        f"upsert {PUT_ROWS} of {keys:,} rows: CPU of a standby per row, against its leader",
        followed,
        led,
        "µs",
        at_most=0.5,
    )


def _take_over(
    cluster: Cluster,
    connection: Connection,
    info: TableInfo,
    leader: Role,
    standby: Role,
) -> Measure:
    table = connection.table(str(info.path))
    rows = table.count()
    leader.kill()
    if (count := table.count()) != rows:  # answered by the next leader
        raise RuntimeError(f"{count} rows were taken over, there were {rows}")
    standby.stop()  # its log is whole then
    if not _times(standby, "standby_promoted"):
        raise RuntimeError(f"the bucket was opened from the disk:\n{standby.log()}")
    (ordered,) = _times(cluster.coordinator, "buckets_taken_over")
    served = _times(standby, "bucket_opened_later")
    label = f"take-over of a bucket with {rows:,} keys by its standby, behind the order"
    return _seconds("standby.takeover", label, [served[0] - ordered], 2.0)
