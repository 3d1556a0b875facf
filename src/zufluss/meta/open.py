"""Opens the metadata store that a configuration names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import structlog

from zufluss.config import options, zookeeper_options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError
from zufluss.meta.api import MetaStore, check_path
from zufluss.meta.embedded import EmbeddedStore

log = structlog.get_logger(__name__)

DIRECTORY = "meta"
"""The directory of the embedded store, in `data.dir`."""


async def open_store(conf: Configuration) -> MetaStore:
    """The store in ZooKeeper if `zookeeper.address` is set, else the one in `data.dir`."""
    if not conf.get(zookeeper_options.ZOOKEEPER_ADDRESS):
        return await EmbeddedStore.open(Path(conf.get(options.DATA_DIR)) / DIRECTORY)
    if importlib.util.find_spec("kazoo") is None:
        raise ConfigError(
            "zookeeper.address is set, which needs the package kazoo: "
            "pip install 'zufluss[zookeeper]'"
        )
    # Only here: kazoo is an extra.
    from zufluss.meta.zookeeper import ZooKeeperStore
    from zufluss.meta.zookeeper_client import ZooKeeperAccess

    access, root = ZooKeeperAccess.of(conf), conf.get(zookeeper_options.ZOOKEEPER_PATH_ROOT)
    try:
        check_path(root)
    except ValueError as problem:
        raise ConfigError(f"zookeeper.path.root = {root!r} is not allowed: {problem}") from None
    try:
        store = await ZooKeeperStore.open(access, root)
    except ValueError as problem:  # kazoo cannot read the address
        raise ConfigError(
            f"zookeeper.address = {access.address!r} is not allowed ({problem}); allowed: "
            "host:port, several separated by commas"
        ) from None
    log.info("metadata_in_zookeeper", address=access.address, root=root)
    return store
