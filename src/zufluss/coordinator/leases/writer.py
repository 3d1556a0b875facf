"""The lease writer: changes of many leases share transactions.

A renewal writes a few bytes, and thousands of clients renew. So while one transaction is under way,
changes for the next one are collected, up to a limit. Acquires, releases and drops wait in one
queue and renewals in another; the queues take turns at being served first, so that a wave of
renewals delays an acquire by one transaction at most, and acquires never stop renewals.

Every caller learns the outcome of its own change. If one change of a group conflicts with the
store, every change is tried alone, so that only the conflicting one fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zufluss.coordinator.ledger import Ledger
from zufluss.meta.api import ConflictError, Create, Op, Put

OPS_MAX = 250
"""Operations of one transaction, unless a single change needs more. Few, so that a transaction is
short; twice as many were measured to renew no faster."""
BYTES_MAX = 500_000
"""Bytes of one transaction, unless a single change needs more."""


Ended = Callable[[Exception | None], None]
"""Called with the error of a change, or with None when the change is durable."""


class _Change(NamedTuple):
    ops: Sequence[Op]
    size: int
    ended: Ended


class LeaseWriter:
    """Writes the changes of leases, one transaction at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self.transactions = 0
        """Transactions that were committed."""
        self._ledger = ledger
        self._queues: tuple[deque[_Change], deque[_Change]] = deque(), deque()
        self._first = 0
        self._task: asyncio.Task[None] | None = None

    async def write(self, ops: Sequence[Op], *, renewal: bool = False) -> None:
        """Apply all operations or none; durable when this returns.

        No two changes that wait at a time may touch the same path.
        """
        outcome = asyncio.get_running_loop().create_future()

        def ended(problem: Exception | None) -> None:
            if outcome.done():  # the caller was cancelled
                return
            if problem is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(problem)

        self.begin(ops, ended, renewal=renewal)
        await outcome

    def begin(self, ops: Sequence[Op], ended: Ended, *, renewal: bool = False) -> None:
        """As `write`, for callers without a task: `ended` is called in every case."""
        size = sum(len(op.value) for op in ops if isinstance(op, Create | Put))
        self._queues[renewal].append(_Change(ops, size, ended))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="lease-writer")

    async def _run(self) -> None:
        while any(self._queues):
            await self._commit(self._group())

    def _group(self) -> list[_Change]:
        """Take the next changes to write out of the queues, which take turns at being first."""
        group: list[_Change] = []
        ops = size = 0
        for queue in (self._queues[self._first], self._queues[1 - self._first]):
            while queue:
                ops += len(queue[0].ops)
                size += queue[0].size
                if group and (ops > OPS_MAX or size > BYTES_MAX):
                    break
                group.append(queue.popleft())
        self._first = 1 - self._first
        return group

    async def _commit(self, group: Sequence[_Change]) -> None:
        problem: Exception | None = None
        try:
            await self._ledger.commit([op for change in group for op in change.ops])
            self.transactions += 1
        except ConflictError as conflict:
            if len(group) > 1:
                for change in group:
                    await self._commit([change])
                return
            problem = conflict
        except Exception as failure:
            problem = failure
        for change in group:
            change.ended(problem)

    def __repr__(self) -> str:
        return f"LeaseWriter(waiting={sum(map(len, self._queues))})"
