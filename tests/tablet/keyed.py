"""A tablet server with a primary-key table whose snapshots are taken when the test says so."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.end_to_end.kv import Codec, kv_batch, put_request
from tests.tablet.support import TABLE, Connection, Tablet
from zufluss.model.schema import Schema
from zufluss.remote.layout import parse
from zufluss.remote.locations import AdminState
from zufluss.remote.snapshot import KvSnapshot
from zufluss.replica.replica import Replica
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

KEYED = Schema.of("id BIGINT NOT NULL, text STRING", primary_key=["id"])


class Keyed(Tablet):
    """Its remote locations are directories of these names below `root`."""

    def __init__(self, root: Path, names: Iterable[str] = ("a",), **options: Any) -> None:
        self.roots = [root / name for name in names]
        conf = {
            "remote.data.dirs": ",".join(map(str, self.roots)),
            "remote.log.task-interval-duration": "1h",
            "zufluss.log.flush": "os",
            **options.pop("conf", {}),
        }
        self.codec = Codec(options.setdefault("schema", KEYED))
        options.setdefault("buckets", 1)
        super().__init__(root / "data", conf=conf, **options)

    def replica(self, bucket: int = 0) -> Replica:
        return self.server.buckets.replica(TABLE, None, bucket)

    def kv_directory(self, bucket: int = 0) -> Path:
        return self.server.data_dir / "db" / f"t-{TABLE}" / f"kv-{bucket}"

    async def put(
        self,
        *rows: tuple[int, str | None],
        bucket: int = 0,
        targets: tuple[int, ...] = (),
        **batch: int,
    ) -> None:
        """Put rows in one batch; None deletes."""
        records = [self._record(*row) for row in rows]
        request = put_request(TABLE, kv_batch(records, **batch), bucket, targets=targets)
        connection = Connection()
        answer = await connection.answer(connection.send(self.server.put.handle, request))
        (entry,) = decode(m.PutKvResponse, answer).buckets_resp
        assert not entry.error_code, entry.error_message

    def _record(self, key: int, text: str | None) -> bytes:
        row = (key, text, *(None for _ in self.codec.schema.columns[2:]))
        return self.codec.delete(row) if text is None else self.codec.put(row)

    async def rows(self, bucket: int = 0) -> dict[int, str]:
        """Everything that is visible."""
        store = self.replica(bucket).tablet.store
        scan = partial(store.scan, None, 1 << 20, 1 << 30, store.horizon)
        _, values = await self.server.kv.call(scan)
        rows = [self.codec.value(value) for value in values.tolist()]
        return {row[0]: row[1] for row in rows if row is not None}

    async def snapshot(self, bucket: int = 0) -> KvSnapshot | None:
        return await self.server.snapshots.snapshot(self.replica(bucket))

    def remote_files(self) -> list[set[str]]:
        """The paths in each location, all of them with a name we know."""
        found = []
        for root in self.roots:
            paths = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
            assert all(parse(path) for path in paths)
            found.append(paths)
        return found

    def set_state(self, location_id: int, state: AdminState) -> None:
        before = self.server.storage.locations
        locations = tuple(
            dataclasses.replace(x, state=state) if x.location_id == location_id else x
            for x in before.locations
        )
        self.server.storage.update(
            dataclasses.replace(before, version=before.version + 1, locations=locations)
        )


@asynccontextmanager
async def keyed(root: Path, names: Iterable[str] = ("a",), **options: Any) -> AsyncIterator[Keyed]:
    """A server that serves, and stops cleanly afterwards."""
    async with serving(Keyed(root, names, **options)) as tablet:
        yield tablet


@asynccontextmanager
async def serving(tablet: Keyed) -> AsyncIterator[Keyed]:
    """Start a server, and stop it cleanly afterwards."""
    await tablet.start()
    try:
        yield tablet
    finally:
        await tablet.server.close()


def many(start: int, end: int, text: str = "text") -> list[tuple[int, str | None]]:
    return [(i, f"{text} {i}") for i in range(start, end)]
