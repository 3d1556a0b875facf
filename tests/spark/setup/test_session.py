"""The session: our settings where nobody said anything, and never where somebody did."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zufluss.spark
from zufluss.errors import ConfigError
from zufluss.spark.read import lake_files
from zufluss.spark.setup import settings
from zufluss.spark.setup.session import check_version
from zufluss.spark.setup.settings import defaults_for, settings_outside, with_retries


@pytest.mark.parametrize("module", [settings, lake_files], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_are_right(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("local", "local[1,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2,1]", "local[2,1]"),
        ("local-cluster[2,1,1024]", "local-cluster[2,1,1024]"),
        ("spark://host:7077", "spark://host:7077"),
        ("yarn", "yarn"),
    ],
)
def test_a_local_master_tries_tasks_again_unless_it_says_how_often(given, used):
    assert with_retries(given) == used


@pytest.mark.parametrize("version", ["3.5.6", "4.0.1", "5.0.0"])
def test_other_versions_of_pyspark_are_refused_with_what_to_install(version):
    with pytest.raises(ConfigError, match=rf"pyspark {version} .*pip install 'pyspark>=4.1,<5'"):
        check_version(version)


@pytest.mark.parametrize("version", ["4.1.4", "4.2.0", "4.3.0", "4.4.0.dev0"])
def test_versions_from_4_1_on_are_taken(version):
    check_version(version)


def test_settings_of_files_and_arguments_are_known_before_there_is_a_jvm(tmp_path):
    (tmp_path / "spark-defaults.conf").write_text("spark.ui.enabled true\nspark.log.level INFO\n")
    environ = {
        "SPARK_CONF_DIR": str(tmp_path),
        "PYSPARK_SUBMIT_ARGS": "--driver-memory 3g --conf 'spark.log.level=WARN' pyspark-shell",
    }
    assert settings_outside(environ, "nowhere") == {
        "spark.ui.enabled": "true",
        "spark.log.level": "WARN",
        "spark.driver.memory": "3g",
    }


def test_memory_of_a_driver_is_set_only_where_everything_runs_in_it():
    assert "spark.driver.memory" in defaults_for("local[2,4]")
    assert "spark.driver.memory" not in defaults_for("spark://host:7077")


def test_the_session_has_our_settings(spark):
    for key, value in defaults_for("local[2,4]").items():
        assert spark.sparkContext.getConf().get(key) == value, key
    assert spark.sparkContext.master == "local[2,4]"


def test_a_running_session_is_returned_and_keeps_its_settings(spark):
    again = zufluss.spark.session("other", "local[1]", {"spark.sql.shuffle.partitions": 3})
    assert again.sparkContext is spark.sparkContext
    assert again.conf.get("spark.sql.shuffle.partitions") == "3"
    assert again.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "65536"
    spark.conf.set("spark.sql.shuffle.partitions", "2")


def test_a_task_that_fails_once_is_tried_again(spark, tmp_path):
    marker = str(tmp_path / "failed")

    def once(tasks):
        import pyarrow as pa

        if not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("the first attempt fails")
        for task in tasks:
            yield pa.record_batch({"id": task["id"]})

    assert spark.range(0, 1, 1, 1).mapInArrow(once, "id long").count() == 1


def test_importing_the_package_does_not_import_pyspark():
    code = "import sys, zufluss.spark; print('pyspark' in sys.modules, zufluss.spark.session)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False <function session")


def test_a_connect_address_without_its_packages_says_what_to_install():
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "import zufluss.spark\n"
        "try:\n    zufluss.spark.session(master='sc://127.0.0.1:1')\n"
        "except zufluss.errors.ConfigError as problem:\n    print(problem.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'pyspark[connect]'" in done.stdout, done.stderr


UNINSTALLED = """
import zufluss.spark
from zufluss.spark.setup.session import bare_session
bare = bare_session("bare", "local[1]", {"spark.ui.enabled": False})
spark = zufluss.spark.session()
assert spark is bare or spark._jsparkSession.equals(bare._jsparkSession)
for each in (spark, spark.newSession()):
    try:
        each.read.format("fluss").load("no.cluster")
    except Exception as problem:
        print("not found" if "DATA_SOURCE_NOT_FOUND" in str(problem) else "found")
spark.stop()
"""


@pytest.mark.slow
def test_the_session_knows_the_format_although_the_search_for_installed_ones_failed(
    spark, tmp_path
):
    """A session of Spark itself has nothing but this search. Needs `spark` only for Java."""
    broken = tmp_path / "pyspark_broken"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not importable')")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", UNINSTALLED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["found", "not", "found"], done.stderr[-4000:]


SUBMITTED = """
import zufluss.spark
spark = zufluss.spark.session("mine")
conf = spark.sparkContext.getConf()
keys = "spark.master", "spark.ui.showConsoleProgress", "spark.scheduler.mode", "spark.log.level"
print([conf.get(key) for key in keys], spark.range(3).count())
spark.stop()
"""


@pytest.mark.slow
def test_settings_of_spark_submit_are_kept(spark, tmp_path):
    """Needs `spark` only so that Java is found."""
    script = tmp_path / "driver.py"
    script.write_text(SUBMITTED)
    from tests.spark.cluster import spark_home

    environ = os.environ | {"PYSPARK_PYTHON": sys.executable}
    command = [Path(spark_home()) / "bin" / "spark-submit", "--master", "local[1]"]
    told = ["--conf", "spark.scheduler.mode=FIFO", "--conf", "spark.log.level=WARN"]
    done = subprocess.run([*command, *told, script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "['local[1,4]', 'false', 'FIFO', 'WARN'] 3" in done.stdout
