"""`zufluss snapshot` and `zufluss cluster config` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Result

Zufluss = Callable[..., Result]
ADAPTIVE = "zufluss.remote.adaptive-weights"


def listed(zufluss: Zufluss, *arguments: str) -> list[dict[str, Any]]:
    found = json.loads(zufluss(*arguments, "--output", "json").out)
    assert isinstance(found, list)
    return found


def put(zufluss: Zufluss, table: str, *rows: dict[str, Any]) -> None:
    zufluss("upsert", table, stdin="\n".join(map(json.dumps, rows)))


def test_a_snapshot_is_taken_now_and_listed(zufluss: Zufluss) -> None:
    zufluss("table", "create", "stock", "sku INT, n INT, PRIMARY KEY (sku)", "--buckets", "1")
    assert listed(zufluss, "snapshot", "list", "stock") == []
    put(zufluss, "stock", {"sku": 1, "n": 1}, {"sku": 2, "n": 2})
    [first] = listed(zufluss, "snapshot", "now", "stock")
    assert (first["bucket"], first["offset"]) == (0, 2)
    assert first["bytes"] > 0
    assert 0 <= first["age_seconds"] < 600
    [same] = listed(zufluss, "snapshot", "now", "stock")
    assert same["id"] == first["id"], "nothing changed meanwhile"
    put(zufluss, "stock", {"sku": 3, "n": 3})
    [second] = listed(zufluss, "snapshot", "now", "stock")
    assert (second["id"], second["offset"]) == (first["id"] + 1, 3)
    kept = listed(zufluss, "snapshot", "list", "stock")
    assert [each["id"] for each in kept] == [first["id"], second["id"]]
    head = zufluss("snapshot", "list", "stock").out.splitlines()[0]
    assert head.split() == ["partition", "bucket", "id", "offset", "bytes", "age_seconds"]


def test_snapshots_of_all_partitions_are_taken(zufluss: Zufluss) -> None:
    zufluss(
        "table", "create", "by_day", "sku INT, day STRING, PRIMARY KEY (sku, day)",
        "--partition-by", "day", "--buckets", "1",
    )  # fmt: skip
    for day in ("mon", "tue"):
        zufluss("partition", "create", "by_day", f"day={day}")
        put(zufluss, "by_day", {"sku": 1, "day": day})
    taken = listed(zufluss, "snapshot", "now", "by_day")
    assert [(each["partition"], each["offset"]) for each in taken] == [("mon", 1), ("tue", 1)]
    [one] = listed(zufluss, "snapshot", "list", "by_day", "--partition", "tue")
    assert one["partition"] == "tue"


def test_a_log_table_has_no_snapshots(zufluss: Zufluss) -> None:
    zufluss("table", "create", "plain", "id INT")
    for command in ("list", "now"):
        assert "primary key" in zufluss("snapshot", command, "plain", code=1).err


def test_an_option_of_the_cluster_is_set_shown_and_unset(zufluss: Zufluss) -> None:
    assert listed(zufluss, "cluster", "config", "get", ADAPTIVE) == [
        {"key": ADAPTIVE, "value": "false", "source": "DEFAULT"}
    ]
    zufluss("cluster", "config", "set", f"{ADAPTIVE}=true")
    assert listed(zufluss, "cluster", "config", "get", ADAPTIVE) == [
        {"key": ADAPTIVE, "value": "true", "source": "DYNAMIC_SERVER_CONFIG"}
    ]
    known = {each["key"]: each["source"] for each in listed(zufluss, "cluster", "config", "get")}
    assert known["data.dir"] == "INITIAL_SERVER_CONFIG"
    zufluss("cluster", "config", "unset", ADAPTIVE)
    assert ADAPTIVE not in {e["key"] for e in listed(zufluss, "cluster", "config", "get")}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no.such.key=1", "no.such.key is not allowed to be changed dynamically. It is unknown; "),
        (
            "data.dir=/tmp",
            "data.dir is not allowed to be changed dynamically. It takes effect at a start",
        ),
        (f"{ADAPTIVE}=perhaps", ADAPTIVE),
    ],
)
def test_an_option_that_cannot_be_changed_is_refused_and_changes_nothing(
    zufluss: Zufluss, change: str, reason: str
) -> None:
    before = listed(zufluss, "cluster", "config", "get")
    assert reason in zufluss("cluster", "config", "set", f"{ADAPTIVE}=true", change, code=1).err
    assert listed(zufluss, "cluster", "config", "get") == before
    assert "is no option" in zufluss("cluster", "config", "get", "no.such.key", code=2).err
    assert "is unknown" in zufluss("cluster", "config", "unset", "no.such.key", code=1).err


def test_a_server_is_tagged_listed_with_its_tag_and_untagged(zufluss: Zufluss) -> None:
    (tablet,) = [s for s in listed(zufluss, "cluster", "servers") if s["role"] == "tablet"]
    server = str(tablet["id"])
    zufluss("cluster", "tag", "add", "temporary_offline", server)
    try:
        (tagged,) = [s for s in listed(zufluss, "cluster", "servers") if s["role"] == "tablet"]
        assert tagged == tablet | {"tag": "TEMPORARY_OFFLINE"}
        assert "(TEMPORARY_OFFLINE)" in zufluss("status").out
        assert (
            "PERMANENT"
            in zufluss("cluster", "tag", "remove", "permanent_offline", server, code=1).err
        )
    finally:
        zufluss("cluster", "tag", "remove", "TEMPORARY_OFFLINE", server)
    assert "OFFLINE" not in zufluss("cluster", "servers").out
    assert "58" in zufluss("cluster", "tag", "add", "permanent_offline", "77", code=1).err


def test_a_rebalance_is_planned_and_refused(zufluss: Zufluss) -> None:
    plan = json.loads(zufluss("cluster", "rebalance", "plan", "--output", "json").out)
    (server,) = plan["servers"]
    assert server["leaders"] == server["leaders_after"]
    assert plan["moves"] == []
    assert "0 moves" in zufluss("cluster", "rebalance", "plan").out
    assert "61" in zufluss("cluster", "rebalance", "start", code=1).err
    assert "no rebalance yet" in zufluss("cluster", "rebalance", "status").err
    assert json.loads(zufluss("cluster", "rebalance", "status", "--output", "json").out) is None
    zufluss("cluster", "rebalance", "cancel")
