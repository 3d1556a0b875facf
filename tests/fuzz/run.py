"""`python -m tests.fuzz.run`: every target under atheris, a coverage-guided fuzzer.

    python -m tests.fuzz.run                        all targets, two at a time
    python -m tests.fuzz.run --seconds 600 produce  one target for ten minutes
    python -m tests.fuzz.run --replay FILE produce  once more with the input that failed

Each target runs in a process of its own for `--seconds` (or ZUFLUSS_FUZZ_SECONDS, 60), starts from
the seeds, and gets a seed of its own for its random numbers, which is printed. An input that makes
a target fail is kept in `--keep` (.fuzz) and named; the exit code is then 1. atheris is in the
dependency group `fuzz`: `make fault` installs it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

INSTRUMENTED = ["zufluss"]
INPUT_BYTES_MAX = 4096
HANG_SECONDS = 10
_EXECUTED = re.compile(r"stat::number_of_executed_units: *(\d+)")
_COVERED = re.compile(r"cov: (\d+)")


class Outcome(NamedTuple):
    """How a target went."""

    name: str
    seed: int
    executed: int
    covered: int
    failed: bool
    output: str

    def __str__(self) -> str:
        verdict = "FAILED" if self.failed else "ok"
        counts = f"{self.executed:>12,} executions, {self.covered:>6,} edges"
        return f"{self.name:16} {verdict:6} {counts}, seed {self.seed}"


def main() -> int:
    """Run the targets that the command line names."""
    parser = argparse.ArgumentParser(description="Fuzz the decoders.")
    parser.add_argument("targets", nargs="*", help="names of targets; all by default")
    parser.add_argument("--seconds", type=int, default=int(_setting("ZUFLUSS_FUZZ_SECONDS", "60")))
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--keep", type=Path, default=Path(".fuzz"), help="for inputs that failed")
    parser.add_argument("--replay", type=Path, help="run a target once with this file")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return fuzz(options.one[0], options.one[1:])
    from tests.fuzz.targets import TARGETS

    unknown = sorted(set(options.targets) - set(TARGETS))
    if unknown:
        parser.error(f"no target is called {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    names = options.targets or list(TARGETS)
    if options.replay:
        TARGETS[names[0]](options.replay.read_bytes())
        return 0
    options.keep.mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda n: run(n, options.seconds, options.keep), names))
    total = sum(outcome.executed for outcome in outcomes)
    failed = [outcome for outcome in outcomes if outcome.failed]
    print(f"{total:,} executions of {len(outcomes)} targets, {len(failed)} failed")
    return 1 if failed else 0


def _setting(name: str, default: str) -> str:
    return os.environ.get(name) or default


def run(name: str, seconds: int, keep: Path) -> Outcome:
    """Fuzz a target in a process of its own."""
    seed = int(_setting("ZUFLUSS_SEED", str(random.SystemRandom().randrange(1, 1 << 31))))
    with tempfile.TemporaryDirectory(prefix="zufluss-fuzz-") as corpus:
        command = [sys.executable, "-m", "tests.fuzz.run", "--one", name, corpus]
        command += [f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1"]
        command += [f"-max_len={INPUT_BYTES_MAX}", f"-timeout={HANG_SECONDS}"]
        command += [f"-artifact_prefix={keep}/{name}-"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    executed = _EXECUTED.search(done.stdout)
    covered = _COVERED.findall(done.stdout)
    outcome = Outcome(
        name,
        seed,
        int(executed[1]) if executed else 0,
        int(covered[-1]) if covered else 0,
        done.returncode != 0,
        done.stdout,
    )
    print(outcome, flush=True)
    if outcome.failed:
        print(done.stdout[-6000:], flush=True)
    return outcome


def fuzz(name: str, arguments: list[str]) -> int:
    """Hand the process over to atheris."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed; run `make fault`, or `uv sync --group fuzz`")
        return 2
    from tests.fuzz.quiet import quiet
    from zufluss.record import kernels

    quiet()
    kernels.warm()  # before the rest: numba would compile the instruments along with them
    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    for number, data in enumerate(target.seeds()):
        (Path(arguments[0]) / f"seed-{number}").write_bytes(data)
    target(b"")  # load what is loaded late before the clock starts
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
