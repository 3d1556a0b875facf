"""Which znodes the operations of a transaction become: rules without I/O.

ZooKeeper has a tree in which every node has a parent; a metadata store has independent paths. So a
path is the node of the same name below a root, and a node exists as long as its path, or a path
below it, has a value:

| data of a node | meaning |
|---|---|
| 0x01, value | its path has this value, which may be empty |
| empty | its path has no value; something below it has |

Parents are created and removed in the same ZooKeeper transaction as the paths that need them. The
version of a value is the number (zxid) of the ZooKeeper transaction that wrote it: unlike the
version of a node it is never given twice, not even after a path was deleted and created again.

Every step names the versions of nodes that `steps_of` was told. If another writer changed one of
them meanwhile, ZooKeeper refuses all steps, and the caller looks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zufluss.meta.api import Check, ConflictError, Create, Delete, Op, Put

_VALUE = b"\x01"
_NO_VALUE = b""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as a reader saw it."""

    data_version: int
    """ZooKeeper's version of its data, which steps have to name."""
    zxid: int
    """The transaction that wrote its data."""
    children: int
    """The number of nodes right below it."""
    has_value: bool
    """Whether its path has a value."""


Nodes = Mapping[str, Node | None]
"""The nodes of paths; None where there is none."""


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Create a node; fails if it exists or has no parent."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class SetNode:
    """Replace the data of a node; fails if it has another version."""

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Remove a node; fails if it has another version, or nodes below it."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class CheckNode:
    """Change nothing; fails if the node has another version."""

    path: str
    version: int


Step = CreateNode | SetNode | DeleteNode | CheckNode


def data_of(value: bytes) -> bytes:
    """The data of the node of a path with a value."""
    return _VALUE + value


def value_of(data: bytes) -> bytes | None:
    """The value of a path, from the data of its node; None if it has none.

    ValueError if no metadata store wrote the data.
    """
    if data == _NO_VALUE:
        return None
    if data[:1] != _VALUE:
        raise ValueError(f"data that begins with {data[:8]!r}")
    return data[1:]


def parents_of(path: str) -> list[str]:
    """The paths above a path, the root of all not among them, the uppermost first."""
    return [path[:at] for at in range(1, len(path)) if path[at] == "/"]


def touched(ops: Sequence[Op]) -> list[str]:
    """The paths whose nodes `steps_of` has to know."""
    paths = dict.fromkeys(op.path for op in ops)
    for op in ops:
        if not isinstance(op, Check):
            paths.update(dict.fromkeys(parents_of(op.path)))
    return list(paths)


def conflict(ops: Sequence[Op], nodes: Nodes) -> ConflictError | None:
    """The first operation that does not fit; None if all do."""
    for index, op in enumerate(ops):
        node = nodes[op.path]
        actual = node.zxid if node is not None and node.has_value else None
        if isinstance(op, Create):
            fits = actual is None
        else:
            fits = actual is not None and op.version in (None, actual)
        if not fits:
            return ConflictError(index, op, actual)
    return None


def steps_of(ops: Sequence[Op], nodes: Nodes) -> list[Step]:
    """The steps that carry out operations without a conflict, in their order."""
    steps = _Steps(nodes, {op.path for op in ops})
    for op in ops:
        if isinstance(op, Check):
            steps.check(op.path)
        elif isinstance(op, Put):
            steps.write(op.path, data_of(op.value))
    for create in sorted((op for op in ops if isinstance(op, Create)), key=_depth):
        steps.write(create.path, data_of(create.value))
    # The deepest first, so that it is known whether nodes are left below the others.
    for delete in sorted((op for op in ops if isinstance(op, Delete)), key=_depth, reverse=True):
        steps.delete(delete.path)
    return steps.steps


def _depth(op: Op) -> int:
    return op.path.count("/")


class _Steps:
    """Steps, and what the tree is after them."""

    def __init__(self, nodes: Nodes, own: set[str]) -> None:
        """`own` are the paths of operations, whose nodes no other operation removes."""
        self.steps: list[Step] = []
        self._own = own
        self._nodes = nodes
        self._created: set[str] = set()
        self._children: dict[str, int] = {}

    def check(self, path: str) -> None:
        self.steps.append(CheckNode(path, self._node(path).data_version))

    def write(self, path: str, data: bytes) -> None:
        if self._nodes[path] is not None:
            self.steps.append(SetNode(path, data, self._node(path).data_version))
            return
        for each in parents_of(path):
            if self._nodes[each] is None and each not in self._created:
                self._create(each, _NO_VALUE)
        self._create(path, data)

    def delete(self, path: str) -> None:
        node = self._node(path)
        if self._children_of(path):
            self.steps.append(SetNode(path, _NO_VALUE, node.data_version))
            return
        while True:
            self.steps.append(DeleteNode(path, node.data_version))
            path = path.rpartition("/")[0]
            if not path:
                return
            self._children[path] = self._children_of(path) - 1
            node = self._node(path)
            if self._children[path] or node.has_value or path in self._own:
                return

    def _create(self, path: str, data: bytes) -> None:
        self.steps.append(CreateNode(path, data))
        self._created.add(path)
        if parent := path.rpartition("/")[0]:
            self._children[parent] = self._children_of(parent) + 1

    def _children_of(self, path: str) -> int:
        node = self._nodes[path]
        return self._children.get(path, 0 if node is None else node.children)

    def _node(self, path: str) -> Node:
        node = self._nodes[path]
        assert node is not None, f"{path} has no node"
        return node
