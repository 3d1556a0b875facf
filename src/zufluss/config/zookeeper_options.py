"""How the coordinator reaches ZooKeeper; names and defaults follow the rules of `options.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zufluss.config.option import Option, bool_option, duration_option, string_option
from zufluss.config.values import HOUR_MS, SECOND_MS

ZOOKEEPER_ADDRESS = string_option(
    "zookeeper.address",
    None,
    "`host:port` of each ZooKeeper server, separated by commas. The coordinator keeps its metadata "
    "there instead of in `data.dir`, and tablet servers find the one that leads; needs "
    "`pip install 'zufluss[zookeeper]'` and ZooKeeper 3.6 or later.",
    default_text="metadata in `data.dir`",
)
ZOOKEEPER_PATH_ROOT = string_option(
    "zookeeper.path.root",
    "/zufluss",
    "The path in ZooKeeper below which a cluster has all of its metadata; each cluster needs its "
    "own. Fluss's default is `/fluss`.",
)
ZOOKEEPER_CLIENT_SESSION_TIMEOUT = duration_option(
    "zookeeper.client.session-timeout",
    6 * SECOND_MS,
    "After so long without a sign of life ZooKeeper takes a server for gone. ZooKeeper has limits "
    "of its own, by default 2 and 20 of its ticks. Fluss's default is 60 s.",
    minimum=SECOND_MS,
    maximum=HOUR_MS,
)
ZUFLUSS_ZOOKEEPER_DIGEST = string_option(
    "zufluss.zookeeper.digest",
    None,
    "`user:password` for ZooKeeper's digest authentication. Nodes that are created while this is "
    "set are open to this user only.",
    secret=True,
    default_text="no login, nodes open to everybody",
)
ZUFLUSS_ZOOKEEPER_SASL = string_option(
    "zufluss.zookeeper.sasl",
    None,
    "`user:password` for a login to ZooKeeper by SASL (DIGEST-MD5), instead of "
    "`zufluss.zookeeper.digest`; needs `pip install 'zufluss[zookeeper-sasl]'`. Nodes that are "
    "created while this is set are open to this user only.",
    secret=True,
    default_text="no login, nodes open to everybody",
)
ZUFLUSS_ZOOKEEPER_TLS = bool_option(
    "zufluss.zookeeper.tls",
    False,
    "Encrypt connections to ZooKeeper; `zookeeper.address` names its secure client ports then. The "
    "certificates of the servers have to be valid for the host names in the address.",
)
ZUFLUSS_ZOOKEEPER_TLS_CA = string_option(
    "zufluss.zookeeper.tls.ca",
    None,
    "A PEM file with certificates of authorities that may sign those of ZooKeeper's servers, "
    "beside those that the system trusts.",
)
ZUFLUSS_ZOOKEEPER_TLS_CERTIFICATE = string_option(
    "zufluss.zookeeper.tls.certificate",
    None,
    "A PEM file with the certificate that this server shows to ZooKeeper.",
)
ZUFLUSS_ZOOKEEPER_TLS_KEY = string_option(
    "zufluss.zookeeper.tls.key",
    None,
    "A PEM file with the key of `zufluss.zookeeper.tls.certificate`.",
)

ZOOKEEPER_OPTIONS: Mapping[str, Option[Any]] = {
    value.key: value for value in list(globals().values()) if isinstance(value, Option)
}
"""Every option of ZooKeeper by key, in the order declared."""
