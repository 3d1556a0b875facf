"""Fluss's Java and Rust clients alone, against `zufluss dev`: a part of `make test-peers`.

    python -m scripts.clients [java] [rust] [--tablet-servers N]

`tests/peers/java_client` and `tests/peers/rust_client` are the first steps of a user: they create
tables, append, upsert, delete, look up and scan, and end with 1 at the first result that is wrong.
Then our client reads what they wrote, and finds each key in the bucket where they put it. The tests
that `scripts.peers` runs use the same Java client, below Flink; here a failure has no Flink in it.

Java needs Maven Central. Rust needs cargo and crates.io, and a first build takes some minutes. A
client that lacks its tools is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zufluss
from scripts.maven import CACHE, OPENING, MavenError, fetched_jars
from zufluss.testing.server import DevServer

PEERS = Path(__file__).parents[1] / "tests" / "peers"
JAVA_CLIENT = PEERS / "java_client"
RUST_CLIENT = PEERS / "rust_client"
DEV = (sys.executable, "-m", "zufluss.cli.main", "dev")
RUN_SECONDS = 600
"""A client that takes longer hangs; it takes seconds."""


class ClientError(Exception):
    """A result is wrong, on one side or the other."""


def java_command() -> list[str]:
    """The command of the Java program; Java compiles the file by itself."""
    jars = fetched_jars(JAVA_CLIENT / "pom.xml")
    return ["java", *OPENING, "-cp", f"{jars}/*", str(JAVA_CLIENT / "JavaClient.java")]


def rust_command() -> list[str]:
    """The command of the Rust program, which is built in the cache of the user."""
    target = CACHE.with_name("rust-client")
    manifest = RUST_CLIENT / "Cargo.toml"
    done = subprocess.run(
        ["cargo", "build", "--quiet", "--locked", "--manifest-path", str(manifest)],
        env=os.environ | {"CARGO_TARGET_DIR": str(target)},
    )
    if done.returncode:
        raise ClientError("cargo could not build Fluss's Rust client, see above")
    return [str(target / "debug" / "rust-client")]


@dataclass(frozen=True)
class Client:
    """A client of Fluss, and what its program needs."""

    tools: tuple[str, ...]
    command: Callable[[], list[str]]
    """Fetches or builds the client; the program takes `host:port` as its argument."""
    database: str
    bucket_hash: str
    """How the client hashes keys: our option `client.bucket.hash`."""


CLIENTS = {
    "java": Client(("mvn", "java", "javac"), java_command, "java_client", "java"),
    "rust": Client(("cargo",), rust_command, "rust_client", "pyfluss"),
}


def main() -> int:
    """Run the programs, each on servers of its own, and read their tables with our client."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="java | rust", help="default: both")
    parser.add_argument("--tablet-servers", type=int, metavar="N", help="default: one process")
    options = parser.parse_args()
    dev = DEV
    if options.tablet_servers is not None:
        dev += ("--tablet-servers", str(options.tablet_servers))
    for name in options.clients or list(CLIENTS):
        if name not in CLIENTS:
            raise ClientError(f"no such client: {name}; there are {', '.join(CLIENTS)}")
        client = CLIENTS[name]
        missing = [tool for tool in client.tools if shutil.which(tool) is None]
        if missing:
            print(f"{name} was left out: {', '.join(missing)} not found on the PATH")
            continue
        command = client.command()
        print(f"Fluss's {name.title()} client, zufluss {' '.join(dev[3:])}", flush=True)
        with (
            tempfile.TemporaryDirectory(prefix="zufluss-") as data,
            DevServer(data, command=dev) as server,
        ):
            done = subprocess.run([*command, server.bootstrap], timeout=RUN_SECONDS)
            if done.returncode:
                raise ClientError(f"Fluss's {name.title()} client failed, see above")
            read_by_our_client(server.bootstrap, client)
        print("our client reads the same rows\n", flush=True)
    return 0


def read_by_our_client(bootstrap: str, client: Client) -> None:
    """Our client has the rows of the program, by scan and by key."""
    options = {"client.bucket.hash": client.bucket_hash}
    with zufluss.connect(bootstrap, **options) as connection:
        events = connection.table(f"{client.database}.events")
        ids = events.scan(["id"], stop="latest").to_arrow()["id"].to_pylist()
        if sorted(ids) != list(range(1, 1001)):
            raise ClientError(
                f"our client reads {len(ids)} rows of events, or not the 1000 written"
            )
        stock = connection.table(f"{client.database}.stock")
        rows = {key: stock_row(key, key * 10) for key in range(2, 300)}
        rows |= {1: None, 300: stock_row(300, 7)}
        wrong = [key for key, row in rows.items() if stock.lookup(key) != row]
        if wrong:
            raise ClientError(f"our client does not have the rows of stock with the ids {wrong}")


def stock_row(key: int, pieces: int) -> dict[str, object] | None:
    """The row of a key as the program wrote it."""
    return {"id": key, "name": f"thing {key}", "pieces": pieces}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ClientError, MavenError) as problem:
        sys.exit(str(problem))
