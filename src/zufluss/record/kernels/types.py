"""Types of the arguments and results of kernels.

numba has such types too, but importing numba takes longer than starting a server. A process that
uses the compiled library (`library.py`) imports no numba; one that compiles converts these types
with `numba_type`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Signature:
    """What a kernel takes and returns."""

    returns: Scalar | UniTuple
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number, a truth value, or nothing; called with arguments it makes a signature."""

    name: str
    """numba's name of the type."""

    def __call__(self, *arguments: Any) -> Signature:
        """Return the signature of a function that returns this."""
        return Signature(self, arguments)


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array without gaps."""

    element: Scalar
    dimensions: int
    layout: Literal["C"]
    readonly: bool = False
    """Whether the kernel only reads the array; then it takes writable and read-only arrays."""


@dataclass(frozen=True, slots=True)
class UniTuple:
    """A tuple of numbers of one type; called with arguments it makes a signature."""

    element: Scalar
    count: int

    def __call__(self, *arguments: Any) -> Signature:
        """Return the signature of a function that returns this."""
        return Signature(self, arguments)


void = Scalar("void")
boolean = Scalar("boolean")
uint8 = Scalar("uint8")
uint32 = Scalar("uint32")
uint64 = Scalar("uint64")
int16 = Scalar("int16")
int32 = Scalar("int32")
int64 = Scalar("int64")
float64 = Scalar("float64")


def numba_type(kind: Any) -> Any:
    """Convert a type or a signature to numba's; a type of numba's own stays as it is."""
    types: Any = import_module("numba.types")
    match kind:
        case Scalar(name):
            return getattr(types, name)
        case Array(element, dimensions, layout, readonly):
            return types.Array(numba_type(element), dimensions, layout, readonly=readonly)
        case UniTuple(element, count):
            return types.UniTuple(numba_type(element), count)
        case Signature(returns, arguments):
            return numba_type(returns)(*map(numba_type, arguments))
    return kind
