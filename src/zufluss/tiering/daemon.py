"""Spark's Python daemon with the imports of a tiering task done: workers are forked with them.

Otherwise each worker would spend seconds on these imports in the first round after a start. Imports
start no threads on Linux, so forking afterwards is safe. Elsewhere each worker imports for itself.
"""

from __future__ import annotations

from pyspark.daemon import manager

from zufluss.system import FORKS_AFTER_IMPORTS
from zufluss.tiering.preload import import_worker

if FORKS_AFTER_IMPORTS:
    import_worker()

if __name__ == "__main__":
    manager()
