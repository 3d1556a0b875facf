"""`make bench`: measures everything in one run and prints it as ratios.

    python -m bench                        all sections, about ten minutes
    python -m bench --only append,scan     some of them
    python -m bench --quick                fewer and shorter rounds, for a first look
    python -m bench --save                 and store the numbers as the new baseline
    python -m bench --only kv --keys 10000000   a larger primary-key table

Every figure is compared with another side measured in the same run, round by round in turns; the
ratio is the median over the quieter half of the rounds. `docs/performance.md` says what each line
means.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from pathlib import Path
from types import ModuleType

from bench.report import Measure, load_baseline, machine, save_baseline, table

SECTIONS = {
    "append": 16,
    "scan": 12,
    "clients": 10,
    "small": 8,
    "cluster": 6,
    "memory": 1,
    "startup": 3,
    "micro": 3,
    "kv": 5,
    "kvscan": 5,
    "aggregate": 5,
    "tiering": 3,
    "union": 6,
    "spark": 5,
    "remote": 5,
    "leases": 5,
    "wal": 6,
    "standbys": 3,
}
"""The modules with a `run`, and the rounds each takes."""
WITH_KEYS = ("kv", "kvscan", "remote", "standbys")
"""The modules that can be told how many keys their large tables have."""
QUICK_ROUNDS = 3


def main() -> None:
    """Run the sections and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", help=f"sections, out of {','.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--save", action="store_true", help="store the numbers as the baseline")
    parser.add_argument("--dir", type=Path, help="where the data goes (a file system, not tmpfs)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is not met")
    parser.add_argument(
        "--keys", type=int, help=f"keys of the large tables of {', '.join(WITH_KEYS)}"
    )
    a = parser.parse_args()
    chosen = a.only.split(",") if a.only else list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    began = time.perf_counter()
    print(machine(), flush=True)
    measures: list[Measure] = []
    modules = {name: importlib.import_module(f"bench.{name}") for name in chosen}
    try:
        for name, module in modules.items():
            print(f"{name} …", flush=True)
            options = {"keys": a.keys} if name in WITH_KEYS and a.keys else {}
            measures += section(module, SECTIONS[name], a.quick, a.dir, **options)
    finally:  # what was measured before a failure is worth seeing
        print(f"\n{machine()}; {time.perf_counter() - began:.0f} s\n")
        print(table(measures, load_baseline()))
    if a.save:
        save_baseline(measures)
    if a.check and any(measure.met is False for measure in measures):
        raise SystemExit(1)


def section(
    module: ModuleType, rounds: int, quick: bool, directory: Path | None, **options: int
) -> list[Measure]:
    """Run one section in a directory of its own."""
    rounds = min(rounds, QUICK_ROUNDS) if quick else rounds
    with tempfile.TemporaryDirectory(prefix="zufluss-bench-", dir=directory) as where:
        return list(module.run(Path(where), rounds, quick, **options))


if __name__ == "__main__":
    main()
