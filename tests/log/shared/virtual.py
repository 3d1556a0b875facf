"""An event loop whose time passes only when nothing else can happen: tests of waits do not wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Never blocks; the loop's clock moves instead."""

    def __init__(self) -> None:
        super().__init__()
        self.pass_time: Callable[[float | None], None] = lambda _: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.pass_time(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop with a clock of its own. Threads must not be used on it."""

    def __init__(self) -> None:
        selector = _Selector()
        self._now = 1000.0
        self._limit: float | None = None
        super().__init__(selector)
        selector.pass_time = self._pass_time

    def time(self) -> float:
        return self._now

    def _pass_time(self, timeout: float | None) -> None:
        if timeout == 0:
            return
        if self._limit is not None and (timeout is None or self._now + timeout > self._limit):
            self._now = max(self._now, self._limit)
            self.call_soon(self.stop)
        elif timeout is None:
            raise RuntimeError("every task waits for something that nobody will do")
        else:
            self._now += timeout

    def settle(self, seconds: float = 0.0) -> None:
        """Let everything happen that happens within some seconds."""
        self._limit = self._now + seconds
        try:
            self.run_forever()
        finally:
            self._limit = None

    def end(self) -> None:
        """Cancel what is still under way, and close the loop."""
        self.settle()
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.settle()
        assert not asyncio.all_tasks(self)
        self.close()

    def finish(self, work: Any) -> Any:
        """Run a coroutine to its end, however long it waits."""
        return self.run_until_complete(work)
