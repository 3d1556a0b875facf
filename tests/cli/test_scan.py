"""`zufluss scan` with a filter, partitions, buckets and a moment, against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import zufluss
from tests.client.pk import create_table, upsert
from zufluss.client.sync.table import Table

from .conftest import Result

Run = Callable[..., Result]
PARTED = "id INT, day STRING, text STRING, PRIMARY KEY (id, day)"


@pytest.fixture
def parted(server_address: str) -> Table:
    with zufluss.connect(server_address) as connection:
        table = create_table(connection, PARTED, partition_keys=["day"], bucket_count=2)
        for day in ("1", "2", "3"):
            connection.admin.create_partition(table.path, {"day": day})
        upsert(
            table,
            {
                "id": [*range(30)],
                "day": [str(i % 3 + 1) for i in range(30)],
                "text": [f"row {i}" for i in range(30)],
            },
        )
        return table


@pytest.fixture
def scan(run: Run, server_address: str) -> Callable[..., list[dict[str, Any]]]:
    """The rows that the command prints."""

    def rows(*arguments: str) -> list[dict[str, Any]]:
        result = run("scan", *arguments, "-o", "json", "-b", server_address)
        assert result.code == 0, result.err
        return [json.loads(line) for line in result.out.splitlines()]

    return rows


Scan = Callable[..., list[dict[str, Any]]]


def test_a_filter_leaves_the_rows_that_match(parted: Table, scan: Scan) -> None:
    name = str(parted.path)
    rows = scan(name, "--where", "day >= '2' AND id < 10", "--columns", "id")
    assert sorted(row["id"] for row in rows) == [1, 2, 4, 5, 7, 8]
    assert scan("--where", "text LIKE '%7'", "--limit", "1", name)[0]["text"].endswith("7")


def test_partitions_and_buckets_are_chosen(parted: Table, scan: Scan) -> None:
    name = str(parted.path)
    rows = scan(name, "--partition", "1", "--partition", "3")
    assert {row["day"] for row in rows} == {"1", "3"}
    assert len(rows) == 20
    parts = [scan(name, "--bucket", bucket) for bucket in ("0", "1")]
    assert sum(map(len, parts)) == 30
    assert all(parts)


def test_rows_are_shown_as_they_were_at_offsets_or_a_time(
    parted: Table, scan: Scan, server_address: str
) -> None:
    name = str(parted.path)
    assert scan(name, "--at", "offset:0") == []
    with zufluss.connect(server_address) as connection:
        table = connection.table(parted.path)
        changes = table.changelog(["id"]).to_arrow()
        written = max(changes["_commit_timestamp"].cast("int64").to_pylist())
        while True:  # until the server's clock has moved
            upsert(table, {"id": [0], "day": ["1"], "text": ["later"]})
            last = table.changelog(["id"]).to_arrow()["_commit_timestamp"].cast("int64")
            if max(last.to_pylist()) > written:
                break
    texts = {row["id"]: row["text"] for row in scan(name)}
    assert texts[0] == "later"
    before = {row["id"]: row["text"] for row in scan(name, "--at", str(written + 1))}
    assert len(before) == 30
    assert before[0] in ("row 0", "later")
    assert scan(name, "--at", "0") == []
    parts = [scan(name, "--at", str(written + 1), "--bucket", bucket) for bucket in ("0", "1")]
    assert sum(map(len, parts)) == 30
    some = scan(name, "--at", str(written + 1), "--bucket", "0", "--partition", "2")
    assert some == [row for row in parts[0] if row["day"] == "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "nothing > 5"], "one of the columns"),
        (["--where", "id >"], "at its end"),
        (["--bucket", "7"], "no bucket 7"),
        (["--at", "yesterday"], "yesterday"),
        (["--at", "offset:x"], "offset"),
        (["--source", "union", "--at", "offset:0"], "--at is for"),
    ],
)
def test_wrong_options_are_usage_errors(
    parted: Table, run: Run, server_address: str, arguments: list[str], message: str
) -> None:
    result = run("scan", str(parted.path), *arguments, "-b", server_address)
    assert result.code == 2
    assert message in " ".join(result.err.replace("│", " ").split())


def test_a_partition_that_does_not_exist_is_named(
    parted: Table, run: Run, server_address: str
) -> None:
    result = run("scan", str(parted.path), "--partition", "9", "-b", server_address)
    assert result.code == 1
    assert "(p=9)" in result.err


def test_a_log_is_filtered_too(run: Run, scan: Scan, server_address: str) -> None:
    with zufluss.connect(server_address) as connection:
        table = create_table(connection, "id INT, text STRING", bucket_count=1)
        with table.append() as writer:
            writer.write({"id": [1, 2, 3], "text": ["a", "b", None]})
    assert scan(str(table.path), "--where", "text IS NULL") == [{"id": 3, "text": None}]
    result = run("scan", str(table.path), "--at", "offset:0", "-b", server_address)
    assert result.code == 2
