"""The memory of a container, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from zufluss.replica.memory_limit import memory_limit

UNLIMITED = 9223372036854771712
"""What version 1 shows for a group without a limit."""


@pytest.mark.parametrize(
    ("own_groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "500"}, 500),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/a/b\n", {"a/memory.max": "400", "a/b/memory.max": "max"}, 400),
        ("0::/a/b\n", {"a/memory.max": "400", "a/b/memory.max": "300"}, 300),
        ("0::/of/the/host\n", {"memory.max": "200"}, 200),
        ("0::/a\n", {"unified/a/memory.max": "100"}, 100),
        (
            "3:cpu,cpuacct:/x\n2:memory:/a\n0::/\n",
            {"memory/memory.limit_in_bytes": str(UNLIMITED), "memory/a/memory.limit_in_bytes": "9"},
            9,
        ),
        ("2:memory:/a\n", {"memory/memory.limit_in_bytes": str(UNLIMITED)}, UNLIMITED),
        ("3:cpu:/a\n", {"a/memory.max": "7"}, None),
        (None, {"memory.max": "7"}, None),
    ],
)
def test_the_least_limit_on_the_way_to_the_root_counts(
    tmp_path: Path, own_groups: str | None, limits: dict[str, str], expected: int | None
) -> None:
    for name, text in limits.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    if own_groups is not None:
        (tmp_path / "own").write_text(own_groups)
    assert memory_limit(tmp_path / "own", tmp_path / "groups") == expected
