"""The checksum inside of documents."""

from __future__ import annotations

import json

import pytest

from zufluss.errors import CorruptRecordError
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.files import RemoteFile
from zufluss.remote.manifest import LogManifest, RemoteSegment
from zufluss.remote.seal import check_seal, sealed

DOCUMENT = b'{"version":1,"name":"x","offset":123}'


def test_any_flipped_bit_is_noticed_but_in_the_name_of_the_field() -> None:
    data = sealed(DOCUMENT)
    name = range(len(DOCUMENT) - 1, data.rindex(b":") + 1)
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            if at in name:
                continue
            with pytest.raises(ValueError, match="checksum"):
                check_seal(bytes(flipped))


def test_a_sealed_document_is_the_document_with_one_more_field() -> None:
    data = sealed(DOCUMENT)
    check_seal(data)
    found = json.loads(data)
    assert isinstance(found.pop("zufluss_crc32c"), int)
    assert found == json.loads(DOCUMENT)


def test_documents_of_others_are_taken_as_they_are() -> None:
    check_seal(DOCUMENT)


def test_a_manifest_with_another_timestamp_is_refused() -> None:
    files = [RemoteFile(1, f"log/db/t-1/0/s/{name}", 10, 7) for name in "abcd"]
    segment = RemoteSegment("s", 0, 10, 1234567890, *files)
    manifest = LogManifest(PhysicalTablePath("db", "t"), TableBucket(1, None, 0), (segment,))
    data = manifest.to_json()
    assert LogManifest.from_json(data) == manifest
    with pytest.raises(CorruptRecordError, match="checksum"):
        LogManifest.from_json(data.replace(b"1234567890", b"1234567891"))
