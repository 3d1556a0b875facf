"""Table paths, partitions and buckets keep an absent partition apart from partition 0."""

from __future__ import annotations

import pytest

from zufluss.errors import InvalidPartitionError
from zufluss.model.table import PhysicalTablePath, TableBucket, TablePath
from zufluss.wire import messages as m
from zufluss.wire import tables


@pytest.mark.parametrize("partition_id", [None, 0, 7])
def test_a_bucket_keeps_its_partition_or_its_absence(partition_id):
    bucket = TableBucket(3, partition_id, 2)
    message = tables.bucket_to_proto(bucket)
    assert message.HasField("partition_id") == (partition_id is not None)
    assert tables.bucket_from_proto(message) == bucket
    assert tables.partition_id_of(message) == partition_id
    assert tables.bucket_key(message) == (partition_id, 2)


def test_a_bucket_without_a_table_takes_the_given_one():
    message = m.PbLookupReqForBucket(bucket_id=4)
    assert tables.bucket_in_table(9, message) == TableBucket(9, None, 4)


def test_paths_travel_both_ways():
    path = TablePath("db", "t")
    assert tables.path_from_proto(tables.path_to_proto(path)) == path
    for physical in (PhysicalTablePath("db", "t"), PhysicalTablePath("db", "t", "2024")):
        message = tables.physical_path_to_proto(physical)
        assert tables.physical_path_from_proto(message) == physical


def test_a_partition_spec_names_each_key_once():
    message = tables.spec_to_proto({"day": "1", "region": "x"})
    assert tables.spec_from_proto(message) == {"day": "1", "region": "x"}
    message.partition_key_values.add(key="day", value="2")
    with pytest.raises(InvalidPartitionError, match="given twice"):
        tables.spec_from_proto(message)


def test_offsets_travel_per_partition_and_name_each_bucket_once():
    offsets = {(None, 0): 5, (None, 1): 0, (0, 0): 7}
    parts = tables.offsets_to_proto(offsets)
    assert len(parts) == 2
    assert tables.offsets_from_proto(parts) == offsets
    with pytest.raises(ValueError, match="there twice"):
        tables.offsets_from_proto([*parts, parts[0]])
