"""A server that is killed right before each kind of file operation.

`ZUFLUSS_KILL_AT=<operation>#<n>` makes the server kill itself right before the n-th write, sync,
rename and so on. Small segments, a short time to live, and tables that come and go make every code
path of the log happen often; the n is random, so every place gets its turn. After each death the
catalog must agree with the disk and with every answer, and at the end the rules of `history.py`
must hold.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.counts import rounds
from tests.fault.ddl import Ddl, create_databases
from tests.fault.history import History, violations
from tests.fault.load import Load, RawWriter, Reader, create_target, read_all
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS
from zufluss.log.files import KILL_AT_VARIABLE, OPERATIONS

PROGRESS_SECONDS = WAIT_SECONDS
PATIENCE_SECONDS = 2.0
"""How long a server may live with a kill point before it is killed anyway."""

BUSY = {
    "log.segment.file-size": "64kb",
    "log.index.interval-size": "1kb",
    "log.flush.offset.checkpoint-interval": "100ms",
    "log.retention.check-interval": "100ms",
}

USUAL = {
    "open": 200, "write": 2000, "truncate": 60, "fdatasync": 300, "dirsync": 60,
    "rename": 40, "unlink": 100, "rmdir": 20, "mkdir": 30,
}  # fmt: skip
"""About how many operations of each kind there are in half a second."""


class Round:
    """Kill points, one server life after the other."""

    def __init__(
        self, server: WarmServer, history: History, ddl: Ddl, rng: random.Random, operation: str
    ) -> None:
        self.server = server
        self.history = history
        self.ddl = ddl
        self.rng = rng
        self.operation = operation
        self.usual = USUAL[operation]
        self.hits = 0

    def live(self) -> None:
        """Start the server and let it die before an operation of this kind."""
        point = f"{self.operation}#{1 + int(self.usual * self.rng.random() ** 2)}"
        self.server.environ = {KILL_AT_VARIABLE: point}
        try:
            self.server.start()
        except RuntimeError:
            code = self.server.wait()
            self.hits += 1
        else:
            self.ddl.settle(self.server.port, self.server.data_dir)
            code = self.await_end()
        assert code == -signal.SIGKILL, f"{point}: exit code {code}"

    def await_end(self) -> int:
        """Wait for the server to kill itself, or kill it when the point does not come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.server.running and time.monotonic() < deadline:
            self.history.wait(lambda: not self.server.running, 0.05)
        if self.server.running:
            self.usual = max(1, self.usual // 3)
            self.server.kill()
            return -signal.SIGKILL
        self.hits += 1
        return self.server.wait()

    def recover(self) -> None:
        """Start the server without a kill point, and assert that all workers make progress."""
        self.server.environ = {KILL_AT_VARIABLE: ""}
        self.server.start()
        self.ddl.settle(self.server.port, self.server.data_dir)
        assert self.history.wait_for_acks(10, PROGRESS_SECONDS), "no progress after a restart"


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_death_before_any_operation_on_files_loses_nothing(
    warm_server: Callable[..., WarmServer], rng: random.Random, operation: str
) -> None:
    server = warm_server(BUSY).start()
    create_databases(server.port)
    history = History()
    target = create_target(server.port, "t", 2, {"table.log.ttl": "1s"})
    load = Load(server.port, history)
    for make in (RawWriter, RawWriter, Reader):
        load.add(make, rng.randrange(1 << 32), target)
    ddl = Ddl(load, rng.randrange(1 << 32))
    load.workers.append(ddl)
    lives = Round(server, history, ddl, rng, operation)
    with load:
        ddl.settle(server.port, server.data_dir)
        assert history.wait_for_acks(100, PROGRESS_SECONDS)
        server.kill()
        for _ in range(rounds(2, 120)):
            lives.live()
            if history.problems:
                break
        lives.recover()
    assert violations(history, read_all(server.port, [target])) == []
    print(
        f"{operation}: {lives.hits} times, {history.acked_rows} rows, "
        f"{ddl.operations} changes of the catalog"
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_death_in_the_first_start_of_all_does_not_spoil_the_directory(
    warm_server: Callable[..., WarmServer], operation: str
) -> None:
    for hit in range(1, 100):
        server = warm_server(name=f"{operation}-{hit}")
        server.environ = {KILL_AT_VARIABLE: f"{operation}#{hit}"}
        try:
            server.start()
        except RuntimeError:
            server.environ = {KILL_AT_VARIABLE: ""}
            server.start()
            assert server.stop() == 0
        else:
            server.kill()
            return
