"""Names of remote files: they are Fluss's, and only exact names are parsed."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import FIXTURES
from zufluss.model.table import PhysicalTablePath, TableBucket, TablePath
from zufluss.remote import layout

SEGMENT = "74c7c8aa-d592-4a0e-9549-98b5a125a3b6"
BUCKET = "log/db/t-1/0"

NAME = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,20}", fullmatch=True)
IDS = st.integers(0, 2**62)
OWNERS = st.builds(
    lambda database, table, partition, table_id, partition_id, bucket_id: (
        PhysicalTablePath(database, table, partition),
        TableBucket(table_id, None if partition is None else partition_id, bucket_id),
    ),
    NAME,
    NAME,
    st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_$-]{0,20}", fullmatch=True),
    IDS,
    IDS,
    st.integers(0, 2**31 - 1),
)


def test_names_are_those_that_fluss_gives() -> None:
    directory = layout.bucket_directory(
        layout.LOG, PhysicalTablePath("rem", "tiered"), TableBucket(290, None, 0)
    )
    assert directory == "log/rem/tiered-290/0"
    below = FIXTURES / "remote-log" / "0"
    for suffix in (".log", ".index", ".timeindex"):
        assert (below / layout.segment_file("0", SEGMENT, 0, suffix)[2:]).exists()
    assert (below / layout.segment_file("0", SEGMENT, 140, ".writer_snapshot")[2:]).exists()


def test_every_file_that_fluss_wrote_is_understood() -> None:
    for kind, owner in (("remote-log", "log/rem/tiered-290"), ("kv-snapshot", "kv/fx/kv_all-244")):
        below = FIXTURES / kind / "0"
        files = [x.relative_to(below.parent) for x in below.rglob("*") if x.is_file()]
        assert files
        for file in files:
            found = layout.parse(f"{owner}/{file}")
            assert found is not None
            assert found.bucket.bucket_id == 0


@given(OWNERS, st.integers(0, 2**62))
@settings(max_examples=100)
def test_every_path_that_we_name_is_parsed_again(
    owner: tuple[PhysicalTablePath, TableBucket], number: int
) -> None:
    path, bucket = owner
    log = layout.bucket_directory(layout.LOG, path, bucket)
    kv = layout.bucket_directory(layout.KV, path, bucket)
    private = f"{layout.snapshot_directory(kv, number)}/{uuid.uuid4()}"
    cases = {
        layout.segment_file(log, SEGMENT, number, ".log"): ("log", SEGMENT, None),
        layout.new_manifest(log): ("log", None, None),
        layout.new_shared_file(kv): ("kv", None, None),
        private: ("kv", None, number),
        f"{layout.snapshot_directory(kv, number)}/{layout.METADATA_NAME}": ("kv", None, number),
    }
    for name, (kind, segment_id, snapshot_id) in cases.items():
        assert layout.parse(name) == layout.RemoteName(
            kind, path.database, path.table, path.partition, bucket, segment_id, snapshot_id
        )


@given(OWNERS)
@settings(max_examples=50)
def test_a_bucket_lies_below_its_partition_and_that_below_its_table(
    owner: tuple[PhysicalTablePath, TableBucket],
) -> None:
    path, bucket = owner
    table = layout.table_directory(
        layout.LOG, TablePath(path.database, path.table), bucket.table_id
    )
    partition = layout.owner_directory(layout.LOG, path, bucket.table_id, bucket.partition_id)
    directory = layout.bucket_directory(layout.LOG, path, bucket)
    assert f"{partition}/".startswith(f"{table}/")
    assert directory.startswith(f"{partition}/")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "log",
        BUCKET,
        f"{BUCKET}/{SEGMENT}",
        f"{BUCKET}/{SEGMENT}/0.log",
        f"{BUCKET}/{SEGMENT}/00000000000000000000.txt",
        f"{BUCKET}/{SEGMENT}/00000000000000000000.log\n",
        f"{BUCKET}/{SEGMENT}/00000000000000000000.log/x",
        f"{BUCKET}/{SEGMENT.upper()}/00000000000000000000.log",
        f"/{BUCKET}/{SEGMENT}/00000000000000000000.log",
        f"x/{BUCKET}/{SEGMENT}/00000000000000000000.log",
        f"kv/db/t-1/0/{SEGMENT}/00000000000000000000.log",
        f"log/db/../t-1/0/{SEGMENT}/00000000000000000000.log",
        f"log/db/t-01/0/{SEGMENT}/00000000000000000000.log",
        f"log/db/t-1/00/{SEGMENT}/00000000000000000000.log",
        f"log/db/t-١/0/{SEGMENT}/00000000000000000000.log",
        f"log/db/t-1/0/{SEGMENT}/0000000000000000000٠.log",
        f"log/db/t/0/{SEGMENT}/00000000000000000000.log",
        f"{BUCKET}/metadata/{SEGMENT}",
        f"{BUCKET}/metadata/mine.manifest",
        f"kv/db/t-1/0/shared/{SEGMENT}.sst",
        "kv/db/t-1/0/shared/000008.sst",
        "kv/db/t-1/0/snap-1/CURRENT",
        "kv/db/t-1/0/snap-01/_METADATA",
        "kv/db/t-1/0/_METADATA",
        f"lake/db/t-1/metadata/{SEGMENT}.offsets",
        f".zufluss-probe/{SEGMENT}",
        "some/file/of/somebody/else",
    ],
)
def test_a_path_that_is_not_exactly_ours_is_not_parsed(path: str) -> None:
    """The sweep deletes only files whose names are parsed."""
    assert layout.parse(path) is None


@settings(max_examples=100)
@given(owner=OWNERS, kind=st.sampled_from([layout.LOG, layout.KV]))
def test_a_full_path_says_where_its_location_begins(
    owner: tuple[PhysicalTablePath, TableBucket], kind: str
) -> None:
    directory = layout.bucket_directory(kind, *owner)
    for root in ("/place", "/mnt/log/kv/a", "/mnt/log/db/t-1"):
        for path in (directory, layout.segment_file(directory, SEGMENT, 0, ".log")):
            assert layout.root_of(f"{root}/{path}") == root
    assert layout.root_of("/place/elsewhere/file") is None
