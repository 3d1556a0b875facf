"""What a put does, in plain Python: the oracle of the tests of primary-key tables.

A row is a tuple of values in column order, a key the tuple of its key columns. The model knows no
bytes, no offsets arrays and no store: a dict from key to row, and the list of changelog batches.

| engine    | row, key known                | row, new key    | delete                        |
|-----------|-------------------------------|-----------------|-------------------------------|
| default   | -U old, +U new, even if equal | +I              | -D old; unknown key: nothing  |
| partial   | targets taken, others kept;   | others NULL, +I | all other columns NULL: -D;   |
|           | only the key named: nothing   |                 | else targets NULL: -U, +U     |
| first_row | nothing                       | +I              | nothing                       |
| versioned | -U, +U unless its version is  | +I              | nothing                       |
|           | smaller; NULL = type's least  |                 |                               |

A put that names target columns is partial, also when it names all of them.
`table.delete.behavior` IGNORE makes every delete nothing, DISABLE refuses the batch. With the
changelog image WAL there is no -U, and a whole row under the default engine is +U even for a new
key. Every put takes offsets: one per change, or a single one when nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Row = tuple[Any, ...]
Key = tuple[Any, ...]
Kind = Literal["+I", "-U", "+U", "-D"]
Engine = Literal["default", "first_row", "versioned"]

INSERT: Kind = "+I"
BEFORE: Kind = "-U"
AFTER: Kind = "+U"
DELETE: Kind = "-D"


class DeletesDisabledError(Exception):
    """The batch has a delete and the table refuses deletes; nothing of it is applied."""


class Change(NamedTuple):
    """One record of the changelog."""

    offset: int
    kind: Kind
    row: Row


class Put(NamedTuple):
    """One record of a put: a row, or None to delete the key."""

    key: Key
    row: Row | None


@dataclass(frozen=True, slots=True)
class Rules:
    """What a table's schema and properties say."""

    columns: int
    keys: tuple[int, ...]
    engine: Engine = "default"
    version: int | None = None
    """Position of the version column."""
    least: Any = None
    """The least value of the version column's type, which NULL stands for."""
    deletes: Literal["ALLOW", "IGNORE", "DISABLE"] = "ALLOW"
    image: Literal["FULL", "WAL"] = "FULL"

    @property
    def properties(self) -> dict[str, str]:
        """The table's properties, apart from the name of the version column."""
        found: dict[str, str] = {}
        if self.engine != "default":
            found["table.merge-engine"] = self.engine
        if self.deletes != "ALLOW":
            found["table.delete.behavior"] = self.deletes
        if self.image != "FULL":
            found["table.changelog.image"] = self.image
        return found

    def key(self, row: Row) -> Key:
        """The key of a row."""
        return tuple(row[i] for i in self.keys)


@dataclass(slots=True)
class Model:
    """One bucket."""

    rules: Rules
    rows: dict[Key, Row] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    end: int = 0
    """The next offset."""

    def put(self, puts: Iterable[Put], targets: Sequence[int] = ()) -> list[Change]:
        """Apply one batch in order; what it adds to the changelog."""
        puts = list(puts)
        if self.rules.deletes == "DISABLE" and any(put.row is None for put in puts):
            raise DeletesDisabledError
        base, partial = self.end, set(targets)
        made: list[Change] = []
        for put in puts:
            for kind, row in self._one(put, partial):
                made.append(Change(base + len(made), kind, row))
        self.end += max(len(made), 1)
        self.changes += made
        return made

    def upsert(self, *rows: Row, targets: Sequence[int] = ()) -> list[Change]:
        """Put whole rows, or rows of which only `targets` count."""
        return self.put([Put(self.rules.key(row), row) for row in rows], targets)

    def delete(self, *keys: Key, targets: Sequence[int] = ()) -> list[Change]:
        """Delete keys, or only their `targets`."""
        return self.put([Put(key, None) for key in keys], targets)

    def _one(self, put: Put, targets: set[int]) -> list[tuple[Kind, Row]]:
        old = self.rows.get(put.key)
        if not self._counts(put, old, targets):
            return []
        new = self._merge(put, old, targets)
        if new is None:
            assert old is not None
            del self.rows[put.key]
            return [(DELETE, old)]
        self.rows[put.key] = new
        return self._describe(old, new, partial=bool(targets))

    def _describe(self, old: Row | None, new: Row, *, partial: bool) -> list[tuple[Kind, Row]]:
        wal = self.rules.image == "WAL"
        if old is None:
            blind = wal and self.rules.engine == "default" and not partial
            return [(AFTER if blind else INSERT, new)]
        return [(AFTER, new)] if wal else [(BEFORE, old), (AFTER, new)]

    def _counts(self, put: Put, old: Row | None, targets: set[int]) -> bool:
        """The record changes something, be it to an equal row."""
        if put.row is None:
            ignored = self.rules.deletes == "IGNORE" or self.rules.engine != "default"
            return old is not None and not ignored
        if old is None:
            return True
        if targets:
            return not targets <= set(self.rules.keys)
        if self.rules.engine == "versioned":
            return not self._is_older(put.row, old)
        return self.rules.engine == "default"

    def _merge(self, put: Put, old: Row | None, targets: set[int]) -> Row | None:
        """The row that stands there afterwards, None for none."""
        if put.row is None:
            assert old is not None
            return self._remove(old, targets)
        if not targets:
            return put.row
        others: Row = (None,) * self.rules.columns if old is None else old
        return tuple(put.row[i] if i in targets else others[i] for i in range(self.rules.columns))

    def _is_older(self, new: Row, old: Row) -> bool:
        assert self.rules.version is not None
        mine, theirs = new[self.rules.version], old[self.rules.version]
        least = self.rules.least
        return bool((least if mine is None else mine) < (least if theirs is None else theirs))

    def _remove(self, old: Row, targets: set[int]) -> Row | None:
        kept = set(range(self.rules.columns)) - targets - set(self.rules.keys)
        if not targets or all(old[i] is None for i in kept):
            return None
        cleared = targets - set(self.rules.keys)
        return tuple(None if i in cleared else old[i] for i in range(self.rules.columns))


def fold(
    changes: Iterable[Change], rules: Rules, state: Mapping[Key, Row] | None = None
) -> dict[Key, Row]:
    """The state a changelog leads to; `AssertionError` where a record contradicts what was before.

    This is promise A4 read from the other side: whoever follows the changelog has the table.
    """
    rows = dict(state or {})
    pending: Key | None = None
    for change in changes:
        key = rules.key(change.row)
        assert (pending is None) or (change.kind == AFTER and key == pending), change
        pending = None
        if change.kind == INSERT:
            assert key not in rows, f"{change} for a key that is there"
            rows[key] = change.row
        elif change.kind == AFTER:
            rows[key] = change.row
        else:
            assert rows.get(key) == change.row, f"{change}, but there is {rows.get(key)}"
            if change.kind == BEFORE:
                pending = key
            else:
                del rows[key]
    assert pending is None, f"a -U of {pending} without its +U"
    return rows
