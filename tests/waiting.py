"""The one place where tests wait by asking again: for what another process does without telling.

A server tells nobody that it has taken a snapshot, or let go of a file; so it is asked until it
has, with a deadline that is far beyond what a loaded machine needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_SECONDS = 300.0
_PAUSE_SECONDS = 0.01


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """Ask again until `condition` answers something true, which is returned."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not happen"
        time.sleep(_PAUSE_SECONDS)
    return found
