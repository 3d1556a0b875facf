"""The memory of a process, from outside."""

from collections.abc import Callable
from pathlib import Path


def memory_of(pid: int, field: str) -> int:
    """A line of /proc/PID/status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def growth(pid: int, work: Callable[[], None]) -> int:
    """How much more memory a process had at most while `work` was done."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from now on
    before = memory_of(pid, "VmRSS")
    work()
    return memory_of(pid, "VmHWM") - before
