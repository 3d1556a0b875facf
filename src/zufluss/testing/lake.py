"""Conformance suite of a lake format: a format is right when this class is green for it.

Subclass it in a test module, give the format, a lake of its own per test, and a reader that shares
no code with the format; pytest runs every promise of `zufluss.lake.base` against it:

    class TestMyFormat(LakeConformance):
        @pytest.fixture
        def factory(self):
            return MyTiering()

        @pytest.fixture
        def properties(self, tmp_path):
            return {"warehouse": f"file://{tmp_path}"}

        def read_rows(self, table, properties, snapshot_id=None):
            return ...  # live rows with system columns, as Arrow

        def list_files(self, table, properties):
            return ...  # every file in the lake table's directory

        def foreign_commit(self, table, properties):
            ...  # a commit by somebody else, which changes no row

Tests of what a format says it cannot do (`LakeCapabilities`) skip. Files are never made older: a
sweep is asked with a bound in the future, or in the past. No test waits on a clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest

from zufluss.clock import wall_ms
from zufluss.lake.base import (
    LakeCommitRefusedError,
    LakeError,
    LakeTableError,
)
from zufluss.model.expression import ColumnRef
from zufluss.model.lake import OFFSET_COLUMN
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.testing.lake_rounds import (
    AnyFactory,
    LakeRounds,
    Row,
    Written,
    lake_table,
    plain_rows,
)
from zufluss.testing.lake_samples import (
    ALL_TYPES,
    EDGES,
    FULL_ROW,
    KEYED,
    LOG,
    NULLS,
    key_rows,
    keyed_rows,
    named_rows,
    partition_rows,
    random_changes,
    typed_rows,
    with_column,
)

HOUR_MS = 3_600_000
"""An hour: bounds in the past and in the future."""


class LakeConformance:
    """The promises of `zufluss.lake.base` as tests. Subclass and give what the module names."""

    @pytest.fixture
    def factory(self) -> AnyFactory:
        """The format under test."""
        raise NotImplementedError("the fixture `factory` gives the LakeTieringFactory under test")

    @pytest.fixture
    def properties(self) -> Mapping[str, str]:
        """Catalog properties of a lake that is new for each test."""
        raise NotImplementedError("the fixture `properties` gives the properties of a new lake")

    def read_rows(
        self, table: TableInfo, properties: Mapping[str, str], snapshot_id: int | None = None
    ) -> pa.Table:
        """Live rows of a snapshot, or of what a reader sees now, by an independent reader."""
        raise NotImplementedError("read_rows gives the lake table's rows by an independent reader")

    def list_files(self, table: TableInfo, properties: Mapping[str, str]) -> set[str]:
        """Every file in the directory of the lake table."""
        raise NotImplementedError("list_files gives the files in the lake table's directory")

    def foreign_commit(self, table: TableInfo, properties: Mapping[str, str]) -> None:
        """A snapshot by somebody else on top, which changes no row."""
        raise NotImplementedError("foreign_commit puts a snapshot of somebody else on top")

    def renamed(self, table: TableInfo) -> TablePath:
        """The name of a lake table after another table took its name."""
        old = f"{table.path.table}__{table.table_id}_{table.created_time}"
        return TablePath(table.path.database, old)

    @pytest.fixture
    def log(self, factory: AnyFactory, properties: Mapping[str, str]) -> LakeRounds:
        """A log table whose lake table is prepared."""
        return self._prepared(factory, lake_table(factory.format, LOG), properties)

    @pytest.fixture
    def keyed(self, factory: AnyFactory, properties: Mapping[str, str]) -> LakeRounds:
        """A primary-key table whose lake table is prepared; skips where there are none."""
        if not factory.capabilities.primary_key:
            pytest.skip(f"{factory.format} has no primary keys")
        return self._prepared(factory, lake_table(factory.format, KEYED), properties)

    def _prepared(
        self, factory: AnyFactory, table: TableInfo, properties: Mapping[str, str]
    ) -> LakeRounds:
        factory.validate_table(table)
        lake = LakeRounds(factory, table, properties)
        lake.prepare()
        return lake

    def _rows(self, lake: LakeRounds, snapshot_id: int | None = None) -> list[Row]:
        return plain_rows(self.read_rows(lake.table, lake.properties, snapshot_id))

    def _files(self, lake: LakeRounds) -> set[str]:
        return self.list_files(lake.table, lake.properties)

    # The lake table

    def test_preparing_again_changes_nothing(self, log: LakeRounds) -> None:
        """Every round prepares; a table must not grow a version with each."""
        before = self._files(log)
        log.prepare()
        assert self._files(log) == before
        assert log.newest() is None
        assert self._rows(log) == []

    def test_a_column_added_to_the_table_is_there_before_its_data(self, log: LakeRounds) -> None:
        """Every reader reads NULL for it in older rows."""
        log.commit(log.write(named_rows(0, 4)))
        log.evolved(with_column(log.table, "extra", "DECIMAL(10, 2)"))
        extra = pa.array([Decimal("1.25"), None], pa.decimal128(10, 2))
        log.commit(log.write(named_rows(4, 2).append_column("extra", extra)))
        assert self._rows(log) == log.contents()
        assert log.own_rows() == log.contents()

    def test_a_table_of_the_same_name_starts_afresh_and_the_old_one_keeps_its_rows(
        self, log: LakeRounds
    ) -> None:
        """Dropped and re-created: nobody asked to delete the lake's copy."""
        log.commit(log.write(named_rows(0, 4)))
        table = replace(log.table, table_id=2, created_time=log.table.created_time + 1)
        new = self._prepared(log.factory, table, log.properties)
        assert new.newest() is None
        assert self._rows(new) == []
        new.commit(new.write(named_rows(10, 3)))
        assert self._rows(new) == new.contents()
        old = replace(log.table, path=self.renamed(log.table))
        assert plain_rows(self.read_rows(old, log.properties)) == log.contents()

    def test_a_table_with_the_same_id_of_another_cluster_is_another_table(
        self, log: LakeRounds
    ) -> None:
        """Ids are given per cluster: a new cluster over an old lake starts with the same ones."""
        log.commit(log.write(named_rows(0, 2)))
        table = replace(log.table, created_time=log.table.created_time + 5)
        new = self._prepared(log.factory, table, log.properties)
        assert new.newest() is None
        assert self._rows(new) == []

    def test_reading_a_table_that_was_never_tiered_says_so(
        self, factory: AnyFactory, properties: Mapping[str, str]
    ) -> None:
        """A union read asks before the first round."""
        lake = LakeRounds(factory, lake_table(factory.format, LOG, name="none"), properties)
        with pytest.raises(LakeTableError), lake.reader():
            pass

    # Writing and committing

    def test_rows_of_several_buckets_appear_together_and_not_before_the_commit(
        self, log: LakeRounds
    ) -> None:
        """Files alone are nothing; a snapshot is all buckets of a round."""
        written = log.write(named_rows(0, 10))
        assert len(written.results) == log.table.bucket_count
        assert self._rows(log) == []
        log.commit(written)
        assert self._rows(log) == log.contents()
        assert len(log.contents()) == 10

    def test_rounds_add_up_and_each_snapshot_stays_what_it_was(self, log: LakeRounds) -> None:
        """A pinned read must not see later rounds."""
        states = []
        for number in range(3):
            result = log.commit(log.write(named_rows(10 * number, 5)))
            states.append((result.snapshot_id, log.contents()))
        for snapshot_id, rows in states:
            assert self._rows(log, snapshot_id) == rows
            assert log.own_rows(snapshot_id) == rows

    def test_bytes_of_another_format_are_refused(self, factory: AnyFactory) -> None:
        """Driver and executors of different versions must not misread each other."""
        for serde in (factory.write_result_serde, factory.committable_serde):
            with pytest.raises(LakeError):
                serde.loads(b"\xff\x05other")

    def test_the_newest_snapshot_is_found_with_the_properties_of_its_commit(
        self, log: LakeRounds
    ) -> None:
        """That is how a crash between the lake's commit and the server's is repaired."""
        assert log.newest() is None
        for _ in range(2):
            written = log.write(named_rows(0, 3))
            wanted = log.round_properties({**log.offsets, **written.stops})
            result = log.commit(written)
            newest = log.newest()
            assert newest is not None
            assert newest.snapshot_id == result.snapshot_id
            assert wanted.items() <= newest.properties.items()
            assert newest.timestamp_ms > log.table.created_time

    @pytest.mark.parametrize("empty_lake", [True, False])
    def test_a_commit_that_expects_an_older_snapshot_is_refused(
        self, log: LakeRounds, empty_lake: bool
    ) -> None:
        """A zombie plans from a snapshot that is no longer the newest of ours."""
        stale = None
        if not empty_lake:
            stale = log.commit(log.write(named_rows(0, 3))).snapshot_id
        zombie = log.write(named_rows(10, 3), attempt="zombie")
        newest = log.commit(log.write(named_rows(20, 3))).snapshot_id
        with pytest.raises(LakeCommitRefusedError):
            log.commit(zombie, expected=stale)
        assert log.newest_id() == newest
        assert self._rows(log) == log.contents()

    def test_a_commit_that_expects_a_snapshot_that_never_was_is_refused(
        self, log: LakeRounds
    ) -> None:
        """The lake was restored from a backup, or is another one."""
        with pytest.raises(LakeCommitRefusedError):
            log.commit(log.write(named_rows(0, 3)), expected=12345)
        assert log.newest() is None

    def test_commits_of_others_do_not_stand_in_the_way(self, log: LakeRounds) -> None:
        """An engine that maintains the table is not a second tiering service."""
        ours = log.commit(log.write(named_rows(0, 3))).snapshot_id
        written = log.write(named_rows(10, 3))
        self.foreign_commit(log.table, log.properties)
        assert log.newest_id() == ours
        log.commit(written, expected=ours)
        self.foreign_commit(log.table, log.properties)
        assert self._rows(log) == log.contents()

    def test_a_committer_that_was_opened_before_other_commits_still_works(
        self, log: LakeRounds
    ) -> None:
        """What it knew of the table is old; its expectation is not."""
        with log.committer() as early:
            early.prepare_table()
            first = log.commit(log.write(named_rows(0, 3))).snapshot_id
            self.foreign_commit(log.table, log.properties)
            written = log.write(named_rows(10, 3))
            properties = log.round_properties(written.stops)
            early.commit(early.to_committable(written.results), properties, first)
            newest = early.newest()
        assert newest is not None
        assert newest.snapshot_id == log.newest_id() != first
        assert len(self._rows(log)) == 6

    def test_an_empty_commit_moves_offsets_and_no_rows(self, log: LakeRounds) -> None:
        """A primary-key table whose changes cancelled each other has no file to commit."""
        if not log.factory.capabilities.empty_commit:
            pytest.skip(f"{log.factory.format} has no empty commits")
        first = log.commit(log.write(named_rows(0, 3))).snapshot_id
        nothing = log.write(named_rows(0, 0))
        second = log.commit(nothing).snapshot_id
        assert second != first
        newest = log.newest()
        assert newest is not None
        assert newest.properties["zufluss.round"] == "round-1"
        assert self._rows(log) == log.contents()

    def test_a_writer_that_got_no_rows_writes_no_rows(self, log: LakeRounds) -> None:
        """A range may hold nothing but records that others removed."""
        context = log.writer_context(_bucket_zero(log), None, 0, None, "idle")
        writer = log.factory.create_writer(context)
        result = writer.complete()
        log.commit(log.write(named_rows(0, 2)) + Written((result,), named_rows(0, 0, log)))
        assert self._rows(log) == log.contents()

    def test_an_aborted_writer_leaves_no_file(self, log: LakeRounds) -> None:
        """The task failed after it had begun to write."""
        before = self._files(log)
        context = log.writer_context(_bucket_zero(log), None, 4, None, "gone")
        writer = log.factory.create_writer(context)
        writer.append(log.with_system_columns(named_rows(0, 4), 0, 0).to_batches()[0])
        writer.abort()
        assert self._files(log) == before

    def test_an_aborted_round_leaves_no_file(self, log: LakeRounds) -> None:
        """The refused caller cleans up its commit."""
        log.commit(log.write(named_rows(0, 2)))
        before = self._files(log)
        written = log.write(named_rows(10, 6))
        assert self._files(log) > before
        with log.committer() as committer:
            committer.abort(committer.to_committable(written.results))
        assert self._files(log) == before
        assert self._rows(log) == log.contents()

    def test_of_two_attempts_at_one_range_only_the_collected_one_counts(
        self, log: LakeRounds
    ) -> None:
        """Spark runs a task again while the first attempt may still be writing."""
        handle = log.prepare()
        log.write(named_rows(0, 6), handle=handle, attempt="lost")
        log.commit(log.write(named_rows(0, 6), handle=handle, attempt="kept"))
        assert self._rows(log) == log.contents()

    # Primary keys

    def test_upserts_deletes_and_new_inserts_leave_one_row_per_key(self, keyed: LakeRounds) -> None:
        """Rounds of random changes against a dictionary; at the end every snapshot again."""
        rng = random.Random(20260215)
        states = []
        for number in range(6):
            result = keyed.commit(random_changes(keyed, rng, number))
            states.append((result.snapshot_id, keyed.contents()))
            assert self._rows(keyed) == keyed.contents(), f"after round {number}"
        for snapshot_id, rows in states:
            assert keyed.own_rows(snapshot_id) == rows
        assert self._rows(keyed, states[1][0]) == states[1][1]

    def test_a_key_that_was_deleted_can_come_back(self, keyed: LakeRounds) -> None:
        """Its old position stays deleted, its new one lives."""
        for upserts, deletes in [([1, 2, 3], []), ([], [2]), ([2], [3]), ([3], [1, 2]), ([1], [])]:
            keyed.commit(keyed.change(keyed_rows(upserts, "r"), key_rows(deletes)))
            assert self._rows(keyed) == keyed.contents()

    def test_deleting_a_key_that_the_lake_never_had_is_fine(self, keyed: LakeRounds) -> None:
        """Inserted and deleted between two rounds."""
        keyed.commit(keyed.change(keyed_rows([1], "a"), key_rows([7, 8, 9])))
        keyed.commit(keyed.change(keyed_rows([], "a"), key_rows([100])))
        assert self._rows(keyed) == keyed.contents()

    def test_a_round_may_delete_everything(self, keyed: LakeRounds) -> None:
        """An empty table is a table."""
        keyed.commit(keyed.change(keyed_rows(range(20), "a")))
        keyed.commit(keyed.change(keyed_rows([], "a"), key_rows(range(20))))
        assert self._rows(keyed) == []
        keyed.commit(keyed.change(keyed_rows([5], "b")))
        assert self._rows(keyed) == keyed.contents()

    def test_a_refused_round_of_changes_deletes_nothing(self, keyed: LakeRounds) -> None:
        """Deletes of a zombie are as invisible as its rows."""
        first = keyed.commit(keyed.change(keyed_rows(range(6), "a"))).snapshot_id
        zombie = keyed.change(keyed_rows([0, 1], "zombie"), key_rows([2, 3]), attempt="zombie")
        keyed.commit(keyed.change(keyed_rows([1], "b"), key_rows([4])))
        with pytest.raises(LakeCommitRefusedError):
            keyed.commit(zombie, expected=first)
        assert self._rows(keyed) == keyed.contents()

    def test_keys_of_several_columns_are_told_apart(
        self, factory: AnyFactory, properties: Mapping[str, str]
    ) -> None:
        """(1, 23) and (12, 3) are two keys."""
        if not factory.capabilities.primary_key:
            pytest.skip(f"{factory.format} has no primary keys")
        columns = "a STRING, b INT, v STRING, PRIMARY KEY (a, b)"
        table = lake_table(factory.format, columns, bucket_keys=["a"])
        lake = self._prepared(factory, table, properties)
        rows = pa.table({"a": ["1", "12", "1"], "b": [23, 3, 3], "v": ["x", "y", "z"]})
        lake.commit(lake.change(rows.cast(table.schema.arrow)))
        lake.commit(lake.change(rows.slice(0, 1), rows.slice(2, 1)))
        assert self._rows(lake) == lake.contents()
        assert len(lake.contents()) == 2

    # Types and partitions

    def test_every_type_comes_back_as_it_went_in(
        self, factory: AnyFactory, properties: Mapping[str, str]
    ) -> None:
        """Full, empty and NULL values of all types, through both readers."""
        lake = self._prepared(factory, lake_table(factory.format, ALL_TYPES), properties)
        lake.commit(lake.write(typed_rows(lake.table, [FULL_ROW, EDGES, NULLS])))
        assert lake.own_rows() == lake.contents()
        assert self._rows(lake) == lake.contents()

    def test_every_type_comes_back_from_a_primary_key_table(
        self, factory: AnyFactory, properties: Mapping[str, str]
    ) -> None:
        """The same through upserts, twice."""
        if not factory.capabilities.primary_key:
            pytest.skip(f"{factory.format} has no primary keys")
        table = lake_table(factory.format, f"{ALL_TYPES}, PRIMARY KEY (id)")
        lake = self._prepared(factory, table, properties)
        lake.commit(lake.change(typed_rows(table, [FULL_ROW, EDGES, NULLS])))
        lake.commit(lake.change(typed_rows(table, [FULL_ROW | {"id": 3}, NULLS | {"id": 1}])))
        assert lake.own_rows() == lake.contents()
        assert self._rows(lake) == lake.contents()

    @pytest.mark.parametrize("keyed_table", [False, True])
    def test_a_partitioned_table_keeps_its_partitions_apart(
        self, factory: AnyFactory, properties: Mapping[str, str], keyed_table: bool
    ) -> None:
        """The same bucket and offset, and the same key, exist once per partition."""
        lake = self._partitioned(factory, properties, keyed_table)
        for number in range(2):
            parts = [
                partition_rows(lake, region, range(number, number + 4), f"v{number}")
                for region in ("eu", "us-1", "ä_b")
            ]
            lake.commit(parts[0] + parts[1] + parts[2])
            assert self._rows(lake) == lake.contents()
        assert lake.own_rows() == lake.contents()

    @pytest.mark.parametrize("keyed_table", [False, True])
    def test_a_partition_created_again_takes_the_place_of_the_one_that_was_dropped(
        self, factory: AnyFactory, properties: Mapping[str, str], keyed_table: bool
    ) -> None:
        """Its first snapshot has none of the old rows; a reader leaves them out before that."""
        lake = self._partitioned(factory, properties, keyed_table)
        eu, us = (partition_rows(lake, region, range(4), "old") for region in ("eu", "us"))
        first, before = lake.commit(eu + us).snapshot_id, lake.contents()
        lake.recreate("eu")
        kept = [row for row in before if row["region"] == "us"]
        assert lake.own_rows(without=["eu"]) == kept
        assert self._rows(lake) == before
        for ids in (range(2, 5), range(1, 3)):
            lake.commit(partition_rows(lake, "eu", ids, f"new-{ids}"))
            assert self._rows(lake) == lake.own_rows() == lake.contents()
        assert lake.own_rows(without=["eu"]) == kept
        assert self._rows(lake, first) == before

    def test_naming_partitions_and_filtering_leave_out_nothing_that_matches(
        self, factory: AnyFactory, properties: Mapping[str, str]
    ) -> None:
        """Pruning may keep too much, never too little."""
        lake = self._partitioned(factory, properties, False)
        eu, us = (partition_rows(lake, region, range(5), region) for region in ("eu", "us"))
        lake.commit(eu + us)
        everything = [r for r in lake.contents() if r["region"] == "eu"]
        assert [r for r in lake.own_rows(partitions=["eu"]) if r["region"] == "eu"] == everything
        wanted = [r for r in lake.contents() if r["id"] > 3]
        found = lake.own_rows(filter=ColumnRef("id") > 3)
        assert [r for r in found if r["id"] > 3] == wanted

    def _partitioned(
        self, factory: AnyFactory, properties: Mapping[str, str], keyed: bool
    ) -> LakeRounds:
        if keyed and not factory.capabilities.primary_key:
            pytest.skip(f"{factory.format} has no primary keys")
        key = ", PRIMARY KEY (region, id)" if keyed else ""
        columns = f"region STRING NOT NULL, id BIGINT NOT NULL, v STRING{key}"
        table = lake_table(factory.format, columns, partition_keys=["region"])
        return self._prepared(factory, table, properties)

    # Reading

    def test_a_reader_gives_the_columns_asked_for_in_their_order_and_types(
        self, log: LakeRounds
    ) -> None:
        """A union read lays these batches beside those of the log."""
        snapshot = log.commit(log.write(named_rows(0, 6))).snapshot_id
        columns = [OFFSET_COLUMN, "name", "id"]
        with log.reader() as reader:
            batches = list(reader.read(reader.plan(snapshot), columns))
        assert batches
        for batch in batches:
            assert batch.schema.names == columns
            assert batch.schema.field("id").type == pa.int32()
            assert batch.schema.field("name").type == pa.string()

    def test_a_plan_names_the_files_and_their_rows(self, keyed: LakeRounds) -> None:
        """Engines that read files themselves count on it."""
        snapshot = keyed.commit(keyed.change(keyed_rows(range(10), "a"))).snapshot_id
        with keyed.reader() as reader:
            scan = reader.plan(snapshot)
        assert scan.snapshot_id == snapshot
        assert sum(file.records for file in scan.files) == 10
        assert all(file.size > 0 for file in scan.files)
        newer = keyed.commit(keyed.change(keyed_rows([1], "b"), key_rows([2]))).snapshot_id
        with keyed.reader() as reader:
            assert sum(file.records for file in reader.plan(newer).files) == 11
            assert reader.plan(snapshot).files == scan.files

    # Maintenance

    def test_compaction_keeps_the_rows_and_what_is_known_of_the_newest_round(
        self, log: LakeRounds
    ) -> None:
        """Recovery after it still finds the offsets."""
        for number in range(5):
            log.commit(log.write(named_rows(10 * number, 4)))
        before, files = log.newest(), _planned(log)
        assert before is not None
        result = _compact(log)
        newest = log.newest()
        assert newest is not None
        assert newest.snapshot_id == result
        keys = [key for key in before.properties if key.startswith(("zufluss.", "fluss-"))]
        assert {k: newest.properties[k] for k in keys} == {k: before.properties[k] for k in keys}
        assert _planned(log) < files
        assert self._rows(log) == log.own_rows() == log.contents()
        assert self._rows(log, before.snapshot_id) == log.contents()

    def test_compacting_what_is_compact_does_nothing(self, log: LakeRounds) -> None:
        """It runs after every round; an idle table must not grow a snapshot with each."""
        _needs_compaction(log)
        with log.maintenance() as maintenance:
            assert maintenance.compact(None) is None
        for number in range(5):
            log.commit(log.write(named_rows(10 * number, 4)))
        newest = _compact(log)
        with log.maintenance() as maintenance:
            assert maintenance.compact(newest) is None
        assert log.newest_id() == newest

    def test_compaction_applies_deletes(self, keyed: LakeRounds) -> None:
        """Rounds continue after it, on the files it wrote."""
        rng = random.Random(7)
        for number in range(4):
            keyed.commit(random_changes(keyed, rng, number))
        _compact(keyed)
        assert self._rows(keyed) == keyed.own_rows() == keyed.contents()
        with keyed.reader() as reader:
            files = reader.plan(_newest_id(keyed)).files
        assert sum(file.records for file in files) == len(keyed.contents())
        for number in range(4, 8):
            keyed.commit(random_changes(keyed, rng, number))
            assert self._rows(keyed) == keyed.contents()
        _compact(keyed)
        assert self._rows(keyed) == keyed.own_rows() == keyed.contents()

    def test_compaction_joins_files_from_before_and_after_a_column_was_added(
        self, log: LakeRounds
    ) -> None:
        """Older rows get the NULL that readers showed all along."""
        _needs_compaction(log)
        for number in range(2):
            log.commit(log.write(named_rows(10 * number, 4)))
        log.evolved(with_column(log.table, "extra", "ROW<a INT, b ARRAY<STRING>>"))
        extra = pa.array([{"a": 1, "b": ["x"]}] * 4, log.table.schema.arrow.field("extra").type)
        for number in range(2):
            log.commit(log.write(named_rows(100 * number, 4).append_column("extra", extra)))
        _compact(log)
        assert self._rows(log) == log.own_rows() == log.contents()

    def test_compaction_keeps_values_of_every_type(
        self, factory: AnyFactory, properties: Mapping[str, str]
    ) -> None:
        """What was written once by a round is written again by other code."""
        lake = self._prepared(factory, lake_table(factory.format, ALL_TYPES), properties)
        for _ in range(4):
            lake.commit(lake.write(typed_rows(lake.table, [FULL_ROW, EDGES, NULLS])))
        _compact(lake)
        assert self._rows(lake) == lake.own_rows() == lake.contents()

    def test_compaction_is_refused_when_a_round_came_first(self, keyed: LakeRounds) -> None:
        """A zombie's compaction would bring back what a later round deleted."""
        _needs_compaction(keyed)
        for number in range(4):
            stale = keyed.commit(keyed.change(keyed_rows([number, 50], f"{number}"))).snapshot_id
        keyed.commit(keyed.change(keyed_rows([1], "new"), key_rows([2])))
        with keyed.maintenance() as maintenance, pytest.raises(LakeCommitRefusedError):
            maintenance.compact(stale)
        assert self._rows(keyed) == keyed.contents()

    def test_a_round_that_was_planned_before_a_compaction_is_refused(
        self, keyed: LakeRounds
    ) -> None:
        """Its deletes name rows of files that are gone."""
        for number in range(4):
            planned = keyed.commit(keyed.change(keyed_rows([number, 50], f"{number}"))).snapshot_id
        late = keyed.change(keyed_rows([1], "late"), key_rows([50]), attempt="late")
        _compact(keyed)
        with pytest.raises(LakeCommitRefusedError):
            keyed.commit(late, expected=planned)
        assert self._rows(keyed) == keyed.contents()
        keyed.commit(keyed.change(keyed_rows([1], "late"), key_rows([50])))
        assert self._rows(keyed) == keyed.contents()

    def test_expiry_keeps_the_newest_and_what_it_is_told_to_keep(self, log: LakeRounds) -> None:
        """A reader that pinned a snapshot continues to read it."""
        states = []
        for number in range(4):
            result = log.commit(log.write(named_rows(10 * number, 3)))
            states.append((result.snapshot_id, log.contents()))
        with log.maintenance() as maintenance:
            assert maintenance.expire(wall_ms() - HOUR_MS, []) == 0
            assert maintenance.expire(wall_ms() + HOUR_MS, [states[1][0]]) == 2
            assert maintenance.expire(wall_ms() + HOUR_MS, [states[1][0]]) == 0
        assert self._rows(log, states[1][0]) == states[1][1]
        assert self._rows(log) == log.own_rows() == log.contents()
        assert log.newest_id() == states[3][0]
        log.commit(log.write(named_rows(100, 3)))
        assert self._rows(log) == log.contents()

    def test_expiry_after_foreign_commits_keeps_our_newest(self, log: LakeRounds) -> None:
        """Offsets live in it, however old it is."""
        ours = log.commit(log.write(named_rows(0, 3))).snapshot_id
        for _ in range(3):
            self.foreign_commit(log.table, log.properties)
        with log.maintenance() as maintenance:
            maintenance.expire(wall_ms() + HOUR_MS, [])
        assert log.newest_id() == ours
        assert self._rows(log) == self._rows(log, ours) == log.contents()

    def test_a_sweep_removes_orphans_and_nothing_else(self, keyed: LakeRounds) -> None:
        """Files of attempts whose results nobody collected, however young rows beside them are."""
        for number in range(3):
            keyed.commit(keyed.change(keyed_rows([number, 9], f"{number}"), key_rows([number - 1])))
        kept = self._files(keyed)
        keyed.change(keyed_rows(range(30), "lost"), key_rows([100]), attempt="lost")
        orphans = self._files(keyed) - kept
        assert orphans
        with keyed.maintenance() as maintenance:
            young = maintenance.sweep(wall_ms() - HOUR_MS)
            assert (young.removed, young.removed_bytes) == (0, 0)
            assert self._files(keyed) == kept | orphans
            report = maintenance.sweep(wall_ms() + HOUR_MS)
        assert report.looked_at >= report.removed >= len(orphans)
        assert report.removed_bytes > 0
        assert not self._files(keyed) & orphans
        assert self._rows(keyed) == keyed.own_rows() == keyed.contents()
        keyed.commit(keyed.change(keyed_rows([1], "after")))
        assert self._rows(keyed) == keyed.contents()

    def test_a_sweep_leaves_every_snapshot_that_can_still_be_read(self, log: LakeRounds) -> None:
        """Time travel within the retained history works after it."""
        states = []
        for number in range(4):
            result = log.commit(log.write(named_rows(10 * number, 3)))
            states.append((result.snapshot_id, log.contents()))
        if log.factory.capabilities.compaction:
            states.append((_compact(log), log.contents()))
        with log.maintenance() as maintenance:
            maintenance.sweep(wall_ms() + HOUR_MS)
        for snapshot_id, rows in states:
            assert self._rows(log, snapshot_id) == rows

    def test_after_compaction_and_expiry_old_files_are_gone(self, keyed: LakeRounds) -> None:
        """Space comes back."""
        for number in range(5):
            keyed.commit(keyed.change(keyed_rows(range(number, 20), f"{number}")))
        before = self._files(keyed)
        _compact(keyed)
        with keyed.maintenance() as maintenance:
            assert maintenance.expire(wall_ms() + HOUR_MS, []) == 5
            maintenance.sweep(wall_ms() + HOUR_MS)
        assert len(self._files(keyed)) < len(before)
        assert self._rows(keyed) == keyed.own_rows() == keyed.contents()


def _planned(lake: LakeRounds) -> int:
    with lake.reader() as reader:
        return len(reader.plan(_newest_id(lake)).files)


def _newest_id(lake: LakeRounds) -> int:
    newest = lake.newest_id()
    assert newest is not None
    return newest


def _needs_compaction(lake: LakeRounds) -> None:
    if not lake.factory.capabilities.compaction:
        pytest.skip(f"{lake.factory.format} does not compact")


def _compact(lake: LakeRounds) -> int:
    """Compact, which must have something to do; the new snapshot."""
    _needs_compaction(lake)
    with lake.maintenance() as maintenance:
        result = maintenance.compact(lake.newest_id())
    assert result is not None
    return result.snapshot_id


def _bucket_zero(lake: LakeRounds) -> TableBucket:
    return TableBucket(lake.table.table_id, None, 0)
