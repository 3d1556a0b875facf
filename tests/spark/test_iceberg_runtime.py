"""Apache Iceberg's own Spark runtime reads and writes what we put into the lake.

Needs Spark 4.1, the newest that the runtime exists for (`make test-spark41`), and its jars from
Maven Central. The settings are those of docs/spark.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.client.rounds import Rounds, lake_table
from tests.paths import DOCS
from tests.waiting import WAIT_SECONDS
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
PAGE = DOCS / "spark.md"
CENTRAL = os.environ.get("ZUFLUSS_MAVEN", "https://repo1.maven.org/maven2")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "zufluss" / "jars"


def page_block() -> str:
    """The settings as the page shows them."""
    section = PAGE.read_text().split("## Reading the lake with official Iceberg")[1]
    found = re.search(r"^```python\n(.*?)^```$", section, re.M | re.S)
    assert found is not None
    return found[1]


def jar(coordinates: str) -> Path:
    """A jar of Maven Central, downloaded once."""
    group, name, version = coordinates.split(":")
    file = CACHE / f"{name}-{version}.jar"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        address = f"{CENTRAL}/{group.replace('.', '/')}/{name}/{version}/{file.name}"
        part = file.with_suffix(f".{os.getpid()}")
        try:
            with urllib.request.urlopen(address, timeout=WAIT_SECONDS) as answer:
                part.write_bytes(answer.read())
        except OSError as problem:
            pytest.skip(f"{address} cannot be had: {problem}")
        part.rename(file)
    return file


def coordinates() -> str:
    """The Maven coordinates of the jars on the page; skips where Spark is not the one for them."""
    pyspark = pytest.importorskip("pyspark")
    if not pyspark.__version__.startswith("4.1."):
        pytest.skip(f"Iceberg has no runtime for Spark {pyspark.__version__}; make test-spark41")
    found = re.search(r'"spark.jars.packages": "(.*?)"', page_block())
    assert found is not None
    return found[1]


def jars() -> str:
    """The jars of the page as the setting `spark.jars` takes them."""
    return ",".join(str(jar(each)) for each in coordinates().split(","))


def test_official_iceberg_reads_and_maintains_our_tables(
    connection: Connection, rounds: Rounds, lake_server: DevServer
) -> None:
    """Position deletes, partitions and the embedded catalog as another implementation sees them."""
    code = page_block().replace("spark.jars.packages", "spark.jars")
    code = code.replace(coordinates(), jars())
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=["id"], bucket_count=2) as table:
        with table.upsert() as writer:
            writer.write({"id": list(range(20)), "name": ["a"] * 20})
        rounds.tier(table)
        with table.upsert() as writer:
            writer.write({"id": [1, 2], "name": ["B", "B"]})
            writer.delete({"id": [3]})
        rounds.tier(table)
        code = code.replace("/path/to/data", str(lake_server.data_dir.resolve()))
        code = code.replace("fluss.orders", str(table.path))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.splitlines()[:1] == ["19"]
        rows = {row["id"]: row["name"] for row in table.scan(source="union").to_arrow().to_pylist()}
        assert rows == {i: "B" if i in (1, 2) else "a" for i in range(20) if i != 3}
        with table.upsert() as writer:
            writer.delete({"id": [5]})
        rounds.tier(table)
        assert table.scan(source="lake").to_arrow().num_rows == 18
