"""Takes the metadata of a cluster out of one store, and puts them into an empty one.

**Taking out.** A store in a directory belongs to one process, so nothing changes meanwhile. One in
ZooKeeper is read again and again until two readings in a row are equal: then every value that was
read was there between them, all at once. What appeared and vanished between two readings may be
missing, and a cluster that goes on knows more than its dump: stop its coordinator first.

**Putting in.** The number of the format is the first path that is created, and the last one that
gets its value; until then it says whose restore is under way. So a coordinator and a restore never
both begin on one store, a coordinator refuses a store that is not whole, and a restore that died
goes on where it was if it is begun again with the same file. Nothing that exists is replaced.
"""

from __future__ import annotations

from typing import Final

from zufluss.coordinator import records
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.meta.api import Check, Create, Entry, MetaStore, Put, VersionedValue, portions
from zufluss.meta.dump import Dump

READINGS_MAX: Final = 10
"""How often a store that changes is read."""


class StoreNotEmptyError(ZuflussError, code=ErrorCode.INVALID_CONFIG_EXCEPTION):
    """A store into which metadata are to be restored has something; nothing was changed."""


class NothingToDumpError(ZuflussError, code=ErrorCode.INVALID_CONFIG_EXCEPTION):
    """A store has no metadata of a cluster, or keeps changing."""


async def dump(store: MetaStore) -> Dump:
    """Everything that a store has, as it was at one moment."""
    entries = await _stable_tree(store)
    values = {entry.path: entry.value for entry in entries}
    form, cluster = values.get(records.FORMAT_PATH), values.get(records.CLUSTER_PATH)
    if form is not None and records.restore_of(form) is not None:
        raise NothingToDumpError(
            f"{store!r} has metadata whose restore has not finished; finish it first"
        )
    if form is None or cluster is None:
        raise NothingToDumpError(f"{store!r} has no metadata of a cluster")
    return Dump(cluster.decode(), form.decode(), values)


async def _stable_tree(store: MetaStore) -> list[Entry]:
    before = await store.tree("/")
    for _ in range(READINGS_MAX):
        now = await store.tree("/")
        if now == before:
            return now
        before = now
    raise NothingToDumpError(
        f"{store!r} changed during each of {READINGS_MAX} readings; stop the coordinator first"
    )


async def restore(store: MetaStore, what: Dump) -> int:
    """Put a dump into an empty store; returns how many paths this call created.

    `StoreNotEmptyError` if the store has anything but the beginning of the same restore.
    """
    _check_format(what)
    mark = records.restoring(what.digest)
    there = {entry.path: entry.value for entry in await store.tree("/")}
    if not there:
        version = await store.compare_and_set(records.FORMAT_PATH, mark, None)
    else:
        stored = await store.read(records.FORMAT_PATH)
        if stored is None or stored.value != mark:
            raise StoreNotEmptyError(_refusal(store, stored))
        version = stored.version
    missing = [
        Create(path, value)
        for path, value in what.values.items()
        if path != records.FORMAT_PATH and path not in there
    ]
    for portion in portions(missing):
        await store.transact([Check(records.FORMAT_PATH, version), *portion])
    await store.transact([Put(records.FORMAT_PATH, what.values[records.FORMAT_PATH], version)])
    return len(missing) + 1


def _check_format(what: Dump) -> None:
    form = what.values.get(records.FORMAT_PATH)
    known = {records.number(each) for each in (records.FORMAT_1, records.FORMAT)}
    if form not in known or records.CLUSTER_PATH not in what.values:
        raise records.CatalogDamagedError(
            f"the dump has a catalog of format {what.catalog_format!r:.20}, this zufluss reads "
            f"formats {records.FORMAT_1}, {records.FORMAT}: use the zufluss that wrote it"
        )


def _refusal(store: MetaStore, form: VersionedValue | None) -> str:
    if form is not None and records.restore_of(form.value) is not None:
        return (
            f"a restore of another dump into {store!r} has begun and not finished; finish that "
            "one, or restore into another place"
        )
    return (
        f"{store!r} is not empty, and metadata are restored into an empty store only; choose "
        "another data.dir or zookeeper.path.root"
    )
