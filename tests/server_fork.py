"""The process that test servers are forked from: it has imported everything a server needs.

The tests start hundreds of servers. Importing all modules and loading the compiled kernels takes
two seconds of CPU, starting an empty server a tenth of a second. So the fork server of
`multiprocessing` imports this module once, and every server is a fork of that process: a process of
its own with the real command line, killed with a real SIGKILL, that only skips the import.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from multiprocessing.connection import Connection

import uvloop  # noqa: F401 - imported here so that no server has to

import zufluss.server  # noqa: F401
from zufluss.cli.main import app, main
from zufluss.record import kernels

PR_SET_PDEATHSIG = 1

kernels.warm()
with contextlib.redirect_stdout(io.StringIO()):
    app(["config"], standalone_mode=False)  # what the command line imports when it is first used


def serve(arguments: list[str], environ: dict[str, str], output: Connection) -> None:
    """Run `zufluss <arguments>` in this process, with its output to `output`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody survives the tests
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.update(environ)
    sys.argv = ["zufluss", *arguments]
    main()
