"""Sets as bytes: Roaring bitmaps, HyperLogLog and theta sketches. Their union is the function.

| function | bytes |
|---|---|
| rbm32 | Roaring bitmap of 32-bit numbers, the portable format |
| rbm64 | Roaring bitmap of 64-bit numbers, the portable format |
| hll | HyperLogLog sketch of Apache DataSketches, any of its types |
| theta | compact theta sketch of Apache DataSketches, with the default seed |

Bytes are checked when they first come, so that what is stored can always be merged. The bitmap that
was made last is kept as an object: the next value of the same key mostly follows it. Sketches
remember more than their bytes have, so they are always read from these: what comes out must not
depend on how the values came in batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from zufluss.model.schema import Column
from zufluss.record.aggregate.base import Builder, Carried, Refused, outside
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
        """The bytes as they are, if they are sound."""
        self._loaded(value)
        return value

    def add(self, state: bytes, value: bytes, *, merging: bool) -> bytes:
        """The bytes of the union."""
        last, known = self._last
        known, more = known if last is state else self._loaded(state), self._loaded(value)
        if self._keeps and more <= known:
            self._last = (state, known)
            return state
        united = self._unite(known, more)
        made = self._dump(united)
        if self._keeps:
            self._last = (made, united)
        return state if made == state else made

    def _loaded(self, value: bytes) -> Any:
        try:
            return self._load(value)
        except (ValueError, IndexError, RuntimeError, MemoryError, TypeError) as e:
            raise Refused(f"{len(value)} bytes are no {self._what}: {e}") from None


def _bitmap(name: str, what: str) -> Builder:
    def build(_column: Column) -> Carried:
        import pyroaring

        kind = getattr(pyroaring, name)

        def load(value: bytes) -> Any:
            found = kind.deserialize(value)
            if found.serialize() != value:
                raise ValueError("bytes are left over, or not as the format has them")
            return found

        return outside(Union(what, load, operator.or_, kind.serialize, keeps=True))

    return build


def _hll(_column: Column) -> Carried:
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

    return outside(Union("HyperLogLog sketch", load, unite, sketch.serialize_compact))


def _theta(_column: Column) -> Carried:
    import datasketches

    def unite(one: Any, other: Any) -> Any:
        retained = max(one.num_retained, other.num_retained)
        bits = min(max(_THETA_BITS, retained.bit_length() - 1), _THETA_BITS_MAX)
        union = datasketches.theta_union(bits)
        union.update(one)
        union.update(other)
        return union.get_result()

    sketch = datasketches.compact_theta_sketch
    return outside(Union("theta sketch", sketch.deserialize, unite, sketch.serialize))


SKETCHES: Final[Mapping[str, Builder]] = {
    "rbm32": _bitmap("BitMap", "Roaring bitmap of 32-bit numbers"),
    "rbm64": _bitmap("BitMap64", "Roaring bitmap of 64-bit numbers"),
    "hll": _hll,
    "theta": _theta,
}
"""The family, by name."""
