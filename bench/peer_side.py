"""What both servers of a comparison have in common: connection, tables, taking turns."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pyarrow as pa

import zufluss
from bench.clients import BUCKETS, Worker
from bench.report import Measure
from bench.work import TEN_COLUMNS, UNCOMPRESSED, T, Target, alternate, new_table
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo

S = TypeVar("S", bound="Side")


class Side:
    """One of the two servers."""

    def __init__(self, bootstrap: str, pids: tuple[int, ...], directory: Path) -> None:
        self.bootstrap = bootstrap
        self.connection = zufluss.connect(bootstrap)
        nodes = self.connection.admin.server_nodes()
        tablet = next(node for node in nodes if node.role == "tablet")
        self.target = Target(f"{tablet.host}:{tablet.port}", pids)
        self.directory = directory
        self._prefix = f"bench_{type(self).__name__.lower()}_{time.time_ns() // 1_000_000}"
        self._made = 0
        self._tables: list[TableInfo] = []

    @functools.cached_property
    def client(self) -> Worker:
        """A process with pyfluss."""
        return Worker("pyfluss", self.bootstrap)

    def table(
        self,
        properties: dict[str, str] | None = UNCOMPRESSED,
        primary_key: Sequence[str] = (),
        schema: pa.Schema | Schema = TEN_COLUMNS,
    ) -> TableInfo:
        """A new table. There are few of them: a peer may be slow to make leaders."""
        self._made += 1
        info = new_table(
            self.connection,
            f"{self._prefix}_{self._made}",
            schema,
            buckets=BUCKETS,
            primary_key=primary_key,
            properties=properties,
        )
        self._tables.append(info)
        return info

    def drop(self, info: TableInfo) -> None:
        """Remove a table that is not needed any more."""
        self._tables.remove(info)
        self.connection.admin.drop_table(info.path)

    def warm_up(self, seconds: float) -> None:
        """The work to be measured, until the peer's compiler has seen enough of it."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the tables and close the connections."""
        for info in [*self._tables]:
            self.drop(info)
        if "client" in self.__dict__:
            self.client.close()
        self.connection.close()


@dataclass(frozen=True)
class Pair(Generic[S]):
    """Both servers."""

    ours: S
    """Started here."""
    theirs: S
    """The peer."""
    rounds: int
    """How often each of them does a work."""

    def both(self, work: Callable[[S], T]) -> tuple[list[T], ...]:
        """What each returns in the quieter rounds, ours first."""
        sides = (self.ours, self.theirs)
        pids = [pid for side in sides for pid in (*side.target.pids, side.client.process.pid)]
        return alternate(self.rounds, pids, lambda: work(self.ours), lambda: work(self.theirs))


Section = Callable[[Pair[S]], Iterator[Measure]]
