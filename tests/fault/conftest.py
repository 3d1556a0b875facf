"""Seeds, and servers whose output stands in the report of a failing test.

`ZUFLUSS_SEED` repeats the decisions of a run (what is written, when the server is killed, what is
damaged); threads and the disk still take their own time. `ZUFLUSS_FAULT=full` is for `make fault`:
the same tests, many more rounds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SERVERS
from tests.servers import WarmServer


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Decisions of a test; its seed is printed and can be given."""
    given = os.environ.get("ZUFLUSS_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(1 << 32)
    print(f"ZUFLUSS_SEED={seed} repeats {request.node.nodeid}")
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture
def warm_server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., WarmServer]]:
    """Servers that belong to one test: `warm_server({"key": "value"}, name="a")`; not started."""
    known = request.config.stash.setdefault(SERVERS, [])
    with ExitStack() as stack:

        def make(
            properties: dict[str, str] | None = None, name: str = "data", **options: Any
        ) -> WarmServer:
            server = WarmServer(tmp_path / name, properties, **options)
            known.append(server)
            stack.callback(known.remove, server)
            stack.callback(server.__exit__, None, None, None)
            return server

        yield make
