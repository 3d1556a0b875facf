"""Producers: exactly-once writers, and the writer ids that identify their puts.

A producer writes some columns of one primary-key table under an id that outlives restarts. Each
start of a producer is an *epoch*. The coordinator announces the epoch to every leader before it
answers, so nobody can write as an earlier epoch afterwards. A job may have many writers, its
*tasks*, under one epoch.

As with any idempotent writer (`log/writer_state`), batches carry a writer id and a sequence, and
the changelog keeps both. The writer ids of a producer consist of its number, epoch and task, so
every changelog batch identifies its writer without another field:

| bits  | 63 | 62 | 61–36           | 35–16  | 15–0 |
|-------|----|----|-----------------|--------|------|
| value | 0  | 1  | producer number | epoch  | task |

INIT_WRITER counts from 0 and never reaches these ids. Sequences begin at 0 with each epoch, per
bucket, because the writer id is new. A leader writes the batches of an undo as task 65535.
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
ID_LENGTH_MAX: Final = 200
"""Characters of a producer id, as on Fluss."""

_FLAG: Final = 1 << 62
_ID: Final = re.compile(r"[A-Za-z0-9._:-]+")


class ProducerWriter(NamedTuple):
    """The producer, epoch and task of a writer id."""

    number: int
    """The number of the producer."""
    epoch: int
    """The epoch of the producer."""
    task: int
    """The task within the job."""

    @property
    def writer_id(self) -> int:
        """The writer id in batches."""
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
    """A producer's writer id without the epoch: the same after every restart of the task."""
    return writer_id & ~(EPOCH_MAX << 16)


def check_producer_id(producer_id: str) -> str:
    """Return the id; raises `InvalidProducerIdError` if it is invalid."""
    if (
        not _ID.fullmatch(producer_id)
        or len(producer_id) > ID_LENGTH_MAX
        or producer_id in (".", "..")
    ):
        raise InvalidProducerIdError(
            f"Invalid producer ID {producer_id!r:.200}: allowed are 1 to {ID_LENGTH_MAX} letters, "
            "digits and . _ : -, but not . or .. alone"
        )
    return producer_id
