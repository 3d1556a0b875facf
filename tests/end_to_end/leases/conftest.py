"""One server per worker for the acceptance tests of leases that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import SERVERS
from tests.end_to_end.leases.stage import Stage, stage


@pytest.fixture(scope="package")
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server that nobody stops; tests keep out of each other's way by their names."""
    with stage(tmp_path_factory.mktemp("leases")) as found:
        request.config.stash.setdefault(SERVERS, []).append(found.server)
        yield found
