"""`zufluss dev --tablet-servers N`: a cluster of processes on one machine, under one supervisor.

One process serves one core at most: everything a server knows belongs to one event loop. With N
tablet servers a machine uses N cores, and a bucket that is busy takes time from the buckets of its
own server only. The coordinator is one process more, at the address of plain `dev`.

What is configured for the machine is shared out:

| | |
|---|---|
| `zufluss.kv.memory` | divided by N |
| `zufluss.net.receive-memory`, `zufluss.net.send-memory` | divided by N + 1, one large request at least |
| `zufluss.metrics.port` P | P for the coordinator, P + 1 to P + N for the tablet servers by id |
| `bind.listeners` | the coordinator's; tablet servers listen on the same hosts, on ports of their own |

The data directory has the layout of `tablet_servers.py`.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from zufluss.clock import process_seconds
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.values import MIB, Endpoint
from zufluss.embedded_lake import with_lake
from zufluss.errors import ConfigError
from zufluss.log.files import Files
from zufluss.obs.logging import configure
from zufluss.replica.memory_limit import kv_memory
from zufluss.supervisor import Child, Serve, Supervisor
from zufluss.system import FORKS_AFTER_IMPORTS, usable_cores
from zufluss.tablet_servers import (
    Ports,
    check_servers,
    directory,
    free_port,
    known_servers,
    remember,
)

log = structlog.get_logger(__name__)

AUTO: Final = "auto"
COORDINATOR: Final = "coordinator"
SERVERS_MAX: Final = 64
"""Most tablet servers on one machine."""
SERVER_LOCK: Final = ".lock"
"""Locked by the server whose logs are in a directory (`server.py`)."""
LOCK_FILE: Final = ".supervisor"
"""Locked as long as the supervisor or one of its processes lives."""
ENDING_SECONDS: Final = 60.0
"""How long the processes of a supervisor that was killed are waited for."""
LOOK_SECONDS: Final = 0.1
"""How often the lock is tried meanwhile."""
ORIGIN: Final = "--tablet-servers"
"""The source of what differs between the processes."""
KV_MEMORY_MIN: Final = 8 * MIB
NET_MEMORY_MIN: Final = 64 * MIB
"""The least shares of a process."""


def server_count(text: str, data_dir: Path) -> int:
    """The number of tablet servers that the user asks for.

    `auto` is one per usable core, and never fewer than the directory has.
    """
    if text == AUTO:
        return min(max(usable_cores(), len(known_servers(data_dir))), SERVERS_MAX)
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= SERVERS_MAX:
        raise ConfigError(
            f"--tablet-servers {text!r:.50} is not allowed; give a number from 1 to {SERVERS_MAX}, "
            f"or {AUTO} for one per usable core"
        )
    return int(text)


def run_cluster(conf: Configuration, count: int) -> int:
    """Run a coordinator and `count` tablet servers until a signal; returns the exit code."""
    data_dir = Path(conf.get(options.DATA_DIR))
    first = conf.get(options.TABLET_SERVER_ID)
    ids = range(first, first + count)
    _check_internal_listener(conf)
    files = Files()
    for parent in files.make_directories(data_dir):
        files.sync_directory(parent)
    with _owned(data_dir):
        _check_unused(data_dir)
        check_servers(data_dir, ids)
        listeners = _with_ports(conf.get(options.BIND_LISTENERS))
        servers = remember(files, data_dir, ids, listeners)
        conf = with_lake(conf)
        if FORKS_AFTER_IMPORTS:
            _import_servers()
        confs = process_configurations(conf, listeners, servers)
        children = [Child(name, _serve(name, each)) for name, each in confs.items()]
        return Supervisor(children, lambda: _ready(listeners, count)).run()


def _import_servers() -> None:
    """Import the modules of all processes once; forked processes share their memory."""
    import zufluss.server  # noqa: F401
    from zufluss.record import kernels

    kernels.warm()


def _serve(name: str, conf: Configuration) -> Serve:
    role = COORDINATOR if name == COORDINATOR else "tablet"

    def serve(life: int) -> int:
        from zufluss.server import run_role

        level, form = conf[options.ZUFLUSS_LOGGING_LEVEL], conf[options.ZUFLUSS_LOGGING_FORMAT]
        configure(level, form, server=name.replace("tablet server ", "tablet-"))
        return run_role(role, conf, life=life)

    return serve


def _ready(listeners: tuple[Endpoint, ...], count: int) -> None:
    """Print the ready line of the cluster."""
    first = listeners[0]
    rest = "".join(f", {listener}" for listener in listeners[1:])
    servers = "1 tablet server" if count == 1 else f"{count} tablet servers"
    sys.stdout.write(
        f"zufluss ready on {first.host}:{first.port}{rest} in {process_seconds():.1f} s "
        f"(coordinator and {servers})\n"
    )
    sys.stdout.flush()


@contextmanager
def _owned(data_dir: Path) -> Iterator[None]:
    """Hold the directory against a second supervisor; waits for processes of one that was killed.

    Plain `dev` and the first tablet server lock the directory against each other besides.
    """
    lock = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = None
        while not _lock(lock):
            if deadline is None:
                deadline = time.monotonic() + ENDING_SECONDS
                log.warning("data_dir_in_use", directory=str(data_dir), waits=f"{ENDING_SECONDS} s")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"data.dir {data_dir} is in use by another zufluss dev --tablet-servers; stop "
                    "it or choose another directory"
                )
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        os.close(lock)


def _check_unused(data_dir: Path) -> None:
    """Refuse the directory of a server that runs: the first tablet server will lock it."""
    lock = os.open(data_dir / SERVER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(lock):
            raise ConfigError(
                f"data.dir {data_dir} is in use by another server; stop it or choose another "
                "directory"
            )
    finally:
        os.close(lock)


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- the configuration of each process ------------------------------------------------------------


def process_configurations(
    conf: Configuration, listeners: tuple[Endpoint, ...], servers: Mapping[int, Ports]
) -> dict[str, Configuration]:
    """The configuration of each process by its name, the coordinator's first.

    `listeners` are the coordinator's, with its ports; `servers` has those of the tablet servers.
    """
    shared = conf.with_overrides(_net_memory(conf, len(servers) + 1), origin=ORIGIN)
    own = {options.BIND_LISTENERS.key: _text(listeners)}
    processes = {COORDINATOR: shared.with_overrides(own, origin=ORIGIN)}
    for number, i in enumerate(servers):
        own = _tablet(conf, listeners, number, [*servers], servers[i])
        processes[f"tablet server {i}"] = shared.with_overrides(own, origin=ORIGIN)
    return processes


def _check_internal_listener(conf: Configuration) -> None:
    """The processes need a listener among themselves, which has no login."""
    name = conf.get(options.INTERNAL_LISTENER_NAME)
    if name not in {e.listener for e in conf.get(options.BIND_LISTENERS)}:
        raise ConfigError(
            f"internal.listener.name {name} is not among bind.listeners; the processes of "
            "--tablet-servers need a listener among themselves"
        )
    if conf.get(options.SECURITY_PROTOCOL_MAP).get(name, "plaintext") != "plaintext":
        raise ConfigError(
            f"listener {name} asks for a login, which the processes of --tablet-servers do not "
            "have among themselves; add a plaintext listener on an address that only servers "
            "reach, and name it in internal.listener.name"
        )


def _with_ports(listeners: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """The coordinator's listeners, with ports that stay the same when its process is restarted."""
    taken = {e.port for e in listeners}
    return tuple(e if e.port else replace(e, port=free_port(e, taken)) for e in listeners)


def _tablet(
    conf: Configuration,
    listeners: tuple[Endpoint, ...],
    number: int,
    ids: Sequence[int],
    ports: Ports,
) -> dict[str, str]:
    """What is the own of the tablet server with this number, from 0 on."""
    internal = conf.get(options.INTERNAL_LISTENER_NAME)
    coordinator = next(e for e in listeners if e.listener == internal)
    data_dir = directory(Path(conf.get(options.DATA_DIR)), ids, ids[number])
    own = {
        options.TABLET_SERVER_ID.key: str(ids[number]),
        options.DATA_DIR.key: str(data_dir),
        options.ZUFLUSS_COORDINATOR_ADDRESS.key: _reached_at(coordinator),
        options.BIND_LISTENERS.key: _text(_at(listeners, ports)),
        options.ZUFLUSS_KV_MEMORY.key: str(max(kv_memory(conf) // len(ids), KV_MEMORY_MIN)),
    }
    advertised = conf.get(options.ADVERTISED_LISTENERS)
    if advertised:
        own[options.ADVERTISED_LISTENERS.key] = _text(_at(advertised, ports))
    metrics = conf.get(options.ZUFLUSS_METRICS_PORT)
    if metrics:
        own[options.ZUFLUSS_METRICS_PORT.key] = str(metrics + number + 1)
    return own


def _net_memory(conf: Configuration, processes: int) -> dict[str, str]:
    """The shares of a process in the memory of connections; the largest request must fit."""
    least = max(NET_MEMORY_MIN, conf.get(options.NETTY_SERVER_MAX_REQUEST_SIZE))
    shares: dict[str, str] = {}
    for option in (options.ZUFLUSS_NET_RECEIVE_MEMORY, options.ZUFLUSS_NET_SEND_MEMORY):
        whole = conf.get(option)
        shares[option.key] = str(min(max(whole // processes, least), whole))
    return shares


def _at(listeners: tuple[Endpoint, ...], ports: Ports) -> tuple[Endpoint, ...]:
    return tuple(replace(e, port=ports[e.listener]) for e in listeners if e.listener in ports)


def _reached_at(endpoint: Endpoint) -> str:
    """`host:port` at which a process of this machine reaches a listener of another."""
    host = {"": "localhost", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(endpoint.host, endpoint.host)
    return f"[{host}]:{endpoint.port}" if ":" in host else f"{host}:{endpoint.port}"


def _text(endpoints: tuple[Endpoint, ...]) -> str:
    return ",".join(map(str, endpoints))
