"""Unions of sets that are stored as bytes: Roaring bitmaps, HyperLogLog and theta sketches.

| function | bytes |
|---|---|
| rbm32 | Roaring bitmap of 32-bit numbers, the portable format |
| rbm64 | Roaring bitmap of 64-bit numbers, the portable format |
| hll | HyperLogLog sketch of Apache DataSketches, any of its types |
| theta | compact theta sketch of Apache DataSketches, with the default seed |

Bytes are checked when they arrive, so that stored bytes can always be merged. The last bitmap is
kept as an object, because the next value is mostly for the same key. A sketch object remembers more
than its bytes, so sketches are always read from bytes: the result must not depend on how the values
were divided into batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from zufluss.model.schema import Column
from zufluss.record.aggregate.functions import Builder, Implementation, RefusedValue, in_python
from zufluss.record.aggregate.hll_bytes import check_hll

_THETA_BITS: Final = 12
_THETA_BITS_MAX: Final = 26


class Union:
    """The union of sets of one kind."""

    def __init__(
        self,
        what: str,
        load: Callable[[bytes], Any],
        unite: Callable[[Any, Any], Any],
        dump: Callable[[Any], bytes],
        *,
        keeps: bool = False,
    ) -> None:
        self._what = what
        self._load = load
        self._unite = unite
        self._dump = dump
        self._keeps = keeps
        self._last: tuple[bytes, Any] = (b"", None)

    def first(self, value: bytes, *, merging: bool) -> bytes:
        """Return the bytes; raises `RefusedValue` if they are damaged."""
        self._loaded(value)
        return value

    def add(self, state: bytes, value: bytes, *, merging: bool) -> bytes:
        """Return the bytes of the union."""
        last, known = self._last
        known, more = known if last is state else self._loaded(state), self._loaded(value)
        if self._keeps and more <= known:
            self._last = (state, known)
            return state
        united = self._unite(known, more)
        result = self._dump(united)
        if self._keeps:
            self._last = (result, united)
        return state if result == state else result

    def _loaded(self, value: bytes) -> Any:
        try:
            return self._load(value)
        except (ValueError, IndexError, RuntimeError, MemoryError, TypeError) as e:
            raise RefusedValue(f"{len(value)} bytes are no {self._what}: {e}") from None


def _bitmap(name: str, what: str) -> Builder:
    def build(_column: Column) -> Implementation:
        import pyroaring

        kind = getattr(pyroaring, name)

        def load(value: bytes) -> Any:
            bitmap = kind.deserialize(value)
            if bitmap.serialize() != value:
                raise ValueError("bytes are left over, or not in the portable format")
            return bitmap

        return in_python(Union(what, load, operator.or_, kind.serialize, keeps=True))

    return build


def _hll(_column: Column) -> Implementation:
    import datasketches

    def unite(one: Any, other: Any) -> Any:
        union = datasketches.hll_union(max(one.lg_config_k, other.lg_config_k))
        union.update(one)
        union.update(other)
        return union.get_result(one.tgt_type)

    sketch = datasketches.hll_sketch

    def load(value: bytes) -> Any:
        check_hll(value)
        return sketch.deserialize(value)

    return in_python(Union("HyperLogLog sketch", load, unite, sketch.serialize_compact))


def _theta(_column: Column) -> Implementation:
    import datasketches

    def unite(one: Any, other: Any) -> Any:
        retained = max(one.num_retained, other.num_retained)
        bits = min(max(_THETA_BITS, retained.bit_length() - 1), _THETA_BITS_MAX)
        union = datasketches.theta_union(bits)
        union.update(one)
        union.update(other)
        return union.get_result()

    sketch = datasketches.compact_theta_sketch
    return in_python(Union("theta sketch", sketch.deserialize, unite, sketch.serialize))


SKETCHES: Final[Mapping[str, Builder]] = {
    "rbm32": _bitmap("BitMap", "Roaring bitmap of 32-bit numbers"),
    "rbm64": _bitmap("BitMap64", "Roaring bitmap of 64-bit numbers"),
    "hll": _hll,
    "theta": _theta,
}
"""Builders of these functions, by name."""
