"""Cursors: another process goes on with a scan, or many processes share one; each row once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zufluss
from tests.counts import rounds
from tests.end_to_end.kv_scans.support import fresh_name
from zufluss.client.keyed.cursor import PREFIX
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import InvalidScanRequestError, KvPinGoneError, PartitionNotExistError
from zufluss.testing.server import DevServer

pytestmark = pytest.mark.timeout(300)

SCHEMA = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
READER = """
import json, sys, zufluss
bootstrap, name, cursor, batches = sys.argv[1:]
with zufluss.connect(bootstrap, **{"client.scanner.kv.fetch.max-bytes": "2kb"}) as connection:
    with connection.table(name).scan(["id"], cursor=cursor).open() as scanner:
        ids, left = [], int(batches)
        for batch in scanner:
            ids += batch["id"].to_pylist()
            left -= 1
            if not left:
                break
        following = scanner.detach()
    print(json.dumps([ids, following]))
"""


def start(server: DevServer, name: str, cursor: str, batches: int = -1) -> subprocess.Popen[str]:
    """A process that reads some batches of a cursor, or all."""
    return subprocess.Popen(
        [sys.executable, "-c", READER, server.bootstrap, name, cursor, str(batches)],
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[list[int], str]:
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    ids, cursor = json.loads(out)
    return ids, cursor


def filled(conn: Connection, ids: Iterable[int], buckets: int = 3) -> Table:
    name = f"fluss.{fresh_name()}"
    conn.admin.create_table(name, SCHEMA, bucket_count=buckets)
    table = conn.table(name)
    upsert(table, ids)
    return table


def upsert(table: Table, ids: Iterable[int], text: str = "first") -> None:
    rows = list(ids)
    with table.upsert() as writer:
        writer.write({"id": rows, "text": [f"{text} {i}".ljust(60) for i in rows]})


def read(table: Table, cursor: str) -> list[int]:
    ids: list[int] = table.scan(["id"], cursor=cursor).to_arrow()["id"].to_pylist()
    return ids


def test_processes_go_on_with_a_scan_where_the_one_before_stopped(
    server: DevServer, paged: Connection
) -> None:
    table = filled(paged, range(1000))
    with table.scan(["id"]).open() as scanner:
        ids = next(scanner)["id"].to_pylist()
        cursor = scanner.detach()
    upsert(table, range(500, 1500), "later")
    with table.upsert() as writer:
        writer.delete({"id": list(range(100))})
    for batches in (3, 1, 5):
        more, cursor = result(start(server, str(table.path), cursor, batches))
        assert more
        ids += more
    rest = table.scan(cursor=cursor).to_arrow()
    assert all(text.startswith("first") for text in rest["text"].to_pylist()), "the same state"
    ids += rest["id"].to_pylist()
    assert sorted(ids) == list(range(1000)), "each row once"
    assert sorted(read(table, cursor)) == sorted(rest["id"].to_pylist()), "it may be used again"


def test_the_cursor_of_a_run_that_goes_on_tells_what_was_not_handed_out(paged: Connection) -> None:
    table = filled(paged, range(700))
    ids: list[int] = []
    with table.scan(["id"]).open() as scanner:
        for batch in scanner:
            ids += batch["id"].to_pylist()
            rest = read(table, scanner.cursor())
            assert sorted([*ids, *rest]) == list(range(700))
        assert read(table, scanner.cursor()) == []


def test_pages_of_a_limit_follow_each_other(paged: Connection) -> None:
    table = filled(paged, range(50))
    ids: list[int] = []
    with table.scan(["id"], limit=7).open() as scanner:
        ids += [i for batch in scanner for i in batch["id"].to_pylist()]
        cursor = scanner.cursor()
    while True:
        with table.scan(["id"], cursor=cursor, limit=7).open() as scanner:
            page = [i for batch in scanner for i in batch["id"].to_pylist()]
            cursor = scanner.cursor()
        ids += page
        if not page:
            break
        assert len(page) <= 7
    assert sorted(ids) == list(range(50))


def test_a_cursor_survives_a_reader_that_was_killed(server: DevServer, paged: Connection) -> None:
    table = filled(paged, range(600))
    paged.admin.take_kv_snapshots(str(table.path))
    with table.scan(["id"]).open() as scanner:
        ids = next(scanner)["id"].to_pylist()
        cursor = scanner.cursor()
        upsert(table, range(600), "later")
    more, _ = result(start(server, str(table.path), cursor))  # its pins are closed by now
    assert sorted([*ids, *more]) == list(range(600))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_processes_read_a_split_table_in_parallel(
    server: DevServer, paged: Connection, count: int
) -> None:
    table = filled(paged, range(2000))
    cursors = table.scan().split(count)
    assert len(cursors) == count
    upsert(table, range(1000, 3000), "later")
    readers = [start(server, str(table.path), cursor) for cursor in cursors]
    parts = [result(reader)[0] for reader in readers]
    assert sorted(i for part in parts for i in part) == list(range(2000))
    assert sum(map(bool, parts)) == count, "keys of integers are spread over all ranges"


@settings(max_examples=rounds(3, 300), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_ranges_cover_random_keys_exactly_once(paged: Connection, seed: int) -> None:
    rng = random.Random(seed)
    name = f"fluss.{fresh_name()}"
    paged.admin.create_table(
        name,
        "k STRING NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (k, n)",
        bucket_count=rng.randint(1, 2),
    )
    table = paged.table(name)
    alphabet = rng.choice(["ab", "abcdefghij", "äöü\0\x7f"])
    shared = "p" * rng.choice([0, 3, 40])
    keys = {
        (shared + "".join(rng.choices(alphabet, k=rng.randint(0, 6))), rng.randint(-300, 300))
        for _ in range(rng.choice([0, 1, 5, 60]))
    }
    if keys:
        with table.upsert() as writer:
            writer.write({"k": [k for k, _ in keys], "n": [n for _, n in keys]})
    count = rng.randint(1, 12)
    cursors = table.scan().split(count)
    assert len(cursors) == count
    found: Counter[tuple[str, int]] = Counter()
    for cursor in rng.sample(cursors, count):
        rows = table.scan(cursor=cursor).to_arrow()
        found.update(zip(rows["k"].to_pylist(), rows["n"].to_pylist(), strict=True))
    paged.admin.drop_table(name)
    assert found == Counter(keys), f"seed {seed}"


def test_a_filter_and_columns_are_given_again(paged: Connection) -> None:
    table = filled(paged, range(400))
    cursors = table.scan(filter="id >= 100").split(5)
    rows = [
        i
        for c in cursors
        for i in table.scan(["id"], "id >= 100", cursor=c).to_arrow()["id"].to_pylist()
    ]
    assert sorted(rows) == list(range(100, 400))


def test_a_cursor_of_another_table_or_a_damaged_one_is_refused(paged: Connection) -> None:
    table, other = filled(paged, range(5)), filled(paged, range(5))
    cursor = table.scan().split(1)[0]
    with pytest.raises(InvalidScanRequestError, match=f"has {other.info.table_id}; pass it to the"):
        other.scan(cursor=cursor)
    rng = random.Random(7)
    for _ in range(200):
        at = rng.randrange(len(PREFIX), len(cursor))
        changed = cursor[:at] + rng.choice("ABCxyz019-_!é") + cursor[at + 1 :]
        if changed != cursor:
            with pytest.raises(InvalidScanRequestError, match=r"is damaged|is not a cursor"):
                table.scan(cursor=changed)
        with pytest.raises(InvalidScanRequestError, match=r"is damaged|is not a cursor"):
            table.scan(cursor=cursor[:at])
    for wrong in ("", "zkc2." + cursor[5:], 7, b"zkc1."):
        with pytest.raises(InvalidScanRequestError, match="is not a cursor"):
            table.scan(cursor=wrong)  # type: ignore[arg-type]
    for options in ({"buckets": [0]}, {"at": {0: 1}}, {"source": "snapshot"}):
        with pytest.raises(InvalidScanRequestError, match="a cursor has its own"):
            table.scan(cursor=cursor, **options)  # type: ignore[arg-type]
    for count in (0, -1, 10**6, True, "3"):
        with pytest.raises(InvalidScanRequestError, match="cannot be split into"):
            table.scan().split(count)  # type: ignore[arg-type]


def test_a_cursor_whose_state_is_gone_says_so(server: DevServer, tmp_path: object) -> None:
    """Without snapshots the state cannot be made again once its pin was closed."""
    del tmp_path
    with zufluss.connect(server.bootstrap, **{"client.request-timeout": "5s"}) as conn:
        table = filled(conn, range(300))
        with table.scan(["id"]).open() as scanner:
            cursor = scanner.detach()
        conn.admin.drop_table(table.path)
        conn.admin.create_table(table.path, SCHEMA, bucket_count=3)
        again = conn.table(str(table.path))
        with pytest.raises(InvalidScanRequestError, match="created again"):
            again.scan(cursor=cursor)
        scans = [scan.scan_id for scan in conn.admin.list_kv_scans(again.path)]
        assert scans == []


def test_a_scan_that_was_killed_cannot_be_continued(paged: Connection) -> None:
    table = filled(paged, range(300))
    cursor = table.scan().split(1)[0]
    scans = [scan.scan_id for scan in paged.admin.list_kv_scans(str(table.path))]
    assert len(scans) == 3
    paged.admin.end_kv_scans(scans)
    with pytest.raises(KvPinGoneError):
        read(table, cursor)


def test_a_dropped_partition_of_a_cursor_is_named(paged: Connection) -> None:
    name = f"fluss.{fresh_name()}"
    paged.admin.create_table(
        name,
        "id BIGINT NOT NULL, day STRING NOT NULL, PRIMARY KEY (id, day)",
        bucket_count=1,
        partition_keys=["day"],
    )
    table = paged.table(name)
    for day in ("mon", "tue"):
        paged.admin.create_partition(name, {"day": day})
        with table.upsert() as writer:
            writer.write({"id": [1, 2], "day": [day] * 2})
    cursors = table.scan().split(2)
    paged.admin.drop_partition(name, {"day": "mon"})
    outcomes = []
    for cursor in cursors:
        try:
            outcomes.append(len(read(table, cursor)))
        except PartitionNotExistError:
            outcomes.append(-1)
    assert sorted(outcomes) == [-1, 2]
