"""Producers: exactly-once writers, and how their puts can be told from all others.

A producer writes some columns of one primary-key table under an id that outlives restarts. Each
start of it is an *epoch*; the coordinator gives the epoch, tells every leader, and only then
answers, so that from then on nobody can write as an earlier epoch. A job may have many writers,
its *tasks*, under one epoch.

Batches carry a writer id and a sequence as those of any idempotent writer do (`log/writer_state`),
and the changelog keeps both. A producer's writer ids are made of its number, epoch and task, so
every changelog batch tells who wrote it, without a field of its own:

| bits  | 63 | 62 | 61–36           | 35–16  | 15–0 |
|-------|----|----|-----------------|--------|------|
| value | 0  | 1  | producer number | epoch  | task |

INIT_WRITER counts from 0 and never gets there. Sequences begin at 0 with each epoch, per bucket,
as the writer id is a new one. Task 65535 is the leader's own: the batches of an undo.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from zufluss.errors import InvalidProducerIdError

NUMBER_MAX: Final = (1 << 26) - 1
"""The last producer number of a cluster; none is used twice."""
EPOCH_MAX: Final = (1 << 20) - 1
"""The last epoch of a producer."""
TASK_MAX: Final = (1 << 16) - 2
"""The last task of a job."""
UNDO_TASK: Final = (1 << 16) - 1
"""The task of batches that a leader writes to undo."""
ID_LENGTH_MAX: Final = 128

_FLAG: Final = 1 << 62
_ID: Final = re.compile(r"[A-Za-z0-9._:-]+")


class ProducerWriter(NamedTuple):
    """Who wrote a batch."""

    number: int
    """The producer."""
    epoch: int
    """Which start of it."""
    task: int
    """Which of its writers."""

    @property
    def writer_id(self) -> int:
        """The id in its batches."""
        return _FLAG | self.number << 36 | self.epoch << 16 | self.task

    @classmethod
    def of(cls, writer_id: int) -> ProducerWriter | None:
        """The producer of a writer id, None for all other writers."""
        if not writer_id & _FLAG or writer_id < 0:
            return None
        return cls(writer_id >> 36 & NUMBER_MAX, writer_id >> 16 & EPOCH_MAX, writer_id & UNDO_TASK)


def is_producer(writer_id: int) -> bool:
    """Whether a writer id is that of a producer's task."""
    return writer_id >= _FLAG


def task_of(writer_id: int) -> int:
    """A producer's writer id without its epoch: the same for every start of the task."""
    return writer_id & ~(EPOCH_MAX << 16)


def check_producer_id(producer_id: str) -> str:
    """The id itself; `InvalidProducerIdError` if it is none."""
    if (
        not _ID.fullmatch(producer_id)
        or len(producer_id) > ID_LENGTH_MAX
        or producer_id in (".", "..")
    ):
        raise InvalidProducerIdError(
            f"{producer_id!r:.200} is no producer id; allowed are 1 to {ID_LENGTH_MAX} letters, "
            "digits and . _ : -, but not . or .. alone"
        )
    return producer_id
