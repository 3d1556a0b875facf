"""What an aggregation function is to the fold: an operation of its kernel, or a function outside.

Functions of numbers, times, flags, and those that choose one of the values there are, are
operations of the kernel (`kernels.py`). The others make new bytes of two values; they are called
value by value (`outside.py`). Which function is what says one small file per family, listed in
`registry.py`; what is declared of them stands in `zufluss.model.aggregate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from zufluss.model.schema import Column
from zufluss.record.aggregate import kernels as k


class Refused(Exception):
    """A function cannot take a value; whoever called it knows the column and the key."""


class Outside(Protocol):
    """A function that is called value by value; neither state nor value is NULL."""

    def first(self, value: Any, *, merging: bool) -> Any:
        """The state after the first value, None for NULL; raises `Refused`.

        When `merging`, the value is a state.
        """
        ...

    def add(self, state: Any, value: Any, *, merging: bool) -> Any:
        """The state after another value, the very same if nothing changes; raises `Refused`."""
        ...


class Carried(NamedTuple):
    """How the function of a column is carried out."""

    add: int
    """The operation for inputs."""
    merge: int
    """The operation for states."""
    retract: int | None = None
    """The operation that takes inputs back, None if there is none."""
    outside: Outside | None = None
    """What is called, where the operations are `OUTSIDE`."""
    retracting: Outside | None = None
    """What is called to take inputs back."""


Builder: TypeAlias = Callable[[Column], Carried]


def outside(function: Outside, retracting: Outside | None = None) -> Carried:
    """A function that is called for inputs and states."""
    back = None if retracting is None else k.OUTSIDE
    return Carried(k.OUTSIDE, k.OUTSIDE, back, function, retracting)


def always(add: int, merge: int | None = None, retract: int | None = None) -> Builder:
    """A function that is the same operation for all columns."""
    carried = Carried(add, add if merge is None else merge, retract)
    return lambda _column: carried
