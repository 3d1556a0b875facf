"""Sessions with the format registered, and views of tables for plain SQL.

Where zufluss is installed, Spark finds the format by itself (`pyspark_zufluss`). But Spark searches
once per JVM, in a Python process; if that process fails, or another module named `pyspark_…` cannot
be imported, the JVM knows no installed format until it ends. So `session` registers the format.

`register` remembers the address twice: in the class that it registers, for relations, and in the
settings of the session, for `zufluss.spark.table` and `register_views` on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zufluss.spark.cluster import BOOTSTRAP_SETTING, client, known_bootstrap
from zufluss.spark.setup.session import bare_session, check_pyspark
from zufluss.spark.source_options import BOOTSTRAP, READ_FRESH, TABLE
from zufluss.spark.types import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session(
    app_name: str = "zufluss",
    master: str | None = None,
    conf: Mapping[str, Any] | None = None,
) -> SparkSession:
    """A Spark session that knows `format("fluss")`, on all cores here if `master` is not given.

    `master` may be a Spark Connect address (`sc://host:port`), which needs `pyspark[connect]`; its
    server has its own settings.

    >>> spark = session(conf={"spark.sql.shuffle.partitions": 8})  # doctest: +SKIP
    """
    spark = bare_session(app_name, master, conf)
    register(spark)
    return spark


def register(spark: SparkSession, bootstrap: str | None = None) -> None:
    """Make `format("fluss")` known; with `bootstrap` its relations need not name the cluster.

    Credentials are not remembered: each relation has its own `client.*` options.

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

    A query of a view has the rows of that moment; a view takes `INSERT INTO`. Call the function
    again for new tables and for tables that were dropped and created again. `options` are the
    client's, as for `zufluss.connect`, such as credentials; every view has them. Returns the names
    of the views.

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
        clause = ", ".join(f"{_text(key)} {_text(value)}" for key, value in of_view.items())
        view = quoted(prefix + table)
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {view} USING fluss OPTIONS ({clause})")
    return [prefix + table for table in tables]


def _text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
