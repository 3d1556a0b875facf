"""Making tables known to a Spark session: the format, and views for plain SQL.

The address that `register` was told is remembered twice: in the class that it registers, for
relations, and among the session's settings, for whoever asks from the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zufluss.spark.cluster import BOOTSTRAP_SETTING, client, known_bootstrap
from zufluss.spark.setup.session import check_pyspark
from zufluss.spark.source_options import BOOTSTRAP, READ_FRESH, TABLE
from zufluss.spark.types import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession, bootstrap: str | None = None) -> None:
    """Make `format("fluss")` known; with `bootstrap` its relations need not name the cluster.

    How to log in is not remembered: relations say it by `client.*` options.

    >>> register(spark, "localhost:9123")  # doctest: +SKIP
    >>> spark.read.format("fluss").load("shop.orders").count()  # doctest: +SKIP
    """
    check_pyspark()
    from zufluss.spark.source import FlussDataSource, source_class

    if bootstrap is None:
        bootstrap = spark.conf.get(BOOTSTRAP_SETTING, None)
    else:
        spark.conf.set(BOOTSTRAP_SETTING, bootstrap)
    spark.dataSource.register(FlussDataSource if bootstrap is None else source_class(bootstrap))


def register_views(
    spark: SparkSession,
    database: str,
    prefix: str = "",
    *,
    bootstrap: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """A temporary view of every table of a database, under its name with `prefix` before it.

    A view has the rows of the moment of each query, and takes `INSERT INTO`. Tables that come later
    have none, and one that was dropped and created again is not seen: call it again. `options` are
    the client's, as for `zufluss.connect`, such as credentials; every view has them. The names of
    the views are returned.

    >>> register_views(spark, "shop")  # doctest: +SKIP
    ['customers', 'orders']
    """
    servers = known_bootstrap(spark, bootstrap)
    register(spark, bootstrap)
    ours = {key: str(value) for key, value in (options or {}).items()}
    cluster = client(servers, ours)
    tables = cluster.run(cluster.connection.admin.list_tables(database))
    for table in tables:
        of_view = {
            BOOTSTRAP.key: servers,
            TABLE.key: f"{database}.{table}",
            READ_FRESH.key: "true",
            **ours,
        }
        said = ", ".join(f"{_text(key)} {_text(value)}" for key, value in of_view.items())
        view = quoted(prefix + table)
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {view} USING fluss OPTIONS ({said})")
    return [prefix + table for table in tables]


def _text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
