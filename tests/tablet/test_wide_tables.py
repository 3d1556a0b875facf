"""Tables with thousands of columns hold up nobody but those who wait for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.support import TABLE, Tablet
from zufluss.model.schema import Schema
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
