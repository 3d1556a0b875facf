"""Decoding of every request, with bytes that are right, cut, changed or random."""

from __future__ import annotations

import re

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.errors import CorruptMessageError
from zufluss.wire import messages as m
from zufluss.wire.api import APIS
from zufluss.wire.codec import CHECKS_AT_ONCE, decode, decode_steps

VALUES = {
    FieldDescriptor.TYPE_STRING: "é",
    FieldDescriptor.TYPE_BYTES: b"\xff",
    FieldDescriptor.TYPE_BOOL: True,
}
REQUESTS = [api.request for api in APIS.values()]


def filled(message_type: type[Message], depth: int = 0) -> Message:
    """A message with something in every field, three levels deep."""
    message = message_type()
    for field in message_type.DESCRIPTOR.fields:
        if field.message_type is not None:
            if depth < 3 or field.is_required:
                child = filled(getattr(m, field.message_type.name), depth + 1)
                target = getattr(message, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(child)
            continue
        value = VALUES.get(field.type, 7)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda t: t.__name__)
def test_every_request_decodes_from_any_kind_of_buffer(request_type: type[Message]) -> None:
    message = filled(request_type)
    body = message.SerializeToString()
    for buffer in (body, bytearray(body), memoryview(bytearray(body))):
        assert decode(request_type, buffer) == message


def test_a_missing_required_field_is_refused() -> None:
    with pytest.raises(CorruptMessageError, match="PbTablePath lacks"):
        decode(m.PbTablePath, b"\x0a\x01a")
    with pytest.raises(CorruptMessageError, match="GetTableInfoRequest lacks"):
        decode(m.GetTableInfoRequest, b"\x0a\x03\x0a\x01a")


@pytest.mark.parametrize(
    ("message_type", "body"),
    [
        (m.PbTablePath, b"\x0a\x01\xff\x12\x01a"),
        (m.GetTableInfoRequest, b"\x0a\x06\x0a\x01a\x12\x01\xff"),
        (m.ListTablesResponse, b"\x0a\x01a\x0a\x01\xff"),
        (m.MetadataRequest, b"\x0a\x06\x0a\x01a\x12\x01\xff"),
    ],
)
def test_text_that_is_not_utf8_is_refused_at_any_depth(
    message_type: type[Message], body: bytes
) -> None:
    with pytest.raises(CorruptMessageError, match="not UTF-8"):
        decode(message_type, body)
    with pytest.raises(CorruptMessageError, match="not UTF-8"):
        list(decode_steps(message_type, body))


def test_a_message_of_many_parts_is_checked_in_steps_to_its_last_one() -> None:
    path = m.PbTablePath(database_name="db", table_name="abc")
    body = m.MetadataRequest(table_path=[path] * 10 * CHECKS_AT_ONCE).SerializeToString()
    assert sum(step is None for step in decode_steps(m.MetadataRequest, body)) >= 10
    names = m.ListTablesResponse(table_name=["t"] * 10 * CHECKS_AT_ONCE).SerializeToString()
    assert sum(step is None for step in decode_steps(m.ListTablesResponse, names)) >= 10
    for message_type, bad in (
        (m.MetadataRequest, body[:-3] + b"\xffbc"),
        (m.ListTablesResponse, names[:-1] + b"\xff"),
    ):
        with pytest.raises(CorruptMessageError, match="not UTF-8"):
            list(decode_steps(message_type, bad))


def test_text_deep_in_a_recursive_message_is_checked() -> None:
    leaf = m.PbPredicate(type=0)
    leaf.leaf.function, leaf.leaf.field_id = 0, 1
    leaf.leaf.literals.add(literal_type=8, is_null=False, string_value="abc")
    tree = m.PbPredicate(type=1)
    tree.compound.function = 0
    tree.compound.children.append(leaf)
    body = tree.SerializeToString()
    assert decode(m.PbPredicate, body) == tree
    with pytest.raises(CorruptMessageError, match="string_value"):
        decode(m.PbPredicate, body.replace(b"abc", b"a\xffc"))


@settings(max_examples=200)
@given(st.sampled_from(REQUESTS), st.data())
def test_cut_and_changed_requests_decode_or_raise_the_typed_error(
    request_type: type[Message], data: st.DataObject
) -> None:
    body = bytearray(filled(request_type).SerializeToString())
    for _ in range(data.draw(st.integers(0, 3)) if body else 0):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_is_refused(request_type, bytes(body[: data.draw(st.integers(0, len(body)))]))


@settings(max_examples=200)
@given(st.sampled_from(REQUESTS), st.binary(max_size=64))
def test_random_bytes_decode_or_raise_the_typed_error(
    request_type: type[Message], body: bytes
) -> None:
    _decodes_or_is_refused(request_type, body)


def _decodes_or_is_refused(request_type: type[Message], body: bytes) -> None:
    try:
        message = decode(request_type, body)
    except CorruptMessageError as refused:
        with pytest.raises(CorruptMessageError, match=re.escape(str(refused))):
            list(decode_steps(request_type, body))
        return
    *nothing, same = decode_steps(request_type, body)
    assert same == message
    assert nothing == [None] * len(nothing)
    assert message.IsInitialized()
    message.SerializeToString()
