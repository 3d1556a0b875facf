"""Helpers for tests of full scans: tables, changelogs, metrics, suspended reader processes."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import signal
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.end_to_end.kv import raw_changelog
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import SCANNED, Row
from tests.waiting import WAIT_SECONDS
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DATABASE = "fluss"
"""The database that every server has from its start."""
CAP_BYTES = 64 << 10
"""`kv.scanner.max-batch-size` of the shared server."""
EXPIRED, UNKNOWN_ID, INVALID, TOO_MANY, BUSY = 66, 67, 68, 69, 30004

State = dict[int, Row]
"""Rows by key."""
Change = tuple[int, str, Row]
"""Offset, kind and row of a changelog record."""

_NUMBERS = itertools.count()
_RUN = secrets.token_hex(3)


def fresh_name() -> str:
    """The name of a table that no other test uses."""
    return f"scan_{_RUN}_{next(_NUMBERS)}"


# -- tables by hand -----------------------------------------------------------------------------


def create(
    raw: RawClient,
    schema: Schema = SCANNED,
    buckets: int = 1,
    *,
    name: str | None = None,
    partition_keys: tuple[str, ...] = (),
) -> int:
    """Create a table; returns its id."""
    name = name or fresh_name()
    descriptor = TableDescriptor(
        schema,
        None,
        partition_keys,
        tuple(k for k in schema.primary_key if k not in partition_keys),
        buckets,
        {"table.replication.factor": "1"},
    )
    request = m.CreateTableRequest(
        table_path=m.PbTablePath(database_name=DATABASE, table_name=name),
        table_json=descriptor.to_json(),
        ignore_if_exists=False,
    )
    raw.call(ApiKey.CREATE_TABLE, request)
    return raw.table_id(DATABASE, name)


def drop(raw: RawClient, name: str) -> None:
    path = m.PbTablePath(database_name=DATABASE, table_name=name)
    raw.call(ApiKey.DROP_TABLE, m.DropTableRequest(table_path=path, ignore_if_not_exists=False))


def close_pins(raw: RawClient, *pin_ids: bytes) -> None:
    raw.call(ApiKey.CLOSE_KV_SNAPSHOT, m.CloseKvSnapshotRequest(pin_ids=pin_ids))


# -- changes ------------------------------------------------------------------------------------


def by_key(rows: Iterable[Row]) -> State:
    """Rows by key; asserts that no key occurs twice."""
    found: State = {}
    for row in rows:
        assert row[0] not in found, f"{row} came twice"
        found[row[0]] = row
    return found


def applied(state: State, changes: Iterable[Change]) -> State:
    """Apply changes to rows."""
    now = dict(state)
    for _, kind, row in changes:
        if kind in ("+I", "+U"):
            now[row[0]] = row
        elif kind == "-D":
            del now[row[0]]
    return now


def changes_from(raw: RawClient, table_id: int, start: int = 0, bucket: int = 0) -> list[Change]:
    """The changelog of a bucket from an offset to its end."""
    return raw_changelog(raw, table_id, SCANNED, bucket, start)


# -- looking ------------------------------------------------------------------------------------


@cache
def metrics_address(server: DevServer, pid: int) -> str:
    """The address of a server's metrics; called at its start, while its log has the line."""
    (url,) = re.findall(r"address=(http://\S+)", server.log())[-1:]
    return str(url)


def scrape(server: DevServer) -> dict[str, float]:
    """The metrics of a server, by name and labels."""
    with urllib.request.urlopen(
        metrics_address(server, server.pid), timeout=WAIT_SECONDS
    ) as answer:
        lines = answer.read().decode().splitlines()
    shown = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in shown}


def metric(server: DevServer, name: str) -> float:
    """One metric, over all its labels."""
    return sum(v for k, v in scrape(server).items() if k.partition("{")[0] == name)


def requests_of(server: DevServer, api: str) -> float:
    """The number of requests of one kind that a server has received."""
    samples = scrape(server).items()
    return sum(v for k, v in samples if k.startswith("zufluss_requests_total{") and f'"{api}"' in k)


def open_pins(server: DevServer) -> float:
    """Scans and pins that a server has open."""
    return metric(server, "zufluss_kv_pins")


def bucket_directory(server: DevServer, table_id: int, bucket: int = 0) -> Path:
    """The directory of the rows of a bucket."""
    (found,) = server.data_dir.glob(f"*/*-{table_id}/kv-{bucket}")
    return found


def tables_of(database: Path) -> set[str]:
    """The table files of a database, by name."""
    return {path.name for path in database.glob("*.sst")}


def pinned_offsets(server: DevServer, table_id: int, bucket: int = 0) -> list[int]:
    """The states of a bucket that are on the disk."""
    pins = bucket_directory(server, table_id, bucket) / "pins"
    names = [p.name for p in pins.iterdir()] if pins.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


# -- a call that takes as long as the test wants ------------------------------------------------


def scan_processes(server: DevServer) -> list[int]:
    """The processes of a server that read pages."""
    threads = Path(f"/proc/{server.pid}/task").glob("*/children")
    children = [pid for path in threads for pid in path.read_text().split()]
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, line in lines.items() if b"zufluss.kv.scan.process" in line]


@contextmanager
def no_pages(server: DevServer) -> Iterator[None]:
    """Suspend the processes that read pages: calls wait until the end of the block."""
    stopped = scan_processes(server)
    assert stopped, "nothing was scanned yet"
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
