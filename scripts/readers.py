"""Set up `.venv/readers`: lake readers that share no code with zufluss, for the tests.

DuckDB's Iceberg extension exists on PyPI for one version of DuckDB only, which is not the one in
the lock file; so it gets an environment of its own, from `tests/lake/readers.txt`. A second call
finds it current and costs next to nothing. Several test workers may call at once: one builds, the
others wait for it. Prints the interpreter to run readers with.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "lake" / "readers.txt"
ENVIRONMENT = ROOT / ".venv" / "readers"
PYTHON = ENVIRONMENT / "bin" / "python"


def state() -> str:
    """What a current environment was built from: the requirements and this Python."""
    content = REQUIREMENTS.read_bytes() + sys.version.encode()
    return hashlib.sha256(content).hexdigest()


def is_current() -> bool:
    """The environment is there and was built from what is asked for now."""
    ready = ENVIRONMENT / ".ready"
    return ready.exists() and PYTHON.exists() and ready.read_text() == state()


def build() -> None:
    """Build the environment, with uv where there is one; the mark is written last."""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    beside = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if uv:
        run(uv, "venv", "--quiet", "--python", sys.executable, str(ENVIRONMENT))
        run(uv, "pip", "install", "--quiet", "--python", str(PYTHON), "-r", str(REQUIREMENTS))
    else:
        run(sys.executable, "-m", "venv", str(ENVIRONMENT))
        pip = (str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "-r", str(REQUIREMENTS))
    (ENVIRONMENT / ".ready").write_text(state())


def run(*command: str) -> None:
    """Run a command, and stop here if it fails."""
    subprocess.run(command, check=True)


def main() -> None:
    """Build what is missing, under a lock, and say where the interpreter is."""
    if not is_current():
        ENVIRONMENT.parent.mkdir(exist_ok=True)
        with (ENVIRONMENT.parent / "readers.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_current():
                build()
    print(PYTHON)


if __name__ == "__main__":
    main()
