"""Flink SQL on zufluss, in one command from the root of the repository.

    python -m examples.flink.run [--bootstrap host:port] [--keep FOLDER]

Flink's SQL client runs `orders.sql`, with the connector of Apache Fluss; its job goes on while
Python appends two more orders to the table that the job reads. When the sums have them, Flink reads
the tables (`report.sql`), and then Python reads them. The server is one of our own unless
`--bootstrap` names yours, where the database `example_flink` is made anew. `--keep` keeps what
Flink printed and logged.

| exit code | meaning |
|---|---|
| 0 | all tables have what they should have |
| 1 | they have not, or a part failed; the output says which |
| 3 | nothing was run, because Java, Maven or the jars are missing; the output says which |
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import zufluss
from examples.flink.sql_client import HERE, SqlClient, SqlError
from scripts.maven import MavenError
from zufluss.errors import DatabaseNotExistError, TableNotExistError, ZuflussError
from zufluss.spark.setup.java import JAVA_MIN, JavaNotFoundError
from zufluss.testing.server import DevServer

DATABASE = "example_flink"
ORDERS = HERE / "orders.sql"
REPORT = HERE / "report.sql"
MORE_ORDERS = [
    {"id": 5, "sku": "ink", "pieces": 4, "ordered": datetime(2026, 3, 2, 16)},
    {"id": 6, "sku": "pen", "pieces": 1, "ordered": datetime(2026, 3, 3, 8)},
]
Tables = dict[str, dict[Any, tuple[Any, ...]]]
"""The values behind each key, by table."""
OF_FLINK: Tables = {
    "revenue": {
        "Ink": (1, Decimal("4.50")),
        "Pad": (2, Decimal("6.00")),
        "Pen": (15, Decimal("18.00")),
    },
    "orders_per_day": {date(2026, 3, 1): (2,), date(2026, 3, 2): (2,)},
}
"""What the job makes of the orders that Flink writes."""
OF_BOTH: Tables = {
    "revenue": {
        "Ink": (5, Decimal("22.50")),
        "Pad": (2, Decimal("6.00")),
        "Pen": (16, Decimal("19.20")),
    },
    "orders_per_day": {date(2026, 3, 1): (2,), date(2026, 3, 2): (3,), date(2026, 3, 3): (1,)},
}
"""The same with the orders of Python."""
NOT_RUN = 3
WAIT_SECONDS = 300
"""Flink needs seconds to sum the orders; a job that takes longer hangs."""


def main() -> int:
    """Run the example; the exit code is in the table above."""
    parser = argparse.ArgumentParser(prog="python -m examples.flink.run")
    parser.add_argument("--bootstrap", help="a server of yours; without it, one is started")
    parser.add_argument("--keep", type=Path, help="a folder for what Flink prints and logs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="zufluss-flink-") as temporary:
            folder = options.keep or Path(temporary) / "flink"
            folder.mkdir(parents=True, exist_ok=True)
            flink = SqlClient(folder)
            server = DevServer(Path(temporary) / "data")
            with nullcontext() if options.bootstrap else server:
                story(flink, options.bootstrap or server.bootstrap)
    except JavaNotFoundError:
        print(f"nothing was run: Flink needs Java {JAVA_MIN} or newer, in JAVA_HOME or on the PATH")
        return NOT_RUN
    except MavenError as problem:
        print(f"nothing was run: {problem}")
        return NOT_RUN
    except (SqlError, ZuflussError, RuntimeError) as problem:
        print(f"the example failed: {problem}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def story(flink: SqlClient, bootstrap: str) -> None:
    """A job of Flink, more orders from Python, both readers."""
    with zufluss.connect(bootstrap) as connection:
        say("orders.sql: Flink makes the tables, writes four orders, and starts to sum them")
        with flink.running(ORDERS, bootstrap) as job:
            wait_for(OF_FLINK, connection, flink, job)
            say("Python appends two orders, and the job takes them up")
            with connection.table(f"{DATABASE}.orders").append() as writer:
                writer.write(MORE_ORDERS)
            wait_for(OF_BOTH, connection, flink, job)
        say("report.sql: Flink reads the tables in batch")
        for statement, table in flink.results(REPORT, bootstrap):
            print(f"\n{statement}\n{table}")
        say("Python reads the same tables")
        for name, rows in read_tables(connection).items():
            print(f"\n{name}")
            for key in sorted(rows):
                print("  ", key, *rows[key])


def wait_for(
    expected: Tables,
    connection: zufluss.Connection,
    flink: SqlClient,
    job: subprocess.Popen[bytes],
) -> None:
    """Wait until the job has written these rows."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (tables := read_tables(connection)) != expected:
        if job.poll() is not None:
            raise SqlError(f"the job of {ORDERS.name} ended:\n{flink.printed(ORDERS)}")
        if time.monotonic() > deadline:
            raise SqlError(f"after {WAIT_SECONDS} s the tables are {tables}")
        time.sleep(0.5)


def read_tables(connection: zufluss.Connection) -> Tables:
    """Read the tables that the job writes; before Flink has created them, they have no rows."""
    tables: Tables = {}
    for name in ("revenue", "orders_per_day"):
        try:
            rows = connection.table(f"{DATABASE}.{name}").scan(stop="latest").to_arrow()
        except (DatabaseNotExistError, TableNotExistError):
            return {}
        keys, *values = (column.to_pylist() for column in rows.columns)
        tables[name] = dict(zip(keys, zip(*values, strict=True), strict=True))
    return tables


def say(text: str) -> None:
    """Print a line of the story."""
    print(f"\n▸ {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
