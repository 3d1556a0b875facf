"""A client in a process of its own, ours or pyfluss: takes work, says how long it took.

One JSON object per line in, the seconds as one line out. Opening the table is not timed; making
the writer or the scan is.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pyarrow as pa

from bench.keyed import every_key, keyed_rows, random_keys
from bench.work import ten_columns


@functools.cache
def batches(rows: int) -> list[pa.RecordBatch]:
    """Some batches to write in turn."""
    return [ten_columns(rows, i * rows) for i in range(4)]


@functools.cache
def single_rows(rows: int) -> list[dict[str, Any]]:
    """Rows as dicts."""
    return ten_columns(rows).to_pylist()


def upserts(work: dict[str, Any]) -> list[pa.RecordBatch]:
    """Batches of `rows` rows, of every key or of random ones."""
    count, size = work["count"], work["rows"]
    random = work["ids"] == "random"
    ids = random_keys(count, work["keys"], work["seed"]) if random else every_key(count)
    return [keyed_rows(ids[at : at + size], at) for at in range(0, count, size)]


def wanted_ids(work: dict[str, Any]) -> list[list[int]]:
    """The keys that each of some tasks is to look up, one after the other."""
    ids = random_keys(work["count"], work["keys"], work["count"])
    return [ids[task :: work["tasks"]].tolist() for task in range(work["tasks"])]


def requests() -> Iterator[dict[str, Any]]:
    """What is to be done."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(began: float, found: int | None = None, expect: int | None = None) -> None:
    """How long it took."""
    seconds = time.perf_counter() - began
    if found != expect:
        raise SystemExit(f"read {found} rows, there are {expect}")
    print(seconds, flush=True)


def zufluss_worker(bootstrap: str) -> None:
    """Work through our client."""
    import zufluss

    with zufluss.connect(bootstrap) as connection:
        for work in requests():
            table = connection.table(f"fluss.{work['table']}")
            if work["do"] == "append":
                chosen = batches(work["rows"])
                began = time.perf_counter()
                with table.append() as writer:
                    for i in range(work["batches"]):
                        writer.write(chosen[i % 4])
                answer(began)
            elif work["do"] == "append_rows":
                rows = single_rows(work["rows"])
                began = time.perf_counter()
                with table.append() as writer:
                    for row in rows:
                        writer.write(row)
                answer(began)
            elif work["do"] == "upsert":
                chosen = upserts(work)
                began = time.perf_counter()
                with table.upsert() as writer:
                    for batch in chosen:
                        writer.write(batch)
                answer(began)
            elif work["do"] == "lookup":
                asyncio.run(_lookups(bootstrap, work))
            else:
                began = time.perf_counter()
                found = table.scan(work["columns"]).to_arrow()
                answer(began, found.num_rows, work["expect"])


async def _lookups(bootstrap: str, work: dict[str, Any]) -> None:
    import zufluss

    async with await zufluss.connect_async(bootstrap) as connection:
        table = await connection.table(f"fluss.{work['table']}")
        await table.lookup(0)
        await _look_up(table.lookup, work)


async def _look_up(look_up: Callable[[Any], Awaitable[Any]], work: dict[str, Any]) -> None:
    """Single lookups from the tasks of one group."""
    missing = 0

    async def one_by_one(ids: list[int]) -> None:
        nonlocal missing
        for key in ids:
            missing += await look_up({"id": key}) is None

    keys = wanted_ids(work)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for ids in keys:
            group.create_task(one_by_one(ids))
    answer(began, work["count"] - missing, work["count"])


def pyfluss_worker(bootstrap: str) -> None:
    """Work through pyfluss."""
    asyncio.run(_pyfluss(bootstrap))


async def _pyfluss(bootstrap: str) -> None:
    import fluss

    config = fluss.Config({"bootstrap.servers": bootstrap})
    connection = await fluss.FlussConnection.create(config)
    for work in requests():
        table = await connection.get_table(fluss.TablePath("fluss", work["table"]))
        if work["do"] == "append":
            chosen = batches(work["rows"])
            began = time.perf_counter()
            writer = table.new_append().create_writer()
            for i in range(work["batches"]):
                writer.write_arrow_batch(chosen[i % 4])
            await writer.flush()
            answer(began)
        elif work["do"] == "append_rows":
            rows = single_rows(work["rows"])
            began = time.perf_counter()
            writer = table.new_append().create_writer()
            for row in rows:
                writer.append(row)
            await writer.flush()
            answer(began)
        elif work["do"] == "upsert_rows":
            rows = single_rows(work["rows"])
            began = time.perf_counter()
            writer = table.new_upsert().create_writer()
            for row in rows:
                writer.upsert(row)
            await writer.flush()
            answer(began)
        elif work["do"] == "lookup":
            lookuper = table.new_lookup().create_lookuper()
            await lookuper.lookup({"id": 0})
            await _look_up(lookuper.lookup, work)
        else:
            buckets = range(table.get_table_info().num_buckets)
            began = time.perf_counter()
            scan = table.new_scan()
            if work["columns"]:
                scan = scan.project_by_name(work["columns"])
            scanner = await scan.create_record_batch_log_scanner()
            scanner.subscribe_buckets(dict.fromkeys(buckets, fluss.EARLIEST_OFFSET))
            found = await scanner.to_arrow()
            answer(began, found.num_rows, work["expect"])


WORKERS: dict[str, Callable[[str], None]] = {"zufluss": zufluss_worker, "pyfluss": pyfluss_worker}

if __name__ == "__main__":
    WORKERS[sys.argv[1]](sys.argv[2])
