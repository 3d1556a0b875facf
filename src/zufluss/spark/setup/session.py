"""A Spark session with suitable settings, on a Java that Spark supports.

`zufluss.spark.session` (`views.py`) gives users such a session with the format registered; the
tiering service needs no format and uses the bare session.

Settings of the user, `spark-submit` or `spark-defaults.conf` are never changed; `settings.py` lists
the defaults for all others. An existing session is returned with `conf` applied, as
`SparkSession.builder.getOrCreate` does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zufluss.errors import ConfigError
from zufluss.spark.setup.java import use_java
from zufluss.spark.setup.settings import defaults_for, is_local, settings_outside, with_retries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PYSPARK_MIN: Final = (4, 1)
PYSPARK_END: Final = (5, 0)
CONNECT_PACKAGES: Final = ("grpc", "grpc_status", "google.rpc", "zstandard", "pandas")
GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""The environment variable of a driver that `spark-submit` started; its JVM runs already."""


def bare_session(
    app_name: str, master: str | None = None, conf: Mapping[str, Any] | None = None
) -> SparkSession:
    """A Spark session without our format; the arguments are those of `zufluss.spark.session`."""
    check_pyspark()
    from pyspark.sql import SparkSession

    settings: dict[str, Any] = {key: _text(value) for key, value in (conf or {}).items()}
    remote = master or settings.get("spark.remote") or os.environ.get("SPARK_REMOTE", "")
    if remote.startswith("sc://"):
        return _connect(remote, settings)
    builder = SparkSession.builder.appName(app_name)
    if not _is_running():
        known = _known() | settings
        chosen = with_retries(master or known.get("spark.master") or "local[*]")
        _prepare_environment(chosen, known)
        unset: dict[str, Any] = {k: v for k, v in defaults_for(chosen).items() if k not in known}
        builder = builder.master(chosen).config(map=unset)
    return builder.config(map=settings).getOrCreate()


def check_pyspark() -> None:
    """Raise `ConfigError` if pyspark is missing or its version is not supported."""
    try:
        import pyspark
    except ImportError:
        raise ConfigError("pyspark is not installed; pip install 'zufluss[spark]'") from None
    check_version(pyspark.__version__)


def check_version(version: str) -> None:
    """Raise `ConfigError` if this version of pyspark is not supported."""
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not PYSPARK_MIN <= parts < PYSPARK_END:
        raise ConfigError(
            f"pyspark {version} is not supported, versions 4.1 to 4.x are; "
            "pip install 'pyspark>=4.1,<5'"
        )


def _is_running() -> bool:
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def _known() -> dict[str, str]:
    """Settings of the user: asked from the JVM of spark-submit, else from files and environment."""
    from pyspark import SparkConf, SparkContext
    from pyspark.find_spark_home import _find_spark_home

    if GATEWAY in os.environ or SparkContext._jvm is not None:
        SparkContext._ensure_initialized()
        return dict(SparkConf().getAll())
    return settings_outside(os.environ, _find_spark_home())


def _prepare_environment(master: str, known: Mapping[str, str]) -> None:
    """Set environment variables that Spark reads at its start, unless they are set."""
    submitted = GATEWAY in os.environ
    if not submitted:
        use_java()
    if "spark.pyspark.python" not in known and (is_local(master) or not submitted):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_local(master) and "spark.driver.host" not in known:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _connect(remote: str, conf: Mapping[str, Any]) -> SparkSession:
    from pyspark.sql import SparkSession

    missing = missing_for_connect()
    if missing:
        raise ConfigError(
            f"{remote} is a Spark Connect address, which needs more packages, and {missing[0]} is "
            "not installed; pip install 'pyspark[connect]'"
        )
    places = ("spark.master", "spark.remote")  # given by `remote`
    rest = {key: value for key, value in conf.items() if key not in places}
    return SparkSession.builder.remote(remote).config(map=rest).getOrCreate()


def missing_for_connect() -> list[str]:
    """The packages that Spark Connect needs and that are not installed.

    Checked beforehand, since pyspark exits the interpreter if one is missing.
    """
    missing = []
    for name in CONNECT_PACKAGES:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
