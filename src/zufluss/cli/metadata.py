"""`zufluss metadata dump|restore`: the metadata of a cluster as a file, without a server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zufluss.cli.session import ConfigFile, Settings, configuration, say

if TYPE_CHECKING:
    from zufluss.config import Configuration
    from zufluss.meta.dump import Dump

app = typer.Typer(
    no_args_is_help=True,
    help="The metadata of a cluster, read and written without a server: dump, restore.",
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file of the dump.")]


@app.command("dump")
def dump_(file: FileArgument, config: ConfigFile = None, settings: Settings = None) -> None:
    """Write all metadata into a new file: tables, leaders, remote files, leases, epochs.

    They come from data.dir, whose server must be stopped, or from ZooKeeper if zookeeper.address is
    set. The file has a line of JSON for each path, and a checksum in its last line. What is written
    to the cluster afterwards is not in it: stop the coordinator, unless the dump is only looked at.

    Example:

      zufluss metadata dump cluster.jsonl -D data.dir=/var/lib/zufluss
    """
    conf = configuration(config, settings)
    if file.exists():
        raise typer.BadParameter(f"{file} exists; choose another name")
    _check_has_store(conf)
    dumped = asyncio.run(_dumped(conf))
    _write(file, dumped)
    say(f"{len(dumped.values)} paths of cluster {dumped.cluster_id} are in {file}")


@app.command()
def restore(file: FileArgument, config: ConfigFile = None, settings: Settings = None) -> None:
    """Put the metadata of a dump into an empty store: a new data.dir, or a new ZooKeeper root.

    A file that is not whole is refused before anything is written, and a store that is not empty
    stays as it is. If the command is interrupted, repeat it with the same file: no coordinator
    starts on the store before it has finished. Never start a server on the former store again.

    Example:

      zufluss metadata restore cluster.jsonl -D zookeeper.address=zk1:2181,zk2:2181,zk3:2181
    """
    from zufluss.meta.dump import decode

    conf = configuration(config, settings)
    dumped = decode(file.read_bytes())
    created = asyncio.run(_restored(conf, dumped))
    say(
        f"{created} paths were created in {_place(conf)}, which has the {len(dumped.values)} of "
        f"cluster {dumped.cluster_id}"
    )


def _place(conf: Configuration) -> str:
    """The store that a configuration names."""
    from zufluss.config import options, zookeeper_options

    address = conf.get(zookeeper_options.ZOOKEEPER_ADDRESS)
    if not address:
        return f"data.dir {conf.get(options.DATA_DIR)}"
    return f"ZooKeeper {address}, {conf.get(zookeeper_options.ZOOKEEPER_PATH_ROOT)}"


def _check_has_store(conf: Configuration) -> None:
    """Refuse a data directory without metadata, in which a store would be created."""
    from zufluss.config import options, zookeeper_options
    from zufluss.meta.embedded import DATABASE_FILE
    from zufluss.meta.open import DIRECTORY

    data_dir = Path(conf.get(options.DATA_DIR))
    in_directory = not conf.get(zookeeper_options.ZOOKEEPER_ADDRESS)
    if in_directory and not (data_dir / DIRECTORY / DATABASE_FILE).exists():
        raise typer.BadParameter(
            f"data.dir {data_dir} has no metadata; name the data directory of the coordinator with "
            "-D data.dir=…, or ZooKeeper with -D zookeeper.address=…"
        )


async def _dumped(conf: Configuration) -> Dump:
    from zufluss.coordinator.moving import dump
    from zufluss.meta.open import open_store

    store = await open_store(conf)
    try:
        return await dump(store)
    finally:
        await store.close()


async def _restored(conf: Configuration, dumped: Dump) -> int:
    from zufluss.coordinator.moving import restore
    from zufluss.meta.open import open_store

    store = await open_store(conf)
    try:
        return await restore(store, dumped)
    finally:
        await store.close()


def _write(file: Path, dumped: Dump) -> None:
    """Write the whole file or none; only its owner may read it, as it names all tables."""
    from zufluss.meta.dump import encode
    from zufluss.system import sync_directory

    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(encode(dumped))
        out.flush()
        os.fsync(out.fileno())
    unfinished.rename(file)
    sync_directory(file.parent)
