"""`zufluss producer` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

import zufluss as client
from tests.end_to_end.raw import RawClient
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

from .conftest import Result

Zufluss = Callable[..., Result]


@pytest.fixture
def zufluss(run: Callable[..., Result], dev_server: DevServer) -> Zufluss:
    """Runs a command against the worker's server."""

    def run_against_server(*arguments: str, code: int = 0) -> Result:
        result = run(*arguments, "--bootstrap", dev_server.bootstrap)
        assert result.code == code, result
        return result

    return run_against_server


@pytest.fixture
def views(dev_server: DevServer) -> Iterator[str]:
    """A table with a producer `job` that owns its only column."""
    with client.connect(dev_server.bootstrap) as connection:
        connection.admin.create_table(
            "cli_views",
            "k INT NOT NULL, pv BIGINT SUM",
            primary_key=["k"],
            bucket_count=1,
            properties={"table.merge-engine": "aggregation"},
        )
        table_id = connection.admin.table_info("cli_views").table_id
        request = m.InitProducerRequest(producer_id="job", table_id=table_id, ttl_ms=60_000)
        with RawClient(dev_server.port) as raw:
            raw.call(ApiKey.INIT_PRODUCER, request)
        yield "cli_views"
        connection.admin.drop_table("cli_views")


def test_a_producer_is_listed_and_dropped(zufluss: Zufluss, views: str) -> None:
    (found,) = json.loads(zufluss("producer", "list", views, "-o", "json").out)
    assert (found["id"], found["table"], found["columns"]) == ("job", "fluss.cli_views", ["pv"])
    assert (found["epoch"], found["exclusive"], found["lost"]) == (1, True, False)
    assert found["baseline"] == [{"partition_id": None, "bucket": 0, "log_offset": 0}]
    head, _, line = zufluss("producer", "list", views).out.splitlines()
    assert head.split()[:4] == ["table", "id", "owner", "columns"]
    assert line.split()[:4] == ["fluss.cli_views", "job", "pv", "exclusive"]
    assert "no producer job any more" in zufluss("producer", "drop", views, "job").err
    assert json.loads(zufluss("producer", "list", views, "-o", "json").out) == []
    assert "has no producer 'job'" in zufluss("producer", "drop", views, "job", code=1).err
