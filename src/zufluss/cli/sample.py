"""`zufluss sample`: small files of rows, so that every command of the pages has something to read.

The files are the same on every machine and in every run: their rows are computed, not drawn.

| file           | rows   | columns                                        |
|----------------|--------|------------------------------------------------|
| trips.parquet  | 10,000 | id BIGINT, city STRING, km DOUBLE              |
| trips.ndjson   | 10     | the first rows of trips.parquet, one per line  |
| stock.csv      | 4      | sku STRING, pieces INT, price DECIMAL(10, 2)   |
| counted.csv    | 2      | sku STRING, pieces INT                         |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from zufluss.cli.output import Output, print_rows
from zufluss.cli.session import OutputOption, usage

if TYPE_CHECKING:
    import pyarrow as pa

TRIPS_ROWS: Final = 10_000
LINES: Final = 10
"""Rows of trips.ndjson."""
CITIES: Final = ("Ulm", "Bonn", "Bern", "Graz", "Linz")
STOCK: Final = "sku,pieces,price\npen,3,1.20\nink,4,7.95\npad,12,2.50\nnib,250,0.35\n"
COUNTED: Final = "sku,pieces\npen,2\nnib,240\n"


def sample(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Created if it does not exist.")
    ] = Path("sample"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Write small files of rows to try the other commands with; needs no server.

    The rows are the same each time, and files of an earlier run are replaced.

    Examples:

      zufluss sample

      zufluss sample /tmp/rows && zufluss append trips /tmp/rows/trips.parquet
    """
    rows = []
    with usage(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        for name, write in FILES.items():
            path = directory / name
            number, schema = write(path)
            rows.append([str(path), number, schema])
    print_rows(output, ["file", "rows", "columns"], rows)


def trips() -> pa.Table:
    """Return the trips: ids from 1, cities by turns, distances between 0.5 and 40 km."""
    import pyarrow as pa

    ids = range(1, TRIPS_ROWS + 1)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "city": [CITIES[number % len(CITIES)] for number in ids],
            "km": [(number * 37 % 80 + 1) / 2 for number in ids],
        }
    )


def _write_parquet(path: Path) -> tuple[int, str]:
    import pyarrow.parquet

    pyarrow.parquet.write_table(trips(), path)
    return TRIPS_ROWS, "id BIGINT, city STRING, km DOUBLE"


def _write_ndjson(path: Path) -> tuple[int, str]:
    lines = [json.dumps(row) for row in trips().slice(0, LINES).to_pylist()]
    path.write_text("\n".join(lines) + "\n")
    return LINES, "id BIGINT, city STRING, km DOUBLE"


def _write_stock(path: Path) -> tuple[int, str]:
    path.write_text(STOCK)
    return STOCK.count("\n") - 1, "sku STRING, pieces INT, price DECIMAL(10, 2)"


def _write_counted(path: Path) -> tuple[int, str]:
    path.write_text(COUNTED)
    return COUNTED.count("\n") - 1, "sku STRING, pieces INT"


FILES: Final[dict[str, Callable[[Path], tuple[int, str]]]] = {
    "trips.parquet": _write_parquet,
    "trips.ndjson": _write_ndjson,
    "stock.csv": _write_stock,
    "counted.csv": _write_counted,
}
"""Each file with the function that writes it and returns its number of rows and its columns."""
