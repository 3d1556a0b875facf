"""The picture of the cluster: found by name and by id, changed by the same changes everywhere."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.support import COORDINATOR, NOON, TABLET, picture
from zufluss.cluster import codec
from zufluss.cluster.image import (
    BucketState,
    ClusterImage,
    DatabaseEntry,
    DatabaseGone,
    DatabasePut,
    ImageChange,
    NodesPut,
    PartitionEntry,
    PartitionGone,
    PartitionPut,
    TableEntry,
    TableGone,
    TablePut,
)
from zufluss.errors import PartitionNotExistError, SchemaNotExistError, TableNotExistError
from zufluss.model.schema import Schema
from zufluss.model.table import (
    DatabaseDescriptor,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.wire import messages as m

STATE = BucketState(replicas=(1, 2), leader=2, leader_epoch=5, isr=(2,), bucket_epoch=9)


def database(name: str) -> DatabasePut:
    return DatabasePut(DatabaseEntry(name, DatabaseDescriptor("c", {"k": name}), NOON, NOON + 1))


def table(table_id: int, name: str = "t", *, partitioned: bool = False) -> TablePut:
    schemas = {1: Schema.of("a INT, p STRING"), 2: Schema.of("a INT, p STRING, c INT")}
    descriptor = TableDescriptor(
        schemas[2], "c", ("p",) if partitioned else (), (), 2, {"table.log.ttl": "1d"}, {"x": "y"}
    )
    info = TableInfo(TablePath("d", name), table_id, 2, descriptor, NOON, NOON + 1)
    return TablePut(TableEntry(info, schemas, () if partitioned else (STATE, STATE)))


def partition(partition_id: int, table_id: int, name: str = "x") -> PartitionPut:
    return PartitionPut(
        PartitionEntry(partition_id, table_id, name, {"p": name}, NOON, (STATE, STATE))
    )


def image_of(*changes: ImageChange) -> ClusterImage:
    image = ClusterImage()
    image.apply(changes)
    return image


def test_a_table_is_found_by_path_and_by_id() -> None:
    image = image_of(database("d"), table(7))
    assert image.table(TablePath("d", "t")) is image.table_by_id(7)
    assert image.table_names("d") == ["t"]
    assert image.find_table(TablePath("d", "u")) is None
    assert image.find_table(TablePath("e", "t")) is None
    with pytest.raises(TableNotExistError, match="d\\.u"):
        image.table(TablePath("d", "u"))


def test_a_schema_is_found_by_id_and_the_current_one_without() -> None:
    """A missing table has no schema either: 9, as Fluss answers."""
    image = image_of(table(7))
    path = TablePath("d", "t")
    assert image.schema(path, None)[0] == 2
    assert len(image.schema(path, 1)[1]) == 2
    with pytest.raises(SchemaNotExistError, match=r"schema id 3 does not exist.*1 to 2"):
        image.schema(path, 3)
    with pytest.raises(SchemaNotExistError):
        image.schema(TablePath("d", "none"), 1)


def test_dropping_a_table_takes_its_partitions_along() -> None:
    image = image_of(table(7, partitioned=True), partition(1, 7), partition(2, 7, "y"))
    assert sorted(image.partitions(7)) == ["x", "y"]
    image.apply([TableGone(7)])
    assert image.partition_by_id(1) is None
    assert image.partitions(7) == {}
    assert list(image.buckets()) == []


def test_a_name_can_be_used_again_before_the_old_table_is_reported_gone() -> None:
    """The late news that the old table was dropped must not drop the new one."""
    image = image_of(table(7), table(8))
    assert image.table_by_id(7) is None
    image.apply([TableGone(7)])
    assert image.table(TablePath("d", "t")).info.table_id == 8


def test_a_partition_name_can_be_used_again() -> None:
    image = image_of(table(7, partitioned=True), partition(1, 7), partition(2, 7))
    image.apply([PartitionGone(1)])
    assert image.partition(TablePath("d", "t"), "x").partition_id == 2
    image.apply([PartitionGone(2)])
    with pytest.raises(PartitionNotExistError):
        image.partition(TablePath("d", "t"), "x")


def test_buckets_and_tables_are_named_with_ids_only_where_names_are_unknown() -> None:
    image = image_of(table(7), table(8, "u", partitioned=True), partition(3, 8), partition(4, 9))
    assert image.name_of(TableBucket(7, None, 1)) == "d.t, bucket 1"
    assert image.name_of(TableBucket(8, 3, 1)) == "d.u, partition x, bucket 1"
    assert image.name_of(TableBucket(8, 4, 1)) == "d.u, partition id 4, bucket 1"
    assert image.name_of(TableBucket(9, None, 1)) == "table id 9 (unknown here), bucket 1"
    assert (image.table_name(7), image.table_name(9)) == ("d.t", "table id 9 (unknown here)")


def test_leaders_are_known_for_buckets_that_exist() -> None:
    image = image_of(table(7), table(8, "u", partitioned=True), partition(3, 8))
    assert image.leader(TableBucket(7, None, 1)) == (2, 5)
    assert image.leader(TableBucket(8, 3, 0)) == (2, 5)
    assert image.leader(TableBucket(8, None, 0)) is None
    assert image.leader(TableBucket(8, 4, 0)) is None
    assert image.leader(TableBucket(7, None, -1)) is None


CHANGES = st.one_of(
    st.sampled_from([database("d"), database("e"), DatabaseGone("d"), DatabaseGone("e")]),
    st.builds(table, st.integers(0, 3), st.sampled_from(["t", "u"]), partitioned=st.just(True)),
    st.builds(TableGone, st.integers(0, 3)),
    st.builds(partition, st.integers(0, 5), st.integers(0, 3), st.sampled_from(["x", "y"])),
    st.builds(PartitionGone, st.integers(0, 5)),
    st.just(NodesPut(COORDINATOR, (TABLET,))),
    st.just(NodesPut(None, ())),
)


def sensible(image: ClusterImage, change: ImageChange) -> bool:
    """The coordinator names partitions of tables that exist, and each id for one partition."""
    if not isinstance(change, PartitionPut):
        return True
    entry = change.entry
    known = image.partition_by_id(entry.partition_id)
    taken = image.partitions(entry.table_id).get(entry.name)
    return (
        image.table_by_id(entry.table_id) is not None
        and (known is None or known == entry)
        and (taken is None or taken == entry)
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(CHANGES, max_size=25))
def test_a_copy_follows_by_snapshot_by_changes_and_over_the_wire(
    changes: list[ImageChange],
) -> None:
    """The image of a tablet server equals the coordinator's; changes may be applied twice."""
    image, follower, wired = ClusterImage(), ClusterImage(), ClusterImage()
    for change in changes:
        if not sensible(image, change):
            continue
        image.apply([change])
        follower.apply([change, change])
        wired.apply(codec.changes_of(over_the_wire([change])))
    assert picture(follower) == picture(wired) == picture(image)
    stale = image_of(database("z"), table(9, "z"), partition(9, 9, "z"))
    stale.apply(codec.changes_of(over_the_wire(image.snapshot())))
    assert picture(stale) == picture(image)
    for entry in image.tables():
        assert image.table(entry.info.path) is entry
    counted = Counter(state.leader for _, _, state in image.buckets())
    assert +image.leaders == +follower.leaders == +wired.leaders == +stale.leaders == counted


def over_the_wire(changes: list[ImageChange]) -> m.UpdateMetadataRequest:
    request = codec.update_request(changes, coordinator_epoch=3, server_epoch=4)
    parsed = m.UpdateMetadataRequest.FromString(request.SerializeToString())
    assert (parsed.coordinator_epoch, parsed.server_epoch) == (3, 4)
    return parsed
