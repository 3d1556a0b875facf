"""Keeps pyarrow from importing pandas, in processes that are ours.

pyarrow imports pandas, where it is installed, to ask whether some array came from pandas: seconds
of CPU and tens of megabytes, in the middle of a request of a server or of a short command. In a
user's process pandas may be wanted, so the client never does this.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=fullname)
        return None


def do_without_pandas() -> None:
    """Let every import of pandas fail, as if it were not installed."""
    if not any(isinstance(finder, _NoPandas) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoPandas())
