"""The shared log over every kind of location that the tests have."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from zufluss.log.shared.api import Session, SharedLog
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server
from zufluss.testing.shared_log import SharedLogConformance, WrittenSession, session

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


class Forgetful(ObjectLog):
    """Deletes the seal with the session."""

    async def trim(self, session: Session, recorded_floor: int) -> int:
        await self.forget(session)
        return 0


async def test_a_log_that_deletes_the_seal_with_the_session_does_not_conform(
    tmp_path: Path,
) -> None:
    uri = parse_location(str(tmp_path / "location"), "test")
    log = Forgetful(Objects(uri, sign_payload=False), AT_ONCE)
    written = WrittenSession(log, session())
    with pytest.raises(AssertionError, match="acknowledged behind the end"):
        await SharedLogConformance().test_a_seal_survives_every_trim(written, log)
    await written.writer.stop()
