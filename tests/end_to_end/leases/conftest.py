"""The server of a worker that tests of leases share, unless they need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import SERVERS
from tests.end_to_end.leases.stage import Stage, stage


@pytest.fixture(scope="package")
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server that no test stops; every test uses tables and leases with names of its own."""
    with stage(tmp_path_factory.mktemp("leases")) as it:
        request.config.stash.setdefault(SERVERS, []).append(it.server)
        yield it
