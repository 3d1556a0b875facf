"""`zufluss status`: the whole cluster on one screen, and an exit code for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import typer

from zufluss.cli.amounts import bytes_text, count_text, rate_text, seconds_text
from zufluss.cli.output import Output, print_document, print_fields, print_table
from zufluss.cli.session import DEFAULT_BOOTSTRAP, Bootstrap, OutputOption, Settings, connected

if TYPE_CHECKING:
    from zufluss.client.core.metadata import ServerFinding
    from zufluss.client.core.servers import ServerInfo
    from zufluss.client.locations import RemoteLocation
    from zufluss.client.sync.admin import Admin
    from zufluss.model.rebalance import ServerTag

PROBLEMS: Final = 5
"""Exit code if something does not work."""
LAKE_TABLES_MAX: Final = 20
"""Most lake tables on the screen, those that wait longest first; JSON has all."""


def status(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the whole cluster: servers, tables, disk and memory, locations, tiering, problems.

    The exit code is 0 if everything works, 5 if something does not (a bucket, a location, a server
    that does not answer), and 3 if no server answers. Problems and warnings are those of `zufluss
    doctor`.

    Examples:

      zufluss status

      zufluss status --output json

      zufluss status --bootstrap stream.example.com:9123 || page-somebody
    """
    with connected(bootstrap, settings) as connection:
        report = _report(connection.admin)
    if output is Output.JSON:
        print_document(report)
    else:
        _print(report)
    if report["problems"]:
        raise typer.Exit(PROBLEMS)


def _report(admin: Admin) -> dict[str, Any]:
    from zufluss.cli.numbers import table_numbers

    servers, findings = admin.describe_servers(), admin.examine_servers()
    tags = {"{}:{}".format(*node.address): node.tag for node in admin.server_nodes()}
    databases = admin.list_databases()
    tables = [f"{name}.{table}" for name in databases for table in admin.list_tables(name)]
    numbers = table_numbers(servers).values()
    return {
        "status": "problem" if _those(findings, 2) else "ok",
        "servers": [_server(info, tags.get(info.server)) for info in servers],
        "databases": len(databases),
        "tables": len(tables),
        "buckets": sum(each.buckets for each in numbers),
        "rows_per_second": round(sum(each.rate for each in numbers), 1),
        "log_bytes": sum(each.log_bytes for each in numbers),
        "locations": [_location(each) for each in admin.locations().locations],
        "tiering": _tiering(admin, servers),
        "problems": _those(findings, 2),
        "warnings": _those(findings, 1),
    }


def _server(info: ServerInfo, tag: ServerTag | None) -> dict[str, Any]:
    from zufluss.obs import metrics

    def value(metric: metrics.Metric) -> int | None:
        number = info.value(metric.name)
        return None if number is None else int(number)

    return {
        "server": info.server,
        "role": info.role,
        "tag": None if tag is None else tag.name,
        "version": info.version,
        "uptime_seconds": info.uptime_ms // 1000,
        "connections": value(metrics.CONNECTIONS),
        "connections_max": value(metrics.CONNECTIONS_MAX),
        "disk_free_bytes": value(metrics.DISK_FREE_BYTES),
        "disk_size_bytes": value(metrics.DISK_SIZE_BYTES),
        "kv_memory_bytes": value(metrics.KV_MEMORY_BYTES),
        "kv_memory_budget_bytes": value(metrics.KV_MEMORY_BUDGET_BYTES),
        "buckets": value(metrics.BUCKETS),
        "unavailable_buckets": (value(metrics.BUCKETS_REFUSED) or 0)
        + (value(metrics.BUCKETS_RECOVERING) or 0),
    }


def _location(location: RemoteLocation) -> dict[str, Any]:
    return {
        "id": location.location_id,
        "uri": location.uri,
        "state": location.state.name.lower(),
        "health": location.health.name.lower(),
        "files": location.live_files,
        "bytes": location.live_bytes,
    }


def _tiering(admin: Admin, servers: list[ServerInfo]) -> list[dict[str, Any]]:
    """The tables with a lake, those that wait longest first."""
    from zufluss.cli.numbers import added
    from zufluss.obs import metrics

    waiting = added(servers, metrics.TIERING_PENDING_SECONDS)
    untiered = added(servers, metrics.UNTIERED_ROWS)
    failures = added(servers, metrics.TIERING_FAILURES)
    lags = added(servers, metrics.TIERING_LAG_SECONDS)
    rows: list[dict[str, Any]] = []
    for path, lag in sorted(lags.items(), key=lambda item: -item[1]):
        snapshot = admin.lake_snapshot(".".join(path)) if len(rows) < LAKE_TABLES_MAX else None
        rows.append(
            {
                "table": ".".join(path),
                "lake_snapshot": None if snapshot is None else snapshot.snapshot_id,
                "untiered_rows": int(untiered.get(path, 0)),
                "seconds_since_tiered": round(lag),
                "seconds_waiting_for_a_service": round(waiting.get(path, 0)),
                "failures": int(failures.get(path, 0)),
            }
        )
    return rows


def _those(findings: list[ServerFinding], severity: int) -> list[dict[str, str]]:
    return [
        {"server": each.server, "subject": each.subject, "finding": each.text}
        for each in findings
        if each.severity == severity
    ]


def _print(report: dict[str, Any]) -> None:
    print_table(
        ["server", "role", "version", "up", "connections", "disk free", "row memory", "buckets"],
        [_server_cells(each) for each in report["servers"]],
    )
    print()
    print_fields(
        {
            "databases": report["databases"],
            "tables": f"{report['tables']} in {report['buckets']} buckets",
            "written": f"{rate_text(report['rows_per_second'])} rows in the last minute",
            "logs": bytes_text(report["log_bytes"]),
        }
    )
    _print_list("locations", report["locations"], ["id", "uri", "state", "health", "files"])
    lake = report["tiering"][:LAKE_TABLES_MAX]
    for each in lake:
        each["tiered"] = f"{seconds_text(each['seconds_since_tiered'])} ago"
        each["waiting rows"] = count_text(each["untiered_rows"])
        each["snapshot"] = each["lake_snapshot"] or "none yet"
    columns = ["table", "snapshot", "waiting rows", "tiered", "failures"]
    _print_list("tiering", lake, columns)
    for kind in ("problems", "warnings"):
        _print_list(kind, report[kind], ["server", "subject", "finding"])
    print()
    count = len(report["problems"])
    print(f"{count} problems" if count else "everything works")


def _print_list(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    if rows:
        print(f"\n{title}")
        print_table(columns, [[row[column] for column in columns] for row in rows])


def _server_cells(server: dict[str, Any]) -> list[str]:
    away = server["unavailable_buckets"]
    memory = server["kv_memory_budget_bytes"]
    buckets = count_text(server["buckets"]) + (f" ({away} unavailable)" if away else "")
    return [
        server["server"],
        server["role"] + (f" ({server['tag']})" if server["tag"] else ""),
        server["version"],
        seconds_text(server["uptime_seconds"]),
        f"{count_text(server['connections'])} of {count_text(server['connections_max'])}",
        f"{bytes_text(server['disk_free_bytes'])} of {bytes_text(server['disk_size_bytes'])}",
        f"{bytes_text(server['kv_memory_bytes'])} of {bytes_text(memory)}" if memory else "",
        "" if server["buckets"] is None else buckets,
    ]
