"""Bucket ids: the measured vectors, and the compiled kernels against the plain twin."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import FIXTURES
from tests.record.keys.plain_hash import bucket_id, key_hash, spread
from zufluss.record.keys.hash import bucket_ids

FIXTURE = FIXTURES / "bucket-ids.json"
VECTORS = json.loads(FIXTURE.read_text())
LAKES = [None, "lance", "paimon", "iceberg"]


def _pack(keys: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(b"".join(keys), dtype=np.uint8)
    return data, np.cumsum([0, *map(len, keys)], dtype=np.int64)


def _lake(fmt: str) -> str | None:
    return None if fmt == "fluss" else fmt


@pytest.mark.parametrize("buckets", [3, 7, 16, 128])
@pytest.mark.parametrize("fmt", ["fluss", "paimon", "iceberg", "hudi"])
def test_every_measured_key_hashes_as_java_and_as_pyfluss_do(fmt: str, buckets: int) -> None:
    # a wrong bucket makes two rows of one key
    vectors = [v for v in VECTORS if v["format"] == fmt]
    java = [v["buckets"][str(buckets)] for v in vectors]
    ours = [v.get("zero_extended_tail", v["buckets"])[str(buckets)] for v in vectors]
    keys = [bytes.fromhex(v["encoded"]) for v in vectors]
    data, offsets = _pack(keys)

    assert bucket_ids(data, offsets, buckets, _lake(fmt), "java").tolist() == java
    assert bucket_ids(data, offsets, buckets, _lake(fmt), "pyfluss").tolist() == ours
    assert [bucket_id(k, buckets, _lake(fmt), "java") for k in keys] == java
    assert [bucket_id(k, buckets, _lake(fmt)) for k in keys] == ours


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("00", -783713497),
        ("01", -386724586),
        ("02", -976699032),
        ("2a", 2032745034),
        ("ffffffff0f", 571599),
        ("c0843d", -1268520771),
        ("0161", -1819928467),
        ("0568656c6c6f", 636232302),
        ("00000000000000000100000000000000", 1465514398),
        ("0000000000000000ffffffff00000000", 1133687267),
        ("", 0x087FCD5C),
    ],
)
def test_key_hash_gives_the_documented_numbers(key: str, expected: int) -> None:
    assert key_hash(bytes.fromhex(key)) == expected


def test_spread_gives_the_documented_numbers() -> None:
    assert [spread(v) for v in (0, 42, -77)] == [0x2362F9DE, 0x43A46E1D, 0x2EEB27DE]


@pytest.mark.parametrize(
    ("key", "buckets", "expected"),
    [
        (bytes.fromhex("000a"), 7, (1, 1, 3)),
        (bytes.fromhex("000a0a0a"), 12, (0, 11, 4)),
        (b"The quick brown fox jumps over the lazy dog", 8, (6, 0, 3)),
    ],
)
def test_short_and_long_keys_land_as_documented(
    key: bytes, buckets: int, expected: tuple[int, int, int]
) -> None:
    data, offsets = _pack([key])
    for lake, bucket in zip((None, "paimon", "iceberg"), expected, strict=True):
        assert bucket_ids(data, offsets, buckets, lake).tolist() == [bucket]


def test_java_and_pyfluss_disagree_on_key_300() -> None:
    data, offsets = _pack([bytes.fromhex("ac02")])
    assert bucket_ids(data, offsets, 16, None, "pyfluss").tolist() == [11]
    assert bucket_ids(data, offsets, 16, None, "java").tolist() == [5]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(max_size=40), max_size=20),
    st.integers(1, 4096),
    st.sampled_from(LAKES),
    st.sampled_from(["pyfluss", "java"]),
)
def test_the_kernel_equals_the_plain_twin(keys, buckets, lake, kind) -> None:
    data, offsets = _pack(keys)
    expected = [bucket_id(k, buckets, lake, kind) for k in keys]
    assert bucket_ids(data, offsets, buckets, lake, kind).tolist() == expected
    assert bucket_ids(data, offsets.astype(np.int32), buckets, lake, kind).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=4, max_size=4), max_size=20), st.integers(1, 4096))
def test_hudi_keys_equal_the_plain_twin(keys, buckets) -> None:
    data, offsets = _pack(keys)
    expected = [bucket_id(k, buckets, "hudi") for k in keys]
    assert bucket_ids(data, offsets, buckets, "hudi").tolist() == expected


@pytest.mark.parametrize("lake", [*LAKES, "hudi"])
@pytest.mark.parametrize("offsets", [[0, 9], [-1, 3], [3, 1], [0, 2, 1]])
def test_offsets_outside_the_data_are_refused(lake: str | None, offsets: list[int]) -> None:
    # without the check a kernel would read foreign memory
    with pytest.raises(ValueError, match="key"):
        bucket_ids(np.zeros(4, np.uint8), np.array(offsets), 3, lake)


def test_unknown_lakes_hashes_and_counts_are_refused() -> None:
    data, offsets = _pack([b"a"])
    with pytest.raises(ValueError, match="delta"):
        bucket_ids(data, offsets, 3, "delta")
    with pytest.raises(ValueError, match="rust"):
        bucket_ids(data, offsets, 3, None, "rust")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0"):
        bucket_ids(data, offsets, 0)
