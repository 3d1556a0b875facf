"""The protocol of a metadata store, small enough for SQLite and for ZooKeeper.

The catalog, the epochs and the id counters of a cluster live in a metadata store: versioned byte
values under slash paths. Every durable change of the coordinator is one `transact`. The table lists
all promises of a backend; `tests/meta/conformance.py` has tests of them, which a backend runs by
subclassing.

| promise | meaning |
|---|---|
| durable | when `transact` returned, the change survives a crash of the process |
| atomic | either every operation of a transaction is applied or none is |
| conditional | `Put`, `Delete` and `Check` with a version fail when the path has another one |
| versions | opaque integers, compared for equality only; every `Put` gives the path a new one |
| independent paths | a path needs no parent, and deleting it leaves what lies below it |

Callers that change much do it in `portions`: a backend may refuse a transaction that has more than
`PORTION_BYTES` (`TransactionTooLargeError`), and takes a single value of any size that is allowed.

A store does not promise: reads of several paths as one snapshot (`tree` included), values above
`VALUE_BYTES_MAX`, or a known outcome when the caller of `transact` is cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from zufluss.errors import ErrorCode, ZuflussError

VALUE_BYTES_MAX = 1_000_000
"""Largest value of one path: what ZooKeeper takes in one request, less room for the path."""

PATH_BYTES_MAX = 4096
"""Longest path, in UTF-8 bytes."""

PORTION_BYTES = 400_000
"""How much of `op_bytes` callers put into one transaction, so that every backend takes it."""

OP_BYTES = 200
"""What an operation takes in a transaction beside its path and value, at most."""


@dataclass(frozen=True, slots=True)
class VersionedValue:
    """A value with the version that a conditional operation has to name."""

    value: bytes
    """The bytes as they were put."""
    version: int
    """Opaque: equal versions of one path mean that it was not put in between."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a `tree`."""

    path: str
    """The full path."""
    value: bytes
    """Its bytes."""
    version: int
    """Its version."""


@dataclass(frozen=True, slots=True)
class Create:
    """Give a path its first value; a conflict when it has one."""

    path: str
    """The path, which must have no value."""
    value: bytes
    """Its value."""


@dataclass(frozen=True, slots=True)
class Put:
    """Replace the value of a path; a conflict when it has none, or another version."""

    path: str
    """The path, which must have a value."""
    value: bytes
    """The new value."""
    version: int | None = None
    """The version the path must have; None takes any."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove the value of a path; a conflict when it has none, or another version."""

    path: str
    """The path, which must have a value."""
    version: int | None = None
    """The version the path must have; None takes any."""


@dataclass(frozen=True, slots=True)
class Check:
    """Change nothing, but let the transaction fail when the path has another version."""

    path: str
    """The path, which must have a value."""
    version: int
    """The version the path must have."""


Op = Create | Put | Delete | Check
AnyOp = TypeVar("AnyOp", bound=Op)


class MetaStoreError(ZuflussError, code=ErrorCode.STORAGE_EXCEPTION):
    """The metadata store cannot be read or written."""


class StoreClosedError(MetaStoreError):
    """The store was closed."""


class StoreOwnedError(MetaStoreError):
    """Another process has this store open."""


class TransactionTooLargeError(MetaStoreError, code=ErrorCode.RECORD_TOO_LARGE_EXCEPTION):
    """A transaction is larger than the store takes; nothing was sent, and nothing was changed."""


class ConflictError(MetaStoreError, code=ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION):
    """A transaction was refused, because a path does not have the version that it expects.

    `index` and `op` name the operation of the transaction; `actual` is the version of its path,
    None without a value.
    """

    def __init__(self, index: int, op: Op, actual: int | None) -> None:
        self.index = index
        self.op = op
        self.actual = actual
        super().__init__(
            f"operation {index} of the transaction, {type(op).__name__.lower()} {op.path}, "
            f"expects {_expectation(op)} but {_finding(actual)}; nothing was changed, "
            f"read the path again and retry"
        )


def _expectation(op: Op) -> str:
    if isinstance(op, Create):
        return "no value there"
    return "a value there" if op.version is None else f"version {op.version}"


def _finding(actual: int | None) -> str:
    return "the path has no value" if actual is None else f"the path has version {actual}"


class MetaStore(Protocol):
    """Versioned values under slash paths; the promises are in the module's docstring."""

    async def read(self, path: str) -> VersionedValue | None:
        """The value of a path, or None."""

    async def children(self, path: str) -> list[str]:
        """The names one level below a path that have a value or something below them, sorted."""

    async def tree(self, path: str) -> list[Entry]:
        """Every value at or below a path, sorted by path."""

    async def transact(self, ops: Sequence[Op]) -> None:
        """Apply all operations or none; ConflictError names the first that conflicts.

        A path may occur once in a transaction.
        """

    async def compare_and_set(self, path: str, value: bytes, version: int | None) -> int:
        """Put a value when the path has this version (None: has no value); its new version."""

    async def close(self) -> None:
        """Finish the calls under way, and release the store."""


def check_path(path: str, *, root: bool = False) -> str:
    """Return the path; ValueError unless it is absolute, clean and short enough."""
    if root and path == "/":
        return path
    parts = path.split("/")
    clean = parts[0] == "" and len(parts) > 1 and all(p and p not in (".", "..") for p in parts[1:])
    if not clean or not path.isprintable():
        raise ValueError(
            f"{path!r} is not a metadata path: it starts with '/', and its parts are not empty, "
            f"not '.' or '..', and printable"
        )
    if len(path.encode()) > PATH_BYTES_MAX:
        raise ValueError(f"metadata path of {len(path.encode())} bytes, at most {PATH_BYTES_MAX}")
    return path


def check_ops(ops: Sequence[Op]) -> None:
    """ValueError when a transaction is malformed: bad or repeated paths, values too large."""
    seen: set[str] = set()
    for op in ops:
        if check_path(op.path) in seen:
            raise ValueError(f"{op.path} occurs twice in one transaction, a path may occur once")
        seen.add(op.path)
        if isinstance(op, Create | Put) and len(op.value) > VALUE_BYTES_MAX:
            raise ValueError(
                f"the value of {op.path} has {len(op.value)} bytes, at most {VALUE_BYTES_MAX}: "
                f"split it over several paths"
            )


def op_bytes(op: Op) -> int:
    """How much of a transaction an operation takes, with a parent that comes or goes with it."""
    value = len(op.value) if isinstance(op, Create | Put) else 0
    return OP_BYTES + 2 * len(op.path.encode()) + value


def fits_a_transaction(ops: Iterable[Op]) -> bool:
    """Whether every backend takes the operations in one transaction."""
    return sum(map(op_bytes, ops)) <= PORTION_BYTES


def portions(ops: Iterable[AnyOp]) -> Iterator[list[AnyOp]]:
    """The operations, in their order, in lists that every backend takes in one transaction."""
    portion: list[AnyOp] = []
    room = PORTION_BYTES
    for op in ops:
        size = op_bytes(op)
        if portion and size > room:
            yield portion
            portion, room = [], PORTION_BYTES
        portion.append(op)
        room -= size
    if portion:
        yield portion
