"""Prints results: aligned text for people, JSON for programs.

Text tables are plain columns, not cut to the width of a terminal, so that they survive a pipe.
JSON of a list or a description is one document; JSON of rows is one object per line, which
`zufluss append` reads.

| Arrow value             | text             | JSON               |
|-------------------------|------------------|--------------------|
| null                    | `NULL`           | null               |
| binary                  | hex              | base64 text        |
| date, time, timestamp   | ISO 8601         | ISO 8601 text      |
| decimal                 | digits           | digits as text     |
| NaN, infinities         | `nan`, `inf`     | null               |
| list, struct, map       | as JSON          | array, object, array of pairs |
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any


class Output(StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"


def print_rows(output: Output, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a list as a text table, or as one JSON array of objects."""
    if output is Output.JSON:
        print_document([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)


def print_document(document: Any) -> None:
    """Print one JSON document, indented."""
    print(json.dumps(plain(document), indent=2, ensure_ascii=False))


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print `name  value` lines, names aligned; fields without a value are left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", (), [], {})}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        print(f"{name.ljust(width)}  {cell(value)}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows below their column names."""
    TablePrinter(columns).print([[cell(value) for value in row] for row in rows])


class TablePrinter:
    """Prints a table in parts, as rows arrive; the first part sets the column widths."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._widths: list[int] | None = None

    def print(self, rows: Sequence[Sequence[str]]) -> None:
        """Print some rows, the first time with the column names above."""
        if self._widths is None:
            lines = [self._columns, *rows]
            self._widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
            self._line(self._columns)
            self._line(["-" * width for width in self._widths])
        for row in rows:
            self._line(row)
        sys.stdout.flush()

    def _line(self, cells: Sequence[str]) -> None:
        padded = [text.ljust(width) for text, width in zip(cells, self._widths or (), strict=True)]
        print("  ".join(padded).rstrip())


def cell(value: Any) -> str:
    """A value as the text of one table cell, always one line."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(plain(value), ensure_ascii=False)
    shown = value if isinstance(value, float) else plain(value)
    return str(shown)


def plain(value: Any) -> Any:
    """Convert a Python value to JSON; the module's docstring has the rules."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return str(value)


def json_line(row: Mapping[str, Any]) -> str:
    """One row as one line of JSON."""
    return json.dumps(plain(row), ensure_ascii=False, separators=(",", ":"))
