"""Every fuzz target with hypothesis: seeds that were changed, cut, repeated and mixed.

The quick form of `make fault`, which runs the same targets under a coverage-guided fuzzer.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.counts import rounds
from tests.fuzz.targets import TARGETS, Target

EXAMPLES = rounds(300, 5_000)
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with a few changes."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("byte", "extreme", "bit", "cut", "insert", "end", "splice"))):
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "extreme":
                count = draw(st.sampled_from((1, 2, 4, 8)))
                data[at : at + count] = bytes([draw(st.sampled_from(EXTREMES))]) * count
            case "bit":
                data[at : at + 1] = bytes(
                    b ^ 1 << draw(st.integers(0, 7)) for b in data[at : at + 1]
                )
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=20))
            case "end":
                del data[at:]
            case "splice":
                other = draw(st.sampled_from(seeds))
                data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted(name: str) -> None:
    """Otherwise the fuzzer would only ever see the first check of a decoder."""
    target = TARGETS[name]
    for data in target.seeds():
        target.run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_seeds_are_decoded_or_refused(name: str) -> None:
    target = TARGETS[name]
    run(target, mutated(target.seeds()))


@pytest.mark.parametrize("name", TARGETS)
def test_random_bytes_are_decoded_or_refused(name: str) -> None:
    run(TARGETS[name], st.binary(max_size=100))


def run(target: Target, inputs: st.SearchStrategy[bytes]) -> None:
    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(inputs)
    def examine(data: bytes) -> None:
        target(data)

    examine()
