"""The formats of row files, by suffix."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class Format(StrEnum):
    """The format of a file of rows."""

    PARQUET = "parquet"
    CSV = "csv"
    NDJSON = "ndjson"


SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".csv": Format.CSV,
    ".ndjson": Format.NDJSON,
    ".jsonl": Format.NDJSON,
    ".json": Format.NDJSON,
}


def format_of(path: Path | None) -> Format:
    """The format of a file by its suffix; standard input (None) is ndjson."""
    if path is None:
        return Format.NDJSON
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise ValueError(
            f"the suffix {path.suffix!r} is unknown; give --format {', '.join(Format)}"
        ) from None
