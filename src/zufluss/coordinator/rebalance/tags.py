"""Tags of tablet servers that are about to leave.

A tagged server goes on with the buckets that it leads, and gets no others: not with a new table
(`catalog/placement.py`), not from a server that is lost (`wal/takeover.py`), not by a rebalance,
which moves away those that it has. The tags are in the metadata store (`/servers/tags`) and in the
image, so that every server can tell them. A server keeps its tag when it leaves and comes back.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog

from zufluss.cluster.examination import Finding, Severity
from zufluss.cluster.image import ClusterImage, ImageChange, TagsPut
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ErrorCode, error
from zufluss.meta.api import Create, Entry, Put
from zufluss.model.rebalance import ServerTag

log = structlog.get_logger(__name__)

TAGS_PATH: Final = "/servers/tags"

Exclusive = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs work that must not overlap with a change of the catalog or a registration."""


class ServerTags:
    """Adds and removes tags."""

    def __init__(
        self,
        ledger: Ledger,
        image: ClusterImage,
        exclusive: Exclusive,
        tell: Callable[[Sequence[ImageChange]], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._image = image
        self._exclusive = exclusive
        self._tell = tell

    async def add(self, server_ids: Collection[int], tag: ServerTag) -> None:
        """Tag servers that are there; all of them or none."""

        async def change() -> None:
            for server_id in server_ids:
                self._check_addition(server_id, tag)
            await self._put({**self._image.tags, **dict.fromkeys(server_ids, tag)})

        await self._exclusive(change)

    async def remove(self, server_ids: Collection[int], tag: ServerTag) -> None:
        """Take a tag from servers; all of them or none. Servers without a tag are fine."""

        async def change() -> None:
            tags = self._image.tags
            for server_id in server_ids:
                if tags.get(server_id, tag) is not tag:
                    raise error(
                        ErrorCode.SEVER_TAG_NOT_EXIST_EXCEPTION,
                        f"Server tag {tag.name} not exists for server {server_id}, the current "
                        f"server tag of this server is {tags[server_id].name}.",
                    )
            await self._put({i: each for i, each in tags.items() if i not in server_ids})

        await self._exclusive(change)

    def _check_addition(self, server_id: int, tag: ServerTag) -> None:
        if server_id not in self._image.tablets:
            raise error(
                ErrorCode.SERVER_NOT_EXIST_EXCEPTION,
                f"Server {server_id} not exists when trying to add server tag. The tablet "
                f"servers are {', '.join(map(str, sorted(self._image.tablets)))}",
            )
        present = self._image.tags.get(server_id, tag)
        if present is not tag:
            raise error(
                ErrorCode.SEVER_TAG_ALREADY_EXIST_EXCEPTION,
                f"Server tag {present.name} already exists for server {server_id}. However you "
                f"want to set it to {tag.name}, please remove the server tag first.",
            )

    async def _put(self, tags: Mapping[int, ServerTag]) -> None:
        if tags == self._image.tags:
            return
        value = json.dumps({str(i): tag.name for i, tag in sorted(tags.items())}).encode()
        new = await self._ledger.read(TAGS_PATH) is None
        await self._ledger.commit([Create(TAGS_PATH, value) if new else Put(TAGS_PATH, value)])
        changes = [TagsPut(tags)]
        self._image.apply(changes)
        await self._tell(changes)
        log.info("server_tags_changed", tags={i: tag.name for i, tag in sorted(tags.items())})

    def findings(self) -> Iterable[Finding]:
        """The tagged servers, and how many buckets they lead."""
        for server_id, tag in sorted(self._image.tags.items()):
            led = self._image.leaders[server_id]
            there = server_id in self._image.tablets
            yield Finding(
                Severity.WARNING if there and led else Severity.FINE,
                f"tablet server {server_id}",
                f"its tag is {tag.name}: it gets no more buckets, and leads {led} of those that "
                f"it had" if led else f"its tag is {tag.name}, and it leads no bucket",
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"ServerTags({self._image.tags})"


def load_tags(entries: Iterable[Entry]) -> list[ImageChange]:
    """The change that brings the stored tags into an image; `CatalogDamagedError` if it fails."""
    return [
        TagsPut(records.guarded(entry.path, _tags, entry.value))
        for entry in entries
        if entry.path == TAGS_PATH
    ]


def _tags(value: bytes) -> dict[int, ServerTag]:
    return {int(i): ServerTag[name] for i, name in json.loads(value).items()}
