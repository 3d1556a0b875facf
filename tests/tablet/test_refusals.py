"""Refused writes in the log of a server."""

from __future__ import annotations

import structlog

from zufluss.errors import LogStorageError, UnknownTableOrBucketError, ZuflussError
from zufluss.tablet.refusals import KINDS_MAX, RefusalLog


def test_a_refusal_is_logged_once_a_second_with_the_number_left_out() -> None:
    now = 0.0
    refusals = RefusalLog(lambda: now)
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            refusals.refused("put_refused", UnknownTableOrBucketError("gone"), 7, bucket=(None, 1))
        now = 1.0
        refusals.refused("put_refused", UnknownTableOrBucketError("gone"), 7, bucket=(None, 2))
    first, second = lines
    assert (first["event"], first["table_id"], first["log_level"]) == ("put_refused", 7, "info")
    assert "left_out" not in first
    assert (second["bucket"], second["left_out"]) == ((None, 2), 4)


def test_other_tables_and_other_errors_are_logged_beside() -> None:
    refusals = RefusalLog(lambda: 0.0)
    with structlog.testing.capture_logs() as lines:
        for table_id in (1, 2, 1, 2):
            refusals.refused("put_refused", UnknownTableOrBucketError("gone"), table_id)
            problem = LogStorageError("no space")
            refusals.failed("append_failed", problem, problem, table_id)
    assert len(lines) == 4
    assert {line["log_level"] for line in lines} == {"info", "error"}


def test_an_unexpected_failure_is_logged_with_its_traceback() -> None:
    problem = MemoryError()
    with structlog.testing.capture_logs() as lines:
        RefusalLog().failed("append_failed", ZuflussError("no memory"), problem, 1)
    assert lines[0]["exc_info"] is problem


def test_a_bounded_number_of_kinds_is_remembered() -> None:
    refusals = RefusalLog(lambda: 0.0)
    for table_id in range(3 * KINDS_MAX):
        refusals.refused("put_refused", ZuflussError("no"), table_id)
    assert len(refusals._kinds) <= KINDS_MAX
