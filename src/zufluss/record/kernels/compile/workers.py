"""Compiles the kernels in several processes, with a progress line.

`compile_in_parallel` starts one worker per processor and gives each one module after another. A
worker imports the module, which compiles its kernels into numba's cache (`cache.py`), and writes
the name of each kernel that was not there yet. Nothing depends on a worker: a kernel that none of
them compiled is compiled when its module is imported. So a worker that fails is only told of.
"""

from __future__ import annotations

import ast
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module

from zufluss.record.kernels import library, progress

WORKERS_MAX = 8
"""Each worker needs some 300 MB of memory."""
_DONE = ""
"""What a worker writes after each module."""


def compile_in_parallel(environ: Mapping[str, str]) -> None:
    """Compile all kernels into numba's cache, in processes with these environment variables."""
    sources = {name: library.path_of(name).read_text() for name in library.kernel_modules()}
    display = progress.Display(sys.stderr, sum(map(_kernel_count, sources.values())))
    modules: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in sorted(sources, key=lambda name: len(sources[name]), reverse=True):
        modules.put(name)
    begun: set[str] = set()
    failures: list[str] = []
    lock = threading.Lock()

    def begin(kernel: str) -> None:
        with lock:
            if kernel not in begun:
                begun.add(kernel)
                display.begin()

    count = min(os.cpu_count() or 1, WORKERS_MAX)
    arguments = (modules, begin, failures.append, environ)
    threads = [threading.Thread(target=_feed, args=arguments) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    display.clear()
    for failure in failures:
        sys.stderr.write(f"a process that compiles kernels failed: {failure}\n")


def _kernel_count(source: str) -> int:
    """Number of functions in a module that are kernels of their own, not parts of others."""
    return sum(
        isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func) == "kernel"
        and bool(decorator.args)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    )


def _feed(
    modules: queue.SimpleQueue[str],
    begin: Callable[[str], None],
    fail: Callable[[str], None],
    environ: Mapping[str, str],
) -> None:
    """Run one worker until no module is left, or until the worker ends by itself."""
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as worker:
            _give(worker, modules, begin)
    except OSError as problem:
        fail(str(problem))
        return
    if worker.returncode:
        fail(f"it ended with {worker.returncode}")


def _give(
    worker: subprocess.Popen[str], modules: queue.SimpleQueue[str], begin: Callable[[str], None]
) -> None:
    """Give a worker one module after another."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    while worker.poll() is None:
        try:
            worker.stdin.write(f"{modules.get_nowait()}\n")
            worker.stdin.flush()
        except (queue.Empty, BrokenPipeError):
            return
        for line in worker.stdout:
            if line.strip() == _DONE:
                break
            begin(line.strip())


def _work() -> None:
    """Import the modules that the parent names."""
    library.ignore()
    progress.tell_parent()
    for line in sys.stdin:
        import_module(line.strip())
        sys.stdout.write(f"{_DONE}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _work()
