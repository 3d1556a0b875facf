"""The tablet servers of `zufluss dev --tablet-servers N`: their ids, directories and ports.

`tablet-servers.json` in the data directory remembers them over restarts:

    {"tablet_servers": {"1": {"FLUSS": 20123}, "2": {"FLUSS": 20967}}}

by id, with the port of each listener. Addresses stay the same because some clients, such as the
lookups of pyfluss 1.0.0, keep to the address that they know.

| directory | what is in it |
|---|---|
| `DIR` | metadata, remote files and lake of the cluster, the buckets of the first tablet server |
| `DIR/tablet.ID` | the buckets of each further tablet server |

So `--tablet-servers N` continues a directory of plain `dev`: its server is the first of N. Buckets
do not move between servers. A start with fewer servers than before, plain `dev` included, would
leave buckets without their server, and is refused before anything is touched. No database can be
named `tablet.2`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from zufluss.config.values import Endpoint
from zufluss.errors import ConfigError
from zufluss.log.files import Files
from zufluss.net.listeners import taken_endpoint

log = structlog.get_logger(__name__)

FILE: Final = "tablet-servers.json"
IDENTITY: Final = "identity.json"
"""Says whose buckets a directory has (`tablet/identity.py`, which a supervisor cannot import:
on macOS a process that is to be forked must not import numpy)."""
PORTS: Final = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections: they are still free after a
restart."""
PORT_TRIES: Final = 1000
"""Ports that are tried before none counts as free."""

Ports = Mapping[str, int]
"""The port of each listener of a server, by the listener's name."""


def known_servers(data_dir: Path) -> dict[int, Ports]:
    """The tablet servers that the directory remembers, by id; none for plain `dev`."""
    path = data_dir / FILE
    try:
        content: Any = json.loads(path.read_bytes())
        return {int(i): dict(ports) for i, ports in content["tablet_servers"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(
            f"{path} is damaged ({e}); restore it, or write into it what the documentation of "
            "zufluss dev --tablet-servers shows, with the ids of the directories tablet.ID"
        ) from None


def check_one_server(data_dir: Path) -> None:
    """Refuse plain `dev` in a directory whose buckets belong to several tablet servers."""
    known = known_servers(data_dir)
    if len(known) > 1:
        raise ConfigError(
            f"data.dir {data_dir} has the buckets of {len(known)} tablet servers, and this would "
            f"be one; start it with --tablet-servers {len(known)} or more"
        )


def check_servers(data_dir: Path, ids: Sequence[int]) -> None:
    """Refuse servers that leave buckets in the directory without their server."""
    known = known_servers(data_dir)
    missing = sorted(known.keys() - set(ids))
    if missing:
        raise ConfigError(
            f"data.dir {data_dir} has buckets of tablet servers {_text(known)}, and the servers "
            f"{_text(missing)} would be missing; start it with --tablet-servers {len(known)} or "
            "more, and the tablet-server.id of before"
        )
    try:
        owner = json.loads((data_dir / IDENTITY).read_bytes())["server_id"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # no server yet; a damaged file is refused by the server itself
    if owner != ids[0]:
        raise ConfigError(
            f"data.dir {data_dir} has buckets of tablet server {owner}, the first one here is "
            f"{ids[0]}; start it with -D tablet-server.id={owner}"
        )


def directory(data_dir: Path, ids: Sequence[int], server_id: int) -> Path:
    """The data directory of one of the tablet servers."""
    return data_dir if server_id == ids[0] else data_dir / f"tablet.{server_id}"


def remember(
    files: Files, data_dir: Path, ids: Sequence[int], listeners: Sequence[Endpoint]
) -> dict[int, Ports]:
    """The ports of the servers, those of before where they are free; durable before the return."""
    known = known_servers(data_dir)
    taken: set[int] = set()
    servers: dict[int, Ports] = {
        i: {e.listener: _port(i, e, known.get(i, {}).get(e.listener), taken) for e in listeners}
        for i in ids
    }
    if servers != known:
        content = {"tablet_servers": {str(i): ports for i, ports in servers.items()}}
        unfinished = data_dir / f"{FILE}.new"
        files.put(unfinished, json.dumps(content).encode(), sync=True)
        files.rename(unfinished, data_dir / FILE)
        files.sync_directory(data_dir)
    return servers


def _port(server_id: int, listener: Endpoint, before: int | None, taken: set[int]) -> int:
    if before is not None and before not in taken and _is_free(replace(listener, port=before)):
        taken.add(before)
        return before
    port = free_port(listener, taken)
    if before is not None:
        log.warning("port_changed", tablet_server=server_id, was=before, now=port, reason="taken")
    return port


def free_port(listener: Endpoint, taken: set[int]) -> int:
    """A port for a listener that nobody uses; it is added to those that are taken."""
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().choice(PORTS)
        if port not in taken and _is_free(replace(listener, port=port)):
            taken.add(port)
            return port
    raise ConfigError(f"no free port from {PORTS.start} to {PORTS.stop - 1} on {listener.host}")


def _is_free(endpoint: Endpoint) -> bool:
    return taken_endpoint([endpoint]) is None


def _text(ids: Sequence[int] | Mapping[int, Any]) -> str:
    return ", ".join(map(str, sorted(ids)))
