"""The process in which a coordinator has lake tables created and altered.

A lake's library takes seconds to import, a hundred megabytes, and Python time that the event loop
of the server would lose; and a catalog may never answer. So the coordinator starts this process,
asks it, and kills it when an answer takes too long (`coordinator/lake/creation.py`). It is the only
way from a server to the `lake` package, which servers never import. It ends with its input, also in
the middle of a call: a killed server leaves nothing behind that waits for a catalog for ever.

Started as `python -m zufluss.lake.process`. Requests and answers are pickles, each behind its
length as a little-endian u32; both ends are the same version of zufluss.

| request | answer |
|---|---|
| None: import the libraries of all formats | `DONE` |
| format, catalog properties, table | outcome, text |

| outcome | meaning |
|---|---|
| `DONE` | the lake table is there and fits |
| `INVALID` | the format can never hold such a table |
| `TAKEN` | the lake has a table of this name that is not this one and cannot give way |
| `ABSENT` | the lake cannot be asked from here: not installed, not configured, no answer |
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

from zufluss.errors import ConfigError, ZuflussError
from zufluss.lake.base import CommitterContext, LakeTableError, lake_factory
from zufluss.lake.creation import ABSENT, DONE, INVALID, LENGTH, TAKEN
from zufluss.lake_formats import LAKE_FORMATS
from zufluss.model.table import TableInfo
from zufluss.no_pandas import do_without_pandas


def prepared(format: str, properties: Mapping[str, str], table: TableInfo) -> tuple[str, str]:
    """Create the lake table, or alter it to fit; returns the outcome and a text about it."""
    try:
        factory = lake_factory(format)
        if table.has_primary_key and not factory.capabilities.primary_key:
            return INVALID, f"table {table.path} has a primary key; {format} takes log tables only"
        factory.validate_table(table)
    except LakeTableError as problem:
        return INVALID, problem.message
    except ConfigError as problem:
        return ABSENT, problem.message
    try:
        committer = factory.create_committer(CommitterContext(table, properties))
        try:
            committer.prepare_table()
        finally:
            committer.close()
    except LakeTableError as problem:
        return TAKEN, problem.message
    except ZuflussError as problem:
        return ABSENT, problem.message
    except ImportError as problem:
        return ABSENT, f"lake format {format} needs packages that are not installed ({problem})"
    except Exception as problem:  # a library or a driver; the tiering service will meet it, too
        return ABSENT, f"{type(problem).__name__}: {problem}"
    return DONE, ""


def warm_up() -> tuple[str, str]:
    """Import what the first request would import."""
    for traits in LAKE_FORMATS.values():
        if traits.driver_module is not None:
            with suppress(ImportError):
                import_module(traits.driver_module)
    return DONE, ""


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the input ends."""
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        request: Any = pickle.loads(source.read(LENGTH.unpack(head)[0]))
        answer = pickle.dumps(warm_up() if request is None else prepared(*request))
        sink.write(LENGTH.pack(len(answer)) + answer)
        sink.flush()


def main() -> None:
    """Serve the standard streams; what libraries print goes to the standard error."""
    do_without_pandas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_input, name="zufluss-lake-input", daemon=True).start()
    with suppress(BrokenPipeError):  # the server was killed; nobody waits for the answer
        serve(sys.stdin.buffer, answers)


def _end_with_input() -> None:
    """End the process when its server has closed the input, also in the middle of a call."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # that the other end hung up is told in any case
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
