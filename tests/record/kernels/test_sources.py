"""The cache directory of kernels is named after every file that kernels depend on, and no other.

numba does not notice a change in another file than the kernel's own; the digest of
`zufluss.record.kernels.library` does, if the file is on its list. A missing file would leave stale
machine code in use; a superfluous one would compile everything again for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import zufluss
from zufluss.record.kernels.library import MODULES_OUTSIDE

ROOT = Path(zufluss.__file__).parents[1]
PACKAGE = "zufluss.record.kernels"


def path_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """Imported names of the project: the module they come from, and their name there."""
    names: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zufluss"):
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module or "", alias.name)
    return names


@cache
def definitions_of(module: str) -> dict[str, ast.AST]:
    """Functions, classes and assigned values of a module, by name."""
    names: dict[str, ast.AST] = {}
    for node in tree_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (leaf for target in targets for leaf in ast.walk(target)):
                if isinstance(name, ast.Name):
                    names[name.id] = node.value
    return names


def kernels_of(module: str) -> Iterator[ast.FunctionDef]:
    for node in tree_of(module).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "kernel":
                    yield node


def modules() -> list[str]:
    paths = (ROOT / "zufluss").rglob("*.py")
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths)]


def kernel_modules() -> set[str]:
    return {m for m in modules() if "kernels.cache import" in path_of(m).read_text()}


def dependencies() -> set[str]:
    """Modules whose functions or constants some kernel uses, directly or through constants."""
    todo: list[tuple[str, ast.AST]] = [
        (m, node) for m in kernel_modules() for node in kernels_of(m)
    ]
    seen: set[tuple[str, str]] = set()
    while todo:
        module, tree = todo.pop()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name) or (module, node.id) in seen:
                continue
            seen.add((module, node.id))
            source, name = imports_of(module).get(node.id, (module, node.id))
            if source != module and path_of(f"{source}.{name}").exists():
                seen.add((f"{source}.{name}", ""))
                continue
            seen.add((source, name))
            if path_of(source).exists() and name in definitions_of(source):
                todo.append((source, definitions_of(source)[name]))
    return {module for module, _ in seen}


def test_every_module_with_kernels_is_loaded_by_warm_and_covered_by_the_digest() -> None:
    outside = {m for m in kernel_modules() if not m.startswith(PACKAGE)}
    assert outside <= set(MODULES_OUTSIDE)


def test_the_digest_covers_every_file_that_kernels_take_functions_and_constants_from() -> None:
    outside = {m for m in dependencies() if not m.startswith(PACKAGE)}
    outside.discard("zufluss.system")  # says where the cache is, not what is in it
    assert outside <= set(MODULES_OUTSIDE)


def test_the_digest_covers_no_file_that_kernels_do_not_need() -> None:
    assert set(MODULES_OUTSIDE) <= kernel_modules() | dependencies()
    assert len(set(MODULES_OUTSIDE)) == len(MODULES_OUTSIDE)
