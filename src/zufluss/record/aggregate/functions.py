"""How an aggregation function is implemented: as an operation of the kernel, or in Python.

Functions of numbers, times and flags, and functions that choose one of two values, are operations
of the fold kernel (`opcodes.py`). The others build new bytes from two values and are called value
by value (`python_fold.py`). Each family of functions has a small module, and `registry.py` joins
them; `zufluss.model.aggregate` declares the functions and their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from zufluss.model.schema import Column
from zufluss.record.aggregate import opcodes as op


class RefusedValue(Exception):
    """A function cannot take a value; the caller adds the column and the key."""


class ValueFunction(Protocol):
    """A function in Python, called value by value; neither state nor value is NULL."""

    def first(self, value: Any, *, merging: bool) -> Any:
        """Return the state after the first value, None for NULL; raises `RefusedValue`.

        When `merging`, the value is a state itself.
        """

    def add(self, state: Any, value: Any, *, merging: bool) -> Any:
        """Return the state after another value, or the same object if it does not change.

        Raises `RefusedValue`.
        """


class Implementation(NamedTuple):
    """How the aggregation function of a column is implemented."""

    add: int
    """Operation for input values."""
    merge: int
    """Operation for states."""
    retract: int | None = None
    """Operation that takes an input value back, None if the function cannot."""
    function: ValueFunction | None = None
    """The Python function, where `add` and `merge` are `OUTSIDE`."""
    retract_function: ValueFunction | None = None
    """The Python function that takes values back, where `retract` is `OUTSIDE`."""


Builder: TypeAlias = Callable[[Column], Implementation]


def in_python(
    function: ValueFunction, retract_function: ValueFunction | None = None
) -> Implementation:
    """Return the implementation by Python functions."""
    retract = None if retract_function is None else op.OUTSIDE
    return Implementation(op.OUTSIDE, op.OUTSIDE, retract, function, retract_function)


def always(add: int, merge: int | None = None, retract: int | None = None) -> Builder:
    """Return the builder of a function that is the same operation for every column."""
    implementation = Implementation(add, add if merge is None else merge, retract)
    return lambda _column: implementation
