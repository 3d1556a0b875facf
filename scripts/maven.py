"""Jars by their Maven coordinates, fetched once: for `make test-peers` and `examples/flink`.

A `pom.xml` names the jars; Maven adds what they need and keeps everything below the cache of the
user. The folder of a `pom.xml` has a hash of its text as its name, so that another version of a jar
makes another folder, and a second call of any script finds what the first one fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zufluss" / "jars"
OPENED = (
    "java.lang",
    "java.nio",
    "java.time",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "sun.nio.ch",
)
"""Packages of Java 17 that Flink and Arrow look into."""
OPENING = tuple(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED)
"""The options of `java` for them."""
NOT_FETCHED = re.compile(r"^\[ERROR\] (.+?)(?: -> \[Help.*)?$", re.M)


class MavenError(Exception):
    """Maven could not fetch the jars: it is not installed, or its repository cannot be reached."""


def fetched_jars(pom: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Have Maven fetch what a `pom.xml` names, unless an earlier call did; return the folder."""
    environ = os.environ if environ is None else environ
    folder = CACHE / hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    if folder.exists():
        return folder
    maven = shutil.which("mvn", path=environ.get("PATH", os.defpath))
    if maven is None:
        raise MavenError("Maven (mvn), which fetches the jars, is not on the PATH")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        command = [maven, "-q", "-B", f"-Dmaven.repo.local={CACHE / 'repository'}", "-f", str(pom)]
        copy = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
        target = Path(place) / "jars"
        done = subprocess.run(
            [*command, *copy, f"-DoutputDirectory={target}"],
            env=environ,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = NOT_FETCHED.search(done.stdout)
            raise MavenError(
                f"Maven could not fetch the jars of {pom.parent.name}/{pom.name}: "
                f"{reason[1] if reason else done.stderr.strip() or 'it did not say why'}"
            )
        target.rename(folder)
    return folder
