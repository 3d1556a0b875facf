"""Log output: an event name plus fields, on stderr, for people or as JSON lines.

Code logs through `structlog.get_logger("zufluss.<package>")` with a snake_case event name and
keyword fields: `log.warning("tablet_silent", server_id=…)`. stdout stays free for the output of
commands and for the one line that says a server is ready.

Messages of the standard library's `logging` (asyncio, dependencies) go through the same renderer.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor


def configure(
    level: str = "info",
    output: str = "console",
    stream: TextIO | None = None,
    *,
    server: str | None = None,
) -> None:
    """Send log events of `level` and above to `stream` (stderr), as `console` or `json`.

    With `server` each event has this name, to tell the processes of one machine apart.
    """
    target = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if server is not None:
        shared.append(partial(_add_server, server))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderer(output, target),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _add_server(name: str, logger: Any, method: str, event: EventDict) -> EventDict:
    event["server"] = name
    return event


def _renderer(output: str, target: TextIO) -> list[Processor]:
    processors = structlog.processors
    if output == "json":
        return [processors.format_exc_info, processors.JSONRenderer(default=str)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=target.isatty(),
            pad_event_to=0,
            # A traceback with local variables would print secrets.
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]
