"""Addresses of locations: each has one spelling, and invalid ones are refused."""

from pathlib import Path

import pytest

from zufluss.errors import ConfigError
from zufluss.remote.uri import MEMORY_VARIABLE, parse_durable_location, parse_location


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("/data/remote", "file:///data/remote"),
        ("/data//remote/./", "file:///data/remote"),
        ("file:/data/remote", "file:///data/remote"),
        ("file:///data/re$mo te", "file:///data/re$mo te"),
        ("  s3://bucket/path/  ", "s3://bucket/path"),
        ("s3a://bucket", "s3://bucket"),
        ("S3://my.bucket-1//a//b", "s3://my.bucket-1/a/b"),
        ("gs://bucket/x", "gs://bucket/x"),
        ("az://container/x", "az://container/x"),
        ("abfss://c@acc.dfs.core.windows.net/x", "abfss://c@acc.dfs.core.windows.net/x"),
        ("memory://test/x", "memory://test/x"),
    ],
)
def test_every_spelling_of_a_place_becomes_the_same(text: str, normalised: str) -> None:
    uri = parse_location(text, "remote.data.dirs")
    assert uri.text == normalised
    assert parse_location(uri.text, "again") == uri


@pytest.mark.parametrize("text", ["memory://test/x", "MEMORY://test"])
def test_memory_is_no_place_for_a_servers_files(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="memory is lost when the server stops; allowed: a path"):
        parse_durable_location(text, "remote.data.dirs")
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    assert parse_durable_location(text, "remote.data.dirs").scheme == "memory"


def test_a_relative_path_is_below_the_working_directory() -> None:
    assert parse_location("remote", "x").path == str(Path.cwd() / "remote")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("hdfs://host/x", "'hdfs' is not known"),
        ("s3://bucket/../other", "`..` is not allowed"),
        ("../x/..", "`..` is not allowed"),
        ("s3://bucket/x?versionId=1", "control characters are not allowed"),
        ("/data/a#b", "control characters are not allowed"),
        ("s3:///x", "not followed by the name of a bucket"),
        ("s3://key:secret@bucket/x", "not followed by the name of a bucket"),
        ("s3://bucket:9000/x", "not followed by the name of a bucket"),
        ("az://logs/x?sv=1&sig=secret", "control characters are not allowed"),
        ("s3://key:sec/ret@bucket/x", "not followed by the name of a bucket"),
        ("file://host/x", "a file has no host"),
        ("file:///", "below `/`"),
        ("/", "below `/`"),
    ],
)
def test_an_invalid_address_is_refused_with_the_name_of_the_option(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_location(text, "remote.data.dirs")
    assert "remote.data.dirs" in caught.value.message
    assert reason in caught.value.message
    assert "sec" not in caught.value.message


@pytest.mark.parametrize(
    ("outer", "inner", "contains"),
    [
        ("/data/a", "/data/a", True),
        ("/data/a", "/data/a/b", True),
        ("/data/a", "/data/ab", False),
        ("/data/a/b", "/data/a", False),
        ("s3://x", "s3a://x/y", True),
        ("s3://x/y", "s3://z/y", False),
        ("s3://x", "gs://x", False),
    ],
)
def test_a_place_contains_what_lies_below_it(outer: str, inner: str, contains: bool) -> None:
    assert parse_location(outer, "x").contains(parse_location(inner, "x")) is contains


def test_a_file_system_is_the_scheme_and_the_bucket() -> None:
    assert parse_location("s3://bucket/a/b", "x").fs_key == "s3://bucket"
    assert parse_location("/a/b", "x").fs_key == "file://"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("abfs://c@acc.dfs.core.windows.net/x", "abfss://c@acc.dfs.core.windows.net/x/y", True),
        ("abfss://c@acc.dfs.core.windows.net/x", "az://c/x", True),
        ("abfss://c@ACC.blob.core.windows.net/x", "abfss://c@acc.dfs.core.windows.net/x", True),
        ("abfss://c@acc.dfs.core.windows.net/x", "abfss://c@other.dfs.core.windows.net/x", False),
        ("az://c/x", "az://d/x", False),
        ("az://c/x", "s3://c/x", False),
    ],
)
def test_the_schemes_of_azure_lead_to_the_same_containers(one: str, other: str, same: bool) -> None:
    assert parse_location(one, "").contains(parse_location(other, "")) is same
