"""Errors as users see them: one line on stderr, an exit code, and no traceback unless asked for.

| error | exit code |
|---|---|
| a usage error of typer; a file or directory that cannot be used; a package that is missing | 2 |
| an error of the cluster; "no" to a question, or no answer | 1 |
| the network: no connection, no answer in time | 3 |
| the reader of the output ended before the command, except where it prints rows (`rows.py`) | 141 |
| anything else is a defect of zufluss | 70 |

141 is what a shell says of other programs whose reader has ended. It is not 0, because the command
may have been a server, or may have had more to do than to print.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Any, Final, NoReturn

import typer

from zufluss.errors import NetworkError, RequestTimeoutError, ZuflussError, reason_of

DEBUG: Final = "ZUFLUSS_DEBUG"
"""The environment variable that asks for tracebacks."""
REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
DEFECT: Final = 70
WITHOUT_READER: Final = 141

_USAGE_ERROR, _CLICK_ERROR = typer.BadParameter.__mro__[1:3]
"""The base classes of typer's errors, which typer does not export."""


def exit_code(problem: Exception) -> int:
    """The exit code for an error that ended a command."""
    if isinstance(problem, (NetworkError, RequestTimeoutError, ConnectionError, TimeoutError)):
        return UNREACHABLE
    if isinstance(problem, ZuflussError) or _is_no(problem):
        return REFUSED
    if isinstance(problem, (_CLICK_ERROR, OSError, ImportError)):
        return USAGE
    return DEFECT


def report(problem: Exception) -> None:
    """Print an error to stderr, with a traceback if that was asked for."""
    if type(problem).__name__ == "NoArgsIsHelpError":
        getattr(problem, "show")()  # noqa: B009
        return
    if _is_no(problem):
        print("aborted", file=sys.stderr)
        return
    if os.environ.get(DEBUG, "").strip().lower() not in ("", "0", "false"):
        traceback.print_exception(problem)
    print(f"error: {message(problem)}", file=sys.stderr)


def _is_no(problem: Exception) -> bool:
    """Whether a question was answered with no, or not at all.

    typer also makes an abort of the end of a file elsewhere, which is then the cause.
    """
    return isinstance(problem, typer.Abort) and problem.__cause__ is None


def message(problem: Exception) -> str:
    """One line: what is wrong and what to do."""
    if isinstance(problem, _CLICK_ERROR):
        return _usage_message(problem)
    if isinstance(problem, ZuflussError):
        return _line(str(problem))
    if isinstance(problem, ImportError):
        return _line(f"{problem}; install it: pip install {problem.name or 'it'}")
    if isinstance(problem, OSError) and exit_code(problem) == USAGE:
        name = f"{problem.filename}: " if problem.filename else ""
        return _line(f"{name}{problem.strerror or reason_of(problem)}")
    if exit_code(problem) == UNREACHABLE:
        return _line(reason_of(problem))
    return _line(
        f"{type(problem).__name__}: {reason_of(problem)}. This is a defect of zufluss: repeat the "
        "command as `zufluss --debug ...`, and report what it prints"
    )


def _usage_message(problem: Any) -> str:
    """The message of a usage error, and the help that explains more."""
    context = getattr(problem, "ctx", None)
    command = getattr(context, "command_path", None) or "zufluss"
    text = problem.message if getattr(problem, "param", None) is None else problem.format_message()
    return f"{_line(text)} (see {command} --help)"


def _line(text: str) -> str:
    return " ".join(text.split())


def end_without_reader() -> NoReturn:
    """End a command whose output nobody reads any more."""
    abandon_output()
    with suppress(BrokenPipeError):  # it may have been stderr
        print("error: the reader of the output ended before the command", file=sys.stderr)
    sys.exit(WITHOUT_READER)


def abandon_output() -> None:
    """Drop buffered output whose reader has ended; otherwise Python fails at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
