"""Messages from bytes, with the checks that protobuf leaves to its callers.

`FromString` alone is not enough for bytes from a peer. It accepts a message whose required fields
are missing, and a proto2 `string` that is not UTF-8 comes out as `bytes`, to fail far away.
`decode` checks both, so that a handler can trust the types of its request. The second check looks
at every message of a body, which takes long for 100,000 of them: `decode_steps` does it in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from zufluss.errors import CorruptMessageError

M = TypeVar("M", bound=Message)


BYTES_AT_ONCE: Final = 32 * 1024
"""A message that is longer is checked in steps."""
CHECKS_AT_ONCE: Final = 64
"""Repeated texts or messages that are checked in one step."""


def decode(message_type: type[M], body: bytes | bytearray | memoryview) -> M:
    """Returns the message in `body`; CorruptMessageError if fields are missing or not UTF-8."""
    message = parse(message_type, body)
    _check_texts(message)
    return message


def decode_steps(message_type: type[M], body: bytes | bytearray | memoryview) -> Iterator[M | None]:
    """`decode` of a long message: yields None between two steps, and last the message."""
    message = _parsed(message_type, body)
    yield None
    _check_complete(message)
    yield from text_steps(message)
    yield message


def parse(message_type: type[M], body: bytes | bytearray | memoryview) -> M:
    """Returns the message in `body`, whose texts are still to be checked."""
    message = _parsed(message_type, body)
    _check_complete(message)
    return message


def _parsed(message_type: type[M], body: bytes | bytearray | memoryview) -> M:
    try:
        # protobuf takes any buffer; its type stubs say bytes.
        return message_type.FromString(body)  # type: ignore[arg-type, unused-ignore]
    except DecodeError as e:
        raise CorruptMessageError(f"the body is no {message_type.__name__}: {e}") from e


def _check_complete(message: Message) -> None:
    if not message.IsInitialized():
        name = message.DESCRIPTOR.name
        raise CorruptMessageError(f"a {name} lacks one of its required fields")


def text_steps(message: Message) -> Iterator[None]:
    """Check the texts of a message, a few at a time."""
    texts, children = _plan(message.DESCRIPTOR)
    for name, repeated in texts:
        value = getattr(message, name)
        if not repeated:
            _check_text(message, name, [value])
            continue
        for begin in range(0, len(value), CHECKS_AT_ONCE):
            yield None
            _check_text(message, name, value[begin : begin + CHECKS_AT_ONCE])
    for name, repeated in children:
        if not repeated:
            if message.HasField(name):
                yield from text_steps(getattr(message, name))
            continue
        for number, child in enumerate(getattr(message, name)):
            if number % CHECKS_AT_ONCE == 0:
                yield None
            yield from text_steps(child)


def _check_texts(message: Message) -> None:
    texts, children = _plan(message.DESCRIPTOR)
    for name, repeated in texts:
        value = getattr(message, name)
        _check_text(message, name, value if repeated else [value])
    for name, repeated in children:
        if repeated:
            for value in getattr(message, name):
                _check_texts(value)
        elif message.HasField(name):
            _check_texts(getattr(message, name))


def _check_text(message: Message, name: str, values: Iterable[object]) -> None:
    for value in values:
        if type(value) is not str:
            raise CorruptMessageError(f"{name} of a {message.DESCRIPTOR.name} is not UTF-8")


_Fields = list[tuple[str, bool]]
"""Name, and whether the field is repeated."""


@cache
def _plan(descriptor: Descriptor) -> tuple[_Fields, _Fields]:
    """The text fields of a message, and the fields whose messages hold text somewhere below."""
    texts = [
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.type == FieldDescriptor.TYPE_STRING
    ]
    children = [
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.message_type is not None and _holds_text(field.message_type, frozenset())
    ]
    return texts, children


def _holds_text(descriptor: Descriptor, seen: frozenset[str]) -> bool:
    if descriptor.full_name in seen:
        return False
    below = seen | {descriptor.full_name}
    return any(
        field.type == FieldDescriptor.TYPE_STRING
        or (field.message_type is not None and _holds_text(field.message_type, below))
        for field in descriptor.fields
    )
