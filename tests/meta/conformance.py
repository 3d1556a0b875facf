"""Conformance suite of the metadata store: a backend is right when this class is green for it.

Subclass it in a test module, say how a store is opened, and pytest runs every promise of
`zufluss.meta.api` against it:

    class TestMyStore(MetaStoreConformance):
        async def open_store(self, directory: Path) -> MetaStore:
            return await MyStore.open(directory)

`open_store` is called with a directory that is new for each test, and called again with the same
one after `close` to see what survived. A backend without files takes the directory's name as a
namespace. No test waits on a clock or depends on the order in which the event loop runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from zufluss.meta.api import (
    PATH_BYTES_MAX,
    VALUE_BYTES_MAX,
    Check,
    ConflictError,
    Create,
    Delete,
    MetaStore,
    Op,
    Put,
    StoreClosedError,
)


class MetaStoreConformance:
    """The promises of `zufluss.meta.api` as tests. Subclass and implement `open_store`."""

    pytestmark = pytest.mark.asyncio

    async def open_store(self, directory: Path) -> MetaStore:
        """Open the store that belongs to a directory; the same directory is the same store."""
        raise NotImplementedError("open_store(directory) returns the MetaStore under test")

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[MetaStore]:
        """A fresh store, closed after the test."""
        store = await self.open_store(tmp_path / "store")
        yield store
        await store.close()

    # Reading

    async def test_a_path_that_was_never_created_reads_as_none(self, store: MetaStore) -> None:
        """A caller tells absent from empty."""
        assert await store.read("/nothing") is None

    async def test_a_value_reads_back_byte_for_byte(self, store: MetaStore) -> None:
        """Values are bytes, not text: every byte survives, and so does the empty value."""
        await store.transact([Create("/all", bytes(range(256))), Create("/empty", b"")])
        assert (await _value(store, "/all"), await _value(store, "/empty")) == (
            bytes(range(256)),
            b"",
        )

    async def test_names_beyond_ascii_are_paths_too(self, store: MetaStore) -> None:
        """User names may become part of a path."""
        await store.transact([Create("/größe/año$1 2", b"x")])
        assert await store.children("/größe") == ["año$1 2"]
        assert await _value(store, "/größe/año$1 2") == b"x"

    async def test_a_parent_needs_no_value_and_has_none(self, store: MetaStore) -> None:
        """A transaction need not create the way to its paths."""
        await store.transact([Create("/a/b/c", b"x")])
        assert await store.read("/a/b") is None
        assert await store.children("/a") == ["b"]

    async def test_children_are_one_level_sorted_and_without_neighbours(
        self, store: MetaStore
    ) -> None:
        """`/a-b` sorts between `/a` and `/a/b`, and is not a child of `/a`."""
        paths = ["/a/z", "/a/b", "/a/b/deep", "/a/b-c", "/a-b/x", "/ab", "/a"]
        await store.transact([Create(path, b"") for path in paths])
        assert await store.children("/a") == ["b", "b-c", "z"]
        assert await store.children("/") == ["a", "a-b", "ab"]
        assert await store.children("/a/z") == []
        assert await store.children("/none") == []

    async def test_a_tree_is_every_value_at_or_below_a_path(self, store: MetaStore) -> None:
        """The catalog loads itself with one call."""
        paths = ["/t", "/t/1", "/t/1/x", "/t/2", "/t2", "/s"]
        await store.transact([Create(path, path.encode()) for path in paths])
        tree = await store.tree("/t")
        assert [entry.path for entry in tree] == ["/t", "/t/1", "/t/1/x", "/t/2"]
        assert all(entry.value == entry.path.encode() for entry in tree)
        assert [e.path for e in await store.tree("/")] == sorted(paths)
        one = await store.read("/t/1")
        assert one is not None
        assert [e.version for e in tree if e.path == "/t/1"] == [one.version]

    # Conditions

    async def test_every_put_changes_the_version(self, store: MetaStore) -> None:
        """Even a put of the same bytes is a change to whoever read before it."""
        await store.transact([Create("/a", b"1")])
        first = await _version(store, "/a")
        await store.transact([Put("/a", b"1")])
        assert await _version(store, "/a") != first

    async def test_a_version_stays_while_other_paths_change(self, store: MetaStore) -> None:
        """A condition on one path must not fail because of another."""
        await store.transact([Create("/a", b"1")])
        before = await _version(store, "/a")
        await store.transact([Create("/b", b"1"), Check("/a", before)])
        assert await _version(store, "/a") == before

    async def test_create_of_an_existing_path_conflicts(self, store: MetaStore) -> None:
        """Two creators of one name: one wins."""
        await store.transact([Create("/a", b"first")])
        error = await _refused(store, [Create("/a", b"second")])
        assert error.actual == await _version(store, "/a")
        assert await _value(store, "/a") == b"first"

    @pytest.mark.parametrize("op", [Put("/a", b"x"), Delete("/a"), Check("/a", 0)])
    async def test_an_operation_on_a_missing_path_conflicts(self, store: MetaStore, op: Op) -> None:
        """Only Create makes a path."""
        error = await _refused(store, [op])
        assert (error.op, error.actual) == (op, None)

    async def test_an_operation_with_a_stale_version_conflicts(self, store: MetaStore) -> None:
        """What was read before somebody else's put must not be written back."""
        await store.transact([Create("/a", b"1")])
        stale = await _version(store, "/a")
        await store.transact([Put("/a", b"2", stale)])
        for op in (Put("/a", b"3", stale), Delete("/a", stale), Check("/a", stale)):
            assert (await _refused(store, [op])).op == op
        assert await _value(store, "/a") == b"2"

    async def test_a_delete_leaves_what_lies_below(self, store: MetaStore) -> None:
        """Paths are independent of each other."""
        await store.transact([Create("/a", b"1"), Create("/a/b", b"2")])
        await store.transact([Delete("/a", await _version(store, "/a"))])
        assert await store.read("/a") is None
        assert await _value(store, "/a/b") == b"2"

    async def test_a_deleted_path_can_be_created_again(self, store: MetaStore) -> None:
        """A name is free after its drop."""
        await store.transact([Create("/a", b"1")])
        await store.transact([Delete("/a")])
        await store.transact([Create("/a", b"2")])
        assert await _value(store, "/a") == b"2"

    # Transactions

    async def test_a_refused_transaction_changes_nothing(self, store: MetaStore) -> None:
        """All or none, wherever in the list the operation stands that does not fit."""
        await store.transact([Create("/a", b"1"), Create("/b", b"1")])
        before = await store.tree("/")
        wanted: list[Op] = [Put("/a", b"2"), Delete("/b"), Create("/c", b"2")]
        for position in range(4):
            ops = [*wanted]
            ops.insert(position, Check("/missing", 7))
            error = await _refused(store, ops)
            assert (error.index, error.op) == (position, Check("/missing", 7))
            assert await store.tree("/") == before

    async def test_an_empty_transaction_is_allowed(self, store: MetaStore) -> None:
        """A caller that collected no operations need not ask first."""
        await store.transact([])
        assert await store.tree("/") == []

    @pytest.mark.parametrize(
        "ops",
        [
            [Create("/a", b""), Put("/a", b"")],
            [Create("a", b"")],
            [Create("/", b"")],
            [Create("/a/", b"")],
            [Create("//a", b"")],
            [Create("/a/../b", b"")],
            [Create("/a\n", b"")],
            [Create("/" + "a" * PATH_BYTES_MAX, b"")],
            [Create("/a", bytes(VALUE_BYTES_MAX + 1))],
        ],
        ids=lambda ops: ops[0].path[:8],
    )
    async def test_a_malformed_transaction_is_a_value_error(
        self, store: MetaStore, ops: list[Op]
    ) -> None:
        """Bad and repeated paths and values over the limit never reach the backend."""
        with pytest.raises(ValueError, match=r"path|bytes|transaction"):
            await store.transact(ops)
        assert await store.tree("/") == []

    async def test_a_value_of_the_largest_size_fits(self, store: MetaStore) -> None:
        """The limit is a promise, not a guess."""
        await store.transact([Create("/a", bytes(VALUE_BYTES_MAX))])
        assert len(await _value(store, "/a")) == VALUE_BYTES_MAX

    async def test_compare_and_set_creates_and_replaces(self, store: MetaStore) -> None:
        """The version it returns is the condition of the next one."""
        first = await store.compare_and_set("/n", b"1", None)
        second = await store.compare_and_set("/n", b"2", first)
        assert (await _value(store, "/n"), await _version(store, "/n")) == (b"2", second)
        for stale in (None, first):
            with pytest.raises(ConflictError):
                await store.compare_and_set("/n", b"3", stale)

    async def test_concurrent_increments_are_never_lost(self, store: MetaStore) -> None:
        """Ids come from counters like this one: no number may be given twice."""
        await store.transact([Create("/n", b"0")])
        taken = await asyncio.gather(*(_increments(store, "/n", 10) for _ in range(5)))
        assert sorted(n for numbers in taken for n in numbers) == list(range(50))

    @pytest.mark.parametrize("seed", range(5))
    async def test_random_transactions_agree_with_a_dictionary(
        self, store: MetaStore, seed: int
    ) -> None:
        """The store is a dictionary with conditions, and nothing else."""
        chance = random.Random(seed)
        model: dict[str, bytes] = {}
        for step in range(60):
            ops = _random_ops(chance, step)
            fits = all((op.path in model) != isinstance(op, Create) for op in ops)
            if not fits:
                await _refused(store, ops)
                continue
            await store.transact(ops)
            for op in ops:
                if isinstance(op, Delete):
                    del model[op.path]
                elif isinstance(op, Create | Put):
                    model[op.path] = op.value
        assert {e.path: e.value for e in await store.tree("/")} == model

    # Durability

    async def test_everything_is_there_after_closing_and_opening(self, tmp_path: Path) -> None:
        """Values, deletions and versions outlive the process."""
        first = await self.open_store(tmp_path / "store")
        await first.transact([Create("/a", b"1"), Create("/b", b"1")])
        await first.transact([Put("/a", b"2"), Delete("/b")])
        before = await first.tree("/")
        await first.close()
        second = await self.open_store(tmp_path / "store")
        try:
            assert await second.tree("/") == before
            await second.transact([Put("/a", b"3", before[0].version)])
        finally:
            await second.close()

    async def test_a_closed_store_refuses_everything(self, store: MetaStore) -> None:
        """A caller that outlives its store hears about it; closing twice is harmless."""
        await store.close()
        await store.close()
        with pytest.raises(StoreClosedError):
            await store.read("/a")
        with pytest.raises(StoreClosedError):
            await store.transact([Create("/a", b"")])


async def _value(store: MetaStore, path: str) -> bytes:
    found = await store.read(path)
    assert found is not None, f"{path} has no value"
    return found.value


async def _version(store: MetaStore, path: str) -> int:
    found = await store.read(path)
    assert found is not None, f"{path} has no value"
    return found.version


async def _refused(store: MetaStore, ops: list[Op]) -> ConflictError:
    with pytest.raises(ConflictError) as caught:
        await store.transact(ops)
    return caught.value


async def _increments(store: MetaStore, path: str, count: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        found = await store.read(path)
        assert found is not None
        number = int(found.value)
        try:
            await store.compare_and_set(path, b"%d" % (number + 1), found.version)
        except ConflictError:
            continue
        taken.append(number)
    return taken


def _random_ops(chance: random.Random, step: int) -> list[Op]:
    paths = chance.sample(["/a", "/a/b", "/a/c", "/d", "/d/e/f", "/g"], chance.randint(1, 3))
    return [_random_op(chance, path, b"%d" % step) for path in paths]


def _random_op(chance: random.Random, path: str, value: bytes) -> Op:
    match chance.randrange(3):
        case 0:
            return Create(path, value)
        case 1:
            return Put(path, value)
        case _:
            return Delete(path)
