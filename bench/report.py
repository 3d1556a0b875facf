"""Measured values, their goals, the stored baseline, and the table they are printed as.

What is compared over time is never a rate but a ratio of two things measured in the same run (or a
size), because rates belong to a machine and an hour. `baseline.json` holds those numbers of one
full run; a later run says how far it is from them.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BASELINE = Path(__file__).with_name("baseline.json")
NOISE = 0.15
"""A change is worth a word if it is larger than this part and the rounds do not cover it."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table."""

    name: str
    """Key in the baseline, `section.what`."""
    label: str
    """What was measured."""
    ours: str
    """Our figure, with its unit."""
    other: str = ""
    """The figure it is compared with."""
    value: float | None = None
    """The number that is comparable between runs: a ratio, or a size in KiB."""
    unit: str = "×"
    """Of `value`."""
    at_least: float | None = None
    """The goal, if more is better."""
    at_most: float | None = None
    """The goal, if less is better."""
    less_is_better: bool = False
    """For measures without a goal; those with `at_most` are so by themselves."""
    spread: tuple[float, float] | None = None
    """Lowest and highest ratio of a round."""

    @property
    def goal(self) -> str:
        """The goal as text."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        """Whether the goal is met, None without one."""
        if self.value is None or not self.goal:
            return None
        if self.at_least is not None:
            return self.value >= self.at_least
        return self.at_most is not None and self.value <= self.at_most

    def change(self, baseline: dict[str, float]) -> str:
        """The baseline's number, and a word if this one is clearly better or worse."""
        before = baseline.get(self.name)
        if before is None or self.value is None:
            return ""
        ratio = self.value / before if before else 1.0
        if self.less_is_better or self.at_most is not None:
            ratio = 1 / ratio if ratio else 1.0
        lowest, highest = self.spread or (self.value, self.value)
        if lowest <= before <= highest or 1 - NOISE <= ratio <= 1 + NOISE:
            return number(before)
        return number(before) + (" better" if ratio > 1 else " worse")

    def cells(self, baseline: dict[str, float]) -> tuple[str, ...]:
        """The line as text."""
        value = "" if self.value is None else f"{number(self.value)} {self.unit}"
        spread = "" if self.spread is None else "–".join(number(v) for v in self.spread)
        mark = {True: "ok", False: "SHORT", None: ""}[self.met]
        goal = f"{self.goal} {mark}".strip()
        return (self.label, self.ours, self.other, value, spread, goal, self.change(baseline))


HEADINGS = ("what", "zufluss", "other side", "value", "rounds", "goal", "baseline")


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def compared(
    name: str,
    label: str,
    ours: Sequence[float],
    others: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    less_is_better: bool = False,
) -> Measure:
    """A line for two series of the same length: medians, and the median of the rounds' ratios."""
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    return Measure(
        name,
        label,
        quantity(statistics.median(ours), unit),
        quantity(statistics.median(others), unit),
        statistics.median(ratios),
        at_least=at_least,
        at_most=at_most,
        less_is_better=less_is_better,
        spread=(min(ratios), max(ratios)),
    )


def quantity(value: float, unit: str) -> str:
    """A figure with its unit, large ones in thousands."""
    if value >= 1e6:
        return f"{value / 1e6:.2f} M{unit}"
    if value >= 1e4:
        return f"{value / 1e3:.1f} k{unit}"
    return f"{number(value)} {unit}"


def load_baseline(path: Path = BASELINE) -> dict[str, float]:
    """The stored numbers, none if there are none."""
    return json.loads(path.read_text()) if path.exists() else {}


def save_baseline(measures: Iterable[Measure], path: Path = BASELINE) -> None:
    """Store the numbers of this run, but no times and rates; those of other sections stay."""
    kept = [m for m in measures if m.value is not None and m.unit not in ("s", "/s")]
    found = {m.name: float(f"{m.value:.3g}") for m in kept}
    merged = load_baseline(path) | found
    path.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n")


def table(measures: Sequence[Measure], baseline: dict[str, float]) -> str:
    """The table, in Markdown."""
    lines = [HEADINGS, *(measure.cells(baseline) for measure in measures)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    rows = ["| " + " | ".join(_pad(line, widths)) + " |" for line in lines]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(rows)


def _pad(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]


def machine() -> str:
    """What the figures were measured on, without names."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, {pages / (1 << 30):.0f} GiB, load average {load}"
