"""What tests of remote storage share."""

from collections.abc import Iterator

import pytest

from zufluss.remote import cloud
from zufluss.testing.s3 import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for all tests whose objects do not get into each other's way."""
    with S3Server() as server:
        yield server


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once."""
    monkeypatch.setattr(cloud, "BACKOFF_SECONDS", 0.001)
