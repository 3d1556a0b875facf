"""DuckDB with its Iceberg extension, as a process: questions in, Arrow files out.

Runs in `.venv/readers` (see `scripts/readers.py`) and knows nothing of zufluss. One line of JSON
per question on stdin: `metadata` (address of a metadata file), `snapshot` (an id or null), `sql`
over the view `lake`, `out` (where to write the Arrow IPC file). One line of JSON per answer:
`{}` or `{"problem": text}`.
"""

import importlib.util
import json
import sys
from pathlib import Path

import duckdb
import pyarrow as pa

EXTENSIONS = ("avro", "iceberg")


def connect() -> duckdb.DuckDBPyConnection:
    """DuckDB with the extensions of PyPI, which never asks the network for one."""
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "threads": "2"})
    for name in EXTENSIONS:
        spec = importlib.util.find_spec(f"duckdb_extension_{name}")
        file = next(Path(spec.origin).parent.glob("extensions/*/*.duckdb_extension"))
        connection.execute(f"LOAD '{file}'")
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def answer(connection: duckdb.DuckDBPyConnection, question: dict) -> None:
    """Write the rows of one question."""
    at = question["snapshot"]
    options = "" if at is None else f", snapshot_from_id => {at}"
    source = f"iceberg_scan('{question['metadata']}'{options})"
    connection.execute(f"CREATE OR REPLACE VIEW lake AS SELECT * FROM {source}")
    rows = connection.sql(question["sql"]).to_arrow_table()
    with pa.OSFile(question["out"], "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def main() -> None:
    """Answer until stdin ends."""
    connection = connect()
    for line in sys.stdin:
        try:
            answer(connection, json.loads(line))
        except duckdb.Error as problem:
            print(json.dumps({"problem": str(problem)}), flush=True)
        else:
            print("{}", flush=True)


if __name__ == "__main__":
    main()
