"""How a round's job is run: in Spark, one job per round and table.

The range of task numbers is all that Spark hands out; the splits stand in the closure. That form
works on classic Spark and over Connect, and gives exactly one group of splits to each task.
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
        """How many tasks can run at the same time."""
        ...

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        """All results of the job; raises what made it fail."""
        ...

    def cancel(self, tag: str) -> None:
        """End the job of that tag; nothing happens if there is none."""
        ...

    def alive(self) -> bool:
        """Jobs can be run."""
        ...

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread that may call `run`."""
        ...


class SparkRunner:
    """Runs jobs in a Spark session, each table in a scheduler pool of its own."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._context = None if _is_connect(spark) else spark.sparkContext

    @property
    def cores(self) -> int:
        """Cores of all executors that there are now."""
        if self._context is not None:
            return max(int(self._context.defaultParallelism), 1)
        text = self._spark.conf.get("spark.default.parallelism", None)
        return int(text) if text else os.cpu_count() or 1

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        """All results of the job; raises what made it fail."""
        count = len(job.groups)
        with self._tagged(tag, str(job.table.path)):
            numbers = self._spark.range(0, count, 1, count)
            rows = numbers.mapInArrow(task_function(job), RESULT_TYPE).collect()
        return [pickle.loads(row[0]) for row in rows]

    def warm_up(self) -> None:
        """Have workers started and code compiled before the first round needs them."""
        count = self.cores
        self._spark.range(0, count, 1, count).mapInArrow(empty_task, RESULT_TYPE).collect()

    def cancel(self, tag: str) -> None:
        """End the job of that tag; nothing happens if there is none."""
        if self._context is not None:
            self._context.cancelJobsWithTag(tag)
        else:
            self._spark.interruptTag(tag)

    def alive(self) -> bool:
        """The session can still be used."""
        try:
            return bool(self._spark.range(1).count() == 1)
        except Exception:  # whatever a dead gateway or session raises
            return False

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread with a JVM thread of its own, so that tags and pools are per table."""
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
