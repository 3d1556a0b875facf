"""Opens the metadata store that a configuration names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import structlog

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError
from zufluss.meta.api import MetaStore
from zufluss.meta.embedded import EmbeddedStore

log = structlog.get_logger(__name__)

DIRECTORY = "meta"
"""The directory of the embedded store, in `data.dir`."""


async def open_store(conf: Configuration) -> MetaStore:
    """The store in ZooKeeper if `zookeeper.address` is set, else the one in `data.dir`."""
    if not conf.get(options.ZOOKEEPER_ADDRESS):
        return await EmbeddedStore.open(Path(conf.get(options.DATA_DIR)) / DIRECTORY)
    if importlib.util.find_spec("kazoo") is None:
        raise ConfigError(
            "zookeeper.address is set, which needs the package kazoo: "
            "pip install 'zufluss[zookeeper]'"
        )
    # Only here: kazoo is an extra.
    from zufluss.meta.zookeeper import ZooKeeperStore
    from zufluss.meta.zookeeper_client import ZooKeeperAccess

    root = conf.get(options.ZOOKEEPER_PATH_ROOT)
    try:
        store = await ZooKeeperStore.open(ZooKeeperAccess.of(conf), root)
    except ValueError as problem:
        if isinstance(problem, ConfigError):
            raise
        raise ConfigError(f"zookeeper.path.root = {root!r} is not allowed: {problem}") from None
    log.info("metadata_in_zookeeper", address=conf.get(options.ZOOKEEPER_ADDRESS), root=root)
    return store
