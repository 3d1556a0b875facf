"""Requests about tables with thousands of columns do not delay other requests."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.support import TABLE, Tablet
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import TableEntry, TablePut
from zufluss.model.schema import Schema
from zufluss.replica.replica import ReplicaSettings
from zufluss.tablet import buckets

WIDE = Schema.of(
    "a BIGINT NOT NULL, " + ", ".join(f"c{i} BIGINT" for i in range(2_000)), primary_key=["a"]
)


@pytest.mark.parametrize("schema", [WIDE, Schema.of("a BIGINT")], ids=["wide", "narrow"])
async def test_what_a_server_knows_of_a_wide_table_is_made_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Schema
) -> None:
    """The encoders and decoders of 10,000 columns take 60 ms to make."""
    made_by: list[bool] = []

    class State(buckets.TableState):
        def __init__(self, *arguments: Any) -> None:
            made_by.append(threading.current_thread() is threading.main_thread())
            super().__init__(*arguments)

    monkeypatch.setattr(buckets, "TableState", State)
    tablet = await Tablet(tmp_path, schema=schema).start()
    assert made_by == [schema is not WIDE]
    assert sorted(tablet.server.buckets.tables[TABLE].replicas) == [(None, 0), (None, 1)]
    await tablet.drop(0, 1)
    assert not tablet.server.buckets.tables
    await tablet.server.close()


async def test_an_alteration_of_a_wide_table_is_made_ready_in_a_thread_and_the_newest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Applying a new schema of 10,000 columns held the event loop for 55 ms."""
    tablet = await Tablet(tmp_path, schema=WIDE).start()
    made_by: list[bool] = []
    going_on, may_go_on = threading.Event(), threading.Event()
    plain = buckets.TableState.settings_of

    def settings_of(self: buckets.TableState, entry: TableEntry) -> ReplicaSettings:
        made_by.append(threading.current_thread() is threading.main_thread())
        if len(made_by) == 1:
            going_on.set()
            assert may_go_on.wait(WAIT_SECONDS)
        return plain(self, entry)

    monkeypatch.setattr(buckets.TableState, "settings_of", settings_of)
    table = tablet.image.table_by_id(TABLE)
    assert table is not None
    first, second = (
        replace(
            table,
            info=replace(
                table.info,
                descriptor=replace(table.info.descriptor, custom_properties={"change": name}),
            ),
        )
        for name in ("first", "second")
    )
    older = asyncio.ensure_future(tablet.server.update_metadata([TablePut(first)]))
    assert await asyncio.to_thread(going_on.wait, WAIT_SECONDS)
    await tablet.server.update_metadata([TablePut(second)])
    may_go_on.set()
    await older
    assert tablet.server.buckets.tables[TABLE].info is second.info
    assert made_by == [False, False]
    await tablet.server.close()
