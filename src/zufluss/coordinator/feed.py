"""Feeds: one part of the coordinator publishes events, others listen, and neither holds the other.

| feed | published by | events |
|---|---|---|
| catalog changes | `catalog/catalog.py` | changes of the image, after they were applied to it |
| freed buckets | `leases/book.py` | buckets with snapshots that no lease pins any more |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class Feed(Generic[E]):
    """Listeners of one kind of event, called in the order in which they subscribed."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[E], None]] = []

    def subscribe(self, listener: Callable[[E], None]) -> None:
        """Call the listener with every event from now on."""
        self._listeners.append(listener)

    def publish(self, event: E) -> None:
        """Call every listener with the event; an exception of a listener is the publisher's."""
        for listener in self._listeners:
            listener(event)

    def __repr__(self) -> str:
        return f"Feed(listeners={len(self._listeners)})"
