"""Starts a tiering service from its command line.

    zufluss tiering --fluss.bootstrap.servers host:9123
    python -m zufluss.tiering --fluss.bootstrap.servers host:9123
    spark-submit --master … …/zufluss/tiering/main.py --fluss.bootstrap.servers host:9123

Prints one line on stdout when the service is ready. SIGTERM or Ctrl-C stops it gracefully, a second
signal at once.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import structlog
from rich.console import Console

import zufluss
from zufluss.errors import ConfigError, NetworkError, RequestTimeoutError, ZuflussError
from zufluss.obs.endpoint import ProbeAnswer
from zufluss.obs.logging import configure
from zufluss.obs.pulse import ALIVE, STARTING
from zufluss.tiering.options import (
    BOOTSTRAP_SERVERS,
    METRICS_HOST,
    METRICS_PORT,
    TieringOptions,
    asks_for_help,
    help_text,
)
from zufluss.tiering.preload import import_driver
from zufluss.tiering.progress import LiveProgress, LogProgress, Progress
from zufluss.tiering.round import OnStep
from zufluss.tiering.runner import SparkRunner
from zufluss.tiering.service import TieringService, no_step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from zufluss.obs.metrics import TieringServiceMetrics

READY: Final = "zufluss tiering ready"
DAEMON_KEY: Final = "spark.python.daemon.module"
DAEMON: Final = "zufluss.tiering.daemon"
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""The environment variable that a driver started by `spark-submit` has."""
WATCH_SECONDS: Final = 0.5
STOPPED, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
"""Exit codes, the same as those of the `zufluss` command."""


def run(options: TieringOptions, on_step: OnStep = no_step) -> int:
    """Tier tables until a signal arrives; returns the exit code."""
    endings: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with ExitStack() as stack:
        bootstrap = options[BOOTSTRAP_SERVERS]
        probes = ServiceProbes()
        counts = _served(options, probes, stack)
        connection = stack.enter_context(zufluss.connect(bootstrap, **options.client))
        runner = _runner(options, stack)
        stack.enter_context(_signals(endings))
        _watch_submit(endings)
        progress = _counted(counts, _shown(stack))
        service = TieringService(
            connection, runner, options, progress=progress, on_step=on_step, failed=endings.put
        )
        with service:
            probes.service = service
            print(f"{READY}: {bootstrap}", flush=True)
            problem = endings.get()
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
    return STOPPED if problem is None else FAILED


def _runner(options: TieringOptions, stack: ExitStack) -> SparkRunner:
    """A Spark session that is ready for jobs."""
    from zufluss.spark.setup.session import bare_session

    imports = import_driver()
    master = options.spark.get("spark.master")
    conf = dict(options.spark)
    if not _is_remote(options):
        conf.setdefault(DAEMON_KEY, DAEMON)
    spark = bare_session("zufluss tiering", master, conf)
    stack.callback(_stop, spark)
    runner = SparkRunner(spark)
    runner.warm_up()
    imports.join()
    return runner


def _is_remote(options: TieringOptions) -> bool:
    """Whether the session uses Spark Connect, whose server has its own settings."""
    settings = options.spark
    places = (
        settings.get("spark.master"),
        settings.get("spark.remote"),
        os.environ.get("SPARK_REMOTE"),
    )
    return any(place.startswith("sc://") for place in places if place)


def _shown(stack: ExitStack) -> Progress:
    """A live table if stderr is a terminal, else log lines."""
    if not sys.stderr.isatty():
        return LogProgress()
    live = stack.enter_context(LiveProgress(Console(stderr=True)))
    configure("warning", stream=sys.stderr)
    return live


class ServiceProbes:
    """Answers the probes of the process, also before there is a service."""

    def __init__(self) -> None:
        self.service: TieringService | None = None
        """The service, once it was started."""

    def health(self) -> ProbeAnswer:
        """Whether the service runs; a process that starts is alive."""
        return ProbeAnswer(True, ALIVE) if self.service is None else self.service.health()

    def ready(self) -> ProbeAnswer:
        """Whether the service gets tables."""
        if self.service is None:
            return ProbeAnswer(False, STARTING, ("the Spark session starts",))
        return self.service.ready()


def _served(
    options: TieringOptions, probes: ServiceProbes, stack: ExitStack
) -> TieringServiceMetrics | None:
    """Serve metrics and probes, if a port is configured; returns the metrics."""
    port = options[METRICS_PORT]
    if port is None:
        return None
    from zufluss.obs.endpoint import HttpEndpoint
    from zufluss.obs.metrics import TieringServiceMetrics, new_registry

    registry = new_registry()
    endpoint = HttpEndpoint(
        registry, options[METRICS_HOST], port, health=probes.health, ready=probes.ready
    )
    stack.callback(endpoint.close)
    structlog.get_logger("zufluss.tiering").info("metrics_served", port=endpoint.port)
    return TieringServiceMetrics(registry)


def _counted(counts: TieringServiceMetrics | None, progress: Progress) -> Progress:
    """The progress with metrics in addition, if there are some."""
    if counts is None:
        return progress
    from zufluss.tiering.progress import MetricsProgress

    return MetricsProgress(counts, progress)


def main(arguments: Sequence[str] | None = None, on_step: OnStep = no_step) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help(words):
        print(help_text())
        return STOPPED
    configure()
    logging.getLogger("py4j").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    try:
        return run(parse(words), on_step)
    except ConfigError as problem:
        print(f"error: {problem.message}", file=sys.stderr)
        return USAGE
    except (NetworkError, RequestTimeoutError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return UNREACHABLE
    except ZuflussError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return FAILED


def parse(words: Sequence[str]) -> TieringOptions:
    """The options of a command line; ZUFLUSS_BOOTSTRAP is the default address of the cluster."""
    bootstrap = os.environ.get("ZUFLUSS_BOOTSTRAP")
    defaults = [f"--{BOOTSTRAP_SERVERS.key}={bootstrap}"] if bootstrap else []
    return TieringOptions.parse([*defaults, *words])


def _stop(spark: SparkSession) -> None:
    """Stop the session; a session whose JVM is gone has stopped already."""
    try:
        spark.stop()
    except Exception as problem:
        structlog.get_logger("zufluss.tiering").info("spark_is_gone", problem=str(problem))


def _watch_submit(endings: queue.SimpleQueue[str | None]) -> None:
    """Stop the service when the `spark-submit` that started it is gone, which sends no signal."""
    if SUBMITTED not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        endings.put("spark-submit has ended")

    threading.Thread(target=watch, name="tiering-submit", daemon=True).start()


@contextmanager
def _signals(endings: queue.SimpleQueue[str | None]) -> Iterator[None]:
    """The first SIGTERM or SIGINT stops the service, the second one kills the process."""

    def handle(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        endings.put(None)

    before = {each: signal.signal(each, handle) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    sys.exit(main())
