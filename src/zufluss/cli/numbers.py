"""Numbers of a cluster, gathered from the metrics of its servers (`admin.describe_servers`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zufluss.obs import metrics

if TYPE_CHECKING:
    from zufluss.client.core.servers import ServerInfo
    from zufluss.obs.metrics import Metric


@dataclass(frozen=True, slots=True)
class TableNumbers:
    """A table, all its servers added up."""

    buckets: int
    """Buckets that are served."""
    rows: int | None
    """Rows; None if they are not counted."""
    records: int
    """Records ever written to its logs."""
    rate: float
    """Records per second over the last minute."""
    log_bytes: int
    """Size of its logs on the disks of the servers."""
    untiered_rows: int | None
    """Records that are not in the lake yet; None if the table has no lake."""


def table_numbers(servers: Iterable[ServerInfo]) -> dict[str, TableNumbers]:
    """The numbers of each table, by `database.table`."""
    infos = list(servers)
    columns = {
        metric: added(infos, metric)
        for metric in (
            metrics.TABLE_BUCKETS,
            metrics.TABLE_ROWS,
            metrics.TABLE_RECORDS,
            metrics.TABLE_RECORD_RATE,
            metrics.TABLE_LOG_SIZE_BYTES,
            metrics.UNTIERED_ROWS,
        )
    }
    return {
        ".".join(path): TableNumbers(
            int(buckets),
            _whole(columns[metrics.TABLE_ROWS].get(path)),
            int(columns[metrics.TABLE_RECORDS].get(path, 0)),
            columns[metrics.TABLE_RECORD_RATE].get(path, 0.0),
            int(columns[metrics.TABLE_LOG_SIZE_BYTES].get(path, 0)),
            _whole(columns[metrics.UNTIERED_ROWS].get(path)),
        )
        for path, buckets in columns[metrics.TABLE_BUCKETS].items()
    }


def added(servers: Iterable[ServerInfo], metric: Metric) -> dict[tuple[str, ...], float]:
    """The values of a metric, added up over the servers, by labels."""
    sums: dict[tuple[str, ...], float] = {}
    for info in servers:
        for labels, value in info.series(metric.name).items():
            sums[labels] = sums.get(labels, 0) + value
    return sums


def total(values: Mapping[tuple[str, ...], float]) -> float:
    """The sum over all labels."""
    return sum(values.values())


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
