"""Silences the log: a fuzzer makes decoders refuse, and log, thousands of times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.fuzz.quiet import quiet


@pytest.fixture(scope="module", autouse=True)
def no_log() -> Iterator[None]:
    before = structlog.get_config()
    quiet()
    yield
    structlog.configure(**before)
