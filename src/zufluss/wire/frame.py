"""Frames: the bytes around a message on the socket.

All integers are big-endian and signed. `length` counts everything after itself.

Request:

| field       | bytes      | meaning                                             |
|-------------|------------|-----------------------------------------------------|
| length      | 4          | 8 + size of the body                                |
| api_key     | 2          | `zufluss.wire.api.ApiKey`                           |
| api_version | 2          | within the versions the server advertised           |
| request_id  | 4          | chosen by the client, 0 to 2³¹ − 1, per connection  |
| body        | length − 8 | the request message                                 |

Response:

| field       | bytes      | meaning                                             |
|-------------|------------|-----------------------------------------------------|
| length      | 4          | 5 + size of the body                                |
| type        | 1          | 0 answer, 1 error                                   |
| request_id  | 4          | of the request it answers; order is free            |
| body        | length − 5 | the response message, or an `ErrorResponse`         |

The protocol also knows response type 2 (a failure of the server, without a request id). Clients
read the first bytes of its body as an id, so we never send it; we do understand it when it comes.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from zufluss.errors import CorruptMessageError, ZuflussError, error
from zufluss.wire.codec import decode
from zufluss.wire.messages import ErrorResponse

LENGTH: Final = struct.Struct(">i")
REQUEST_HEADER: Final = struct.Struct(">ihhi")
"""length, api_key, api_version, request_id"""
RESPONSE_HEADER: Final = struct.Struct(">ibi")
"""length, type, request_id"""

FAILURE_HEADER: Final = struct.Struct(">ib")
"""length, type; a failure of the server has no request_id."""

REQUEST_LENGTH_MIN: Final = REQUEST_HEADER.size - LENGTH.size
"""What `length` of a request counts besides the body."""
RESPONSE_LENGTH_MIN: Final = RESPONSE_HEADER.size - LENGTH.size
"""What `length` of a response counts besides the body."""

SUCCESS: Final = 0
ERROR: Final = 1
SERVER_FAILURE: Final = 2

REQUEST_ID_MASK: Final = 0x7FFF_FFFF
"""Request ids wrap at 31 bits."""

_INT32_MAX: Final = 0x7FFF_FFFF
_MESSAGE_CHARS_MAX: Final = 8 * 1024

Buffer = bytes | bytearray | memoryview


class ResponseFrame(NamedTuple):
    """A response frame: which request it answers, and the body or the error it carries."""

    request_id: int | None
    """None for a failure of the server as a whole: the connection is lost."""
    body: memoryview
    error: ZuflussError | None


def pack_request(api_key: int, version: int, request_id: int, body: bytes) -> bytes:
    """A whole request frame."""
    return REQUEST_HEADER.pack(8 + len(body), api_key, version, request_id) + body


def pack_response(request_id: int, body: bytes) -> bytes:
    """A whole frame that answers `request_id`."""
    return RESPONSE_HEADER.pack(5 + len(body), SUCCESS, request_id) + body


def response_header(request_id: int, body_size: int) -> bytes:
    """The header alone, for a body that is sent as several buffers."""
    if body_size > _INT32_MAX - RESPONSE_LENGTH_MIN:
        raise CorruptMessageError(
            f"the answer to request {request_id} has {body_size} bytes, a frame holds at most "
            f"{_INT32_MAX - RESPONSE_LENGTH_MIN}; ask for less at a time"
        )
    return RESPONSE_HEADER.pack(5 + body_size, SUCCESS, request_id)


def pack_error(request_id: int, code: int, message: str) -> bytes:
    """A whole frame that says why `request_id` failed."""
    # A message may quote a file name with bytes that are not text; protobuf would refuse it.
    text = message[:_MESSAGE_CHARS_MAX].encode("utf-8", "replace").decode()
    body = ErrorResponse(error_code=code, error_message=text).SerializeToString()
    return RESPONSE_HEADER.pack(5 + len(body), ERROR, request_id) + body


def pack_failure(code: int, message: str) -> bytes:
    """A whole frame that says why the server closes a connection; it answers no request."""
    body = ErrorResponse(error_code=code, error_message=message).SerializeToString()
    return FAILURE_HEADER.pack(1 + len(body), SERVER_FAILURE) + body


def unpack_response(frame: memoryview) -> ResponseFrame:
    """Take a response apart; `frame` is what follows the length field, and all of it."""
    if len(frame) < RESPONSE_LENGTH_MIN:
        raise CorruptMessageError(
            f"a response frame has at least {RESPONSE_LENGTH_MIN} bytes, got {len(frame)}"
        )
    kind, request_id = struct.unpack_from(">bi", frame)
    if kind == SUCCESS:
        return ResponseFrame(request_id, frame[5:], None)
    if kind == ERROR:
        return ResponseFrame(request_id, frame[5:], _error(frame[5:]))
    if kind == SERVER_FAILURE:
        return ResponseFrame(None, frame[1:], _error(frame[1:]))
    raise CorruptMessageError(f"response type {kind}; known are 0 (answer), 1 and 2 (errors)")


def _error(body: memoryview) -> ZuflussError:
    response = decode(ErrorResponse, body)
    return error(response.error_code, response.error_message)
