"""The file formats that rows are read from, and how a file name tells its format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class Format(StrEnum):
    """How the rows are written."""

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
    """The format of a file by its suffix; standard input is ndjson unless said otherwise."""
    if path is None:
        return Format.NDJSON
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise ValueError(
            f"the suffix {path.suffix!r} is unknown; say --format {', '.join(Format)}"
        ) from None
