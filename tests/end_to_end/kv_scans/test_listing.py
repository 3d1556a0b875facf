"""Operators see who scans what, and end scans; metrics are per table."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import zufluss
from tests.cli.conftest import Result, run
from tests.client.pk import create_table, upsert
from tests.end_to_end.guarded import guarded_properties, listener_ports
from tests.end_to_end.kv_scans.support import EXPIRED, create, scrape
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import call, good, next_request, numbered, open_request, put_rows
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import InvalidScanRequestError, KvPinGoneError
from zufluss.testing.server import DevServer

COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
ROWS = 2_000

Run = Callable[..., Result]

__all__ = ["run"]


def filled(connection: Connection) -> Table:
    table = create_table(connection, COLUMNS, bucket_count=2)
    upsert(table, {"id": [*range(ROWS)], "text": [f"row {i}" for i in range(ROWS)]})
    return table


def test_a_scan_is_listed_with_its_client_and_how_far_it_came(
    server: DevServer, paged: Connection
) -> None:
    table = filled(paged)
    with table.scan(prefetch=0).open() as scanner:
        rows = next(scanner).num_rows
        scans = paged.admin.list_kv_scans(table.path)
        assert {scan.table for scan in scans} == {str(table.path)}
        assert [scan.bucket for scan in scans] == [0, 1]
        assert sorted(scan.rows for scan in scans) == [0, rows]
        assert all(scan.connected and scan.client.startswith("127.0.0.1:") for scan in scans)
        offsets = {bucket.bucket_id: at for bucket, at in scanner.log_offsets.items()}
        assert {scan.bucket: scan.log_offset for scan in scans} == offsets
        labels = f'{{database="{table.path.database}",table="{table.path.table}"}}'
        metrics = scrape(server)
        assert metrics[f"zufluss_kv_pins{labels}"] == 2
        assert metrics[f"zufluss_kv_scan_rows_total{labels}"] == rows
        assert metrics[f"zufluss_kv_scan_bytes_total{labels}"] > 0
        assert metrics[f"zufluss_kv_pin_oldest_age_seconds{labels}"] > 0
        assert set(scans) <= set(paged.admin.list_kv_scans()) or len(scans) == 2
    assert paged.admin.list_kv_scans(table.path) == []


def test_a_scan_that_is_ended_raises_and_does_not_begin_again_by_itself(
    paged: Connection,
) -> None:
    table = filled(paged)
    with table.scan(prefetch=0).open() as scanner:
        next(scanner)
        ids = [scan.scan_id for scan in paged.admin.list_kv_scans(table.path)]
        assert paged.admin.end_kv_scans([*ids, "0-999999999", "99-1"]) == ids
        with pytest.raises(KvPinGoneError, match="ended by an operator"):
            list(scanner)
    assert paged.admin.list_kv_scans(table.path) == []
    assert table.scan().to_arrow().num_rows == ROWS


def test_a_client_of_fluss_is_told_that_its_scan_has_expired(
    raw: RawClient, paged: Connection
) -> None:
    table_id = create(raw)
    put_rows(raw, table_id, numbered(0, 10))
    scanner = good(raw, open_request(table_id, size=1)).scanner_id
    (scan,) = [s for s in paged.admin.list_kv_scans() if s.rows == 1 and s.bucket == 0][-1:]
    assert paged.admin.end_kv_scans(scan.scan_id) == [scan.scan_id]
    answer = call(raw, next_request(scanner, 1))
    assert answer.error_code == EXPIRED
    assert "ended by an operator" in answer.error_message


@pytest.mark.parametrize("scan_id", ["", "x", "1", "1-", "-1-2", "1-2-3", 7, None, "1" * 40])
def test_what_is_no_id_of_a_scan_is_refused(paged: Connection, scan_id: object) -> None:
    with pytest.raises(InvalidScanRequestError, match="no id of a scan"):
        paged.admin.end_kv_scans([scan_id])  # type: ignore[list-item]


def test_the_command_lists_and_ends_scans(server: DevServer, paged: Connection, run: Run) -> None:
    table = filled(paged)
    where = ("--bootstrap", server.bootstrap)
    with table.scan(prefetch=0).open() as scanner:
        rows = next(scanner).num_rows
        text = run("scan", "list", str(table.path), *where)
        assert text.code == 0
        assert str(rows) in text.out
        listed = json.loads(run("scan", "list", str(table.path), "-o", "json", *where).out)
        assert [scan["bucket"] for scan in listed] == [0, 1]
        ids = [scan["scan_id"] for scan in listed]
        some = run("scan", "kill", ids[0], "0-999999999", *where)
        assert some.code == 1
        assert "ended 1 scans" in some.err
        assert "no scan 0-999999999" in some.err
        assert run("scan", "kill", "--table", str(table.path), *where).code == 0
        with pytest.raises(KvPinGoneError):
            list(scanner)
    assert run("scan", "kill", *where).code == 2
    assert run("scan", "kill", "nonsense", *where).code == 2
    assert json.loads(run("scan", "list", "-o", "json", str(table.path), *where).out) == []


def test_only_the_owner_or_a_super_user_ends_a_scan(new_server: Callable[..., DevServer]) -> None:
    ports = listener_ports()
    properties = guarded_properties(ports, "anna", "bob", "root")
    new_server(properties | {"super.users": "User:root"})

    def user(name: str) -> Connection:
        return zufluss.connect(
            f"127.0.0.1:{ports['SECURE']}",
            **{
                "client.security.protocol": "sasl",
                "client.security.sasl.username": name,
                "client.security.sasl.password": f"{name}-secret",
                "client.scanner.kv.fetch.max-bytes": "2kb",
            },
        )

    with user("anna") as anna, user("bob") as bob, user("root") as root:
        table = filled(anna)
        with table.scan(prefetch=0).open() as scanner:
            next(scanner)
            ids = [scan.scan_id for scan in root.admin.list_kv_scans()]
            assert {scan.owner for scan in root.admin.list_kv_scans()} == {"anna"}
            with pytest.raises(zufluss.errors.AuthorizationError, match="belongs to anna"):
                bob.admin.end_kv_scans(ids)
            assert root.admin.end_kv_scans(ids[:1]) == ids[:1]
            assert anna.admin.end_kv_scans(ids) == ids[1:]
            with pytest.raises(KvPinGoneError, match=r"ended by (root|anna)"):
                list(scanner)
