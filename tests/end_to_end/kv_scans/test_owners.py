"""A scan belongs to its owner; scans of killed clients end by themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.conftest import SERVERS
from tests.end_to_end.guarded import guarded_properties, listener_ports, logged_in
from tests.end_to_end.kv_scans.support import (
    bucket_directory,
    close_pins,
    create,
    open_pins,
    pinned_offsets,
    tables_of,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    all_rows,
    call,
    close_request,
    go_on,
    good,
    in_key_order,
    next_request,
    numbered,
    open_request,
    page,
    page_request,
    pages,
    pin,
    pin_request,
    put_rows,
    rows_of,
)
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.errors import ErrorCode
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

FORBIDDEN = ErrorCode.AUTHORIZATION_EXCEPTION
COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
ROWS = 300
TTL = {
    "zufluss.metrics.port": "0",
    "kv.scanner.ttl": "2s",
    "kv.scanner.expiration-interval": "100ms",
}


# -- users ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, int]]:
    """A server with one port that requires passwords and one that does not."""
    ports = listener_ports()
    properties = guarded_properties(ports, "alice", "bob")
    server = WarmServer(tmp_path_factory.mktemp("guarded"), properties)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield ports


@pytest.mark.parametrize("stranger", ["bob", "nobody"])
def test_nobody_continues_repeats_or_closes_the_scan_of_another(
    guarded: dict[str, int], stranger: str
) -> None:
    """Knowing the id is not enough; the owner continues, also over another connection."""
    ports, rows = guarded, in_key_order(numbered(0, 100))
    other_port = ports["SECURE" if stranger == "bob" else "OPEN"]
    with (
        logged_in(ports["SECURE"], "alice") as alice,
        logged_in(ports["SECURE"], "alice") as alice_again,
        logged_in(other_port, stranger) if stranger == "bob" else RawClient(other_port) as other,
    ):
        table_id = create(alice)
        put_rows(alice, table_id, rows)
        (made,) = pin(alice, table_id)
        session = good(alice, open_request(table_id, size=500))
        begun = page(alice, table_id, made.pin_id, size=500)
        for after in (None, begun.last_key):
            request = page_request(table_id, made.pin_id, after_key=after)
            assert other.error_code(ApiKey.SCAN_KV_SNAPSHOT, request) == FORBIDDEN
        closing = m.CloseKvSnapshotRequest(pin_ids=[made.pin_id])
        assert other.error_code(ApiKey.CLOSE_KV_SNAPSHOT, closing) == FORBIDDEN
        for wrong in (*(next_request(session.scanner_id, seq) for seq in (0, 1, 2)),
                      close_request(session.scanner_id)):  # fmt: skip
            answer = call(other, wrong)
            assert answer.error_code == FORBIDDEN
            assert not answer.HasField("records")
        (own,) = pin(other, table_id)
        assert all_rows(pages(other, table_id, own.pin_id)) == rows, "its own it may have"
        rest = pages(alice_again, table_id, made.pin_id, after_key=begun.last_key)
        assert all_rows([begun, *rest]) == rows
        assert go_on(alice_again, session, 500) == rows
        last = call(other, next_request(session.scanner_id, 1, 500))
        assert last.error_code
        assert rows_of(last) == []
        close_pins(alice, made.pin_id)
        close_pins(other, own.pin_id)


def test_a_client_with_a_password_scans_and_others_cannot_use_its_state(
    guarded: dict[str, int],
) -> None:
    def secrets(name: str) -> dict[str, str]:
        return {
            "client.security.protocol": "sasl",
            "client.security.sasl.username": name,
            "client.security.sasl.password": f"{name}-secret",
            "client.scanner.kv.fetch.max-bytes": "2kb",
        }

    address = f"127.0.0.1:{guarded['SECURE']}"
    with (
        zufluss.connect(address, **secrets("alice")) as alice,
        zufluss.connect(address, **secrets("bob")) as bob,
    ):
        table = create_table(alice, COLUMNS, bucket_count=2)
        upsert(table, {"id": [*range(ROWS)], "text": ["a row"] * ROWS})
        with table.scan(prefetch=0).open() as scanner:
            taken = next(scanner).num_rows
            with bob.table(table.path).scan(at=scanner.log_offsets).open() as same:
                assert sum(batch.num_rows for batch in same) == ROWS
            assert taken + sum(batch.num_rows for batch in scanner) == ROWS


# -- clients that were killed --------------------------------------------------------------------

CLIENT = """
import sys, zufluss
connection = zufluss.connect(sys.argv[1], **{"client.scanner.kv.fetch.max-bytes": "2kb"})
scanner = connection.table(sys.argv[2]).scan(prefetch=0).open()
print("read", next(scanner).num_rows, flush=True)
sys.stdin.read()
"""


def begun_client(server: DevServer, table: Table) -> subprocess.Popen[str]:
    """A client in a process of its own that has read one page and stops."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.bootstrap, str(table.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    kind, rows = client.stdout.readline().split()
    assert (kind, int(rows) > 0) == ("read", True)
    return client


def files_of(server: DevServer) -> set[int]:
    """All table files of key-value stores, by inode: a pinned one has several names."""
    found = set[int]()
    for path in server.data_dir.glob("*/*/kv-*/**/*.sst"):
        with suppress(FileNotFoundError):  # compacted away just now
            found.add(path.stat().st_ino)
    return found


def rewrite(raw: RawClient, server: DevServer, table_id: int) -> None:
    """Write and flush all keys until the bucket itself needs none of its earlier files."""
    database = bucket_directory(server, table_id) / "rocks"
    before = tables_of(database)
    assert before

    def gone() -> bool:
        put_rows(raw, table_id, numbered(0, ROWS, "again"))
        (made,) = pin(raw, table_id)
        close_pins(raw, made.pin_id)
        return not before & tables_of(database)

    eventually(gone, f"a compaction of {database}")


def test_a_client_that_was_killed_holds_nothing_after_the_idle_time(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server(TTL)
    with zufluss.connect(server.bootstrap) as connection, RawClient(server.port) as raw:
        table = create_table(connection, COLUMNS, bucket_count=1)
        table_id = table.info.table_id
        put_rows(raw, table_id, numbered(0, ROWS))
        client = begun_client(server, table)
        try:
            pinned = files_of(server)
            assert pinned
            rewrite(raw, server, table_id)
            assert open_pins(server) == 1, "a client that lives keeps what it reads"
            assert pinned_offsets(server, table_id) == [ROWS]
            assert pinned <= files_of(server), "though the bucket needs them no more"
        finally:
            client.kill()
            client.communicate()
        eventually(lambda: not open_pins(server), "the end of the scan")
        eventually(lambda: not pinned_offsets(server, table_id), "the end of its state")
        assert not pinned & files_of(server), "its files are gone with it"
        request = pin_request(table_id, [0], [ROWS])
        (again,) = raw.call(ApiKey.OPEN_KV_SNAPSHOT, request).pins
        assert all_rows(pages(raw, table_id, again.pin_id)) == in_key_order(numbered(0, ROWS))
