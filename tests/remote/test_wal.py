"""The format of the shared log's objects: what was written is read, damage is found and named."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from zufluss.model.table import TableBucket
from zufluss.remote import wal
from zufluss.remote.wal import (
    EntryKind,
    NewEntry,
    WalEntryDamagedError,
    WalHeader,
    WalKind,
    WalName,
    WalObjectDamagedError,
)

CLUSTER = "0123456789abcdef0123456789abcdef"
URI = "s3://wal"
NAME = WalName(7, 3)

ids = st.integers(0, 2**63 - 1)
buckets = st.builds(TableBucket, ids, st.none() | ids, st.integers(0, 2**31 - 1))
pieces = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=3)


def header(kind: WalKind = WalKind.DATA, said: int = 0) -> WalHeader:
    return WalHeader(kind, CLUSTER, 2, NAME.server_epoch, NAME.number, b"n" * 16, said)


def entry(bucket: TableBucket, first: int, data: list[bytes], kind: EntryKind) -> NewEntry:
    whole = b"".join(data)
    if kind is EntryKind.RELEASE:
        return NewEntry(bucket, 4, kind, first, first, (), 0, 0)
    return NewEntry(bucket, 4, kind, first, first + 5, data, len(whole), crc32c(whole))


entries = st.lists(
    st.builds(entry, buckets, st.integers(0, 2**62), pieces, st.sampled_from(EntryKind)),
    min_size=1,
    max_size=6,
)

SMALL = wal.encode(
    header(),
    [
        entry(TableBucket(2, None, 1), 10, [b"rows", b"more"], EntryKind.BATCHES),
        entry(TableBucket(1, None, 0), 100, [b"carried"], EntryKind.CARRY),
        entry(TableBucket(1, 9, 0), 70, [b"partition"], EntryKind.BATCHES),
        entry(TableBucket(1, None, 0), 105, [b"behind"], EntryKind.BATCHES),
    ],
)
BODY = SMALL.index(b"carried")


def offsets(data: bytes) -> dict[tuple[TableBucket, int], bytes | None]:
    """The bytes of each entry, None where they are damaged and the error says which."""
    read = wal.decode(data, NAME, URI)
    return {(each.bucket, each.first_offset): taken(read, each) for each in read.entries}


def taken(read: wal.WalObject, each: wal.WalEntry) -> bytes | None:
    try:
        return bytes(read.bytes_of(each))
    except WalEntryDamagedError as error:
        message = error.message
    said = f"offsets {each.first_offset} to {each.end_offset - 1} of {each.bucket}: "
    assert message.startswith(f"{URI}/{NAME.path}: {said}")
    return None


@given(entries)
def test_what_was_encoded_is_decoded(new: list[NewEntry]) -> None:
    read = wal.decode(wal.encode(header(), new), NAME, URI)
    expected = sorted(new, key=lambda e: wal.bucket_key(e.bucket))
    assert [
        (e.bucket, e.leader_epoch, e.kind, e.first_offset, e.end_offset) for e in read.entries
    ] == [tuple(e[:5]) for e in expected]
    assert [bytes(read.bytes_of(e)) for e in read.entries] == [b"".join(e.pieces) for e in expected]
    assert read.header[:7] == header()[:7]
    assert read.header.name == NAME


def test_the_entries_of_a_bucket_lie_together_and_keep_their_order() -> None:
    read = wal.decode(SMALL, NAME, URI)
    assert [(e.bucket, e.first_offset) for e in read.entries] == [
        (TableBucket(1, None, 0), 100),
        (TableBucket(1, None, 0), 105),
        (TableBucket(1, 9, 0), 70),
        (TableBucket(2, None, 1), 10),
    ]
    assert SMALL[BODY:] == b"carriedbehindpartitionrowsmore"


def test_large_pieces_are_not_copied_and_small_ones_are_joined() -> None:
    large = b"l" * wal.PIECE_BYTES_MIN
    new = entry(TableBucket(1, None, 0), 0, [b"a", b"b", large, b"c"], EntryKind.BATCHES)
    first, begin, kept, end = wal.encode_pieces(header(), [new])
    assert len(first) == wal.HEADER_BYTES
    assert begin.endswith(b"ab")
    assert kept is large
    assert end == b"c"


@pytest.mark.parametrize("kind", [WalKind.SEAL, WalKind.CLOSE])
def test_a_seal_and_a_close_are_the_header_alone(kind: WalKind) -> None:
    data = wal.encode(header(kind, said=12))
    assert len(data) == wal.HEADER_BYTES
    assert wal.decode(data, NAME, URI).header[:7] == header(kind, said=12)[:7]
    assert wal.read_header(data, NAME, URI).said == 12


def test_every_flipped_bit_of_header_and_index_is_found() -> None:
    for at in range(BODY):
        for bit in range(8):
            damaged = bytearray(SMALL)
            damaged[at] ^= 1 << bit
            with pytest.raises(WalObjectDamagedError, match=f"{URI}/{NAME.path}"):
                wal.decode(bytes(damaged), NAME, URI)


def test_every_flipped_bit_of_the_body_costs_one_entry() -> None:
    whole = offsets(SMALL)
    for at in range(BODY, len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[at] ^= 1 << at % 8
        read = offsets(bytes(damaged))
        assert list(read.values()).count(None) == 1
        assert all(data in (None, whole[key]) for key, data in read.items())


def test_an_object_that_is_cut_gives_the_entries_before_the_cut() -> None:
    whole = offsets(SMALL)
    for end in range(BODY):
        with pytest.raises(WalObjectDamagedError):
            wal.decode(SMALL[:end], NAME, URI)
    for end in range(BODY, len(SMALL)):
        read = list(offsets(SMALL[:end]).values())
        left = read.index(None)
        assert read[:left] == list(whole.values())[:left]
        assert set(read[left:]) == {None}


def test_an_object_under_another_name_is_refused() -> None:
    for other in (WalName(7, 4), WalName(8, 3)):
        with pytest.raises(WalObjectDamagedError, match="number 3 of server epoch 7"):
            wal.decode(SMALL, other, URI)


def test_an_object_of_a_later_format_is_refused() -> None:
    later = bytearray(SMALL)
    later[8] = 2
    later[92:96] = crc32c(bytes(later[:92])).to_bytes(4, "little")
    with pytest.raises(WalObjectDamagedError, match="format 2, this server reads 1"):
        wal.decode(bytes(later), NAME, URI)


def test_an_object_with_more_bytes_than_were_written_is_refused() -> None:
    with pytest.raises(WalObjectDamagedError, match="more than were written"):
        wal.decode(SMALL + b"x", NAME, URI)


def test_entries_that_contradict_themselves_are_not_written() -> None:
    bucket = TableBucket(1, None, 0)
    for wrong in (
        NewEntry(bucket, 4, EntryKind.BATCHES, 5, 5, (), 0, 0),
        NewEntry(bucket, 4, EntryKind.BATCHES, 5, 7, (), 0, 0),
        NewEntry(bucket, 4, EntryKind.CARRY, 7, 5, (b"x",), 1, 0),
        NewEntry(bucket, 4, EntryKind.RELEASE, 5, 6, (b"x",), 1, 0),
        NewEntry(bucket, 4, EntryKind.BATCHES, -1, 5, (b"x",), 1, 0),
    ):
        with pytest.raises(ValueError, match="table 1, bucket 0"):
            wal.encode(header(), [wrong])


def test_only_data_has_entries() -> None:
    new = entry(TableBucket(1, None, 0), 0, [b"x"], EntryKind.BATCHES)
    with pytest.raises(ValueError, match="SEAL with 1 entries"):
        wal.encode(header(WalKind.SEAL), [new])
    with pytest.raises(ValueError, match="DATA with 0 entries"):
        wal.encode(header())


def test_names_sort_as_their_numbers() -> None:
    names = [WalName(epoch, number) for epoch in (1, 9, 16, 300) for number in (0, 15, 16, 4096)]
    paths = [name.path for name in names]
    assert paths == sorted(paths)
    assert [WalName.parse(path) for path in paths] == names
    assert paths[0] == "wal/0000000000000001/0000000000000000"
    assert WalName.parse("wal/1/0") is None
