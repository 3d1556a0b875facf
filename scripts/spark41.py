"""Run the Spark tests on the oldest Spark that we support: `make test-spark41`.

The environment `.venv/spark41` holds what `uv.lock` says, except that pyspark is 4.1.4 with the
py4j that it brings. It is made anew when the lock file changes. Arguments go to pytest, in place of
the directories that are tested by default.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PYSPARK = "4.1.4"
ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv" / "spark41"
TESTED = ("tests/spark", "tests/tiering")


def main(arguments: list[str]) -> int:
    """Make the environment if it is not current, and run pytest in it."""
    python = ENVIRONMENT / "bin" / "python"
    state = ENVIRONMENT / ".made-from"
    wanted = hashlib.sha256((ROOT / "uv.lock").read_bytes() + PYSPARK.encode()).hexdigest()
    if not state.exists() or state.read_text() != wanted:
        make(python)
        state.write_text(wanted)
    tested = arguments or [path for path in TESTED if (ROOT / path).is_dir()]
    environment = {k: v for k, v in os.environ.items() if k not in ("SPARK_HOME", "VIRTUAL_ENV")}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *tested]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def make(python: Path) -> None:
    """Create the environment from the lock file, with the other pyspark."""
    uv = shutil.which("uv") or str(ROOT / ".venv" / "bin" / "uv")
    export = [uv, "export", "--frozen", "--quiet", "--no-hashes", "--no-emit-project"]
    locked = subprocess.run(export, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    kept = [line for line in locked.splitlines() if not line.startswith(("pyspark==", "py4j=="))]
    requirements = ENVIRONMENT.with_suffix(".txt")
    requirements.write_text("\n".join([*kept, f"pyspark=={PYSPARK}", "-e ."]) + "\n")
    subprocess.run(
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, ENVIRONMENT], check=True
    )
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements)]
    subprocess.run(install, cwd=ROOT, check=True)
    requirements.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
