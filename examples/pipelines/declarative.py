"""A Spark Declarative Pipeline: you declare views and sinks, `spark-pipelines run` fills them.

    sales (log) ──► paid_sales, a view ──► takings, a sink (aggregation): sales and cents by shop

`declarative/` is the pipeline, laid out as by `spark-pipelines init`: a file of definitions, and a
spec. This script creates the tables, runs the pipeline on some sales, and checks the result.
It needs the packages of `pip install 'pyspark[pipelines]'`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT

import yaml
from running import check, empty_database, run, say

import zufluss
from zufluss.spark.setup.java import use_java

PIPELINE = Path(__file__).with_suffix("")
SALES = {"shop": ["Bern", "Ulm", "Bern", "Ulm"], "cents": [1250, 300, 90, 0]}
TAKINGS = [{"shop": "Bern", "sales": 2, "cents": 1340}, {"shop": "Ulm", "sales": 1, "cents": 300}]


def main(bootstrap: str) -> None:
    """Append sales, run the pipeline, and check the result."""
    with zufluss.connect(bootstrap) as connection, tempfile.TemporaryDirectory() as directory:
        create_tables(connection)
        with connection.table("example_shop.sales").append() as writer:
            writer.write(SALES)
        run_pipeline(copied(Path(directory), bootstrap))
        takings = connection.table("example_shop.takings").lookup(["Bern", "Ulm"]).to_pylist()
        check(takings == TAKINGS, f"takings are {takings}")
        for row in takings:
            say(f"{row['shop']} took {row['cents'] / 100:.2f} in {row['sales']} sales")


def create_tables(connection: zufluss.Connection) -> None:
    """Create the source table and the table that the sink writes to."""
    empty_database(connection, "example_shop")
    connection.admin.create_table("example_shop.sales", "shop STRING, cents BIGINT", bucket_count=1)
    connection.admin.create_table(
        "example_shop.takings",
        "shop STRING, sales BIGINT SUM, cents BIGINT SUM, PRIMARY KEY (shop)",
        bucket_count=1,
        properties={"table.merge-engine": "aggregation"},
    )


def copied(directory: Path, bootstrap: str) -> Path:
    """Copy the pipeline to another directory and set the cluster's address in its spec."""
    shutil.copytree(PIPELINE, directory, dirs_exist_ok=True)
    spec = directory / "spark-pipeline.yml"
    said = yaml.safe_load(spec.read_text())
    said["storage"] = f"{directory.as_uri()}/checkpoints"
    said["configuration"]["shop.bootstrap"] = bootstrap
    spec.write_text(yaml.safe_dump(said))
    return directory


def run_pipeline(directory: Path) -> None:
    """Run `spark-pipelines run` in the directory of the spec; prints its messages on flows."""
    environ = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"} | os.environ
    use_java(environ)
    command = [str(Path(sysconfig.get_path("scripts")) / "spark-pipelines"), "run"]
    process = subprocess.Popen(
        command, cwd=directory, env=environ, stdout=PIPE, stderr=STDOUT, text=True
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if "Flow" in line or "Run is" in line:
            say(line.strip())
    check(process.wait() == 0, f"spark-pipelines failed:\n{''.join(output)[-3000:]}")


if __name__ == "__main__":
    sys.exit(run(main))
