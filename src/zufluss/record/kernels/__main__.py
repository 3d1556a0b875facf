"""`python -m zufluss.record.kernels`: compile the kernels now, so that no later start waits.

Makes the compiled library beside the sources, as a wheel has it. Without a C compiler, or if the
sources cannot be written to, the kernels go to numba's cache.
"""

from __future__ import annotations

import sys

from zufluss.record.kernels import library, warm
from zufluss.record.kernels.compile.link import LinkError, make_library


def _main() -> None:
    if library.functions() is None:
        try:
            make_library(library.HERE)
            library.functions.cache_clear()
        except LinkError as problem:
            sys.stderr.write(f"no compiled library: {problem}\n")
    warm()


_main()
