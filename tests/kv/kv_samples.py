"""Stores for tests: small memory, so that cleaning, flushing and evicting happen early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.memory import KvMemory
from zufluss.kv.store import KvStore, LookupPlaces, hash_keys
from zufluss.log.files import Files
from zufluss.record.slices import Slices
from zufluss.wire import messages as m

SEGMENT = 16 * 1024


def small_memory(segments: int = 24, on_retired: Callable[..., None] | None = None) -> KvMemory:
    at_once = on_retired or (lambda free: free())
    return KvMemory(segments * SEGMENT, at_once, SEGMENT, wait_seconds=60)


def open_store(directory: Path, memory: KvMemory) -> KvStore:
    return KvStore.open(directory, memory, Files())


def put(store: KvStore, keys: Sequence[bytes], values: Sequence[bytes | None], offset: int) -> None:
    names = Slices.of(keys)
    store.put(names, hash_keys(names), Slices.of(values), offset)


def get(store: KvStore, keys: Sequence[bytes]) -> list[bytes | None]:
    names = Slices.of(keys)
    return store.get(names, hash_keys(names), NEWEST).tolist()


def look_up(store: KvStore, keys: Sequence[bytes], horizon: int) -> list[bytes | None] | None:
    """What the event loop answers; None if it has to ask the worker."""
    names = Slices.of(keys)
    places, out = LookupPlaces.of(len(keys)), np.empty(1 << 20, np.uint8)
    places.starts[:], places.ends[:] = names.starts, names.ends
    size = store.answer(names.data, places, len(keys), horizon, -1, 0, out)
    if size < 0:
        return None
    (entry,) = m.LookupResponse.FromString(out[:size].tobytes()).buckets_resp
    return [v.values if v.HasField("values") else None for v in entry.values]
