"""The bytes that only leases keep agree with the files in the directories."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.leases.stage import RETAINED, Caller, Stage, exist, stage, unique
from tests.waiting import eventually
from zufluss.client.lease.info import KvSnapshotLeaseUsage
from zufluss.client.sync.table import Table
from zufluss.model.table import TableBucket


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server whose leases are all made by these tests."""
    with stage(tmp_path_factory.mktemp("usage")) as it:
        yield it


def size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def numbers(row: KvSnapshotLeaseUsage) -> tuple[int, int]:
    assert row.uncounted_snapshots == 0
    return row.held_bytes, row.freed_bytes


def snapshots(it: Stage, table: Table, leases: dict[str, tuple[Caller, str]]) -> None:
    """Let each lease have another snapshot, which newer ones share files with."""
    bucket = TableBucket(table.info.table_id, None, 0)
    for step, (lease_id, (caller, _)) in enumerate(leases.items()):
        it.take(table, range(100 * step, 100 * step + 100), f"step {step}")
        caller.latest(lease_id, [bucket])
    for step in range(RETAINED):
        it.take(table, range(9000, 9001 + step), "newest")


def test_what_leases_hold_and_free_is_what_lies_in_the_directories(alone: Stage) -> None:
    it = alone
    table = it.create()
    bucket = TableBucket(table.info.table_id, None, 0)
    with it.caller("anna") as anna, it.caller("bert") as bert:
        leases = {"a1": (anna, "anna"), "a2": (anna, "anna"), "b": (bert, "bert")}
        snapshots(it, table, leases)
        bert.acquire("b2", anna.leased("a1"))  # the same snapshot as a1
        held = {i: it.objects(bucket, *anna.leased(i).values()) for i in (*leases, "b2")}
        kept: set[Path] = set()
        for snapshot_id in it.kept(table)[-RETAINED:]:
            kept |= it.objects(bucket, snapshot_id)
        held = {i: files - kept for i, files in held.items()}
        owners = {"anna": held["a1"] | held["a2"], "bert": held["b"] | held["b2"]}
        everything = owners["anna"] | owners["bert"]

        usage = it.admin.kv_snapshot_lease_usage()
        assert [numbers(row) for row in usage.tables] == [(size(everything), size(everything))]
        assert {row.owner: numbers(row) for row in usage.owners} == {
            "anna": (size(owners["anna"]), size(owners["anna"] - owners["bert"])),
            "bert": (size(owners["bert"]), size(owners["bert"] - owners["anna"])),
        }
        for row in usage.leases:
            assert row.lease_id is not None
            others = set().union(*(f for i, f in held.items() if i != row.lease_id))
            own = held[row.lease_id]
            assert numbers(row) == (size(own), size(own - others))
            assert usage.of_lease(row.lease_id) == numbers(row)
        assert size(held["a2"]) > 0, "the example is worth something"

        promised = usage.of_lease("a2")[1]
        before = size(everything)
        anna.drop("a2")
        eventually(lambda: len(exist(everything)) < len(everything), "files are deleted")
        it.until_kept(table, sorted({*anna.leased("a1").values(), *bert.leased("b").values(),
                                     *it.kept(table)[-RETAINED:]}))  # fmt: skip
        eventually(lambda: before - size(exist(everything)) == promised, "what was promised")
        for lease_id, caller in (("a1", anna), ("b", bert), ("b2", bert)):
            caller.drop(lease_id)
        usage = it.admin.kv_snapshot_lease_usage()
        assert (usage.tables, usage.owners, usage.leases) == ((), (), ())


def test_a_lease_of_retained_snapshots_costs_nothing(alone: Stage) -> None:
    _, buckets = alone.filled(buckets=2)
    alone.calls.latest(lease := unique("cheap"), buckets)
    assert alone.admin.kv_snapshot_lease_usage().tables == ()
    alone.calls.drop(lease)


def test_all_files_of_a_dropped_table_are_held_by_its_leases(alone: Stage) -> None:
    table, buckets = alone.filled(2, buckets=2)
    files = {
        p for b in buckets for i in alone.kept(table, b.bucket_id) for p in alone.objects(b, i)
    }
    directories = {next(p for p in path.parents if p.name == "kv") for path in files}
    (kv,) = directories
    alone.calls.latest("one", buckets[:1])
    alone.calls.latest("two", buckets[1:])
    expected = size(files)
    alone.admin.drop_table(table.path)

    def counted() -> list[KvSnapshotLeaseUsage]:
        rows = alone.admin.kv_snapshot_lease_usage().tables
        return [row for row in rows if not row.uncounted_snapshots]

    eventually(lambda: bool(counted()), "the files of the drop are counted")
    (row,) = counted()
    assert (row.table_id, row.table) == (table.info.table_id, None)
    assert row.held_bytes == row.freed_bytes >= expected
    usage = alone.admin.kv_snapshot_lease_usage()
    assert usage.of_lease("one") == (row.held_bytes, 0), "the other lease keeps all files, too"
    alone.calls.drop("two")
    usage = alone.admin.kv_snapshot_lease_usage()
    assert usage.of_lease("one") == (row.held_bytes, row.held_bytes)
    alone.calls.drop("one")
    eventually(lambda: not exist(files), "the files are deleted")
    assert kv.is_dir()


def test_a_lease_of_somebody_else_is_named_and_the_others_are_dropped(alone: Stage) -> None:
    _, buckets = alone.filled()
    with alone.caller("anna") as anna, alone.caller("bert") as bert:
        bert.latest("berts", buckets)
        anna.latest("annas", buckets)
        options = {
            "protocol": "sasl",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "anna",
            "sasl.password": "anna-secret",
        }
        settings = [f"-Dclient.security.{key}={value}" for key, value in options.items()]
        done = subprocess.run(
            [sys.executable, "-m", "zufluss.cli.main", "lease", "drop", "berts", "annas",
             "--bootstrap", f"127.0.0.1:{alone.ports['SECURE']}", *settings],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 1
        refused, ended = done.stderr.splitlines()
        assert refused.startswith("error: lease berts: ")
        assert "bert" in refused
        assert ended.startswith("ended lease annas of anna: 1 snapshots of ")
        assert anna.lease("annas") is None
        bert.drop("berts")
