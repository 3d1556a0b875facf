"""The order of the keys in memory, made in steps while the bucket goes on changing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kv.kv_samples import open_store, put, small_memory
from zufluss.kv.hot import order
from zufluss.kv.hot.order import KeysNotSortedError
from zufluss.kv.store import KvStore

ROOM = 1 << 20


def values_in_order(store: KvStore, horizon: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    low: bytes | None = b""
    while low is not None:
        page, low = store.page(low, None, horizon, ROOM)
        values += page.tolist()
    return values


@pytest.mark.parametrize("seed", range(6))
def test_a_base_that_is_made_in_steps_misses_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Between the steps rows are put and deleted, and segments cleaned, flushed and dropped."""
    monkeypatch.setattr(order, "SORTED_AT_ONCE", 50)
    monkeypatch.setattr(order, "SEGMENTS_AT_ONCE", 1)
    chosen = random.Random(seed)
    store = open_store(tmp_path / "bucket", small_memory())
    rows: dict[bytes, bytes | None] = {}
    offset = 0

    def change() -> None:
        nonlocal offset
        keys = {b"key of a row %06d" % chosen.randrange(4000): None for _ in range(200)}
        batch = {k: None if chosen.random() < 0.2 else k + b" %d" % offset for k in keys}
        put(store, [*batch], [*batch.values()], offset)
        rows.update(batch)
        offset += 1
        store.horizon = offset

    for _ in range(30):
        change()
    with pytest.raises(KeysNotSortedError):
        store.page(b"", None, offset, ROOM)
    base = store.order.begin_base()
    more = True
    while more:
        change()
        more = base.copy_some()
    base.sort()
    change()
    store.order.take_base(base)
    expected = [value for _, value in sorted(rows.items()) if value is not None]
    assert values_in_order(store, offset) == expected
    assert not store.resident, "memory was too small for all rows"


def test_keys_that_came_while_the_base_was_made_do_not_ask_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a lookup beside a busy writer would never get its turn."""
    monkeypatch.setattr(order, "SORTED_AT_ONCE", 50)
    monkeypatch.setattr(order, "TAIL_MIN", 10)
    store = open_store(tmp_path / "bucket", small_memory())
    names = [b"%05d" % i for i in range(3000)]
    put(store, names[:1000], names[:1000], 0)
    base = store.order.begin_base()
    while base.copy_some():
        pass
    base.sort()
    put(store, names[1000:2000], names[1000:2000], 1)
    store.order.take_base(base)
    assert values_in_order(store, 2) == names[:2000]
    put(store, names[2000:], names[2000:], 2)
    with pytest.raises(KeysNotSortedError):
        store.page(b"", None, 3, ROOM)
