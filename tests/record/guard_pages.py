"""Runs the kernels over damaged batches that lie between two pages nobody may touch.

Started as a process of its own by `test_kernels.py`: a read or write even one byte outside the
batch kills it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tests.record.arrow.projection import project
from tests.record.arrow_samples import (
    CODECS,
    NESTED,
    NESTED_ROWS,
    SMALL,
    SMALL_ROWS,
    log_batch,
    only,
)
from zufluss.errors import ZuflussError
from zufluss.record.arrow.layout import Layout
from zufluss.record.arrow.project import Projector
from zufluss.record.header import read_header
from zufluss.record.kernels.batch_check import check_batch
from zufluss.record.kernels.lz4 import frame_fault
from zufluss.record.kernels.message_read import read_message

PAGE = mmap.PAGESIZE
PROT_NONE = 0


class Guarded:
    """One page between two forbidden ones."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 3 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (0, 2):
            at = ctypes.c_void_p(address + page * PAGE)
            if libc.mprotect(at, ctypes.c_size_t(PAGE), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.page = np.frombuffer(self.memory, dtype=np.uint8)[PAGE : 2 * PAGE]

    def places(self, data: bytes) -> Iterator[np.ndarray]:
        """The data right behind the first forbidden page, then right before the second."""
        self.page[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        yield self.page[: len(data)]
        self.page[PAGE - len(data) :] = np.frombuffer(data, dtype=np.uint8)
        yield self.page[PAGE - len(data) :]


def damaged(data: bytes) -> Iterator[bytes]:
    """The data with each byte changed in several ways, and cut everywhere."""
    for position in range(8, len(data)):
        for value in (0x00, 0x7F, 0x80, 0xFF, data[position] ^ 0x04):
            yield data[:position] + bytes([value]) + data[position + 1 :]
    for size in range(1, len(data)):
        yield data[:size]


def main() -> None:
    guarded = Guarded()
    count = 0
    for schema, rows in ((SMALL, SMALL_ROWS), (NESTED, NESTED_ROWS)):
        program = Layout.of(schema.arrow).program(1)
        projector = Projector(only(schema), schema)
        for codec in CODECS:
            for bad in damaged(bytes(log_batch(rows, codec, magic=1))):
                for place in guarded.places(bad):
                    check_batch(place, 0, place.size, program, True)
                    read_message(place, min(52, place.size), place.size)
                    try:
                        projector.project_all(place, (0, 2))
                        project(projector, place, 0, read_header(memoryview(place)), (0, 2))
                    except ZuflussError:
                        pass
                    count += 1
    for bad in damaged(pa.compress(b"some words, words again " * 9, codec="lz4", asbytes=True)):
        for place in guarded.places(bad):
            frame_fault(place, 0, place.size)
            count += 1
    print(count)


if __name__ == "__main__":
    main()
