"""The steps of transactions in ZooKeeper's tree, against a dictionary of paths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.meta import znodes
from zufluss.meta.api import Check, Create, Delete, Op, Put
from zufluss.meta.znodes import CheckNode, CreateNode, DeleteNode, Node, SetNode, Step

PATHS = ["/a", "/a/b", "/a/b/c", "/a/b/d", "/a/e", "/f/g/h", "/f/g", "/i"]


class Tree:
    """ZooKeeper's rules: every node has a parent, and only a node without children goes."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, int]] = {}
        self.zxid = 0

    def node(self, path: str) -> Node | None:
        if path not in self.nodes:
            return None
        data, version, zxid = self.nodes[path]
        has_value = znodes.value_of(data) is not None
        return Node(version, zxid, len(self.below(path)), has_value)

    def below(self, path: str) -> list[str]:
        return [each for each in self.nodes if each.rpartition("/")[0] == path]

    def carry_out(self, steps: list[Step]) -> None:
        self.zxid += 1
        for step in steps:
            parent = step.path.rpartition("/")[0]
            if isinstance(step, CreateNode):
                assert step.path not in self.nodes
                assert parent == "" or parent in self.nodes
                self.nodes[step.path] = step.data, 0, self.zxid
                continue
            version = self.nodes[step.path][1]
            assert version == step.version
            if isinstance(step, SetNode):
                self.nodes[step.path] = step.data, version + 1, self.zxid
            elif isinstance(step, DeleteNode):
                assert not self.below(step.path)
                del self.nodes[step.path]
            else:
                assert isinstance(step, CheckNode)


_KINDS = st.sampled_from(["create", "put", "delete", "check"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(PATHS), _KINDS, max_size=6), max_size=12))
def test_a_tree_holds_the_values_of_paths_and_no_other_nodes(
    transactions: list[dict[str, str]],
) -> None:
    """Parents exist as long as somebody needs them, whatever is created and deleted at once."""
    tree, values, zxids = Tree(), dict[str, bytes](), dict[str, int]()
    for number, kinds in enumerate(transactions):
        ops: list[Op] = []
        for path, kind in kinds.items():
            match kind:
                case "create":
                    ops.append(Create(path, b"%d" % number))
                case "put":
                    ops.append(Put(path, b"%d" % number, zxids.get(path)))
                case "delete":
                    ops.append(Delete(path, zxids.get(path)))
                case _:
                    ops.append(Check(path, zxids.get(path, 7)))
        fits = all((op.path in values) != isinstance(op, Create) for op in ops)
        nodes = {path: tree.node(path) for path in znodes.touched(ops)}
        assert (znodes.conflict(ops, nodes) is None) == fits
        if not fits:
            continue
        tree.carry_out(znodes.steps_of(ops, nodes))
        for op in ops:
            if isinstance(op, Delete):
                del values[op.path], zxids[op.path]
            elif isinstance(op, Create | Put):
                values[op.path], zxids[op.path] = op.value, tree.zxid
        stored = {path: znodes.value_of(data) for path, (data, _, _) in tree.nodes.items()}
        assert {path: value for path, value in stored.items() if value is not None} == values
        for path, value in stored.items():
            assert value is not None or tree.below(path), f"{path} is a node without a use"


def test_a_path_that_was_created_again_has_another_version() -> None:
    """ZooKeeper's own versions begin at 0 again; a stale condition must not hold by chance."""
    tree = Tree()
    tree.carry_out(znodes.steps_of([Create("/a", b"1")], {"/a": None}))
    first = tree.node("/a")
    tree.carry_out(znodes.steps_of([Delete("/a")], {"/a": first}))
    tree.carry_out(znodes.steps_of([Create("/a", b"2")], {"/a": None}))
    again = tree.node("/a")
    assert first is not None
    assert again is not None
    assert again.data_version == first.data_version
    assert znodes.conflict([Delete("/a", first.zxid)], {"/a": again}) is not None
