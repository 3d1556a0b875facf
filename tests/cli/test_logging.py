"""Log output: an event name and fields, readable by people or by machines, without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from zufluss.obs.logging import configure


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level
    structlog.reset_defaults()


def test_json_output_is_one_object_per_event_with_its_fields() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    structlog.get_logger("zufluss.log").info("segment_rolled", base_offset=42)
    logging.getLogger("asyncio").warning("slow callback")
    ours, foreign = map(json.loads, stream.getvalue().splitlines())
    assert ours["event"] == "segment_rolled"
    assert ours["base_offset"] == 42
    assert ours["logger"] == "zufluss.log"
    assert ours["level"] == "info"
    assert (foreign["event"], foreign["level"]) == ("slow callback", "warning")


def test_events_below_the_level_are_not_printed() -> None:
    stream = io.StringIO()
    configure("warning", "console", stream)
    structlog.get_logger("zufluss.log").info("segment_rolled")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("output", ["console", "json"])
def test_a_traceback_does_not_print_local_variables(output: str) -> None:
    # A password in a local variable would end up in the log of the server.
    stream = io.StringIO()
    configure("info", output, stream)
    password = "".join(["ge", "heim"])
    try:
        raise ValueError("nothing about the value")
    except ValueError:
        structlog.get_logger("zufluss.net").exception("login_failed")
    assert "nothing about the value" in stream.getvalue()
    assert password not in stream.getvalue()
