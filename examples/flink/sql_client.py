"""Flink's own SQL client, in which jobs run as well: it needs Java and Maven, and no cluster.

It is what `bin/sql-client.sh --file orders.sql` starts in a distribution of Flink; here, Maven
fetches the jars that `pom.xml` names.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.maven import OPENING, fetched_jars
from zufluss.spark.setup.java import use_java

HERE = Path(__file__).parent
RESULT = re.compile(r"\+-.*? in set|Empty set", re.S)
"""What the client prints for a SELECT, behind an echo of the statement."""
ERROR = "[ERROR]"
"""What the client prints when a statement fails; its exit code is 0 all the same."""


class SqlError(Exception):
    """A script of SQL failed."""


class SqlClient:
    """Runs scripts of SQL, each in a process of its own that also runs the jobs of the script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environ = os.environ | {"FLINK_CONF_DIR": str(folder)}
        home = use_java(environ).home
        self._java = "java" if home is None else str(home / "bin" / "java")
        self._jars = fetched_jars(HERE / "pom.xml", environ)
        self._environ = environ
        (folder / "config.yaml").write_text("execution.target: local\n")

    @contextmanager
    def running(self, script: Path, bootstrap: str) -> Iterator[subprocess.Popen[bytes]]:
        """A script that runs until it ends or until the end of the block, whichever is first."""
        process = self._start(script, bootstrap)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def results(self, script: Path, bootstrap: str) -> list[tuple[str, str]]:
        """Run a script to its end; return each SELECT, and the table that Flink printed for it."""
        with self.running(script, bootstrap) as process:
            code = process.wait()
        printed = self.printed(script)
        if code or ERROR in printed:
            raise SqlError(f"{script.name} failed:\n{printed}")
        answers = printed.split("Flink SQL> ")[1:]
        tables = map(RESULT.search, answers)
        pairs = zip(statements(script), tables, strict=False)
        return [(statement, table[0]) for statement, table in pairs if table]

    def printed(self, script: Path) -> str:
        """What the client printed while it ran a script."""
        return self._file(script, "out").read_text()

    def _start(self, script: Path, bootstrap: str) -> subprocess.Popen[bytes]:
        sql = self._file(script, "sql")
        sql.write_text(script.read_text().replace("localhost:9123", bootstrap))
        command = [
            *(self._java, "-Xmx1g", *OPENING, "-cp", f"{self._jars}/*"),
            f"-Djava.io.tmpdir={self._folder}",
            f"-Dlog.file={self._file(script, 'log')}",
            f"-Dlog4j.configurationFile={HERE / 'log4j2.xml'}",
            *("org.apache.flink.table.client.SqlClient", "embedded", "--file", str(sql)),
            *("--history", str(self._folder / "history")),
        ]
        with self._file(script, "out").open("w") as output:
            return subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _file(self, script: Path, suffix: str) -> Path:
        return self._folder / f"{script.stem}.{suffix}"


def statements(script: Path) -> list[str]:
    """The statements of a script, without comments."""
    lines = [line for line in script.read_text().splitlines() if not line.startswith("--")]
    return [f"{statement.strip()};" for statement in "\n".join(lines).split(";")[:-1]]
