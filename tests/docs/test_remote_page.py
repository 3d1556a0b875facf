"""Configurations, rules and metrics on docs/remote-storage.md are right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from scripts.pages import fenced
from tests.docs.aws import client
from tests.paths import DOCS
from zufluss.config.load import Configuration
from zufluss.obs.metrics import render
from zufluss.remote.registry import configured_locations
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

PAGE = DOCS / "remote-storage.md"


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.bucket("my-bucket")
        yield server


def configurations() -> list[dict[str, str]]:
    return [yaml.safe_load(block) for block in fenced(PAGE, "yaml")]


def test_the_configurations_of_the_page_are_understood() -> None:
    one, many = (Configuration.of(settings) for settings in configurations())
    assert [tuple(x) for x in configured_locations(one)] == [("s3://my-bucket/zufluss", 1)]
    assert [tuple(x) for x in configured_locations(many)] == [
        ("s3://fast/zufluss", 1),
        ("s3://large/zufluss", 3),
    ]
    large = store_properties(many, parse_location("s3://large/zufluss", "the page"))
    assert large == {"s3.endpoint": "https://storage.example.com", "s3.region": "us-east-1"}


def test_the_lifecycle_rule_of_the_page_is_one(s3: S3Server) -> None:
    (block,) = fenced(PAGE, "json")
    rules = json.loads(block)
    amazon = client(s3.endpoint)
    amazon.put_bucket_lifecycle_configuration(Bucket="my-bucket", LifecycleConfiguration=rules)
    (found,) = amazon.get_bucket_lifecycle_configuration(Bucket="my-bucket")["Rules"]
    assert found["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}


def test_the_metrics_of_the_page_exist() -> None:
    declared = render()
    for name in re.findall(r"`(zufluss_\w+)`", PAGE.read_text()):
        assert f"`{name}`" in declared
