"""Run the tests of Fluss's Flink connector against `zufluss dev`: `make test-peers`.

    python -m scripts.peers [--keep FOLDER] [Flink120UndoRecoveryITCase …]

`--keep` leaves reports, logs and data of each class in a folder of its own below FOLDER, in place
of those of an earlier run. Ctrl-C and SIGTERM end the server and the Java process of the class.

Our own tests show what we think Fluss's clients do. These are the tests by which Fluss's developers
judge a server, with the Java client and Flink SQL as users have them: Maven fetches the released
jars into the cache of the user, and the classes in `tests/peers/java` put a running server in the
place of the cluster that the tests would start. `tests/peers/expected.txt` names the cases that
fail, each with its reason. A failure that is not in the list ends this script with exit code 1, and
so does a case of the list that passes now. Each class gets a server and a Java process of its own.

Not part of CI, because it needs Maven Central; without Maven or Java it says so, and runs nothing.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from scripts.maven import OPENING, MavenError, fetched_jars
from scripts.newcomer import free_port
from zufluss.testing.server import DevServer

PEERS = Path(__file__).parents[1] / "tests" / "peers"
POM = PEERS / "pom.xml"
SOURCES = PEERS / "java"
EXPECTED = PEERS / "expected.txt"
CLASS_MINUTES = 40
"""A class that takes longer hangs: the limit of a case ends it long before."""
CASE_LIMIT = "4m"
ORIGINS = ("theirs", "differs", "ours")
"""How the reason of a listed case begins; the head of the list says what each means."""


@dataclass(frozen=True)
class Case:
    """A class of Fluss's tests, and the options that its tests assume of a server."""

    name: str
    properties: dict[str, str] = field(default_factory=dict)
    sasl: bool = False
    """The server has a second listener, CLIENT, with the users of Fluss's tests."""

    @property
    def short(self) -> str:
        """The name without its package."""
        return self.name.rpartition(".")[2]


FLINK = "org.apache.fluss.flink"
CASES = (
    Case(f"{FLINK}.sink.Flink120UndoRecoveryITCase"),
    Case(
        f"{FLINK}.sink.undo.UndoRecoveryManagerITCase",
        {"zufluss.aggregation.default-function": "last_value_ignore_nulls"},
    ),
    Case(f"{FLINK}.sink.Flink120TableSinkITCase"),
    Case(f"{FLINK}.sink.Flink120ComplexTypeITCase"),
    Case(f"{FLINK}.sink.FlussSinkITCase"),
    Case(f"{FLINK}.source.Flink120TableSourceITCase"),
    Case(f"{FLINK}.source.Flink120TableSourceBatchITCase"),
    Case(f"{FLINK}.source.Flink120TableSourceFailOverITCase"),
    Case(f"{FLINK}.source.Flink120ChangelogVirtualTableITCase"),
    Case(f"{FLINK}.source.Flink120BinlogVirtualTableITCase"),
    Case(f"{FLINK}.source.FlussSourceITCase"),
    Case(f"{FLINK}.metrics.Flink120MetricsITCase"),
    Case(
        f"{FLINK}.catalog.Flink120CatalogITCase",
        {"auto-partition.check.interval": "3s", "datalake.format": "paimon"},
    ),
    Case(
        f"{FLINK}.procedure.Flink120ProcedureITCase",
        {"datalake.format": "paimon", "kv.rocksdb.shared-rate-limiter.bytes-per-sec": "100 mb"},
        sasl=True,
    ),
)
USERS = (
    "org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required"
    ' user_root="password" user_guest="password2";'
)
"""The users of the test of procedures, as it declares them itself."""


class PeersError(Exception):
    """The tests could not be run."""


def main() -> int:
    """Run the classes, print the table, compare with the list; the exit code says what came."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--keep", type=Path, help="a folder for reports, logs and data")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    missing = [name for name in ("mvn", "java", "javac") if shutil.which(name) is None]
    if missing:
        print(f"nothing was run: {', '.join(missing)} not found on the PATH")
        return 0
    unknown = set(options.classes) - {case.short for case in CASES}
    if unknown:
        raise PeersError(f"no such class: {', '.join(sorted(unknown))}")
    expected = read_expected(EXPECTED.read_text())
    jars = fetched_jars(POM)
    told: list[str] = []
    with tempfile.TemporaryDirectory(prefix="zufluss-peers-") as temporary:
        folder = options.keep.resolve() if options.keep else Path(temporary)
        stubs = compiled_stubs(jars, folder / "classes")
        print(f"{'class':<40} {'passed':>7} {'failed':>7} {'expected':>9} {'minutes':>8}")
        for case in CASES:
            if options.classes and case.short not in options.classes:
                continue
            began = time.monotonic()
            outcome = run(case, (stubs, jars), folder / case.short)
            failed = {name for name, passed in outcome.items() if not passed}
            print(
                f"{case.short:<40} {len(outcome) - len(failed):>7} {len(failed):>7}"
                f" {len(failed & set(expected)):>9} {(time.monotonic() - began) / 60:>8.1f}",
                flush=True,
            )
            told += surprises(case.short, outcome, expected)
    print("\n".join(told or ["all as expected"]))
    return 1 if told else 0


def surprises(short: str, outcome: dict[str, bool], expected: dict[str, str]) -> list[str]:
    """Return a line for each case of a class that did otherwise than the list says."""
    lines = []
    listed = {name for name in expected if name.startswith(f"{short}#")}
    for name in sorted(listed | set(outcome)):
        if name not in listed and not outcome[name]:
            lines.append(f"{name} failed")
        if name in listed and outcome.get(name, True):
            instead = "passed" if name in outcome else "did not run"
            lines.append(f"{name} {instead}, but is in {EXPECTED.name}")
    return lines


def read_expected(text: str) -> dict[str, str]:
    """Return the reason of each case that is expected to fail, by `class#method`."""
    reasons = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, reason = line.partition("  ")
            if "#" not in name or not reason.strip():
                raise PeersError(f"{EXPECTED.name}: no case and reason in {line!r}")
            reasons[name] = reason.strip()
    return reasons


def compiled_stubs(jars: Path, classes: Path) -> Path:
    """Compile the classes of `tests/peers/java`; return the folder."""
    sources = [str(source) for source in sorted(SOURCES.glob("*.java"))]
    command = ["javac", "-nowarn", "-d", str(classes), "-cp", f"{jars}/*", *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeersError(f"javac: {done.stderr}")
    return classes


def run(case: Case, class_path: tuple[Path, Path], folder: Path) -> dict[str, bool]:
    """Run one class on a server of its own; return whether each of its cases passed."""
    stubs, jars = class_path
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    client = f"127.0.0.1:{free_port()}"
    properties = case.properties
    if case.sasl:
        properties = properties | {
            "bind.listeners": f"FLUSS://127.0.0.1:0,CLIENT://{client}",
            "security.protocol.map": "CLIENT:sasl",
            "security.sasl.plain.jaas.config": USERS,
            "super.users": "User:root",
        }
    with DevServer(folder / "data", properties) as server:
        java = [
            "java",
            "-Xmx2g",
            *OPENING,
            f"-Dpeer={server.bootstrap}",
            f"-Dpeer.CLIENT={client}",
            f"-Dpeer.python={sys.executable}",
            f"-Dlog4j.configurationFile={PEERS / 'log4j2.xml'}",
        ]
        console = [
            *("-cp", f"{stubs}:{jars}/*", "org.junit.platform.console.ConsoleLauncher", "execute"),
            *("--select-class", case.name, "--disable-banner", "--disable-ansi-colors"),
            *("--config", f"junit.jupiter.execution.timeout.testable.method.default={CASE_LIMIT}"),
            *("--reports-dir", str(folder / "reports")),
        ]
        log = folder / "java.log"
        with log.open("w") as output:
            try:
                subprocess.run(
                    [*java, *console],
                    cwd=folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=60 * CLASS_MINUTES,
                )
            except subprocess.TimeoutExpired:
                raise PeersError(f"{case.short} took over {CLASS_MINUTES} minutes") from None
        (folder / "server.log").write_text("".join(f"{line}\n" for line in server.output))
    outcome = read_report(folder / "reports" / "TEST-junit-jupiter.xml")
    if not outcome:
        raise PeersError(f"{case.short}: no case ran:\n{log.read_text()[-4000:]}")
    return outcome


def read_report(report: Path) -> dict[str, bool]:
    """Return whether each case of a JUnit report passed, by `class#method`, without the skipped."""
    outcome = {}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                name = f"{case.get('classname', '').rpartition('.')[2]}#{case.get('name', '')}"
                passed = case.find("failure") is None and case.find("error") is None
                outcome[name.removesuffix("()")] = passed
    return outcome


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PeersError, MavenError) as problem:
        sys.exit(str(problem))
