"""A real server keeps rows that the lake lacks, expires those it has, and reports both.

Segments of a kilobyte and a time to live of a millisecond, looked at every few milliseconds. That
retention has been at work is seen by a table without lake beside it: when that one's rows are gone,
those of the lake table, which were written before, have been looked at too.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.end_to_end.lake_round import FRESH, report_tiered
from tests.end_to_end.raw import OFFSET_EARLIEST, RawClient, table_path
from tests.servers import RoleServer
from tests.waiting import WAIT_SECONDS, eventually
from zufluss.errors import ErrorCode
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

SERVER = {
    "datalake.format": "iceberg",
    "log.segment.file-size": "1kb",
    "log.retention.check-interval": "5ms",
    "kv.snapshot.interval": "100ms",  # a changelog stays from its oldest snapshot on
    "kv.snapshot.num-retained": "1",
    "zufluss.metrics.port": "0",
}
EXPIRES = {"table.log.ttl": "1ms"}
TIERED = {**EXPIRES, **FRESH}
ROWS, BATCHES = 10, 40
END = ROWS * BATCHES
DEADLINE_SECONDS = WAIT_SECONDS
NUMBERS = count()


class Retention:
    """A server, and the queries of the tests."""

    def __init__(
        self, server: DevServer, coordinator: DevServer, connection: zufluss.client.Connection
    ) -> None:
        self.server = server
        self.coordinator = coordinator
        self.connection = connection
        self.admin = connection.admin

    def write(self, name: str, primary_key: bool, properties: dict[str, str]) -> None:
        """A table of one bucket and many segments."""
        key = ["id"] if primary_key else []
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("text", pa.string())])
        self.admin.create_table(
            name, schema, primary_key=key, bucket_count=1, properties=properties
        )
        table = self.connection.table(name)
        with table.upsert() if primary_key else table.append() as writer:
            for at in range(BATCHES):
                ids = pa.array(range(at * ROWS, (at + 1) * ROWS), pa.int64())
                texts = pa.array([f"text {at}"] * ROWS)
                writer.write(pa.table([ids, texts], schema=schema))
                writer.flush()

    def earliest(self, name: str) -> int:
        """The first offset that the server still has."""
        with RawClient(self.server.port) as raw:
            request = m.ListOffsetsRequest(
                follower_server_id=-1,
                offset_type=OFFSET_EARLIEST,
                table_id=raw.table_id("fluss", name),
                bucket_id=[0],
            )
            (entry,) = raw.call(ApiKey.LIST_OFFSETS, request).buckets_resp
        return int(entry.offset)

    def looked(self) -> None:
        """Wait until retention has checked all earlier segments."""
        name = f"without_lake_{next(NUMBERS)}"
        self.write(name, False, EXPIRES)
        eventually(lambda: self.earliest(name) == END)

    def tiered(self, name: str, offset: int, snapshot_id: int) -> None:
        """Report, as a tiering service, a snapshot with everything below `offset`."""
        report_tiered(self.connection, name, snapshot_id, offset)

    def untiered_rows(self, name: str) -> float:
        """The number of untiered rows, from the server's metrics."""
        text = scrape(self.server)
        (line,) = re.findall(rf'zufluss_untiered_rows{{.*table="{name}".*}} (.*)', text)
        return float(line)


def scrape(server: DevServer) -> str:
    (url,) = re.findall(r"address=(http://\S+)", server.log())[-1:]
    with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
        return str(answer.read().decode())


@contextmanager
def connected(server: DevServer, coordinator: DevServer | None = None) -> Iterator[Retention]:
    with zufluss.connect(server.bootstrap) as connection:
        yield Retention(server, coordinator or server, connection)


@pytest.mark.parametrize("primary_key", [False, True], ids=["log", "primary key"])
def test_untiered_rows_stay_and_tiered_ones_go(
    new_server: Callable[..., DevServer], primary_key: bool
) -> None:
    server = new_server(SERVER)
    with connected(server) as cluster:
        cluster.write("t", primary_key, TIERED)
        cluster.looked()
        assert cluster.earliest("t") == 0, "nothing was tiered"
        assert cluster.untiered_rows("t") == END
        cluster.tiered("t", END // 2, snapshot_id=1)
        eventually(lambda: cluster.earliest("t") > 0)
        cluster.looked()
        assert 0 < cluster.earliest("t") <= END // 2
        assert cluster.untiered_rows("t") == END // 2

    server.kill()
    server.start()
    with connected(server) as cluster:
        cluster.looked()
        assert cluster.earliest("t") <= END // 2, "after a start the lake still lacks the rest"
        cluster.tiered("t", END, snapshot_id=2)
        eventually(lambda: cluster.earliest("t") == END)
        assert cluster.untiered_rows("t") == 0


def test_an_untrue_lake_commit_deletes_nothing_and_tiering_goes_on(
    new_server: Callable[..., DevServer],
) -> None:
    with connected(new_server(SERVER)) as cluster:
        cluster.write("t", False, TIERED)
        with RawClient(cluster.coordinator.port) as raw:
            request = m.CommitLakeTableSnapshotRequest()
            table = request.tables_req.add(table_id=raw.table_id("fluss", "t"), snapshot_id=7)
            untrue = table.buckets_req.add(bucket_id=0, log_end_offset=10**15)
            codes = set()
            for service_holds_it in (False, True):
                if service_holds_it:  # one that sends no epochs, so its commit may have none
                    asked = m.LakeTieringHeartbeatRequest(request_table=True)
                    held = raw.call(ApiKey.LAKE_TIERING_HEARTBEAT, asked)
                    assert held.HasField("tiering_table")
                for offset in (10**15, END + 1):
                    untrue.log_end_offset = offset
                    (answer,) = raw.call(ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, request).table_resp
                    codes.add(answer.error_code)
            beyond = ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
            assert codes == {ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION, beyond}
            given_up = m.PbHeartbeatReqForTable(
                table_id=table.table_id,
                tiering_epoch=held.tiering_table.tiering_epoch,
                coordinator_epoch=held.coordinator_epoch,
            )
            raw.call(
                ApiKey.LAKE_TIERING_HEARTBEAT,
                m.LakeTieringHeartbeatRequest(failed_tables=[given_up]),
            )
        cluster.looked()
        assert cluster.earliest("t") == 0
        cluster.tiered("t", END // 2, snapshot_id=1)
        assert cluster.untiered_rows("t") == END // 2


def test_a_tablet_server_of_its_own_hears_of_the_lake_and_again_when_it_comes_back(
    tmp_path: Path,
) -> None:
    lake = {"datalake.format": "iceberg", "datalake.iceberg.uri": "http://catalog.example"}
    coordinator = RoleServer("coordinator", tmp_path, lake)
    address = {"zufluss.coordinator.address": coordinator.bootstrap}
    tablet = RoleServer("tablet", tmp_path, {**SERVER, **lake, **address})
    with coordinator, tablet:
        with connected(tablet, coordinator) as cluster:
            cluster.write("t", False, TIERED)
            cluster.looked()
            assert cluster.earliest("t") == 0, "nothing was tiered"
            properties = cluster.admin.table_info("t").descriptor.properties
            assert properties["table.datalake.iceberg.uri"] == "http://catalog.example"
            cluster.tiered("t", END // 2, snapshot_id=1)
            eventually(lambda: 0 < cluster.earliest("t") <= END // 2)
        tablet.kill()
        tablet.start()
        with connected(tablet, coordinator) as cluster:
            eventually(lambda: cluster.untiered_rows("t") == END // 2)
            cluster.looked()
            assert 0 < cluster.earliest("t") <= END // 2
        tablet.stop()
        coordinator.stop()


def test_turning_the_lake_off_lets_everything_expire(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server(SERVER)
    with connected(server) as cluster:
        cluster.write("t", False, TIERED)
        cluster.looked()
        assert cluster.earliest("t") == 0
        cluster.admin.alter_table("t", set={"table.datalake.enabled": "false"})
        eventually(lambda: cluster.earliest("t") == END)


def test_a_server_shows_its_requests_errors_and_tables_to_prometheus(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server(SERVER)
    with connected(server) as cluster:
        cluster.write("orders", False, {**TIERED, "table.datalake.freshness": "1h"})
        with RawClient(server.port) as raw:
            missing = m.GetTableInfoRequest(table_path=table_path("fluss", "missing"))
            assert raw.error_code(ApiKey.GET_TABLE_INFO, missing)
        shown = dict(line.rsplit(" ", 1) for line in scrape(server).splitlines() if line[0] != "#")
    assert float(shown['zufluss_requests_total{api="PRODUCE_LOG"}']) == BATCHES
    assert float(shown['zufluss_request_errors_total{error="TABLE_NOT_EXIST"}']) == 1
    assert float(shown["zufluss_received_bytes_total"]) > END
    assert float(shown["zufluss_sent_bytes_total"]) > BATCHES
    assert float(shown["zufluss_connections"]) >= 1
    assert float(shown["zufluss_buckets"]) == 1
    assert float(shown["zufluss_log_size_bytes"]) > 1024
    assert float(shown["zufluss_tiering_pending_tables"]) == 0
    assert float(shown['zufluss_tiering_lag_seconds{database="fluss",table="orders"}']) >= 0
    assert float(shown['zufluss_tiering_failures_total{database="fluss",table="orders"}']) == 0
    assert any(key.startswith("process_cpu_seconds_total") for key in shown)
    assert server.stop() == 0


def test_metrics_on_a_port_that_is_taken_stop_the_start(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server({"zufluss.metrics.port": "0"})
    (port,) = re.findall(r"http://localhost:(\d+)/", server.log())
    with pytest.raises(RuntimeError, match=rf"(?s)cannot serve metrics.*localhost:{port}"):
        new_server({"zufluss.metrics.port": port})
