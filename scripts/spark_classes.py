"""Set up `.venv/spark-classes.jsa`: Spark's classes as Java keeps them in memory, for the tests.

The tests start some sixty Java processes. Each spends most of its first seconds on loading the same
ten thousand classes, and one that maps this file spends half. Java leaves the file alone when it is
of another Java or another Spark. Made once per Spark version, in about fifteen seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ARCHIVE = Path(sys.prefix) / f"spark-classes-{version('pyspark')}.jsa"
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Starts sooner still; what runs for long runs slower."""

WORK = """
import zufluss.spark
spark = zufluss.spark.session(master="local[2]")
numbers = spark.range(0, 100, 1, 2).mapInArrow(lambda batches: batches, "id long")
numbers.groupBy("id").count().collect()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait()
"""


def options() -> str:
    """What to start a Java with, so that it is quick; for the variable `SPARK_SUBMIT_OPTS`."""
    archive = f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable" if ARCHIVE.exists() else ""
    return QUICK + archive


def main() -> None:
    """Make the file, unless it is there."""
    if ARCHIVE.exists():
        return
    made = ARCHIVE.with_suffix(f".{os.getpid()}")
    flags = f"{QUICK} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
    environment = os.environ | {"SPARK_SUBMIT_OPTS": flags}
    subprocess.run(
        [sys.executable, "-c", WORK], env=environment, check=True, stderr=subprocess.DEVNULL
    )
    if made.exists():  # a Java that cannot make one starts as slowly as ever
        made.rename(ARCHIVE)


if __name__ == "__main__":
    main()
