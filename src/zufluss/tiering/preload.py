"""Imports that take long, done while nobody waits for them.

Lake formats import their libraries at first use. The tiering service is going to use those of the
installed formats: the driver imports them while the JVM starts, Spark's daemon before it forks.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module

from zufluss.lake_formats import LAKE_FORMATS


def import_worker() -> None:
    """Import what a task needs."""
    import_module("zufluss.client.sync.connection")
    import_module("zufluss.tiering.tasks")
    _import_installed([traits.task_module for traits in LAKE_FORMATS.values()])


def import_driver() -> threading.Thread:
    """Import what the driver's side of a round needs, in a thread that is running on return."""
    modules = [traits.driver_module for traits in LAKE_FORMATS.values()]
    thread = threading.Thread(
        target=_import_installed, args=(modules,), name="tiering-imports", daemon=True
    )
    thread.start()
    return thread


def _import_installed(modules: list[str | None]) -> None:
    """Import these modules, without those whose libraries are not installed."""
    for module in filter(None, modules):
        with suppress(ImportError):
            import_module(module)
