"""Imports slow libraries before they are needed.

Lake formats import their libraries at first use. The tiering service imports those of the installed
formats earlier: the driver while the JVM starts, Spark's daemon before it forks.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module

from zufluss.lake_formats import LAKE_FORMATS


def import_worker() -> None:
    """Import the libraries of a task."""
    import_module("zufluss.client.sync.connection")
    import_module("zufluss.tiering.tasks")
    _import_installed([traits.task_module for traits in LAKE_FORMATS.values()])


def import_driver() -> threading.Thread:
    """Start a thread that imports the libraries of the driver."""
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
