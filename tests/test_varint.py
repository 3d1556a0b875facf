"""The plain varint codec: what it writes it reads back, and damaged input has an answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zufluss.varint import BYTES_MAX, CUT, TOO_LONG, UINT64_MASK, decode_varint, encode_varint
from zufluss.wire import messages as m

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**22)


@given(INT64, st.binary(max_size=3), st.binary(max_size=3))
def test_a_number_is_read_back_wherever_it_stands(value: int, before: bytes, after: bytes) -> None:
    encoded = encode_varint(value)
    data = before + encoded + after
    decoded = decode_varint(data, len(before), len(data))
    assert decoded == (value & UINT64_MASK, len(before) + len(encoded))


@given(INT64)
def test_a_number_without_its_last_byte_is_cut(value: int) -> None:
    encoded = encode_varint(value)
    assert decode_varint(encoded, 0, len(encoded) - 1)[1] == CUT


@given(st.integers(1, BYTES_MAX))
def test_a_number_with_a_byte_too_many_is_too_long(bytes_max: int) -> None:
    data = b"\x80" * bytes_max + b"\x01"
    assert decode_varint(data, 0, len(data), bytes_max)[1] == TOO_LONG
    assert decode_varint(data, 0, bytes_max, bytes_max)[1] == TOO_LONG
    assert decode_varint(data, 0, len(data), bytes_max + 1) == (1 << 7 * bytes_max, len(data))


@given(INT64)
def test_a_number_is_written_as_protobuf_writes_it(value: int) -> None:
    expected = m.InitWriterResponse(writer_id=value).SerializeToString()
    assert b"\x08" + encode_varint(value) == expected
