"""Pins are taken while a scan advances, and those of killed clients do not stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.client.relay import Relay
from tests.end_to_end.kv_scans.conftest import PAGED
from tests.end_to_end.kv_scans.support import open_pins, requests_of, scrape
from tests.end_to_end.kv_scans.test_owners import begun_client
from tests.waiting import eventually
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import InvalidScanRequestError, KvScanBusyError, PartitionNotExistError
from zufluss.testing.server import DevServer

COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
PARTED = "id BIGINT NOT NULL, day STRING NOT NULL, text STRING, PRIMARY KEY (id, day)"
PER_SERVER, AT_OPEN, BUCKETS, ROWS = 8, 2, 20, 4_000
FEW_PINS = {
    "zufluss.metrics.port": "0",
    "kv.scanner.max-per-server": str(PER_SERVER),
    "zufluss.kv.scanner.disconnect-grace": "2s",
    "kv.scanner.ttl": "10min",
}


@pytest.fixture
def few(new_server: Callable[..., DevServer]) -> Iterator[tuple[DevServer, Connection]]:
    """A server with room for few pins, and a client that reads in small pages."""
    server = new_server(FEW_PINS)
    scrape(server)
    with zufluss.connect(server.bootstrap, **PAGED) as connection:
        yield server, connection


def filled(connection: Connection, buckets: int = BUCKETS) -> Table:
    table = create_table(connection, COLUMNS, bucket_count=buckets)
    upsert(table, {"id": [*range(ROWS)], "text": [f"row {i}" for i in range(ROWS)]})
    return table


# -- more buckets than pins ------------------------------------------------------------------------


def test_a_table_with_more_buckets_than_pins_is_scanned(few: tuple[DevServer, Connection]) -> None:
    server, connection = few
    table = filled(connection)
    rows: dict[int, str] = {}
    most = 0.0
    with table.scan().open() as scanner:
        assert open_pins(server) == AT_OPEN
        with pytest.raises(InvalidScanRequestError, match="18 of 20 buckets"):
            scanner.log_offsets  # noqa: B018 - a property that raises
        for number, batch in enumerate(scanner):
            if number % 10 == 0:
                upsert(table, {"id": [number, ROWS + number], "text": ["changed"] * 2})
                most = max(most, open_pins(server))
            for row in batch.to_pylist():
                assert row["id"] not in rows, "each key once"
                rows[row["id"]] = row["text"]
        offsets = scanner.log_offsets
    assert len(offsets) == BUCKETS
    assert most <= PER_SERVER
    assert not open_pins(server)
    changes = table.changelog(start=offsets).to_arrow().sort_by("_log_offset").to_pylist()
    rows |= {c["id"]: c["text"] for c in changes if c["_change_type"] in ("+I", "+U")}
    assert rows == {row["id"]: row["text"] for row in table.scan().to_arrow().to_pylist()}


def test_scans_of_large_tables_beside_each_other_all_end(few: tuple[DevServer, Connection]) -> None:
    """Together they want ten times as many pins as there are."""
    server, connection = few
    table = filled(connection)
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(lambda: table.scan().to_arrow().num_rows) for _ in range(4)]
        assert [run.result() for run in runs] == [ROWS] * 4
    assert not open_pins(server)


def test_the_state_at_offsets_is_read_with_few_pins(few: tuple[DevServer, Connection]) -> None:
    _, connection = few
    table = filled(connection)
    with table.scan().open() as scanner:
        before = sum(batch.num_rows for batch in scanner)
        offsets = scanner.log_offsets
    upsert(table, {"id": [*range(ROWS, 2 * ROWS)], "text": ["later"] * ROWS})
    assert table.scan(at=offsets).to_arrow().num_rows == before == ROWS


# -- partitions ------------------------------------------------------------------------------------


def parted(connection: Connection, days: int = 6) -> Table:
    table = create_table(connection, PARTED, partition_keys=["day"], bucket_count=2)
    for day in map(str, range(days)):
        connection.admin.create_partition(table.path, {"day": day})
        upsert(table, {"id": [*range(300)], "day": [day] * 300, "text": [f"of {day}"] * 300})
    return table


def test_a_filter_on_a_partition_column_reads_only_partitions_that_can_match(
    server: DevServer, paged: Connection
) -> None:
    table, before = parted(paged), open_pins(server)
    filter = (col("day") >= "4") & (col("id") < 10)
    with table.scan(["id", "day"], filter, prefetch=0).open() as scanner:
        assert open_pins(server) == before + 4, "two partitions of two buckets"
        rows = [(r["day"], r["id"]) for batch in scanner for r in batch.to_pylist()]
        offsets = scanner.log_offsets
    assert sorted(rows) == [(day, i) for day in ("4", "5") for i in range(10)]
    again = table.scan(["id", "day"], filter, at=offsets).to_arrow()
    assert again.num_rows == len(rows)
    fetched = requests_of(server, "FETCH_LOG")
    assert table.changelog(["id"], col("day") == "no such day").to_arrow().num_rows == 0
    assert requests_of(server, "FETCH_LOG") == fetched, "a log is pruned, too"


def test_the_state_at_offsets_is_pruned_by_a_filter(server: DevServer, paged: Connection) -> None:
    table = parted(paged, 3)
    with table.scan().open() as scanner:
        offsets = scanner.log_offsets
    before = open_pins(server)
    with table.scan(filter=col("day") == "1", at=offsets).open() as scanner:
        assert open_pins(server) == before + 2
        assert sum(batch.num_rows for batch in scanner) == 300


def test_a_partition_dropped_before_its_turn_is_left_out(few: tuple[DevServer, Connection]) -> None:
    _, connection = few
    table = parted(connection)
    days = []
    with table.scan(prefetch=0).open() as scanner:
        days += next(scanner)["day"].to_pylist()
        (begun,) = set(days)
        gone = "5" if begun != "5" else "4"
        connection.admin.drop_partition(table.path, {"day": gone})
        for batch in scanner:
            days += batch["day"].to_pylist()
        assert len(scanner.log_offsets) == 10
    assert len(days) == 5 * 300
    assert gone not in days


def test_a_partition_dropped_while_it_is_read_is_named(few: tuple[DevServer, Connection]) -> None:
    _, connection = few
    table = parted(connection)
    with table.scan(prefetch=0).open() as scanner:
        (begun,) = set(next(scanner)["day"].to_pylist())
        connection.admin.drop_partition(table.path, {"day": begun})
        with pytest.raises(PartitionNotExistError, match=rf"partition '{begun}' .* dropped during"):
            list(scanner)
        rest = [day for batch in scanner for day in batch["day"].to_pylist()]
    assert len(rest) == 5 * 300
    assert begun not in rest


def test_a_partition_that_the_scan_names_is_never_left_out(
    few: tuple[DevServer, Connection],
) -> None:
    _, connection = few
    table = parted(connection)
    with table.scan(prefetch=0, partitions=list("012345")).open() as scanner:
        (begun,) = set(next(scanner)["day"].to_pylist())
        gone = "5" if begun != "5" else "4"
        connection.admin.drop_partition(table.path, {"day": gone})
        with pytest.raises(PartitionNotExistError, match=f"partition '{gone}'"):
            list(scanner)


# -- clients that were killed ----------------------------------------------------------------------


def test_eight_killed_clients_block_a_bucket_for_no_longer_than_the_grace(
    few: tuple[DevServer, Connection],
) -> None:
    """Their pins would live for the idle time of ten minutes, and this client gives up before."""
    server, connection = few
    table = filled(connection, 1)
    clients = [begun_client(server, table) for _ in range(8)]
    try:
        with (
            zufluss.connect(server.bootstrap, **PAGED, **{"client.request-timeout": "1s"}) as hasty,
            pytest.raises(KvScanBusyError),
        ):
            hasty.table(table.path).scan().to_arrow()
        assert open_pins(server) == 8
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    assert table.scan().to_arrow().num_rows == ROWS
    eventually(lambda: not open_pins(server), "the end of all pins")


def test_a_client_that_waits_keeps_its_pin_though_its_connection_breaks(
    new_server: Callable[..., DevServer],
) -> None:
    """Without resume, so that a pin that was lost would be an error."""
    with Relay() as relay:
        server = new_server(FEW_PINS | {"advertised.listeners": f"FLUSS://{relay.bootstrap}"})
        scrape(server)
        relay.target = server.port
        with zufluss.connect(relay.bootstrap, **PAGED) as connection:
            table = filled(connection, 1)
            with table.scan(prefetch=0, resume=False).open() as scanner:
                rows = next(scanner).num_rows
                calls = requests_of(server, "SCAN_KV_SNAPSHOT")
                relay.cut()
                relay.mend()
                eventually(lambda: requests_of(server, "SCAN_KV_SNAPSHOT") > calls, "a new touch")
                since = time.monotonic()
                eventually(lambda: time.monotonic() > since + 3, "the end of the grace")
                rows += sum(batch.num_rows for batch in scanner)
        assert rows == ROWS
