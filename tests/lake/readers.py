"""Rows of an Iceberg table as others see them: DuckDB, pyiceberg, polars.

None of them shares code with `zufluss.lake`, so what they agree on is really in the table. All
take the address of a metadata file (`Table.metadata_location`) and give Arrow. DuckDB runs in an
environment and a process of its own, built and started on first use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow as pa

from tests.paths import ROOT

EVERYTHING = "SELECT * FROM lake"


def duckdb_rows(
    metadata_location: str, sql: str = EVERYTHING, *, snapshot_id: int | None = None
) -> pa.Table:
    """What DuckDB answers to `sql`, in which the table is called `lake`."""
    process = _duckdb()
    with tempfile.NamedTemporaryFile(suffix=".arrow") as out:
        question = {"metadata": metadata_location, "snapshot": snapshot_id}
        process.stdin.write(json.dumps(question | {"sql": sql, "out": out.name}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"problem": "the process ended"}')
        if answer:
            raise AssertionError(f"DuckDB on {metadata_location}: {answer['problem']}")
        return pa.ipc.open_file(Path(out.name).read_bytes()).read_all()


@cache
def _duckdb() -> subprocess.Popen[str]:
    """This worker's DuckDB; it ends when our end of its stdin closes."""
    script = str(ROOT / "scripts" / "readers.py")
    built = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    return subprocess.Popen(
        [built.stdout.strip(), str(Path(__file__).with_name("duckdb_process.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def pyiceberg_rows(metadata_location: str, *, snapshot_id: int | None = None) -> pa.Table:
    """All rows as pyiceberg reads them."""
    from pyiceberg.table import StaticTable

    return StaticTable.from_metadata(metadata_location).scan(snapshot_id=snapshot_id).to_arrow()


def polars_rows(
    metadata_location: str, *, snapshot_id: int | None = None, native: bool = True
) -> pa.Table:
    """All rows as polars reads them: with its own parquet reader, or through pyiceberg."""
    import polars

    reader = "native" if native else "pyiceberg"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", polars.exceptions.PerformanceWarning)
        frame = polars.scan_iceberg(
            metadata_location, snapshot_id=snapshot_id, reader_override=reader
        )
        return frame.collect().to_arrow()


READERS: dict[str, Callable[..., pa.Table]] = {
    "duckdb": duckdb_rows,
    "pyiceberg": pyiceberg_rows,
    "polars": polars_rows,
}
"""Every reader, for tests that ask all of them."""
