"""One part of the coordinator publishes, others listen."""

from __future__ import annotations

from zufluss.coordinator.feed import Feed


def test_listeners_get_every_event_in_the_order_in_which_they_subscribed() -> None:
    feed: Feed[int] = Feed()
    heard: list[tuple[str, int]] = []
    feed.publish(0)
    feed.subscribe(lambda event: heard.append(("first", event)))
    feed.subscribe(lambda event: heard.append(("second", event)))
    feed.publish(1)
    feed.publish(2)
    assert heard == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]
