"""A job in a process of its own, to be killed: reads events, writes them once, keeps checkpoints.

The process is forked from one that has imported everything (`tests/server_fork.py`). It writes a
line to a pipe for each step, so that a test knows when to kill it:

| line | |
|---|---|
| `undo N` | its undo has put back N keys |
| `begun E` | it writes, in epoch E |
| `wrote N` | the events before N were taken over |
| `kept N` | the checkpoint at N is in the file, with its position |
| `failed NAME` | an error of this class ended it |
| `done` | everything is written |
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import zufluss
from tests import servers
from tests.end_to_end.aggregation.recovery import columns_of, event, written
from tests.server_fork import PR_SET_PDEATHSIG
from zufluss.client import ProducerHandle
from zufluss.client.producer.undo import UndoProgress
from zufluss.client.sync.write import ExactlyOnceWriter
from zufluss.errors import ZuflussError

_forks = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Work:
    """The parameters of a job."""

    bootstrap: str
    table: str
    kept: Path
    """The file that holds its checkpoint."""
    seed: int
    """Seed of its events."""
    count: int
    """Number of its events."""
    producer_id: str = "job"
    undo: Literal["server", "client"] = "server"
    checkpoints: float = 0.2
    """Probability of a checkpoint after a batch."""
    flushes: float = 0.5
    """Probability that the job waits for the acknowledgement of a batch."""
    batch_rows: int = 7
    ttl: str = "1min"
    halts: bool = False
    """Stop in the middle of the undo and wait to be killed."""

    @property
    def position(self) -> int:
        """Position of the last checkpoint."""
        return int(json.loads(self.kept.read_text())[0]) if self.kept.exists() else 0

    @property
    def state(self) -> bytes | None:
        """The last checkpoint."""
        return json.loads(self.kept.read_text())[1].encode() if self.kept.exists() else None


def run(work: Work, chance_seed: int, pipe: Pipe) -> None:
    """Entry point of the process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _run(work, random.Random(chance_seed), pipe)
    except ZuflussError as problem:
        pipe.send(f"failed {type(problem).__name__}")


def _run(work: Work, chance: random.Random, pipe: Pipe) -> None:
    def undoing(progress: UndoProgress) -> None:
        pipe.send(f"undo {progress.keys}")
        if work.halts and progress.keys:
            threading.Event().wait()

    with zufluss.connect(work.bootstrap) as conn:
        state = work.state
        table = conn.table(work.table)
        writer = table.exactly_once_writer(
            work.producer_id if state is None else None,
            state=state,
            ttl=work.ttl,
            undo=work.undo,
            on_undo=undoing,
        )
        pipe.send(f"begun {writer.epoch}")
        position = work.position
        while position < work.count:
            end = min(work.count, position + chance.randrange(1, work.batch_rows + 1))
            writer.write(written(table, work.seed, range(position, end)))
            if chance.random() < work.flushes:
                writer.flush()
            position = end
            pipe.send(f"wrote {position}")
            if chance.random() < work.checkpoints or position == work.count:
                _keep(work, writer, position)
                pipe.send(f"kept {position}")
        pipe.send("done")
        signal.pause()


def _keep(work: Work, writer: ExactlyOnceWriter, position: int) -> None:
    """Store state and position in one step."""
    new = work.kept.with_suffix(".new")
    new.write_text(json.dumps([position, writer.checkpoint().to_bytes().decode()]))
    new.replace(work.kept)


class Job:
    """A running job."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.lines: list[str] = []
        """Lines that the job has written so far."""
        self._pipe, theirs = _forks.Pipe(duplex=False)
        self.process: BaseProcess = _forks.Process(target=target, args=(*arguments, theirs))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def says(self) -> bool:
        """Whether the job has written another line."""
        return self._pipe.poll()

    def next_line(self) -> str:
        """The next line."""
        assert self._pipe.poll(servers.WAIT_SECONDS), "the job says nothing"
        line: str = self._pipe.recv()
        self.lines.append(line)
        return line

    def until(self, *beginnings: str) -> str:
        """Wait for a line with one of these beginnings, or for `failed`."""
        deadline = time.monotonic() + servers.WAIT_SECONDS
        while not (line := self.next_line()).startswith((*beginnings, "failed")):
            assert time.monotonic() < deadline, f"the job never says {beginnings}"
        return line

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(servers.WAIT_SECONDS)


@contextmanager
def job(work: Work, chance_seed: int = 0) -> Iterator[Job]:
    """Start a process that is killed at the end of the block."""
    with _alive(Job(run, work, chance_seed)) as found:
        yield found


@contextmanager
def _alive(found: Job) -> Iterator[Job]:
    try:
        yield found
    finally:
        if found.process.is_alive():
            found.kill()


# -- tasks of a job ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The parameters of a task: it writes the events of its own from `first` on."""

    work: Work
    handle: ProducerHandle
    task: int
    tasks: int
    first: int
    last: int
    ends: bool
    """Whether the task ends by itself; otherwise it waits to be killed."""


def run_task(share: Share, pipe: Pipe) -> None:
    """The process of a task; `wrote N` when all its events are acknowledged."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    work = share.work
    with zufluss.connect(work.bootstrap) as conn:
        writer = conn.table(work.table).producer_writer(share.handle, share.task)
        for position in range(share.first, share.last):
            inputs = event(work.seed, position)
            if inputs["k"] % share.tasks == share.task:
                writer.write(columns_of([inputs]))
        writer.flush()
        pipe.send(f"wrote {share.last}")
        if share.ends:
            writer.finish()
            pipe.send("done")
        signal.pause()


@contextmanager
def task(share: Share) -> Iterator[Job]:
    """Start a process that is killed at the end of the block."""
    with _alive(Job(run_task, share)) as found:
        yield found
