"""A process that commits to a table of a catalog of type hadoop, and may be killed while it does.

    python -m tests.lake.iceberg.hadoop_writer WAREHOUSE NAME COUNT [SETTING=VALUE…]

It sets the properties NAME-0, NAME-1, … of the table db.t, one by commit, and commits again after
every conflict. `die=STEP` kills the process with SIGKILL at that step of its first commit.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from pyiceberg.exceptions import CommitFailedException

from zufluss.lake.iceberg import warehouse
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.hadoop import HadoopCatalog

TABLE: Final = "db.t"

STEPS: Final = ("half written", "before the link", "after the link", "before the hint")
"""Where a commit can be killed."""


def commit(catalog: HadoopCatalog, key: str) -> int:
    """Set a property of the table; returns how many attempts lost."""
    lost = 0
    while True:
        try:
            with catalog.load_table(TABLE).transaction() as transaction:
                transaction.set_properties({key: "set"})
            return lost
        except CommitFailedException:
            lost += 1


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: str) -> None:
    """Kill this process at a step of its next commit."""
    link = warehouse._link

    def half(write: Callable[..., None]) -> Callable[..., None]:
        def write_half(fd: int, data: bytes, position: int) -> None:
            write(fd, data[: len(data) // 2], position)
            die()

        return write_half

    def link_and_die(*paths: Any) -> None:
        link(*paths)
        die()

    if step == "half written":
        warehouse.write_all = half(warehouse.write_all)  # type: ignore[attr-defined]
    elif step == "before the link":
        warehouse._link = die
    elif step == "after the link":
        warehouse._link = link_and_die
    elif step == "before the hint":
        warehouse.LocalWarehouse.replace = die  # type: ignore[method-assign]
    else:
        raise ValueError(f"{step} is none of {', '.join(STEPS)}")


def main(location: str, name: str, count: int, *settings: str) -> None:
    properties = dict(setting.split("=", 1) for setting in settings)
    step = properties.pop("die", None)
    catalog = load({"type": "hadoop", "warehouse": location, **properties})
    assert isinstance(catalog, HadoopCatalog)
    if step is not None:
        die_at(step)
    for number in range(count):
        commit(catalog, f"{name}-{number}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
