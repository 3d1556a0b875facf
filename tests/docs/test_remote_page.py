"""docs/remote-storage.md does what it says, with a real S3 protocol and one server.

Blocks are taken in the order of the page. Python blocks print what stands behind their `print(…)`;
commands are run line by line, `aws s3 sync` by the library it is made of. Configurations are read
by what would read them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

import zufluss
from tests.docs.test_readme import ROOT, blocks, run_python
from tests.servers import WarmServer
from zufluss.config.load import Configuration
from zufluss.obs.metrics import render
from zufluss.remote.registry import configured_locations
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from zufluss.testing.server import DevServer

PAGE = ROOT / "docs" / "remote-storage.md"
QUICK = {
    "remote.log.task-interval-duration": "100ms",
    "kv.snapshot.interval": "200ms",
    "log.segment.file-size": "4kb",
}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SECONDS = 60
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        for bucket in ("my-bucket", "fast", "large", "new", "archive"):
            server.bucket(bucket)
        yield server


@pytest.fixture(scope="module")
def amazon(s3: S3Server) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


def configurations() -> list[dict[str, str]]:
    return [yaml.safe_load(block) for block in blocks(PAGE, "yaml")]


def test_the_blocks_of_the_page_do_what_they_say(s3: S3Server, amazon: Any, tmp_path: Path) -> None:
    dirs = {k: v for k, v in configurations()[1].items() if k.startswith("remote.")}
    code_blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    scripts = commands = 0
    with WarmServer(tmp_path, {**QUICK, **dirs, **s3.properties}) as server:
        fill(server)
        for language, code in code_blocks:
            if language == "python":
                scripts += 1
                expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)
                assert run_python(code, server).splitlines() == expected
                continue
            for line in code.splitlines():
                commands += 1
                run_command(line, server, amazon)
        check_everything_is_there(server)
    assert (scripts, commands) == (3, 25)


def fill(server: DevServer) -> None:
    """A table with segments in both locations."""
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table("fluss.events", "id BIGINT, text STRING", bucket_count=1)
        with connection.table("fluss.events").append() as writer:
            for start in range(0, 1000, 50):
                ids = list(range(start, start + 50))
                writer.write({"id": ids, "text": [f"{i * 7919} {i**9}" for i in ids]})
                writer.flush()
        deadline = time.monotonic() + SECONDS
        while min(x.live_files for x in connection.admin.locations().locations) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def run_command(line: str, server: DevServer, amazon: Any) -> None:
    if line.startswith("aws s3 sync"):
        return sync(amazon, *line.split()[3:])
    environment = os.environ | {"PATH": PATH, "ZUFLUSS_BOOTSTRAP": server.bootstrap}
    deadline = time.monotonic() + SECONDS
    while True:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
        if "still has" not in done.stderr or time.monotonic() > deadline:
            break  # a location that is drained is empty after a while
    assert done.returncode == 0, (line, done.stderr)
    return None


def sync(amazon: Any, source: str, target: str) -> None:
    origin, place = (parse_location(uri, "the page") for uri in (source, target))
    listed = amazon.list_objects_v2(Bucket=origin.authority, Prefix=origin.path[1:] + "/")
    assert listed["KeyCount"] > 0
    for each in listed["Contents"]:
        key = place.path[1:] + each["Key"].removeprefix(origin.path[1:])
        copied = {"Bucket": origin.authority, "Key": each["Key"]}
        amazon.copy_object(Bucket=place.authority, Key=key, CopySource=copied)
        amazon.delete_object(**copied)  # nobody may need it there


def check_everything_is_there(server: DevServer) -> None:
    with zufluss.connect(server.bootstrap) as connection:
        assert connection.table("fluss.events").scan(stop="latest").to_arrow().num_rows == 1000
        locations = {x.location_id: x for x in connection.admin.locations().locations}
        assert [x.state.name for x in locations.values()] == ["RETIRED", "ACTIVE", "ACTIVE"]
        assert locations[2].uri == "s3://archive/zufluss"
        assert (locations[2].weight, locations[3].weight) == (3, 5)


def test_the_configurations_of_the_page_are_understood() -> None:
    one, many = (Configuration.of(settings) for settings in configurations())
    assert [tuple(x) for x in configured_locations(one)] == [("s3://my-bucket/zufluss", 1)]
    assert [tuple(x) for x in configured_locations(many)] == [
        ("s3://fast/zufluss", 1),
        ("s3://large/zufluss", 3),
    ]
    large = store_properties(many, parse_location("s3://large/zufluss", "the page"))
    assert large == {"s3.endpoint": "https://storage.example.com", "s3.region": "us-east-1"}


def test_the_lifecycle_rule_of_the_page_is_one(amazon: Any) -> None:
    (block,) = blocks(PAGE, "json")
    rules = json.loads(block)
    amazon.put_bucket_lifecycle_configuration(Bucket="my-bucket", LifecycleConfiguration=rules)
    (found,) = amazon.get_bucket_lifecycle_configuration(Bucket="my-bucket")["Rules"]
    assert found["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}


def test_the_metrics_of_the_page_exist() -> None:
    declared = render()
    for name in re.findall(r"`(zufluss_\w+)`", PAGE.read_text()):
        assert f"`{name}`" in declared
