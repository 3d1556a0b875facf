"""Whether this coordinator is still the last one: one question for all who ask at the same time.

A heartbeat that a coordinator answers lets a tablet server answer lookups for a while. A
coordinator that was replaced, and does not know it, must not say so: the next one may have given
the buckets to others. So with several coordinators the answer waits for a transaction of the
ledger, which only the last coordinator gets through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from zufluss.tasks import forgive


class Confirmations:
    """Shares the questions of many callers."""

    def __init__(self, confirm: Callable[[], Awaitable[None]]) -> None:
        """`confirm` raises if another coordinator has taken over."""
        self._confirm = confirm
        self._under_way: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def confirmed(self) -> None:
        """Return when a question that was asked after this call got a yes; raises for a no."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask(self._under_way), name="confirm-epoch")
            self._next.add_done_callback(forgive)
        await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        self._under_way, self._next = self._next, None
        await self._confirm()
