"""Runs the job of a round in Spark: one job per round and table.

Spark distributes only a range of task numbers; the splits are in the closure. This works on classic
Spark and over Connect, and gives each task exactly one group of splits.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from zufluss.tiering.tasks import BucketResult, TieringJob, empty_task, task_function

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESULT_TYPE = "result binary"
POOL = "spark.scheduler.pool"
DESCRIPTION = "spark.job.description"


class JobRunner(Protocol):
    """Runs the job of a round. Called from several threads."""

    @property
    def cores(self) -> int:
        """The number of tasks that can run at the same time."""

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        """Run the job and return its results; raises the error that made it fail."""

    def cancel(self, tag: str) -> None:
        """Cancel the job with this tag, if there is one."""

    def alive(self) -> bool:
        """Whether jobs can be run."""

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread that may call `run`."""


class SparkRunner:
    """Runs jobs in a Spark session, each table in a scheduler pool of its own."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._context = None if _is_connect(spark) else spark.sparkContext

    @property
    def cores(self) -> int:
        """The cores of all current executors."""
        if self._context is not None:
            return max(int(self._context.defaultParallelism), 1)
        text = self._spark.conf.get("spark.default.parallelism", None)
        return int(text) if text else os.cpu_count() or 1

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        """Run the job and return its results; raises the error that made it fail."""
        count = len(job.groups)
        with self._tagged(tag, str(job.table.path)):
            numbers = self._spark.range(0, count, 1, count)
            rows = numbers.mapInArrow(task_function(job), RESULT_TYPE).collect()
        return [pickle.loads(row[0]) for row in rows]

    def warm_up(self) -> None:
        """Start workers and compile code before the first round needs them."""
        count = self.cores
        self._spark.range(0, count, 1, count).mapInArrow(empty_task, RESULT_TYPE).collect()

    def cancel(self, tag: str) -> None:
        """Cancel the job with this tag, if there is one."""
        if self._context is not None:
            self._context.cancelJobsWithTag(tag)
        else:
            self._spark.interruptTag(tag)

    def alive(self) -> bool:
        """Whether the session can still be used."""
        try:
            return bool(self._spark.range(1).count() == 1)
        except Exception:  # whatever a dead gateway or session raises
            return False

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread with its own JVM thread, so that each table has its own tags and pool."""
        from pyspark import InheritableThread

        session = self._spark if self._context is None else None
        thread: threading.Thread = InheritableThread(target=target, session=session)
        thread.name = name
        thread.daemon = True
        return thread

    @contextmanager
    def _tagged(self, tag: str, table: str) -> Iterator[None]:
        context = self._context
        if context is None:
            self._spark.addTag(tag)
        else:
            context.addJobTag(tag)
            context.setLocalProperty(POOL, table)
            context.setLocalProperty(DESCRIPTION, f"tiering {table}")
        try:
            yield
        finally:
            if context is None:
                self._spark.removeTag(tag)
            else:
                context.removeJobTag(tag)


def _is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")
