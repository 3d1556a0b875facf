"""A process that creates and drops tables, and prints what was acknowledged; to be killed.

    creator.py DIRECTORY RUN [ADDRESS OF A ZOOKEEPER]

Lines: `table NAME ID`, `dropping NAME`, `gone NAME`, `writer ID`, `id ID`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.coordinator.support import COUNTED, EVENTS, Cluster, counted, table_json
from tests.meta.zookeepers import opener
from zufluss.model.table import TablePath
from zufluss.obs import logging
from zufluss.wire.api import ApiKey


async def main(directory: Path, run: str, zookeeper: str | None = None) -> None:
    logging.configure("error")
    cluster = Cluster(directory)
    if zookeeper is not None:
        cluster.open_store = opener(zookeeper)
    await cluster.start()
    events = await cluster.catalog.create_table(EVENTS, counted(), ignore_if_exists=True)
    number = 0
    while True:
        path = TablePath("fluss", f"t_{run}_{number}")
        entry = await cluster.catalog.create_table(path, table_json(buckets=number % 3 + 1))
        print("table", path.table, entry.info.table_id, flush=True)
        if number % 3 == 2:
            print("dropping", path.table, flush=True)
            await cluster.catalog.drop_table(path)
            print("gone", path.table, flush=True)
        writer = await cluster.call(ApiKey.INIT_WRITER)
        print("writer", writer.writer_id, flush=True)
        ids = await cluster.catalog.allocate_ids(events.info.table_id, COUNTED, 2)
        for each in range(*ids):
            print("id", each, flush=True)
        number += 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
