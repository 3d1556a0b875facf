"""Puts that write some columns of an aggregation table, against a model, through crashes.

`first_value` and `first_value_ignore_nulls` have one rule: the first value that is not NULL stays,
until a delete or an overwrite takes it away. It needs nothing but the stored row, so it holds
whichever columns a put leaves out, and whatever the bucket did in between: flush, evict, replay its
changelog.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.counts import rounds
from tests.end_to_end.kv import Codec, kv_batch, records_of
from tests.kv.kv_samples import open_store, small_memory
from tests.log.support import open_log
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.memory import KvMemory
from zufluss.kv.store import hash_keys
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.record.slices import Slices

SCHEMA = Schema.of(
    "k INT NOT NULL, a STRING FIRST_VALUE, b INT FIRST_VALUE, g STRING FIRST_VALUE_IGNORE_NULLS, "
    "n BIGINT SUM",
    ["k"],
)
CODEC = Codec(SCHEMA)
PROPERTIES = {"table.merge-engine": "aggregation", "table.delete.behavior": "ALLOW"}
KEY, FIRSTS, SUM = 0, (1, 2, 3), 4
EVERY = range(len(SCHEMA.columns))
KEYS = (0, 1, 2)
SEGMENTS = 32

Row = tuple[Any, ...]
Rows = dict[int, Row]
Put = tuple[int, Row | None]
"""A key, and its row; None for a delete."""

TEXTS = st.sampled_from([None, None, "", "x", "long " * 30])
NUMBERS = st.sampled_from([None, None, 0, 7, -1])
VALUES = st.tuples(TEXTS, NUMBERS, TEXTS, NUMBERS)
PUTS = st.tuples(st.sampled_from(KEYS), st.one_of(VALUES, VALUES, VALUES, st.none()))
COLUMNS = st.sets(st.integers(1, SUM)).map(lambda chosen: (KEY, *sorted(chosen))) | st.just(())


def folded(rows: Rows, puts: list[Put], columns: tuple[int, ...], mode: MergeMode) -> Rows:
    """The rows after one batch."""
    rows, written = dict(rows), set(columns or EVERY) - {KEY}
    for key, values in puts:
        old = rows.get(key)
        if values is None:
            if old is not None:
                rows[key] = tuple(None if i in written else v for i, v in enumerate(old))
                if all(value is None for value in rows[key][1:]):
                    del rows[key]
            continue
        row = list(old or (key, None, None, None, None))
        for i in written:
            row[i] = _after(row[i], values[i - 1], i, mode)
        rows[key] = tuple(row)
    return rows


def _after(state: Any, value: Any, column: int, mode: MergeMode) -> Any:
    if mode is MergeMode.OVERWRITE:
        return value
    if column in FIRSTS:
        return value if state is None else state
    return state if value is None else (state or 0) + value


class PartialPutMachine(RuleBasedStateMachine):
    """A bucket with its log, and its rows at every offset that may still come back."""

    memory: KvMemory

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        descriptor = TableDescriptor(SCHEMA, None, (), ("k",), 1, PROPERTIES, {})
        info = TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0)
        self.table = KvTable(info, {1: SCHEMA})
        self.rows: Rows = {}
        self.durable: tuple[int, Rows] = 0, {}
        """The high watermark, and the rows there."""
        self.later: list[tuple[int, Rows]] = []
        """The same after each batch above the high watermark."""
        self.open()

    def open(self) -> None:
        self.log = open_log(self.directory)
        store = open_store(self.directory / "kv-0", self.memory)
        self.tablet = KvTablet(self.table, store, 1 << 20)
        store.flush_wanted = self.tablet.flush
        self.tablet.recover(self.log)

    def teardown(self) -> None:
        self.tablet.store.abandon()
        self.log.close(clean=False)
        shutil.rmtree(self.directory)

    @rule(
        puts=st.lists(PUTS, min_size=1, max_size=8),
        columns=COLUMNS,
        mode=st.sampled_from([MergeMode.AGGREGATE, MergeMode.AGGREGATE, MergeMode.OVERWRITE]),
    )
    def put(self, puts: list[Put], columns: tuple[int, ...], mode: MergeMode) -> None:
        sent: list[bytes] = []
        for key, values in puts:
            row = (key, *(values or (None,) * SUM))
            row = tuple(v if not columns or i in columns else None for i, v in enumerate(row))
            sent.append(CODEC.delete(row) if values is None else CODEC.put(row))
        batch = np.frombuffer(kv_batch(sent), np.uint8).copy()
        prepared = self.tablet.prepare(batch, columns, mode, 0)
        assert prepared.changes is not None
        encoded = prepared.changes.encode()
        self.log.append(encoded.view, (encoded.checked,), prepared.now_ms)
        self.rows = folded(self.rows, puts, columns, mode)
        self.later.append((prepared.end_offset, self.rows))

    @rule()
    def commit(self) -> None:
        """All of the log is durable."""
        if self.later:
            self.durable, self.later = self.later[-1], []
        self.log.advance_high_watermark(self.durable[0])
        self.tablet.store.horizon = self.durable[0]

    @rule()
    def flush(self) -> None:
        """The state goes to disk."""
        self.tablet.flush()
        self.tablet.store.flush_wait()

    @rule()
    def evict(self) -> None:
        """Memory gives up whatever the disk has."""
        self.tablet.store.flush_wait()
        self.tablet.store.evict(1 << 30)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A kill, which may lose what was not durable; the changelog is replayed."""
        kept = data.draw(st.integers(0, len(self.later)), "batches that survive")
        self.durable = end, self.rows = self.later[kept - 1] if kept else self.durable
        self.later = []
        self.tablet.store.abandon()
        self.log.truncate_to(end)
        self.log.close(clean=False)
        self.open()

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        keys = Slices.of([CODEC.key((key, *(None,) * SUM)) for key in KEYS])
        values = self.tablet.store.get(keys, hash_keys(keys), NEWEST).tolist()
        assert [CODEC.value(v or b"") for v in values] == [self.rows.get(key) for key in KEYS]

    @invariant()
    def the_changelog_leads_to_the_rows(self) -> None:
        if not self.durable[0]:
            return
        found = self.log.read(0, 1 << 24, at_least_one=True, nowait=False)
        last: Rows = {}
        for _, kind, row in records_of(bytes(found.records), SCHEMA):
            if kind == "-D":
                del last[row[0]]
            else:
                last[row[0]] = row
        assert last == self.durable[1]


@pytest.fixture(scope="module", autouse=True)
def memory() -> Any:
    """One memory with one flush process for all examples."""
    PartialPutMachine.memory = small_memory(SEGMENTS)
    yield
    PartialPutMachine.memory.close()


TestPartialPutsAgainstModel = PartialPutMachine.TestCase
TestPartialPutsAgainstModel.settings = settings(
    max_examples=rounds(40, 2_000),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
