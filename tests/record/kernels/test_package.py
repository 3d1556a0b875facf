"""Kernels as a package: how they are loaded, and where their machine code is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.paths import ROOT
from tests.record.batch import plain_check as plain
from zufluss.record import header as batch
from zufluss.record import kernels as package
from zufluss.record.arrow import layout
from zufluss.record.kernels import batch_check, batch_header, batch_statistics, cache, library

KERNELS = Path(package.__file__).parent


def in_a_new_process(code: str, **environ: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_importing_the_package_imports_no_compiler() -> None:
    code = "import sys, zufluss, zufluss.record.kernels; print('numba' in sys.modules)"
    assert in_a_new_process(code) == "False"


def test_warming_loads_every_kernel_module() -> None:
    package.warm()
    assert set(library.kernel_modules()) <= set(sys.modules)
    assert {path.stem for path in KERNELS.glob("[a-z]*.py")} - {
        name.rpartition(".")[2] for name in library.kernel_modules()
    } == {"compiler_memory", "library", "progress"}


def test_constants_repeated_in_kernels_equal_their_originals() -> None:
    for name in ("FIXED", "BOOL", "STRING", "BINARY", "LIST", "STRUCT", "TIME", "DECIMAL"):
        assert getattr(batch_check, name) == getattr(layout, name)
    for name in ("NULLABLE", "NOT_NULL", "MASKED"):
        assert getattr(batch_check, name) == getattr(layout, name)
    assert batch_check.MAX_UNCOMPRESSED_BYTES == plain.MAX_UNCOMPRESSED_BYTES
    for name in ("PROGRAM_HEAD", "PROGRAM_STRIDE"):
        assert getattr(batch_check, name) == getattr(layout, name)
    for name in ("SLOT_NONE", "SLOT_FIXED", "SLOT_VARIABLE", "SLOT_TIMESTAMP", "SLOT_DECIMAL"):
        assert getattr(batch_statistics, name) == getattr(layout, name)
    assert batch_header.LENGTH_OVERHEAD == batch.LENGTH_OVERHEAD
    assert batch_header.MAGIC_MAX == batch.MAX_MAGIC
    for magic, size in enumerate(batch.HEADER_SIZES):
        assert size == batch_header.HEADER_BYTES_MIN + 4 * magic
        assert batch_header.crc_at(0, magic) == batch.CRC_OFFSETS[magic]


def test_a_directory_that_others_can_write_to_is_never_used(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    shared.chmod(0o777)
    assert cache.choose_directory((shared, private), tmp_path) == private
    assert private.stat().st_mode & 0o777 == 0o700


def test_a_directory_is_found_when_no_candidate_fits(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    directory = cache.choose_directory((occupied, occupied / "below"), tmp_path)
    assert directory.parent == tmp_path
    assert directory.is_dir()


def test_old_generations_of_compiled_code_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for i in range(9):
        old = tmp_path / f"kernels-{i}"
        old.mkdir()
        os.utime(old, (i, i))
    chosen = cache.cache_directory.__wrapped__()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == cache.KEPT_GENERATIONS
    assert chosen.name in left


@pytest.mark.slow
def test_no_kernel_touches_a_byte_outside_a_damaged_batch() -> None:
    command = [sys.executable, "-m", "tests.record.guard_pages"]
    root = ROOT
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"killed or failed ({done.returncode}): {done.stderr[-2000:]}"
    assert int(done.stdout) > 10_000


def test_a_kernel_takes_read_only_and_writable_arrays() -> None:
    data = batch.build_batch(1, b"", 0, append_only=False, change_types=b"")
    numbers = np.zeros(8, dtype=np.int64)
    numbers[0] = 1
    for buf in (np.frombuffer(bytes(data), np.uint8), np.frombuffer(bytearray(data), np.uint8)):
        assert batch_check.check_batch(buf, 0, buf.size, numbers, True)[0] == 0
