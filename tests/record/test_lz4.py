"""LZ4 frames: accepted only if liblz4 and the other decoders all accept them."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.record import plain_lz4 as lz4
from zufluss.record.kernels.lz4 import frame_fault

TEXTS = {
    "nothing to find": bytes(np.random.default_rng(1).integers(0, 256, 3000, np.uint8)),
    "one byte": b"x",
    "a long run": b"a" * 100_000,
    "words": b"the quick brown fox jumps over the lazy dog " * 50,
    "several blocks": bytes(np.random.default_rng(2).integers(0, 4, 1 << 20, np.uint8)),
}


def compressed(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="lz4", asbytes=True))


def verdicts(frame: bytes, start: int = 0, end: int | None = None) -> tuple[int, int]:
    stop = len(frame) if end is None else end
    array = np.frombuffer(frame, np.uint8)
    return lz4.frame_fault(frame, start, stop), int(frame_fault(array, start, stop))


@pytest.mark.parametrize("text", TEXTS)
def test_a_frame_of_liblz4_is_in_order(text: str) -> None:
    assert verdicts(compressed(TEXTS[text])) == (-1, -1)


@pytest.mark.parametrize("text", TEXTS)
def test_a_frame_inside_other_bytes_is_in_order(text: str) -> None:
    frame = compressed(TEXTS[text])
    assert verdicts(b"before" + frame + b"after", 6, 6 + len(frame)) == (-1, -1)


def test_a_match_zero_bytes_back_is_refused_although_liblz4_takes_it() -> None:
    """The case that a fuzzed batch showed: pyfluss could never read past it."""
    data = b"abcdefgh" * 100
    frame = bytearray(compressed(data))
    at = frame.index(struct.pack("<H", 8), 11)
    frame[at : at + 2] = b"\x00\x00"
    checksum = frame[4] & lz4.CONTENT_CHECKSUM
    assert not checksum, "pyarrow writes no content checksum that would show it"
    pa.decompress(bytes(frame), len(data), codec="lz4")
    assert verdicts(bytes(frame)) == (at, at)


HEADERS = {
    "no magic": (0, 0xFF),
    "another version": (4, 0x80),
    "a reserved flag": (4, 0x02),
    "a dictionary": (4, 0x01),
    "a reserved bit of the descriptor": (5, 0x80),
    "a low bit of the descriptor": (5, 0x01),
    "a block size of nothing": (5, 0x40),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_some_decoder_refuses_is_refused(case: str) -> None:
    at, bits = HEADERS[case]
    frame = bytearray(compressed(TEXTS["words"]))
    frame[at] ^= bits
    ours, kernel = verdicts(bytes(frame))
    assert ours == kernel >= 0


def test_bytes_after_the_end_are_refused() -> None:
    frame = compressed(TEXTS["words"])
    assert verdicts(frame + b"\x00") == (len(frame), len(frame))
    assert min(verdicts(frame + frame)) >= 0


def test_a_frame_cut_anywhere_is_refused() -> None:
    frame = compressed(TEXTS["words"])
    for size in range(len(frame)):
        ours, kernel = verdicts(frame[:size])
        assert ours == kernel >= 0


@given(st.data())
def test_the_kernel_agrees_with_the_plain_walk(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([TEXTS["words"], TEXTS["a long run"], b"x"]))
    frame = bytearray(compressed(text))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.sampled_from([0, 1, 15, 0x0F, 0xF0, 0x7F, 0x80, 255]))
    cut = data.draw(st.integers(0, len(frame)))
    ours, kernel = verdicts(bytes(frame[:cut]))
    assert ours == kernel
