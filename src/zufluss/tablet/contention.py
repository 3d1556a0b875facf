"""Counts by which puts, lookups and scans give way to each other.

All of them want the two cores and the memory of the key-value state. The key-value worker rests
when lookups were answered during its put, and scans rest while puts are worked out. Each side only
reads the count of the other, so no side needs to know the other's handler.
"""

from __future__ import annotations


class Contention:
    """Shared by the handlers of one server."""

    __slots__ = ("lookups", "puts")

    def __init__(self) -> None:
        self.lookups = 0
        """Lookups that were answered on the event loop."""
        self.puts = 0
        """Changes whenever the key-value worker begins or ends a put."""
