"""Frames, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.errors import CorruptMessageError, ErrorCode, TableNotExistError
from zufluss.wire import frame
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)


def test_the_first_request_of_a_connection_has_the_bytes_a_client_was_seen_to_send() -> None:
    body = m.ApiVersionsRequest(client_software_name="fluss-rust", client_software_version="1.0.0")
    packed = frame.pack_request(ApiKey.API_VERSIONS, 0, 0, body.SerializeToString())
    assert packed.hex() == "0000001b03e80000000000000a0a666c7573732d727573741205312e302e30"
    metadata = frame.pack_request(ApiKey.GET_METADATA, 0, 1, b"")
    assert metadata.hex() == "0000000803f4000000000001"


@given(INT32, st.binary(max_size=40))
def test_a_response_reads_back(request_id: int, body: bytes) -> None:
    packed = frame.pack_response(request_id, body)
    assert packed == frame.response_header(request_id, len(body)) + body
    answer = frame.unpack_response(memoryview(packed)[4:])
    assert (answer.request_id, bytes(answer.body), answer.error) == (request_id, body, None)


def test_an_error_frame_becomes_the_error_of_its_code() -> None:
    packed = frame.pack_error(7, ErrorCode.TABLE_NOT_EXIST, "no table 'a.b'")
    assert packed[4] == 1
    answer = frame.unpack_response(memoryview(packed)[4:])
    assert answer.request_id == 7
    assert isinstance(answer.error, TableNotExistError)
    assert answer.error.message == "no table 'a.b'"


def test_a_negative_code_and_text_that_is_not_unicode_can_be_sent() -> None:
    packed = frame.pack_error(7, -1, "file \udcff is broken")
    answer = frame.unpack_response(memoryview(packed)[4:])
    assert answer.error is not None
    assert answer.error.code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert answer.error.message == "file ? is broken"


def test_a_huge_message_is_cut_so_that_an_error_never_fills_a_frame() -> None:
    assert len(frame.pack_error(1, 3, "x" * 1_000_000)) < 10_000


def test_a_failure_of_the_server_without_request_id_is_understood() -> None:
    body = m.ErrorResponse(error_code=-1, error_message="out of memory").SerializeToString()
    answer = frame.unpack_response(memoryview(b"\x02" + body))
    assert answer.request_id is None
    assert answer.error is not None


def test_a_body_too_large_for_a_frame_is_refused_before_it_is_sent() -> None:
    with pytest.raises(CorruptMessageError, match="ask for less"):
        frame.response_header(1, 2**31)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_response_or_a_typed_error(data: bytes) -> None:
    try:
        frame.unpack_response(memoryview(data))
    except CorruptMessageError:
        pass
