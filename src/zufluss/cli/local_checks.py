"""What `zufluss doctor` checks on the machine that it runs on; no server is needed.

Each check yields findings: a state (`ok`, `warning`, `problem`), a subject, and a text that says
what is wrong and what to do. A check changes nothing, and a check that fails is a finding itself.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from zufluss.cli.amounts import bytes_text
from zufluss.system import SERVERS_RUN, optional_module

if TYPE_CHECKING:
    from zufluss.config import Configuration

resource = optional_module("resource")

OK, WARNING, PROBLEM = "ok", "warning", "problem"
GIB: Final = 1 << 30
MIB: Final = 1 << 20
DISK_MIN: Final = 1 * GIB
"""A server whose disk has less than this will soon refuse writes."""
MEMORY_MIN: Final = 640 * MIB
"""What a server needs to live in (docs/server.md)."""
FILES_MIN: Final = 1024
FILES_WANTED: Final = 65_536
THREADS_MIN: Final = 256
PYTHON_MIN: Final = (3, 11)
NETWORK_FILES: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})
VOLATILE_FILES: Final = frozenset({"tmpfs", "ramfs"})
PACKAGES: Final = ("pyarrow", "numpy", "numba", "protobuf", "rocksdict", "obstore")
MOUNTS: Final = Path("/proc/self/mounts")
TCP_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING: Final = "0A"


class LocalFinding(NamedTuple):
    """One observation about this machine."""

    state: str
    """`ok`, `warning` or `problem`."""
    subject: str
    """What it is about."""
    text: str
    """The state of the subject, and what to do if it is bad."""


Findings = Iterator[LocalFinding]


def machine_findings() -> Findings:
    """Python, packages, kernels, limits, clock, Spark: needed by servers and clients."""
    limits = (_files, _memory, _threads) if SERVERS_RUN else ()
    for check in (_python, _kernels, *limits, _clock, _spark):
        yield from _guarded(check)


def server_findings(conf: Configuration) -> Findings:
    """The configuration of a server that runs here, or would: directory, ports, values, lake."""
    for check in (_data_dir, _ports, _dangers, _locations, _lake) if SERVERS_RUN else ():
        yield from _guarded(lambda check=check: check(conf))  # type: ignore[misc]


def unknown_findings(config_file: Path | None, settings: list[str]) -> Findings:
    """Keys of the configuration that have no effect."""
    from zufluss.config.load import unknown_keys

    unknown = unknown_keys(config_file, os.environ, settings)
    for key, origin, match in unknown:
        hint = f"; did you mean {match}?" if match else "; docs/configuration.md lists all keys"
        yield LocalFinding(WARNING, "configuration", f"{key} from {origin} has no effect{hint}")
    if not unknown:
        yield LocalFinding(OK, "configuration", "all keys are known, and all values are allowed")


def _guarded(check: Callable[[], Findings]) -> Findings:
    """The findings of a check; one that cannot look is a warning and ends no other check."""
    try:
        yield from check()
    except Exception as problem:
        name = getattr(check, "__name__", "check").strip("_<>")
        yield LocalFinding(WARNING, name, f"could not be checked: {problem!r:.200}")


# -- this machine ---------------------------------------------------------------------------------


def _python() -> Findings:
    version = platform.python_version()
    if sys.version_info < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        yield LocalFinding(PROBLEM, "python", f"{version} is too old; install {wanted} or later")
    else:
        yield LocalFinding(OK, "python", f"{version} on {platform.system()} {platform.machine()}")
    versions = [f"{name} {_version(name) or 'missing'}" for name in ("zufluss", *PACKAGES)]
    missing = [name for name in PACKAGES if _version(name) is None]
    text = ", ".join(versions)
    if missing:
        text += f"; install them: pip install {' '.join(missing)}"
    yield LocalFinding(PROBLEM if missing else OK, "packages", text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels() -> Findings:
    from zufluss.record import kernels

    if kernels.are_compiled():
        yield LocalFinding(OK, "kernels", "compiled")
    else:
        text = "not compiled; the first start compiles them, which takes about a minute"
        yield LocalFinding(
            WARNING, "kernels", f"{text}: python -m zufluss.record.kernels does, too"
        )


def _files() -> Findings:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    text = f"{soft} open files, a server may raise that to {most if most < sys.maxsize else 'any'}"
    if most < FILES_MIN:
        yield LocalFinding(PROBLEM, "open files", f"{text}; raise the limit: ulimit -n 65536")
    elif most < FILES_WANTED:
        more = "enough for few connections and buckets; raise the hard limit (ulimit -Hn 65536)"
        yield LocalFinding(WARNING, "open files", f"{text}: {more}")
    else:
        yield LocalFinding(OK, "open files", text)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        text = f"limited to {bytes_text(space)} (ulimit -v); remove that limit, native libraries "
        yield LocalFinding(PROBLEM, "address space", f"{text}abort the process when they meet it")


def _memory() -> Findings:
    from zufluss.replica.memory_limit import memory_limit

    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min(memory_limit() or machine, machine)
    where = "of this machine" if limit == machine else "of this container"
    if limit < MEMORY_MIN:
        text = f"{bytes_text(limit)} {where}; a server needs {bytes_text(MEMORY_MIN)} or more"
        yield LocalFinding(PROBLEM, "memory", text)
    else:
        yield LocalFinding(OK, "memory", f"{bytes_text(limit)} {where}")


def _threads() -> Findings:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < THREADS_MIN:
        text = f"{soft} processes and threads of this user; raise the limit: ulimit -u 4096"
        yield LocalFinding(WARNING, "threads", text)
    else:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} for this user"
        yield LocalFinding(OK, "threads", f"{shown}, {os.cpu_count()} processors")


def _clock() -> Findings:
    from zufluss.clock import wall_ms

    with tempfile.NamedTemporaryFile() as fresh:
        behind = Path(fresh.name).stat().st_mtime - wall_ms() / 1000
    installed = Path(__file__).stat().st_mtime
    if wall_ms() / 1000 < installed - 86_400:
        text = "the wall clock is behind the installation of zufluss; set it (NTP)"
        yield LocalFinding(PROBLEM, "clock", text)
    elif abs(behind) > 60:
        text = f"the clock of the file system differs by {behind:.0f} s; synchronise both (NTP)"
        yield LocalFinding(WARNING, "clock", text)
    else:
        yield LocalFinding(OK, "clock", "plausible")


def _spark() -> Findings:
    version = _version("pyspark")
    if version is None:
        text = "pyspark is not installed; only tiering and zufluss.spark need it: "
        yield LocalFinding(OK, "spark", f"{text}pip install 'zufluss[spark]'")
        return
    from zufluss.spark.setup.java import JavaNotFoundError, use_java

    try:
        java = use_java(dict(os.environ))
    except JavaNotFoundError as problem:
        yield LocalFinding(WARNING, "spark", f"pyspark {version}, but {problem.message}")
    else:
        yield LocalFinding(OK, "spark", f"pyspark {version}, Java {java.version} of {java.origin}")


# -- the server that runs here, or would --------------------------------------------------------


def _data_dir(conf: Configuration) -> Findings:
    from zufluss.config.options import DATA_DIR

    directory = Path(conf.get(DATA_DIR)).absolute()
    if directory.exists() and not directory.is_dir():
        text = f"{directory} is not a directory; move it away, or choose another data.dir"
        yield LocalFinding(PROBLEM, "data directory", text)
        return
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{existing} is not writable for this user; chown it, or choose another data.dir"
        yield LocalFinding(PROBLEM, "data directory", text)
        return
    note = "" if directory.exists() else ", which the first start creates"
    usage, kind = shutil.disk_usage(existing), _file_system(existing)
    text = f"{directory}{note}: {bytes_text(usage.free)} free, {kind or 'unknown file system'}"
    if usage.free < DISK_MIN:
        more = "free some, or move data.dir; without space writes are refused"
        yield LocalFinding(PROBLEM, "data directory", f"{text}; {more}")
    elif kind in VOLATILE_FILES:
        yield LocalFinding(WARNING, "data directory", f"{text}; its files are lost at a reboot")
    elif kind in NETWORK_FILES:
        more = "locks and syncs over a network may not keep what they promise; use a local disk"
        yield LocalFinding(WARNING, "data directory", f"{text}; {more}")
    else:
        yield LocalFinding(OK, "data directory", text)


def _file_system(path: Path) -> str | None:
    """The type of the file system of a path; None where that is not known."""
    try:
        mounts = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    resolved = path.resolve()
    inside = [(where, kind) for where, kind in mounts if resolved.is_relative_to(where)]
    return max(inside, key=lambda mount: len(mount[0]))[1] if inside else None


def _ports(conf: Configuration) -> Findings:
    from zufluss.config.options import BIND_LISTENERS, ZUFLUSS_METRICS_HOST, ZUFLUSS_METRICS_PORT

    addresses = [(each.host or "0.0.0.0", each.port) for each in conf.get(BIND_LISTENERS)]
    metrics = conf.get(ZUFLUSS_METRICS_PORT)
    if metrics is not None:
        addresses.append((conf.get(ZUFLUSS_METRICS_HOST), metrics))
    for host, port in addresses:
        if port:
            yield _port(host, port)


def _port(host: str, port: int) -> LocalFinding:
    subject, where = f"port {port}", f"{host}:{port}"
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:
            text = f"{where} cannot be used: {problem.strerror}; correct bind.listeners"
            return LocalFinding(PROBLEM, subject, text)
        owner = _owner_of(port)
        text = f"{where} is taken by {owner or 'another process'}"
        if owner is not None and "zufluss" in owner:
            return LocalFinding(OK, subject, text)
        return LocalFinding(WARNING, subject, f"{text}; stop it, or choose another port")
    return LocalFinding(OK, subject, f"{where} is free")


def _owner_of(port: int) -> str | None:
    """The process that listens on a port, as far as this user may see; Linux only."""
    inodes = set()
    for table in TCP_TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(file.readlink()) in inodes for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                return f"process {process.name} ({command:.80})"
        except OSError:  # of another user, or it has ended
            continue
    return None


def _dangers(conf: Configuration) -> Findings:
    """Values that are allowed and may hurt."""
    from zufluss.config import options

    if conf.get(options.ZUFLUSS_LOG_FLUSH) == "os":
        text = "zufluss.log.flush=os: a power failure may lose acknowledged rows; ack loses none"
        yield LocalFinding(WARNING, "durability", text)
    protocols = conf.get(options.SECURITY_PROTOCOL_MAP)
    for each in conf.get(options.BIND_LISTENERS):
        if each.host in ("", "0.0.0.0", "::") and protocols.get(each.listener) != "sasl":
            text = f"listener {each.listener} is open to the network without a login; set "
            yield LocalFinding(WARNING, "security", f"{text}security.protocol.map (docs/server.md)")
    memory = conf.get(options.ZUFLUSS_KV_MEMORY)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory is not None and memory > machine // 2:
        text = f"zufluss.kv.memory is {bytes_text(memory)} of {bytes_text(machine)}; leave half of "
        yield LocalFinding(WARNING, "row memory", f"{text}the memory to the page cache")
    if str(conf.get(options.DATA_DIR)).startswith(("/tmp/", "/var/tmp/", "/dev/shm/")):
        text = f"{conf.get(options.DATA_DIR)} may be cleaned at a reboot; choose a lasting data.dir"
        yield LocalFinding(WARNING, "data directory", text)


def _locations(conf: Configuration) -> Findings:
    """Directories among the remote locations; a running server probes all of them."""
    from zufluss.config.options import REMOTE_DATA_DIR, REMOTE_DATA_DIRS

    first = conf.get(REMOTE_DATA_DIR)
    for uri in dict.fromkeys((*([first] if first else ()), *conf.get(REMOTE_DATA_DIRS))):
        path = Path(uri.removeprefix("file://"))
        if "://" in str(uri) and not uri.startswith("file://"):
            yield LocalFinding(OK, "location", f"{uri} is configured; a running server probes it")
        elif path.exists() and not os.access(path, os.W_OK):
            text = f"{uri} is not writable for this user; chown it, or choose another location"
            yield LocalFinding(PROBLEM, "location", text)
        else:
            yield LocalFinding(OK, "location", f"{uri}{'' if path.exists() else ', to be created'}")


def _lake(conf: Configuration) -> Findings:
    """Whether the catalog of the lake answers."""
    from zufluss.config.options import DATALAKE_FORMAT

    format = conf.get(DATALAKE_FORMAT)
    if format is None:
        return
    properties = conf.lake_properties(format)
    if format != "iceberg" or not properties:
        where = "in the data directory" if not properties else "not checked here"
        yield LocalFinding(OK, "lake", f"{format}, {where}")
        return
    if importlib.util.find_spec("pyiceberg") is None:
        text = "pyiceberg is missing: pip install 'zufluss[iceberg]'"
        yield LocalFinding(PROBLEM, "lake", text)
        return
    from zufluss.errors import reason_of
    from zufluss.lake.iceberg.catalog import load

    try:
        namespaces = load(properties).list_namespaces()
    except Exception as problem:  # whatever the driver of the catalog raises
        text = f"the Iceberg catalog does not answer: {reason_of(problem):.300}"
        yield LocalFinding(PROBLEM, "lake", f"{text}; check datalake.iceberg.* and the network")
    else:
        text = f"the Iceberg catalog answers and has {len(namespaces)} namespaces"
        yield LocalFinding(OK, "lake", text)
