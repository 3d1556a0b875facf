"""Instructions for kernels that Python has no expression for.

An intrinsic is written as numba wants it: a function of types that returns a signature and a
function that generates LLVM instructions. Both run only when a kernel is compiled, so a process
that uses the compiled library never imports numba or llvmlite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from zufluss.record.kernels import library
from zufluss.record.kernels.types import numba_type


class _LazyModule:
    """A module that is imported when a name of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


ir: Any = _LazyModule("llvmlite.ir")
cgutils: Any = _LazyModule("numba.core.cgutils")


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make an intrinsic of a function that returns a signature of our types and a generator."""
    if library.functions() is not None:
        return function
    from numba import extending

    @functools.wraps(function)
    def typed(*kinds: Any) -> Any:
        signature, generate = function(*kinds)
        return numba_type(signature), generate

    return extending.intrinsic(typed)
