"""Scans of primary-key tables as an administrator sees them: which client reads which bucket.

Every tablet server has its own scans, so all of them are asked. A scan is one bucket that a client
reads or has pinned; a run of `table.scan()` has several.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.errors import InvalidScanRequestError
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

_SCAN_ID: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class KvScanInfo:
    """A bucket of a primary-key table that a client scans, or has pinned."""

    scan_id: str
    """The scan's id, `SERVER-NUMBER`, for `admin.end_kv_scans`."""
    table: str
    """`database.table`."""
    partition: str | None
    """The partition's name; None without partitions."""
    bucket: int
    """The bucket's number."""
    log_offset: int
    """The scan shows the bucket as it was at this offset of the changelog."""
    owner: str | None
    """The user who opened the scan; None without authentication."""
    client: str
    """The address of the client."""
    connected: bool
    """Whether a client is connected; if not, the scan ends soon, unless it was detached."""
    age_ms: int
    """Time since the scan was opened."""
    idle_ms: int
    """Time since its last call."""
    rows: int
    """Rows that were sent."""
    bytes: int
    """Size of these rows."""


async def list_kv_scans(
    connection: ClusterConnection, table_id: int | None = None
) -> list[KvScanInfo]:
    """All scans, or those of a table, by server and age."""
    await connection.refresh()
    servers = [server for _, server in sorted(connection.metadata.tablets.items())]
    request = m.ListKvScansRequest(table_id=table_id)
    answers = await asyncio.gather(
        *(_call(connection, server, ApiKey.LIST_KV_SCANS, request) for server in servers)
    )
    return [
        _info(server, scan)
        for server, answer in zip(servers, answers, strict=True)
        for scan in answer.scans
    ]


async def end_kv_scans(connection: ClusterConnection, scan_ids: Iterable[str]) -> list[str]:
    """End scans; returns the ids of those that existed."""
    numbers: dict[int, list[int]] = {}
    for scan_id in scan_ids:
        server_id, number = check_scan_id(scan_id)
        numbers.setdefault(server_id, []).append(number)
    await connection.refresh()
    servers = connection.metadata.tablets
    ended = []
    for server_id, some in numbers.items():
        if server_id in servers:
            request = m.EndKvScansRequest(numbers=some)
            answer = await _call(connection, servers[server_id], ApiKey.END_KV_SCANS, request)
            ended += [f"{server_id}-{number}" for number in answer.numbers]
    return ended


def check_scan_id(scan_id: str) -> tuple[int, int]:
    """The server and the number of a scan; `InvalidScanRequestError` if the id is none."""
    match = _SCAN_ID.fullmatch(scan_id) if isinstance(scan_id, str) else None
    if match is None:
        raise InvalidScanRequestError(
            f"{scan_id!r:.100} is no id of a scan; `zufluss scan list` and "
            "admin.list_kv_scans() show them, such as '0-17'"
        )
    return int(match[1]), int(match[2])


async def _call(
    connection: ClusterConnection, server: ServerNode, api_key: ApiKey, request: Any
) -> Any:
    return await connection.call_at(server.address, api_key, request)


def _info(server: ServerNode, scan: m.PbKvScan) -> KvScanInfo:
    return KvScanInfo(
        f"{server.id}-{scan.number}",
        scan.table,
        scan.partition if scan.HasField("partition") else None,
        scan.bucket_id,
        scan.log_offset,
        scan.owner if scan.HasField("owner") else None,
        scan.client,
        scan.connected,
        scan.age_ms,
        scan.idle_ms,
        scan.rows,
        scan.bytes,
    )
