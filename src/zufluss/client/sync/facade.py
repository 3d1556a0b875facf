"""How the synchronous classes are derived from the async ones.

A façade holds its *twin*, the async object that does the work, and the thread whose event loop
runs it. Parameters, types and docstrings of a method are written once, in the class of the twin:

| in a façade | the twin's method | runs on |
|---|---|---|
| `waits(AsyncX.do)` | is a coroutine; its result is returned | the loop |
| `opens(AsyncX.open, Y)` | is a coroutine; its result becomes the twin of a façade `Y` | the loop |
| `makes(AsyncX.make, Y)` | returns the twin of a façade `Y` | the loop |
| `plans(AsyncX.scan, Y)` | returns the twin of a façade `Y` | the caller's thread |
| `calls(AsyncX.check)` | returns a value | the caller's thread |

Type checkers see the parameters of the twin's method and the façade's result. `help()` shows the
docstring with the examples as synchronous code.

Properties, overloads, and methods whose parameters or conversions differ are written out, because
a derivation would lose their types; `documented_by` gives them the docstrings of the twin's class.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    get_type_hints,
)

from zufluss.client.sync.loop import LoopThread

T = TypeVar("T", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
C = TypeVar("C", bound=type)


class _Block(Protocol):
    def __aexit__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, None]: ...


B = TypeVar("B", bound=_Block, covariant=True)

_ASYNC_WORDS: Final = re.compile(r"\b(?:async|await) ")


class Facade(Generic[T]):
    """An object for synchronous code; its twin does the work on the loop of the connection."""

    def __init__(self, thread: LoopThread, twin: T) -> None:
        self._thread = thread
        self._twin = twin

    def __repr__(self) -> str:
        return repr(self._twin).replace("Async", "", 1)


class BlockFacade(Facade[B]):
    """A façade for `with`: leaving its block leaves that of the twin."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.run(self._twin.__aexit__(*exc))


def waits(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Facade[T], P], R]:
    """A method that waits for a coroutine of the twin."""

    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(_bound(self._twin, method)(*args, **kwargs))

    return _described(call, method)


def calls(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[Facade[T], P], R]:
    """A method that calls the twin in the caller's thread."""

    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _bound(self._twin, method)(*args, **kwargs)

    return _described(call, method)


def opens(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, A]],
    facade: Callable[[LoopThread, A], R],
) -> Callable[Concatenate[Facade[T], P], R]:
    """A method that waits for a coroutine of the twin and puts a façade before its result."""

    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return facade(self._thread, self._thread.run(_bound(self._twin, method)(*args, **kwargs)))

    return _described(call, method, facade)


def makes(
    method: Callable[Concatenate[T, P], A], facade: Callable[[LoopThread, A], R]
) -> Callable[Concatenate[Facade[T], P], R]:
    """A method that calls the twin on the loop and puts a façade before its result."""

    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        make = functools.partial(_bound(self._twin, method), *args, **kwargs)
        return facade(self._thread, self._thread.call(make))

    return _described(call, method, facade)


def plans(
    method: Callable[Concatenate[T, P], A], facade: Callable[[LoopThread, A], R]
) -> Callable[Concatenate[Facade[T], P], R]:
    """A method that calls the twin in the caller's thread and puts a façade before its result."""

    def call(self: Facade[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return facade(self._thread, _bound(self._twin, method)(*args, **kwargs))

    return _described(call, method, facade)


def documented_by(twin: type) -> Callable[[C], C]:
    """Give members of a façade that have no docstring the one of their twin."""

    def document(facade: C) -> C:
        for name, member in vars(facade).items():
            text = getattr(getattr(twin, name, None), "__doc__", None)
            if text and not name.startswith("_") and not member.__doc__:
                member.__doc__ = _ASYNC_WORDS.sub("", text)
        return facade

    return document


def _bound(twin: object, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
    """The method of this twin, whose class may override it."""
    bound: Callable[P, R] = getattr(twin, method.__name__)
    return bound


def _described(
    call: Callable[P, R], method: Callable[..., Any], facade: Callable[..., Any] | None = None
) -> Callable[P, R]:
    """Name, signature and docstring of the method, for `help()`."""
    functools.update_wrapper(call, method)
    call.__qualname__ = method.__qualname__.removeprefix("Async")
    call.__doc__ = _ASYNC_WORDS.sub("", method.__doc__ or "")
    if facade is not None:
        result = facade if isinstance(facade, type) else get_type_hints(facade)["return"]
        call.__annotations__ = {**method.__annotations__, "return": result}
        signature = inspect.signature(method).replace(return_annotation=result)
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call
