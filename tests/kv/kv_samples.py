"""Stores for tests: small memory, so that cleaning, flushing and evicting happen early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from zufluss.kv.memory import KvMemory
from zufluss.kv.store import KvStore, hash_keys
from zufluss.log.files import Files
from zufluss.record.slices import Slices

SEGMENT = 16 * 1024


def small_memory(segments: int = 24, on_retired: Callable[..., None] | None = None) -> KvMemory:
    return KvMemory(segments * SEGMENT, on_retired or (lambda free: free()), SEGMENT)


def open_store(directory: Path, memory: KvMemory) -> KvStore:
    return KvStore.open(directory, memory, Files())


def put(store: KvStore, keys: Sequence[bytes], values: Sequence[bytes | None], offset: int) -> None:
    names = Slices.of(keys)
    store.put(names, hash_keys(names), Slices.of(values), offset)


def get(store: KvStore, keys: Sequence[bytes]) -> list[bytes | None]:
    names = Slices.of(keys)
    return store.get(names, hash_keys(names)).tolist()


def look_up(store: KvStore, keys: Sequence[bytes], horizon: int) -> list[bytes | None] | None:
    found = store.lookup(Slices.of(keys), horizon)
    return None if found is None else found.tolist()
