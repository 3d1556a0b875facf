"""A bucket of a primary-key table against the model: puts, flushes, crashes, in any order.

The tablet works as in the server, with a real log, a real store and little memory: `prepare` makes
the changelog batch and the state, the machine appends the batch and moves the high watermark when
it likes. After every step promise A4 holds: the state is the fold of the changelog, what is
visible below the high watermark is the fold up to there, and both are what the model says. A crash
loses what the store had not flushed, and of the log any part above the high watermark.
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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.counts import rounds
from tests.end_to_end.kv import Codec, kv_batch, records_of
from tests.kv.kv_samples import look_up, open_store, small_memory
from tests.kv.model import Change, DeletesDisabledError, Model, Put, Rules, fold
from tests.log.support import open_log
from zufluss.errors import ErrorCode, InvalidTargetColumnError, ZuflussError
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.memory import KvMemory
from zufluss.kv.store import hash_keys
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.record.header import iter_headers
from zufluss.record.slices import Slices

SCHEMA = Schema.of("text STRING, id BIGINT NOT NULL, n INT", primary_key=["id"])
CODEC = Codec(SCHEMA)
KEYS = tuple(range(-3, 40))
KEY_BYTES = {(key,): CODEC.key((None, key)) for key in KEYS}
INT_MIN = -(2**31)
SEGMENTS = 32
READ_BYTES = 1 << 20
EXAMPLES = rounds(30, 2_000)

VARIANTS = [
    Rules(3, (1,)),
    Rules(3, (1,), image="WAL"),
    Rules(3, (1,), deletes="IGNORE"),
    Rules(3, (1,), deletes="DISABLE"),
    Rules(3, (1,), "first_row", deletes="IGNORE"),
    Rules(3, (1,), "versioned", 2, INT_MIN, "IGNORE"),
    Rules(3, (1,), "versioned", 2, INT_MIN, "IGNORE", "WAL"),
]
TEXTS = st.sampled_from([None, "", "a", "text", "long " * 30])
NUMBERS = st.sampled_from([None, 0, 1, 2, -1, INT_MIN])
ROWS = st.tuples(TEXTS, st.sampled_from(KEYS), NUMBERS)
PUTS = st.one_of(
    ROWS.map(lambda row: Put((row[1],), row)),
    st.sampled_from(KEYS).map(lambda key: Put((key,), None)),
)
COLUMNS = st.sampled_from([(), (), (1,), (0, 1), (1, 2), (0, 1, 2)])


def table_of(rules: Rules) -> KvTable:
    """The table with these rules."""
    properties = dict(rules.properties)
    if rules.engine == "versioned":
        properties["table.merge-engine.versioned.ver-column"] = "n"
    descriptor = TableDescriptor(SCHEMA, None, (), ("id",), 1, properties, {})
    info = TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0)
    return KvTable(info, {1: SCHEMA})


def copy_of(model: Model) -> Model:
    return Model(model.rules, dict(model.rows), list(model.changes), model.end)


class TabletMachine(RuleBasedStateMachine):
    """A tablet, its log, and the model at every offset that may still come back."""

    memory: KvMemory

    @initialize(rules=st.sampled_from(VARIANTS))
    def begin(self, rules: Rules) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.table = table_of(rules)
        self.model = Model(rules)
        self.durable = Model(rules)
        self.later: list[Model] = []
        """The model after each batch above the high watermark."""
        self.tail: list[bytes] = []
        """Those batches, which a log does not show yet."""
        self.sent: list[tuple[bytes, tuple[int, ...], int]] = []
        """The last batches of the writer in the log: bytes, targets, end offset."""
        self.sequence = 0
        self.now = 1_000
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

    # -- steps ----------------------------------------------------------------------------------

    @rule(puts=st.lists(PUTS, min_size=1, max_size=12), columns=COLUMNS, numbered=st.booleans())
    def put(self, puts: list[Put], columns: tuple[int, ...], numbered: bool) -> None:
        records = [
            CODEC.delete((None, p.key[0])) if p.row is None else CODEC.put(p.row) for p in puts
        ]
        number = {"writer_id": 7, "sequence": self.sequence} if numbered else {}
        self.send(kv_batch(records, **number), puts, columns, numbered)

    def send(self, data: bytes, puts: list[Put], targets: tuple[int, ...], numbered: bool) -> None:
        self.now += 1
        made, rules = copy_of(self.model), self.model.rules
        if targets and rules.engine != "default":
            self.refused(data, targets, InvalidTargetColumnError.code)
            return
        try:
            changes = made.put(puts, targets)
        except DeletesDisabledError:
            self.refused(data, targets, ErrorCode.DELETION_DISABLED_EXCEPTION)
            return
        prepared = self.tablet.prepare(array(data), targets, 0, self.now)
        assert prepared.changes is not None
        batch = prepared.changes.encode()
        assert prepared.end_offset == made.end
        self.log.append(batch.view, (batch.checked,), prepared.now_ms)
        self.tail.append(bytes(batch.view))
        assert [Change(*r) for r in records_of(self.tail[-1], SCHEMA)] == changes  # type: ignore[arg-type]
        self.model = made
        self.later.append(made)
        if numbered:
            self.sequence += 1
            self.sent.append((data, targets, made.end))

    def refused(self, data: bytes, targets: tuple[int, ...], *codes: ErrorCode) -> None:
        with pytest.raises(ZuflussError) as caught:
            self.tablet.prepare(array(data), targets, 0, self.now)
        assert caught.value.code in codes, caught.value

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(1, 5))
    def repeat(self, back: int) -> None:
        """A batch that is sent again is known, and changes nothing."""
        data, targets, end = self.sent[-min(back, len(self.sent))]
        prepared = self.tablet.prepare(array(data), targets, 0, self.now)
        assert (prepared.changes, prepared.end_offset) == (None, end)

    @rule(row=ROWS, flip=st.integers(9, 27))
    def damaged(self, row: tuple[Any, ...], flip: int) -> None:
        """A batch that is wrong changes nothing."""
        data = bytearray(kv_batch([CODEC.put(row)]))
        data[flip] ^= 1
        self.refused(bytes(data), (), ErrorCode.CORRUPT_RECORD_EXCEPTION)

    @rule(part=st.sampled_from([0.5, 1.0]))
    def commit(self, part: float) -> None:
        """Some or all of the log is durable."""
        count = int(len(self.later) * part)
        if count:
            self.durable = self.later[count - 1]
            self.later, self.tail = self.later[count:], self.tail[count:]
        self.log.advance_high_watermark(self.durable.end)
        self.tablet.store.horizon = self.durable.end

    @rule(wait=st.booleans())
    def flush(self, wait: bool) -> None:
        """The state goes to disk, while puts go on or at once."""
        self.tablet.flush()
        if wait:
            self.tablet.store.flush_wait()

    @rule()
    def evict(self) -> None:
        """Memory gives up whatever the disk has."""
        self.tablet.store.flush_wait()
        self.tablet.store.evict(1 << 30)

    @rule()
    def stop(self) -> None:
        """A clean stop and a start, which has nothing to replay."""
        self.commit(1.0)
        self.tablet.close()
        self.log.close(clean=True)
        self.open()
        assert self.tablet.store.flushed_offset == self.model.end

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A kill or a power failure: some of what was not durable is gone with it."""
        kept = data.draw(st.integers(0, len(self.later)), "batches that survive")
        self.model = self.later[kept - 1] if kept else self.durable
        self.tablet.store.abandon()
        self.log.truncate_to(self.model.end)
        self.log.close(clean=False)
        self.durable, self.later, self.tail = self.model, [], []
        self.sent = [one for one in self.sent if one[2] <= self.model.end]
        self.open()
        self.sequence = self.known_sequence()

    def known_sequence(self) -> int:
        """The sequence the writer goes on with after a crash."""
        found = [
            header.batch_sequence
            for _, header in iter_headers(self.read())
            if header.writer_id == 7
        ]
        return found[-1] + 1 if found else 0

    # -- what must hold -------------------------------------------------------------------------

    def read(self) -> bytes:
        """The whole log."""
        parts, offset = [], 0
        while offset < self.log.high_watermark:
            found = self.log.read(offset, READ_BYTES, at_least_one=True, nowait=False)
            parts.append(bytes(found.records))
            offset = found.end_offset
        return b"".join(parts + self.tail)

    def rows_at(self, horizon: int) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Every key's row below a horizon, by lookup as the server does it."""
        names, store = list(KEY_BYTES.values()), self.tablet.store
        keys = Slices.of(names)
        if horizon == NEWEST:
            found = store.get(keys, hash_keys(keys), NEWEST).tolist()
        else:
            found = look_up(store, names, horizon) or store.get_at(keys, horizon).tolist()
        rows = zip(KEY_BYTES, found, strict=True)
        return {key: row for key, v in rows if (row := CODEC.value(v or b"")) is not None}

    @invariant()
    def the_state_is_the_fold_of_the_changelog(self) -> None:
        changes = [Change(*record) for record in records_of(self.read(), SCHEMA)]  # type: ignore[arg-type]
        assert changes == self.model.changes
        assert fold(changes, self.model.rules) == self.model.rows == self.rows_at(NEWEST)

    @invariant()
    def what_is_visible_is_what_is_durable(self) -> None:
        assert self.rows_at(self.durable.end) == self.durable.rows
        _, values = self.tablet.store.scan(None, 1_000, 1 << 20, self.durable.end)
        rows = [CODEC.value(v or b"") for v in values.tolist()]
        keys = sorted(self.durable.rows, key=KEY_BYTES.__getitem__)
        assert rows == [self.durable.rows[key] for key in keys]

    @invariant()
    def rows_are_counted(self) -> None:
        counted = self.model.rules.image == "FULL"
        assert self.tablet.row_count == (len(self.model.rows) if counted else None)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).copy()


@pytest.fixture(scope="module", autouse=True)
def memory() -> Any:
    """One memory with one flush process for all examples."""
    TabletMachine.memory = small_memory(SEGMENTS)
    yield
    TabletMachine.memory.close()


TestTabletAgainstModel = TabletMachine.TestCase
TestTabletAgainstModel.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
