"""Puts the compiled kernels into a wheel; hatchling runs this when it builds one.

An editable install and a source distribution get no kernels: a clone makes them with `make
kernels`. If the library cannot be made, for example because there is no C compiler, the wheel is a
pure one whose kernels numba compiles at the first start.

The machine code needs no particular version of numba and uses only Python's stable interface, so
one wheel per platform serves Python 3.11 and later, and the dependency on numba has no upper bound.

On Linux the tag of the wheel is that of the machine (`linux_x86_64`), which PyPI refuses: run
`auditwheel repair`, which checks what the library links to and gives it a `manylinux` tag.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "src/zufluss/record/kernels"


class KernelsHook(BuildHookInterface[Any]):
    """The build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels unless the source tree has a current library."""
        if version != "standard":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from zufluss.record.kernels import library
        from zufluss.record.kernels.compile.link import LinkError, make_library

        try:
            library.load(library.HERE)
        except library.LibraryError:
            try:
                make_library(library.HERE)
            except LinkError as problem:
                self.app.display_warning(f"the wheel has no compiled kernels: {problem}")
                return
        build_data["artifacts"] += [f"{PACKAGE}/{n}" for n in (library.LIBRARY, library.LABEL)]
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"
