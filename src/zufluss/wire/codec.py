"""Messages from bytes, with the checks that protobuf leaves to its callers.

`FromString` alone is not enough for bytes from a peer. It accepts a message whose required fields
are missing, and a proto2 `string` that is not UTF-8 comes out as `bytes`, to fail far away.
`decode` checks both, so that a handler can trust the types of its request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from zufluss.errors import CorruptMessageError

M = TypeVar("M", bound=Message)


def decode(
    message_type: type[M],
    body: bytes | bytearray | memoryview,
    admit: Callable[[M], None] | None = None,
) -> M:
    """Returns the message in `body`; CorruptMessageError if fields are missing or not UTF-8.

    `admit` may refuse the message by its size before every field of it is looked at.
    """
    try:
        # protobuf takes any buffer; its type stubs say bytes.
        message = message_type.FromString(body)  # type: ignore[arg-type, unused-ignore]
    except DecodeError as e:
        raise CorruptMessageError(f"the body is no {message_type.__name__}: {e}") from e
    if not message.IsInitialized():
        raise CorruptMessageError(f"a {message_type.__name__} lacks one of its required fields")
    if admit is not None:
        admit(message)
    _check_texts(message)
    return message


def _check_texts(message: Message) -> None:
    texts, children = _plan(message.DESCRIPTOR)
    for name, repeated in texts:
        value = getattr(message, name)
        if any(type(v) is not str for v in value) if repeated else type(value) is not str:
            raise CorruptMessageError(f"{name} of a {message.DESCRIPTOR.name} is not UTF-8")
    for name, repeated in children:
        if repeated:
            for value in getattr(message, name):
                _check_texts(value)
        elif message.HasField(name):
            _check_texts(getattr(message, name))


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
