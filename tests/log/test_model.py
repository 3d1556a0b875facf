"""The log against a list: whatever is done to it, it stays what the list says."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.log.disk import SilentFiles
from tests.log.support import BUCKET, batch, entry, expire, offsets, read_all
from zufluss.errors import OutOfOrderSequenceError
from zufluss.log.config import LogConfig
from zufluss.log.log import Log
from zufluss.record.header import iter_headers

CONFIG = LogConfig(
    segment_bytes_max=700, index_interval_bytes=120, ttl_ms=50, writer_expiry_ms=1 << 40
)

Row = tuple[int, int, int, bytes]
"""Base offset, end offset, timestamp, bytes."""


class LogAgainstList(RuleBasedStateMachine):
    """Every rule does the same to a log and to a list of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.rows: list[Row] = []
        self.end = 0
        self.visible = 0
        self.now = 100
        self.sequences: dict[int, list[tuple[int, int, int]]] = {}
        self.files = SilentFiles()
        self.open()

    def open(self) -> None:
        self.log = Log.open(
            self.directory / "log-0", CONFIG, files=self.files, now_ms=self.now, bucket=BUCKET
        )
        self.visible = self.end

    @rule(
        sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90)), min_size=1, max_size=4),
        writer=st.sampled_from((-1, 1, 2)),
        magic=st.integers(0, 2),
        step=st.integers(-5, 20),
        visible=st.booleans(),
    )
    def append(
        self, sizes: list[tuple[int, int]], writer: int, magic: int, step: int, visible: bool
    ) -> None:
        self.now += step
        known = self.sequences.get(writer, [])
        first = known[-1][0] + 1 if known else 0
        batches = [
            batch(
                records,
                body=bytes(size),
                writer=writer,
                sequence=first + i if writer >= 0 else -1,
                magic=magic,
            )
            for i, (records, size) in enumerate(sizes)
        ]
        view, checked = entry(*batches)
        result = self.log.append(view, checked, self.now)
        assert (result.base_offset, result.duplicate) == (self.end, False)
        stamped = bytes(view[checked[0].start : checked[-1].end])
        for at, h in iter_headers(stamped):
            assert h.base_offset == self.end
            self.end = h.next_offset
            data = stamped[at : at + h.size]
            self.rows.append((h.base_offset, h.next_offset, h.timestamp, data))
            if writer >= 0:
                item = (h.batch_sequence, h.base_offset, h.next_offset)
                self.sequences.setdefault(writer, []).append(item)
        assert result.end_offset == self.end == self.log.log_end_offset
        if visible:
            self.log.advance_high_watermark(self.end)
            self.visible = self.end

    @rule(writer=st.sampled_from((1, 2)), back=st.integers(0, 7))
    def retry(self, writer: int, back: int) -> None:
        known = self.sequences.get(writer, [])
        if back >= len(known):
            return
        sequence, base, end = known[-1 - back]
        view, checked = entry(batch(end - base, writer=writer, sequence=sequence))
        if back < 5:
            assert self.log.append(view, checked, self.now) == (base, end, True)
        else:
            with pytest.raises(OutOfOrderSequenceError):
                self.log.append(view, checked, self.now)

    @rule(share=st.floats(0, 1))
    def advance(self, share: float) -> None:
        self.log.advance_high_watermark(self.visible + int(share * (self.end - self.visible)))
        assert self.visible <= self.log.high_watermark <= self.end
        self.visible = self.log.high_watermark

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        self.log.close(clean=clean)
        self.open()

    @rule(passed=st.integers(0, 80))
    def expire(self, passed: int) -> None:
        self.now += passed
        expire(self.log, self.now)
        start = self.log.log_start_offset
        gone = [row for row in self.rows if row[0] < start]
        assert all(row[2] < self.now - CONFIG.ttl_ms for row in gone)
        self.rows = self.rows[len(gone) :]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.log.log_start_offset, self.end))
        self.log.truncate_to(offset)
        self.rows = [row for row in self.rows if row[1] <= offset]
        self.end = self.rows[-1][1] if self.rows else self.log.log_start_offset
        self.visible = min(self.visible, self.end)
        for writer, known in self.sequences.items():
            self.sequences[writer] = [item for item in known if item[2] <= self.end]
        self.sequences = {w: known for w, known in self.sequences.items() if known}

    @invariant()
    def offsets_agree(self) -> None:
        assert self.log.log_end_offset == self.end
        assert self.log.high_watermark == self.visible

    @invariant()
    def readers_see_the_list(self) -> None:
        expected = b"".join(row[3] for row in self.rows if row[1] <= self.visible)
        assert read_all(self.log) == expected
        assert read_all(self.log, 150) == expected

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def read_anywhere(self, data: st.DataObject) -> None:
        if self.visible <= self.log.log_start_offset:
            return
        offset = data.draw(st.integers(self.log.log_start_offset, self.visible - 1))
        self.log._cursors.clear()
        found = offsets(bytes(self.log.read(offset, 1, at_least_one=True).records))
        row = next(row for row in self.rows if row[0] <= offset < row[1])
        assert found == [(row[0], row[1] - row[0])]

    @rule(timestamp=st.integers(80, 600))
    def look_up_a_time(self, timestamp: int) -> None:
        first = next((row[0] for row in self.rows if row[2] >= timestamp), self.visible)
        assert self.log.offset_for_timestamp(timestamp) == min(first, self.visible)

    def teardown(self) -> None:
        self.log.close(clean=False)
        shutil.rmtree(self.directory)


LogAgainstList.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLogAgainstList = LogAgainstList.TestCase
