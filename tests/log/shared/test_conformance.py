"""The shared log over every kind of location that the tests have."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from zufluss.log.shared.api import SharedLog
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server
from zufluss.testing.shared_log import SharedLogConformance

AT_ONCE = WalSettings(interval_seconds=0)


def log_over(address: str, properties: dict[str, str] | None = None) -> Callable[[], SharedLog]:
    uri = parse_location(address, "test")
    return lambda: ObjectLog(Objects(uri, properties, sign_payload=False), AT_ONCE)


class TestDirectory(SharedLogConformance):
    @pytest.fixture
    def new_log(self, tmp_path: Path) -> Callable[[], SharedLog]:
        return log_over(str(tmp_path / "location"))


class TestMemory(SharedLogConformance):
    @pytest.fixture
    def new_log(self) -> Callable[[], SharedLog]:
        return log_over(f"memory://{uuid.uuid4()}/root")


class TestS3(SharedLogConformance):
    @pytest.fixture
    def new_log(self, s3_server: S3Server) -> Callable[[], SharedLog]:
        s3_server.bucket("wal")
        return log_over(f"s3://wal/{uuid.uuid4()}", s3_server.properties)
