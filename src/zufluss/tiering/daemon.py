"""Spark's Python daemon with the imports of a tiering task done: workers are forked with them.

Otherwise each worker would spend seconds on these imports in the first round after a start. Imports
start no threads, so forking afterwards is safe.
"""

from __future__ import annotations

from pyspark.daemon import manager

from zufluss.tiering.preload import import_worker

import_worker()

if __name__ == "__main__":
    manager()
