"""The part of the demo about aggregation: page views, counted once by a writer that is killed.

The writer is a process of its own, this file. It reads made-up events in order, writes them under a
producer id, and every few batches keeps a checkpoint: the position in its source and the state of
its writer, in one file that is replaced in one step. It is killed with SIGKILL in the middle of its
work and started again, several times; in the end the table is compared with the events.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

import zufluss
from zufluss.client import ProducerState

TABLE = "fluss.pages"
PRODUCER = "page-views"
EVENTS = 120_000
BATCH = 2_000
CHECKPOINT_BATCHES = 10
PAGES = np.array(["/", "/about", "/blog", "/docs", "/docs/spark", "/download", "/legal"])
SHARES = np.array([40, 3, 15, 20, 10, 11, 1]) / 100
USERS = 5_000
KILLS = 2
BEGINNING = np.datetime64("2026-01-01T00:00:00", "ms")


# -- the writer, in a process of its own -------------------------------------------------------


def write(bootstrap: str, kept: Path) -> None:
    """Write all events from the last checkpoint on, and print the progress."""
    position, state = restored(kept)
    with zufluss.connect(bootstrap) as connection:
        table = connection.table(TABLE)
        writer = table.exactly_once_writer(PRODUCER, state=state, pre_aggregate=True)
        undone = 0 if writer.undone is None else writer.undone.keys
        tell(f"restored {position} {undone}")
        for start in range(position, EVENTS, BATCH):
            writer.write(rows(start))
            writer.flush()
            position = start + BATCH
            if position % (BATCH * CHECKPOINT_BATCHES) == 0 or position == EVENTS:
                keep(kept, position, writer.checkpoint())
            tell(f"written {position}")
        writer.release()


def restored(kept: Path) -> tuple[int, ProducerState | None]:
    """Position of the source and state of the writer at the last checkpoint."""
    if not kept.exists():
        return 0, None
    found = json.loads(kept.read_text())
    return found["position"], ProducerState.from_bytes(found["state"].encode())


def keep(kept: Path, position: int, state: ProducerState) -> None:
    """Store position and state in one step."""
    new = kept.with_suffix(".new")
    new.write_text(json.dumps({"position": position, "state": state.to_bytes().decode()}))
    new.replace(kept)


def tell(line: str) -> None:
    """Print a line for the parent process."""
    print(line, flush=True)


def events(start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Page, user and time of the events of one batch; the same whenever they are read."""
    rng = np.random.default_rng(start)
    times = BEGINNING + np.arange(start, start + BATCH).astype("timedelta64[ms]")
    return rng.choice(PAGES, BATCH, p=SHARES), rng.integers(0, USERS, BATCH), times


def rows(start: int) -> pa.RecordBatch:
    """The events of one batch as rows of the table."""
    pages, users, times = events(start)
    bitmaps = [BitMap64([user]).serialize() for user in users.tolist()]
    return pa.record_batch(
        {
            "page": pages,
            "views": np.ones(BATCH, np.int64),
            "users": pa.array(bitmaps, pa.binary()),
            "last_seen": pa.array(times),
        }
    )


# -- the story ---------------------------------------------------------------------------------


def counts_part(connection: zufluss.Connection, bootstrap: str, directory: str) -> None:
    """Count page views while the writer is killed and started again, and compare."""
    from demo_lake import check, console, say

    connection.admin.create_table(
        TABLE,
        "page STRING, views BIGINT SUM, users BYTES RBM64, last_seen TIMESTAMP(3) MAX,"
        " PRIMARY KEY (page)",
        bucket_count=4,
        properties={"table.merge-engine": "aggregation"},
    )
    say(f"table [bold]{TABLE}[/] created: views add up, users are bitmaps, last_seen is the latest")
    kept = Path(directory) / "checkpoint"
    for nth in range(KILLS + 1):
        with Writing(bootstrap, kept) as writing:
            if nth:
                say(f"started again: {writing.undone} rows undone, on from event {writing.begun:,}")
            behind = writing.run_on(0 if nth == KILLS else EVENTS * (nth + 1) // (KILLS + 1))
        if nth < KILLS:
            say(f"the writer is killed ([bold]kill -9[/]), {behind:,} events behind a checkpoint")
    rows = connection.table(TABLE).scan().to_arrow().sort_by([("views", "descending")])
    check(summary(rows) == truth(), "some event was counted twice, or not at all")
    say(f"{EVENTS:,} events counted once, whatever was killed:")
    for row in rows.to_pylist():
        users = len(BitMap64.deserialize(row["users"]))
        console.print(f"    {row['page']:<12} {row['views']:>7,} views  {users:>6,} users")


class Writing:
    """The process that writes."""

    def __init__(self, bootstrap: str, kept: Path) -> None:
        command = [sys.executable, __file__, bootstrap, str(kept)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._kept = kept
        self.begun = 0
        """The event it began with."""
        self.undone = 0
        """Rows that the undo restored before it began."""

    def __enter__(self) -> Writing:
        line = next(self._lines(), ["restored", "0", "0"])
        self.begun, self.undone = int(line[1]), int(line[2])
        return self

    def run_on(self, until: int) -> int:
        """Let the writer pass this event and then a checkpoint; 0 means to its end."""
        from demo_lake import check

        for _, written in self._lines():
            behind = int(written) % (BATCH * CHECKPOINT_BATCHES)
            if until and int(written) > until and behind > BATCH:
                return behind
        check(self._process.wait() == 0, "the writer of page views ended by itself")
        return 0

    def _lines(self) -> Iterator[list[str]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.split()

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


def summary(found: pa.Table) -> dict[str, tuple[int, int, np.datetime64]]:
    """Views, users and last visit by page."""
    return {
        row["page"]: (
            row["views"],
            len(BitMap64.deserialize(row["users"])),
            np.datetime64(row["last_seen"], "ms"),
        )
        for row in found.to_pylist()
    }


def truth() -> dict[str, tuple[int, int, np.datetime64]]:
    """The same, counted from the events."""
    batches = [events(start) for start in range(0, EVENTS, BATCH)]
    pages, users, times = (np.concatenate(columns) for columns in zip(*batches, strict=True))
    return {
        str(page): (
            int((pages == page).sum()),
            len(np.unique(users[pages == page])),
            times[pages == page].max(),
        )
        for page in PAGES
    }


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
