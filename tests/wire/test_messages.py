"""The generated messages against the field tables they were written from."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldOptions

from tests.paths import ROOT
from zufluss.wire import messages as m
from zufluss.wire.proto import extension_pb2

TABLES: dict[str, Any] = yaml.safe_load((ROOT / "tests/fixtures/messages.yaml").read_text())
TYPES = {
    "int32": FieldDescriptor.TYPE_INT32,
    "int64": FieldDescriptor.TYPE_INT64,
    "bool": FieldDescriptor.TYPE_BOOL,
    "float": FieldDescriptor.TYPE_FLOAT,
    "double": FieldDescriptor.TYPE_DOUBLE,
    "string": FieldDescriptor.TYPE_STRING,
    "bytes": FieldDescriptor.TYPE_BYTES,
    "fixed32": FieldDescriptor.TYPE_FIXED32,
}
OWN_FIELD_MIN = 1000
VARINTS = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_BOOL}


def label(field: FieldDescriptor) -> str:
    if field.is_required:
        return "req"
    if not field.is_repeated:
        return "opt"
    options: FieldOptions = field.GetOptions()
    return "rep_packed" if options.packed else "rep"


def described(name: str) -> dict[int, list[str]]:
    """Our message in the notation of the tables."""
    kinds = {number: kind for kind, number in TYPES.items()}
    return {
        field.number: [
            field.name,
            field.message_type.name if field.message_type else kinds[field.type],
            label(field),
        ]
        for field in getattr(m, name).DESCRIPTOR.fields
    }


@pytest.mark.parametrize("name", TABLES["messages"])
def test_every_message_has_the_fields_numbers_types_and_labels_of_the_table(name: str) -> None:
    newer = TABLES["newer_fields_measured"].get(name, {})
    ours = {
        number: field
        for number, field in described(name).items()
        if number not in newer and number < OWN_FIELD_MIN
    }
    assert ours == TABLES["messages"][name]


@pytest.mark.parametrize("name", TABLES["messages"])
def test_fields_of_our_own_are_never_required_of_a_peer(name: str) -> None:
    for field in getattr(m, name).DESCRIPTOR.fields:
        assert field.number < OWN_FIELD_MIN or not field.is_required


def test_fields_that_newer_clients_know_are_there_and_optional() -> None:
    for name, fields in TABLES["newer_fields_measured"].items():
        for number, (field_name, kind) in fields.items():
            field = getattr(m, name).DESCRIPTOR.fields_by_number[number]
            assert field.name == field_name
            assert field.is_repeated == kind.endswith("_repeated")
            assert not field.is_required
            assert (field.type in VARINTS) == kind.startswith("varint")


def test_other_messages_are_extensions_or_hang_on_fields_of_our_own() -> None:
    reached = {
        field.message_type.name
        for name in TABLES["messages"]
        for field in getattr(m, name).DESCRIPTOR.fields
        if field.number >= OWN_FIELD_MIN and field.message_type is not None
    }
    extensions = set(extension_pb2.DESCRIPTOR.message_types_by_name)
    names = {name for name, value in vars(m).items() if hasattr(value, "FromString")}
    assert extensions <= names
    assert names - set(TABLES["messages"]) <= extensions | reached


def test_the_checked_in_code_is_what_the_proto_files_generate() -> None:
    script = ROOT / "scripts/proto.py"
    run = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
