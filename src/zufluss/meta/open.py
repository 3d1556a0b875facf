"""Opens the metadata store that a configuration names."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from zufluss.config import options, zookeeper_options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError
from zufluss.meta.api import MetaStore, check_path
from zufluss.meta.embedded import EmbeddedStore

if TYPE_CHECKING:
    from zufluss.meta.zookeeper_client import ZooKeeperClient

log = structlog.get_logger(__name__)

DIRECTORY = "meta"
"""The directory of the embedded store, in `data.dir`."""


async def open_store(conf: Configuration) -> MetaStore:
    """The store in ZooKeeper if `zookeeper.address` is set, else the one in `data.dir`."""
    if not conf.get(zookeeper_options.ZOOKEEPER_ADDRESS):
        return await EmbeddedStore.open(Path(conf.get(options.DATA_DIR)) / DIRECTORY)
    root = _checked_root(conf)
    # Only here: kazoo is an extra.
    from zufluss.meta.zookeeper import ZooKeeperStore
    from zufluss.meta.zookeeper_client import ZooKeeperAccess

    access = ZooKeeperAccess.of(conf)
    with _readable(access.address):
        store = await ZooKeeperStore.open(access, root)
    log.info("metadata_in_zookeeper", address=access.address, root=root)
    return store


async def open_zookeeper(conf: Configuration) -> ZooKeeperClient:
    """A session in ZooKeeper, for what is beside the metadata: elections."""
    _checked_root(conf)
    from zufluss.meta.zookeeper_client import ZooKeeperAccess, ZooKeeperClient

    access = ZooKeeperAccess.of(conf)
    with _readable(access.address):
        return await ZooKeeperClient.open(access)


def _checked_root(conf: Configuration) -> str:
    """`zookeeper.path.root`; `ConfigError` if it, or the package, cannot be used."""
    if importlib.util.find_spec("kazoo") is None:
        raise ConfigError(
            "zookeeper.address is set, which needs the package kazoo: "
            "pip install 'zufluss[zookeeper]'"
        )
    root = conf.get(zookeeper_options.ZOOKEEPER_PATH_ROOT)
    try:
        return check_path(root)
    except ValueError as problem:
        raise ConfigError(f"zookeeper.path.root = {root!r} is not allowed: {problem}") from None


@contextmanager
def _readable(address: str) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:  # kazoo cannot read the address
        raise ConfigError(
            f"zookeeper.address = {address!r} is not allowed ({problem}); allowed: "
            "host:port, several separated by commas"
        ) from None
