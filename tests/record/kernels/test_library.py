"""The compiled library: how its kernels behave, and when it is not used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zufluss.record.kernels import library
from zufluss.record.kernels.compile import link
from zufluss.record.kernels.library import LABEL, LIBRARY, LibraryError

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small library."""
    directory = tmp_path_factory.mktemp("library")
    command = [sys.executable, "-m", "tests.record.kernels.small_library", str(directory)]
    subprocess.run(command, check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(directory)})
    return directory


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """Another directory with the same library, as if installed long ago."""
    for name in (LIBRARY, LABEL):
        shutil.copyfile(made / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    return tmp_path


@pytest.fixture
def kernels(copied: Path) -> dict[str, Callable[..., Any]]:
    return {name.rpartition(".")[2]: kernel for name, kernel in library.load(copied).items()}


def test_numbers_tuples_truth_and_nothing_are_returned(
    kernels: dict[str, Callable[..., Any]],
) -> None:
    table = np.zeros((2, 3), np.int64)
    assert kernels["byte_at"](np.arange(9, dtype=np.uint8), 7) == 7
    assert kernels["fill"](table, 4, True) == (2, 3, 8)
    assert table.tolist() == [[80, 81, 82], [81, 82, 83]]
    assert kernels["fill"](table, -1, False) == (2, 3, -1)
    assert kernels["count"](np.array([True, False, True]), table) is None
    assert table[0, 0] == 2
    assert kernels["is_even"](4) is True
    assert kernels["is_even"](np.int32(3)) is False


def test_unsigned_numbers_keep_their_highest_bit(kernels: dict[str, Callable[..., Any]]) -> None:
    assert kernels["folded"](1, 2**63) == 2**31 + 1
    assert kernels["folded"](2**32 - 1, 0) == 2**32 - 1


def test_an_index_outside_raises_as_numba_does(kernels: dict[str, Callable[..., Any]]) -> None:
    with pytest.raises(IndexError):
        kernels["byte_at"](np.zeros(3, np.uint8), 3)


def test_arrays_may_begin_at_any_byte(kernels: dict[str, Callable[..., Any]]) -> None:
    """Columns of a changelog in a file do; recovery reads them."""
    table = np.zeros(49, np.uint8)[1:].view(np.int64).reshape(2, 3)
    assert not table.flags.aligned
    kernels["fill"](table, 4, True)
    assert table.tolist() == [[80, 81, 82], [81, 82, 83]]


def test_arguments_of_other_types_are_refused(kernels: dict[str, Callable[..., Any]]) -> None:
    data, table = np.zeros(9, np.uint8), np.zeros((2, 2), np.int64)
    fixed = table.copy()
    fixed.flags.writeable = False
    for wrong in (
        (data,),
        (data, 1, 2),
        (data, "1"),
        (data, 1.5),
        (b"bytes", 1),
        (data[::2], 1),
        (data.astype(np.int64), 1),
        (data.reshape(3, 3), 1),
    ):
        with pytest.raises(TypeError):
            kernels["byte_at"](*wrong)
    for array in (fixed, table.T, table.astype(">i8"), table[0]):
        with pytest.raises(TypeError, match="argument 1 must be a contiguous writable array of"):
            kernels["fill"](array, 1, True)
    with pytest.raises(OverflowError):
        kernels["byte_at"](data, 2**63)


def test_a_library_is_used_in_another_directory_with_other_times(copied: Path) -> None:
    assert len(library.load(copied)) == 5


def test_a_damaged_library_is_not_loaded(copied: Path) -> None:
    content = bytearray((copied / LIBRARY).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / LIBRARY).write_bytes(content)
    with pytest.raises(LibraryError, match="is damaged"):
        library.load(copied)
    (copied / LIBRARY).unlink()
    with pytest.raises(LibraryError, match="cannot be read"):
        library.load(copied)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"sources": 1}', '{"sources": 1, "features": 2}']
)
def test_a_damaged_label_is_not_believed(copied: Path, text: str) -> None:
    (copied / LABEL).write_text(text)
    with pytest.raises(LibraryError):
        library.load(copied)


def test_a_library_that_is_none_is_not_loaded(copied: Path) -> None:
    """The digest is right, the file is of another platform or no library at all."""
    (copied / LIBRARY).write_bytes(b"no machine code")
    processor = link.target()
    assert processor is not None
    link.publish(copied / LIBRARY, processor, copied)
    with pytest.raises(LibraryError, match="cannot be loaded"):
        library.load(copied)


def relabel(directory: Path, **changes: object) -> None:
    label = json.loads((directory / LABEL).read_text())
    (directory / LABEL).write_text(json.dumps({**label, **changes}))


def test_a_library_of_other_sources_is_not_loaded(copied: Path) -> None:
    relabel(copied, sources="0123456789abcdef")
    with pytest.raises(LibraryError, match="other sources"):
        library.load(copied)


def test_a_library_for_a_newer_processor_is_not_loaded(copied: Path) -> None:
    relabel(copied, features=["of-the-future"])
    with pytest.raises(LibraryError, match="this processor lacks of-the-future"):
        library.load(copied)


def test_an_unusable_library_is_logged_and_kernels_are_compiled_instead(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relabel(copied, features=["of-the-future"])
    monkeypatch.setattr(library, "HERE", copied)
    monkeypatch.setattr(library, "source_digest", lambda: sources_of(copied))
    library.functions.cache_clear()
    try:
        assert library.functions() is None
    finally:
        library.functions.cache_clear()
    assert "of-the-future" in caplog.text


def sources_of(directory: Path) -> str:
    return str(json.loads((directory / LABEL).read_text())["sources"])


def test_without_a_c_compiler_no_kernel_is_compiled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(link, "compile_in_parallel", lambda _: pytest.fail("compiled too early"))
    with pytest.raises(link.LinkError, match="no C compiler"):
        link.make_library(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sources_that_cannot_be_read_are_a_reason_not_to_load(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MODULES_OUTSIDE", ("zufluss.stripped",))
    library.source_digest.cache_clear()
    try:
        with pytest.raises(LibraryError, match=r"sources .* cannot be read"):
            library.load(copied)
    finally:
        library.source_digest.cache_clear()


def test_processes_that_compile_find_what_only_the_search_path_of_this_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip builds wheels like this."""
    given: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path / "build-requirements"))
    monkeypatch.setattr(
        link, "compile_in_parallel", lambda environ: given.append(environ["PYTHONPATH"])
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(link.LinkError, match="no-python"):
        link.make_library(tmp_path)
    (path,) = given
    assert path.split(os.pathsep)[:2] == [
        str(library.HERE.parents[2]),
        str(tmp_path / "build-requirements"),
    ]


def test_a_failure_to_make_object_files_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "compile_in_parallel", lambda _: None)
    false = shutil.which("false")
    assert false is not None
    monkeypatch.setattr(sys, "executable", false)
    with pytest.raises(link.LinkError, match="non-zero exit status 1"):
        link.make_library(tmp_path)
    assert list(tmp_path.iterdir()) == []
