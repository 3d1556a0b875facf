"""Spark's Python daemon with the imports of a tiering task done: workers are forked with them.

A worker that has to import the client and the lake's libraries itself takes seconds for that, in
the first round after a start. Importing starts no threads, so forking afterwards is safe.
"""

from __future__ import annotations

from pyspark.daemon import manager

from zufluss.tiering.preload import import_worker

import_worker()

if __name__ == "__main__":
    manager()
