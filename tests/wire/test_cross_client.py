"""Our client and pyfluss on the same tables: what one writes the other reads, every type."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import fluss
import pyarrow as pa
import pytest

import zufluss
from tests.wire.helpers import (
    EARLIEST,
    IDS,
    append,
    create,
    ids,
    in_time,
    poll_batches,
    read_arrow,
    arrow_scanner,
)
from tests.wire.samples import ALL_TYPES, SAMPLES, Sample, all_types_batch
from tests.wire.test_types import COMPRESSIONS
from zufluss.testing.server import DevServer


@pytest.fixture(scope="module")
def ours(dev_server: DevServer, conn: fluss.FlussConnection) -> Iterator[zufluss.Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection
