"""What tests of locations inspect beside tables: files, metrics, the command line."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from typer.testing import CliRunner

import zufluss
from tests.end_to_end.lake_round import FRESH, report_tiered
from tests.end_to_end.locations.stage import CLIENT, SERVER, TABLE, Stage
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS, eventually
from zufluss.cli.main import app
from zufluss.client.sync.table import Table
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.server import DevServer

METRICS = {"zufluss.metrics.port": "0"}
LAKE = {"datalake.format": "iceberg"}
"""Options of a server whose tables may have a lake."""
IN_LAKE = FRESH
SNAPSHOTS = {"kv.snapshot.interval": "50ms"}
NO_COPIES = {"remote.log.task-interval-duration": "0", "kv.snapshot.interval": "1h"}
"""Options of a server that uploads nothing by itself."""
SWEEPING = {"zufluss.remote.sweep.interval": "20ms", "zufluss.remote.sweep.grace": "0"}
"""Options of a server that deletes unreferenced files at once; valid only without uploads."""
DOCUMENTS = re.compile(r".*(\.manifest|/_METADATA|\.offsets)")
"""Files whose sizes no manifest contains."""


PATIENT = {**CLIENT, "client.request-timeout": "30s"}


@contextmanager
def patient(directory: Path, properties: Mapping[str, str]) -> Iterator[Stage]:
    """A server and a client with timeouts for slow machines."""
    conf = {**SERVER, "zufluss.remote.request-timeout": "30s", **properties}
    server = WarmServer(directory / "data", conf)
    with server, patient_again(server) as it:
        yield it


@contextmanager
def patient_again(server: WarmServer) -> Iterator[Stage]:
    """The same server after a restart."""
    with zufluss.connect(server.bootstrap, **PATIENT) as conn:
        yield Stage(server, conn)


def stored(place: object, properties: Mapping[str, str] | None = None) -> dict[str, int]:
    """The files of tables in a location, with their sizes."""

    async def listed() -> dict[str, int]:
        objects = Objects(parse_location(str(place), "place"), properties or {})
        pages = [page async for page in objects.list("")]
        return {x.path: x.size for page in pages for x in page if not x.path.startswith(".")}

    return asyncio.run(listed())


def put(place: object, path: str, properties: Mapping[str, str] | None = None) -> str:
    """Create a file in a location without the server."""
    objects = Objects(parse_location(str(place), "place"), properties or {})
    asyncio.run(objects.put(path, b"put there by hand"))
    return path


def orphan(table: Table, directory: str = "") -> str:
    """The name of a log file that nothing refers to."""
    info = table.info
    bucket = f"log/{info.path.database}/{info.path.table}-{info.table_id}{directory}/0"
    return f"{bucket}/{uuid.uuid4()}/{0:020d}.log"


def of_table(table: Table, files: Mapping[str, int], kind: str = "log|kv|lake") -> set[str]:
    """The files among these that belong to a table."""
    name = f"{table.info.path.table}-{table.info.table_id}"
    return {path for path in files if re.match(rf"({kind})/fluss/{name}/", path)}


def keyed(it: Stage, name: str, *, by_day: bool = False, **properties: str) -> Table:
    """A primary-key table."""
    it.admin.create_table(
        name,
        f"id BIGINT, text STRING{', day STRING' if by_day else ''}",
        primary_key=["id", "day"] if by_day else ["id"],
        partition_keys=["day"] if by_day else (),
        bucket_count=1,
        properties={**TABLE, **properties},
    )
    return it.conn.table(name)


def upsert(table: Table, begin: int, end: int, day: str | None = None) -> None:
    """Rows `begin` to `end`, ten at a time, more than a segment holds."""
    with table.upsert() as writer:
        for start in range(begin, end, 10):
            ids = list(range(start, start + 10))
            columns: dict[str, Any] = {
                "id": ids,
                "text": [f"row {i} ".ljust(150, "x") for i in ids],
            }
            writer.write(pa.table(columns if day is None else {**columns, "day": [day] * 10}))
            writer.flush()


def until_snapshot(it: Stage, table: Table, offset: int, day: str | None = None) -> None:
    """Wait until a snapshot contains everything below an offset."""

    def there() -> bool:
        snapshots = it.admin.latest_kv_snapshots(table.path, day)
        return any(snapshot.log_offset == offset for snapshot in snapshots)

    eventually(there, f"a snapshot of {table.path} at {offset}")


def tiered(it: Stage, table: Table, snapshot_id: int, offset: int) -> None:
    """Report as a tiering service that the lake has everything below an offset."""
    report_tiered(it.conn, table.path.table, snapshot_id, offset)


def scrape(server: DevServer) -> dict[str, float]:
    """The metrics of a server, by name and labels."""
    (url,) = re.findall(r"address=(http://\S+)", server.log())[-1:]
    with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    shown = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in shown}


def cli(server: DevServer, *arguments: str) -> str:
    """The output of a `zufluss` command."""
    done = CliRunner().invoke(app, [*arguments, "--bootstrap", server.bootstrap])
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def listed_by_cli(server: DevServer) -> dict[int, Any]:
    """`zufluss location list`, by id."""
    found = json.loads(cli(server, "location", "list", "--output", "json"))
    return {location["id"]: location for location in found["locations"]}


def live(it: Stage) -> list[int]:
    """The number of referenced files, by location."""
    return [location.live_files for location in it.admin.locations().locations]


def lose_disk(server: DevServer, *tables: Table) -> None:
    """Remove the local files of some tables."""
    for table in tables:
        name = f"{table.info.path.table}-{table.info.table_id}"
        directory = Path(server.data_dir, table.info.path.database, name)
        directory.rename(Path(server.data_dir).parent / f"lost-{name}-{uuid.uuid4()}")
