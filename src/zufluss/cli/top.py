"""`zufluss top`: what the servers do right now, refreshed every second.

A frame is the difference of two samples of the servers' metrics. The servers count anyway, so
watching costs them one request per frame.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zufluss.cli.amounts import bytes_text, count_text, rate_text, seconds_text
from zufluss.cli.output import Output, print_document, print_table
from zufluss.cli.session import DEFAULT_BOOTSTRAP, Bootstrap, OutputOption, Settings, connected

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zufluss.client.core.servers import ServerInfo
    from zufluss.client.sync.admin import Admin

TABLES: Final = 15
"""Hottest tables that are shown."""
SERVER_COLUMNS: Final = [
    *("server", "rows in", "bytes in", "bytes out"),
    *("requests", "in flight", "connections", "loop lag"),
]
TABLE_COLUMNS: Final = ["table", "rows in", "rows", "log bytes", "untiered", "last tiered"]

Frame = dict[str, Any]
"""What is shown at one moment, as the JSON output has it."""


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one sample and end, as into a pipe.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two samples.")
    ] = 1.0,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    settings: Settings = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show live what the servers do: rows, bytes and requests per second, the hottest tables.

    Ctrl-C ends it. If the output is not a terminal, one sample is printed. `loop lag` is the
    longest time in the last minute or two that all clients of a server waited for one of its jobs.

    Examples:

      zufluss top

      zufluss top --once --output json

      zufluss top --interval 5
    """
    with connected(bootstrap, settings) as connection:
        admin = connection.admin
        if once or output is Output.JSON or not sys.stdout.isatty():
            shown = _next_frame(admin, _sample(admin), interval)[0]
            _print(shown, output)
        else:
            _live(admin, interval)


Samples = tuple[float, "list[ServerInfo]"]
"""The time of a sample, and what the servers answered."""


def _sample(admin: Admin) -> Samples:
    return time.monotonic(), admin.describe_servers()


def _next_frame(admin: Admin, before: Samples, interval: float) -> tuple[Frame, Samples]:
    time.sleep(max(before[0] + interval - time.monotonic(), 0))
    after = _sample(admin)
    return frame(before[1], after[1], after[0] - before[0]), after


def frame(before: list[ServerInfo], after: list[ServerInfo], seconds: float) -> Frame:
    """The rates between two samples."""
    earlier = {info.server: info for info in before}
    servers = [_server(earlier.get(info.server, info), info, seconds) for info in after]
    return {"servers": servers, "tables": _tables(before, after, seconds)[:TABLES]}


def _server(before: ServerInfo, after: ServerInfo, seconds: float) -> dict[str, Any]:
    from zufluss.obs import metrics

    def rate(metric: metrics.Metric) -> float:
        counts = [sum(info.series(metric.name).values()) for info in (before, after)]
        return max(counts[1] - counts[0], 0) / seconds if seconds > 0 else 0.0

    return {
        "server": after.server,
        "rows_in_per_second": rate(metrics.TABLE_RECORDS),
        "bytes_in_per_second": rate(metrics.RECEIVED_BYTES),
        "bytes_out_per_second": rate(metrics.SENT_BYTES),
        "requests_per_second": rate(metrics.REQUESTS),
        "requests_in_flight": after.value(metrics.REQUESTS_IN_FLIGHT.name),
        "connections": after.value(metrics.CONNECTIONS.name),
        "loop_lag_seconds": after.value(metrics.LOOP_LAG_SECONDS_MAX.name),
    }


def _tables(
    before: list[ServerInfo], after: list[ServerInfo], seconds: float
) -> list[dict[str, Any]]:
    """The tables, those with the most new rows first."""
    from zufluss.cli.numbers import added, table_numbers
    from zufluss.obs import metrics

    earlier, lags = table_numbers(before), added(after, metrics.TIERING_LAG_SECONDS)
    rows: list[dict[str, Any]] = []
    for name, now in table_numbers(after).items():
        new = now.records - earlier[name].records if name in earlier else 0
        rows.append(
            {
                "table": name,
                "rows_in_per_second": max(new, 0) / seconds if seconds > 0 else 0.0,
                "rows": now.rows,
                "log_bytes": now.log_bytes,
                "untiered_rows": now.untiered_rows,
                "seconds_since_tiered": lags.get(tuple(name.split(".", 1))),
            }
        )
    return sorted(rows, key=lambda row: (-row["rows_in_per_second"], row["table"]))


def _server_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["server"],
        rate_text(row["rows_in_per_second"]),
        bytes_text(row["bytes_in_per_second"]) + "/s",
        bytes_text(row["bytes_out_per_second"]) + "/s",
        rate_text(row["requests_per_second"]),
        count_text(row["requests_in_flight"]),
        count_text(row["connections"]),
        seconds_text(row["loop_lag_seconds"]),
    ]


def _table_cells(row: dict[str, Any]) -> list[str]:
    tiered, untiered = row["seconds_since_tiered"], row["untiered_rows"]
    return [
        row["table"],
        rate_text(row["rows_in_per_second"]),
        count_text(row["rows"]),
        bytes_text(row["log_bytes"]),
        "" if untiered is None else count_text(untiered),
        "" if tiered is None else f"{seconds_text(tiered)} ago",
    ]


def _print(shown: Frame, output: Output) -> None:
    if output is Output.JSON:
        print_document(shown)
        return
    print_table(SERVER_COLUMNS, [_server_cells(row) for row in shown["servers"]])
    if shown["tables"]:
        print()
        print_table(TABLE_COLUMNS, [_table_cells(row) for row in shown["tables"]])


def _live(admin: Admin, interval: float) -> None:
    """Show frames until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    before = _sample(admin)
    shown = frame(before[1], before[1], interval)
    try:
        with Live(_screen(shown), console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                shown, before = _next_frame(admin, before, interval)
                live.update(_screen(shown), refresh=True)
    except KeyboardInterrupt:
        return


def _screen(shown: Frame) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
        made = Table(title=title, title_justify="left", expand=True, box=None)
        for number, column in enumerate(columns):
            made.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
        for row in rows:
            made.add_row(*row)
        return made

    servers = [_server_cells(row) for row in shown["servers"]]
    tables = [_table_cells(row) for row in shown["tables"]]
    return Group(
        table("zufluss top · Ctrl-C ends", SERVER_COLUMNS, servers),
        table("hottest tables", TABLE_COLUMNS, tables),
    )
