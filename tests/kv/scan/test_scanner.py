"""Pages of pinned state, read by a separate process: their rows, and every failure."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

from tests.waiting import WAIT_SECONDS, eventually
from zufluss.errors import LogStorageError
from zufluss.kv.cold.rocks import table_options
from zufluss.kv.scan import scanner as scanner_module
from zufluss.kv.scan.scanner import Page, Scanner

ALL = 1 << 40
ROWS = {b"key-%05d" % i: b"value %d" % i * (i % 7) for i in range(0, 4_000, 2)}
"""Every other key, so that there are some in between; one in seven is without a value."""


def write(directory: Path, *tables: Mapping[bytes, bytes | None]) -> Path:
    """A database of table files that were taken over one after the other; None deletes."""
    options = table_options()
    database = Rdict(str(directory), options, {"default": options})
    for rows in tables:
        writer = SstFileWriter(options)
        writer.open(f"{directory}.sst")
        for key, value in sorted(rows.items()):
            if value is None:
                del writer[key]
            else:
                writer[key] = value
        writer.finish()
        moved = IngestExternalFileOptions()
        moved.set_move_files(True)
        database.ingest_external_file([f"{directory}.sst"], moved)
    database.close()
    return directory


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("state") / "rocks", ROWS)


@pytest.fixture(scope="module")
def scanner() -> Iterator[Scanner]:
    scanner = Scanner(1)
    yield scanner
    scanner.stop()


def read(
    scanner: Scanner,
    state: Path,
    after: bytes | None = None,
    until: bytes | None = None,
    rows: int = ALL,
    size: int = ALL,
) -> Page:
    return scanner.read(state, after, until, rows, size).result(timeout=WAIT_SECONDS)


def expected(
    after: bytes | None, until: bytes | None, rows: int, size: int
) -> tuple[list[bytes], bytes | None, bool]:
    """A page in plain Python: its values, the last key, and whether it is the last page."""
    keys = [
        key
        for key in sorted(ROWS)
        if (after is None or key > after) and (until is None or key <= until)
    ]
    values: list[bytes] = []
    for key in keys:
        values.append(ROWS[key])
        if len(values) >= rows or sum(map(len, values)) >= size:
            break
    return values, keys[len(values) - 1] if values else None, len(values) == len(keys)


def as_plain(page: Page) -> tuple[list[bytes | None], bytes | None, bool]:
    return page.values.tolist(), page.last_key, page.done


@pytest.mark.parametrize(("rows", "size"), [(1, ALL), (7, ALL), (ALL, 1), (ALL, 500), (300, 9_000)])
def test_pages_have_each_row_once_in_the_order_of_the_keys(
    scanner: Scanner, state: Path, rows: int, size: int
) -> None:
    found: list[bytes | None] = []
    after = None
    while True:
        page = read(scanner, state, after, None, rows, size)
        assert 1 <= page.values.count <= rows
        found += page.values.tolist()
        after = page.last_key
        if page.done:
            break
    assert found == [ROWS[key] for key in sorted(ROWS)]
    assert after == max(ROWS)


KEYS = st.one_of(
    st.none(), st.sampled_from(sorted(ROWS)), st.sampled_from([b"", b"key-00001", b"key-03", b"z"])
)


@settings(max_examples=100, deadline=None)
@given(KEYS, KEYS, st.integers(1, 5_000), st.one_of(st.integers(1, 60_000), st.just(ALL)))
def test_a_page_agrees_with_the_plain_path_and_can_be_read_again(
    scanner: Scanner, state: Path, after: bytes | None, until: bytes | None, rows: int, size: int
) -> None:
    wanted = expected(after, until, rows, size)
    assert as_plain(read(scanner, state, after, until, rows, size)) == wanted
    assert as_plain(read(scanner, state, after, until, rows, size)) == wanted
    if wanted[1] is not None:  # the place where it ended was kept, and is the right one
        behind = read(scanner, state, wanted[1], until, rows, size)
        assert as_plain(behind) == expected(wanted[1], until, rows, size)


def test_a_row_larger_than_the_page_comes_alone(scanner: Scanner, tmp_path: Path) -> None:
    large = write(tmp_path / "rocks", {b"a": b"x" * 5_000, b"b": b"y" * 5_000})
    first = read(scanner, large, size=10)
    assert (first.values.count, first.last_key, first.done) == (1, b"a", False)
    second = read(scanner, large, b"a", size=10)
    assert as_plain(second) == ([b"y" * 5_000], b"b", True)


def test_deleted_rows_are_passed_over_and_a_state_may_have_none(
    scanner: Scanner, tmp_path: Path
) -> None:
    rows: dict[bytes, bytes | None] = {b"%06d" % i: b"value" for i in range(50_000)}
    deleted = dict.fromkeys(rows)
    holes = write(tmp_path / "holes", rows, {**deleted, b"049999": b"left"})
    assert as_plain(read(scanner, holes, rows=1)) == ([b"left"], b"049999", True)
    empty = write(tmp_path / "empty", rows, deleted)
    assert as_plain(read(scanner, empty)) == ([], None, True)
    assert as_plain(read(scanner, write(tmp_path / "new"))) == ([], None, True)


def test_many_places_in_a_state_are_read_at_once(scanner: Scanner, state: Path) -> None:
    """There are more readers than kept iterators; dropped places are searched again."""
    keys = sorted(ROWS)
    cursors: list[bytes | None] = [None, *keys[:1_900:50]]
    for _ in range(3):
        pages = [scanner.read(state, after, None, 5, ALL) for after in cursors]
        for i, page in enumerate(pages):
            found = page.result(timeout=WAIT_SECONDS)
            assert as_plain(found) == expected(cursors[i], None, 5, ALL)
            cursors[i] = found.last_key


def test_a_damaged_file_is_an_error_and_not_the_end(scanner: Scanner, tmp_path: Path) -> None:
    state = write(tmp_path / "rocks", ROWS)
    (table,) = state.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[len(data) // 3] ^= 1
    table.write_bytes(data)
    first = read(scanner, state, rows=1)
    assert first.last_key == min(ROWS), "the rows before are there"
    for _ in range(2):
        with pytest.raises(LogStorageError, match="Check the disk"):
            read(scanner, state, first.last_key)


def test_a_directory_that_is_no_database_is_an_error(scanner: Scanner, tmp_path: Path) -> None:
    with pytest.raises(LogStorageError, match="could not be read"):
        read(scanner, tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_files_are_read_to_the_end_after_they_lost_their_names(tmp_path: Path) -> None:
    """A table is dropped: calls that are under way finish."""
    rows = {b"key-%05d" % i: os.urandom(500) for i in range(2_000)}
    state = write(tmp_path / "rocks", rows)
    scanner = Scanner(1)
    first = read(scanner, state, rows=1)
    shutil.rmtree(state)
    rest = read(scanner, state, first.last_key)
    assert first.values.tolist() + rest.values.tolist() == [rows[key] for key in sorted(rows)]
    scanner.close(state).result(timeout=WAIT_SECONDS)
    with pytest.raises(LogStorageError):
        read(scanner, state)
    scanner.stop()


def test_a_process_that_dies_is_replaced_and_asked_again(state: Path) -> None:
    scanner = Scanner(1)
    first = read(scanner, state, rows=10)
    (process_id,) = scanner.process_ids
    os.kill(process_id, signal.SIGKILL)
    second = read(scanner, state, first.last_key, rows=10)
    assert as_plain(second) == expected(first.last_key, None, 10, ALL)
    assert scanner.process_ids != [process_id]
    scanner.stop()


def test_the_scan_process_ignores_an_interrupt_at_the_terminal(state: Path) -> None:
    """The terminal sends it to all processes; the server decides when the process ends."""
    scanner = Scanner(1)
    read(scanner, state, rows=1)
    (process_id,) = scanner.process_ids
    os.kill(process_id, signal.SIGINT)
    assert read(scanner, state).done
    assert scanner.process_ids == [process_id]
    scanner.stop()


@pytest.mark.parametrize("executable", [shutil.which("true"), "/nowhere/python"])
def test_a_process_that_dies_again_and_again_is_an_error(
    state: Path, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    scanner = Scanner(1)
    with pytest.raises(LogStorageError, match="died twice"):
        read(scanner, state)
    monkeypatch.undo()
    assert read(scanner, state).done, "and the next page is tried anew"
    scanner.stop()


def test_an_answer_that_does_not_fit_into_memory_is_not_taken_for_the_next_one(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of it in the pipe would be read as rows."""
    scanner = Scanner(1)
    received, left = scanner_module._received, [1]

    def full(source: int, size: int) -> Any:
        if size > 10_000 and left:
            left.pop()
            raise MemoryError(f"{size} bytes")
        return received(source, size)

    monkeypatch.setattr(scanner_module, "_received", full)
    with pytest.raises(MemoryError):
        read(scanner, state)
    assert as_plain(read(scanner, state, rows=10)) == expected(None, None, 10, ALL)
    scanner.stop()


def test_states_are_spread_over_processes_and_closed_one_by_one(tmp_path: Path) -> None:
    states = [write(tmp_path / name, {b"key": name.encode()}) for name in "abcd"]
    scanner = Scanner(2)
    for state in states:
        assert read(scanner, state).values.tolist() == [state.name.encode()]
    assert [process.states for process in scanner._processes] == [2, 2]
    assert len(set(scanner.process_ids)) == 2
    for state in states:
        scanner.close(state).result(timeout=WAIT_SECONDS)
    scanner.close(states[0]).result(timeout=WAIT_SECONDS)
    assert [process.states for process in scanner._processes] == [0, 0]
    scanner.stop()
    assert scanner.process_ids == []


def test_a_stop_does_not_wait_for_a_process_that_was_just_being_started(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page may take minutes: a state may consist of deleted rows."""
    start, silent = subprocess.Popen, [sys.executable, "-c", "import sys; sys.stdin.read()"]
    starting, go_on = threading.Event(), threading.Event()

    def slowly(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        starting.set()
        go_on.wait(WAIT_SECONDS)
        return start(silent, **settings)

    monkeypatch.setattr(subprocess, "Popen", slowly)
    scanner = Scanner(1)
    page = scanner.read(state, None, None, ALL, ALL)
    assert starting.wait(WAIT_SECONDS)
    stop = threading.Thread(target=scanner.stop)
    stop.start()
    eventually(lambda: scanner._processes[0]._stopped, "the stop")
    go_on.set()
    stop.join()
    with pytest.raises(LogStorageError, match="the server stops"):
        page.result()


def test_the_scan_process_ends_with_its_input_and_imports_little() -> None:
    modules = (
        "import sys; import zufluss.kv.scan.process as p; p.main(); "
        "print([m for m in ('numba', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", modules], input=b"", capture_output=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, b"[]"), ended.stderr
