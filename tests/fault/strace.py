"""System calls that fail or kill on demand: strace attached to a running server.

`with injected(pid, "fdatasync:error=EIO"): …` makes every such call of the process fail for the
length of the block, whoever made it: our code, SQLite, a library. It needs strace and the right to
trace; where either is missing the test is skipped and says why.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DETACH_SECONDS = 3.0


@contextmanager
def injected(pid: int, *rules: str) -> Iterator[subprocess.Popen[str]]:
    """Have the system calls of a process fail by strace's `inject` rules, all threads included."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; it injects the disk errors of this test")
    calls = ",".join(rule.partition(":")[0] for rule in rules)
    command = [strace, "-f", "-o", "/dev/null", "-e", f"trace={calls}", "-p", str(pid)]
    for rule in rules:
        command += ["-e", f"inject={rule}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _await_attached(process)
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Detach; strace sometimes waits for ever for a process that was killed under it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(DETACH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stderr is not None
    process.stderr.close()


def _await_attached(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if "attached" in line:
            return
        if "Operation not permitted" in line:
            pytest.skip(f"strace may not trace here: {line.strip()}")
    pytest.skip("strace could not attach to the server")
