"""Helpers for the pipelines: a server unless one is named, a Spark session, output.

`python examples/pipelines/clickstream.py` starts a server of its own in a temporary directory, and
nothing is left behind. With `--bootstrap host:port` the pipeline runs against a cluster of yours,
in a database that begins with `example_`; it is made anew each time, and stays for you to look at.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from rich.console import Console
from rich.markup import escape

import zufluss
import zufluss.spark
from zufluss.errors import ZuflussError
from zufluss.testing.server import DevServer

console = Console(highlight=False, soft_wrap=True)


class PipelineError(Exception):
    """The result of a pipeline is wrong."""


def say(text: str) -> None:
    """Print one line."""
    console.print(f"[bold cyan]▸[/] {text}")


def check(fine: bool, otherwise: str) -> None:
    """Raise unless a check holds."""
    if not fine:
        raise PipelineError(otherwise)


def empty_database(connection: zufluss.Connection, name: str) -> None:
    """Create a database, without the tables of an earlier run."""
    connection.admin.drop_database(name, cascade=True, ignore_if_not_exists=True)
    connection.admin.create_database(name)


def run(*stories: Callable[[str], None]) -> int:
    """Run pipelines on the named cluster, or on a server of our own; 0 if all succeed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", help="a cluster of yours; without it a server is started")
    try:
        with cluster(parser.parse_args().bootstrap) as bootstrap:
            for story in stories:
                story(bootstrap)
    except (PipelineError, ZuflussError, PySparkException) as problem:
        console.print(f"[bold red]✗[/] {escape(str(problem))}")
        return 1
    return 0


@contextmanager
def cluster(bootstrap: str | None) -> Iterator[str]:
    """The address of the cluster; starts a server unless one is named."""
    if bootstrap:
        yield bootstrap
        return
    with tempfile.TemporaryDirectory(prefix="zufluss-") as data, DevServer(data) as server:
        say(f"a server of our own runs on {server.bootstrap}")
        yield server.bootstrap


def in_session(*pipelines: Callable[[SparkSession, str], None]) -> Callable[[str], None]:
    """Run pipelines one after the other, in one Spark session that is connected to the cluster."""

    def story(bootstrap: str) -> None:
        settings = {"spark.sql.shuffle.partitions": 2}  # little data
        spark = zufluss.spark.session("pipelines", "local[2]", settings)
        zufluss.spark.register(spark, bootstrap)
        for pipeline in pipelines:
            console.rule(f"[bold]{pipeline.__module__}")
            pipeline(spark, bootstrap)
        spark.stop()

    return story
