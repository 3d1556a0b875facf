"""The settings that `zufluss.spark.session` starts with, unless the user set them.

| setting | value | why |
|---|---|---|
| `spark.python.unix.domain.socket.enabled` | true | a Python task costs a third of that over TCP |
| `spark.scheduler.mode` | FAIR | rounds of several tables share the cores |
| `spark.driver.memory` | 1g | of a local master: everything runs in there |
| `spark.sql.execution.arrow.maxRecordsPerBatch` | 65536 | small batches cost half the throughput |
| `spark.sql.execution.arrow.pyspark.enabled` | true | `toPandas` by columns |
| `spark.sql.sources.parallelPartitionDiscovery.threshold` | 1024 | no job to look at some files |
| `spark.ui.enabled`, `spark.ui.showConsoleProgress` | false | no port, no bar |
| `spark.log.level` | ERROR | |

Speculation is off by Spark's own default and stays off: a second copy of a task would write files
that are never committed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LOCAL_RETRIES: Final = 4
"""Attempts per task on local masters, where Spark's own default is one."""

DEFAULTS: Final[Mapping[str, str]] = {
    "spark.scheduler.mode": "FAIR",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1024",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
POSIX_DEFAULTS: Final[Mapping[str, str]] = {"spark.python.unix.domain.socket.enabled": "true"}
LOCAL_DEFAULTS: Final[Mapping[str, str]] = {
    "spark.driver.memory": "1g",
}

_LOCAL = re.compile(r"local(?:\[([^,\]]+)\])?")
_SUBMIT_OPTIONS: Final[Mapping[str, str]] = {
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--driver-memory": "spark.driver.memory",
    "--executor-memory": "spark.executor.memory",
}


def is_local(master: str) -> bool:
    """Whether executors run on this machine, with this interpreter."""
    return master.startswith("local")


def with_retries(master: str) -> str:
    """A local master with retries of tasks; other masters, or one with retries, are unchanged.

    >>> with_retries("local[2]"), with_retries("local[2,1]")
    ('local[2,4]', 'local[2,1]')
    """
    match = _LOCAL.fullmatch(master)
    return master if match is None else f"local[{match[1] or 1},{LOCAL_RETRIES}]"


def defaults_for(master: str) -> dict[str, str]:
    """The settings for a master, to be used where the user set nothing."""
    out = dict(DEFAULTS)
    if os.name == "posix":
        out |= POSIX_DEFAULTS
        if is_local(master):
            out |= LOCAL_DEFAULTS
    return out


def settings_outside(environ: Mapping[str, str], spark_home: str) -> dict[str, str]:
    """The settings in `PYSPARK_SUBMIT_ARGS` and `spark-defaults.conf`, read without a JVM."""
    directory = environ.get("SPARK_CONF_DIR") or str(Path(spark_home) / "conf")
    file = Path(directory) / "spark-defaults.conf"
    settings = parse_defaults(file.read_text()) if file.is_file() else {}
    return settings | parse_submit_args(environ.get("PYSPARK_SUBMIT_ARGS", ""))


def parse_defaults(text: str) -> dict[str, str]:
    """The settings of a `spark-defaults.conf`: `key value` or `key=value` by line.

    >>> parse_defaults("# mine\\nspark.ui.enabled  true\\nspark.a=b c")
    {'spark.ui.enabled': 'true', 'spark.a': 'b c'}
    """
    lines = (line.strip() for line in text.splitlines())
    parts = (re.split(r"\s*[=:\s]\s*", line, maxsplit=1) for line in lines if line[:1] not in "#!")
    return {part[0]: part[1] for part in parts if len(part) == 2}


def parse_submit_args(text: str) -> dict[str, str]:
    """The settings among the arguments of spark-submit.

    >>> parse_submit_args("--master local[2] --conf spark.a=b pyspark-shell")
    {'spark.master': 'local[2]', 'spark.a': 'b'}
    """
    out: dict[str, str] = {}
    words = iter(shlex.split(text))
    for word in words:
        option, _, value = word.partition("=")
        if option in ("--conf", "-c"):
            key, _, setting = (value or next(words, "")).partition("=")
            out[key] = setting
        elif option in _SUBMIT_OPTIONS:
            out[_SUBMIT_OPTIONS[option]] = value or next(words, "")
    return out
