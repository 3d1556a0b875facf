"""The lake that `zufluss dev --lake FORMAT` brings along, in its data directory."""

from __future__ import annotations

from pathlib import Path

from zufluss.config import options
from zufluss.config.lake import EMBEDDED_LAKE, embedded_lake
from zufluss.config.load import Configuration


def with_lake(conf: Configuration) -> Configuration:
    """The configuration, with a lake in the data directory if only a lake format is configured."""
    format = conf.get(options.DATALAKE_FORMAT)
    if format is None or conf.lake_properties(format):
        return conf
    data_dir = Path(conf.get(options.DATA_DIR))
    (data_dir / EMBEDDED_LAKE / "warehouse").mkdir(parents=True, exist_ok=True)
    return conf.with_overrides(embedded_lake(format, data_dir), origin="embedded lake")
