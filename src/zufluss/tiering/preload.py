"""Imports that take long, done while nobody waits for them.

Lake formats import their libraries when they are used. A service is going to use them, most likely
those of Iceberg: the driver imports them while the JVM starts, Spark's daemon before it forks.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module


def import_worker() -> None:
    """What a task needs."""
    import_module("zufluss.client.sync.connection")
    import_module("zufluss.tiering.tasks")
    with suppress(ImportError):  # the lake is another one
        import_module("zufluss.lake.iceberg.writer")


def import_driver() -> threading.Thread:
    """What the driver's side of a round needs, in a thread that is running already."""

    def work() -> None:
        with suppress(ImportError):  # the lake is another one
            import_module("zufluss.lake.iceberg.committer")

    thread = threading.Thread(target=work, name="tiering-imports", daemon=True)
    thread.start()
    return thread
