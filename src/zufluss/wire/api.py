"""The registry of RPCs: key, versions, messages, and the role that answers.

Every RPC of the protocol is declared here once, whether a server implements it yet or not: what a
server advertises is what it registered handlers for. `roles` says who answers a key in a cluster
with the roles apart; one process with both roles answers the union on one port.

Keys from 30000 are ours (`extension.proto`): zufluss servers use them among themselves, and those
are private so that they are never offered to a client; the administration of remote locations is
for clients of ours. Private APIs are for servers only, but for those of a tiering service: it is no
server of the cluster, and comes as clients do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Literal

from google.protobuf.message import Message

from zufluss.wire import messages

Role = Literal["coordinator", "tablet"]


class ApiKey(IntEnum):
    """API keys, as they stand in the header of a request frame."""

    API_VERSIONS = 1000
    CREATE_DATABASE = 1001
    DROP_DATABASE = 1002
    LIST_DATABASES = 1003
    DATABASE_EXISTS = 1004
    CREATE_TABLE = 1005
    DROP_TABLE = 1006
    GET_TABLE_INFO = 1007
    LIST_TABLES = 1008
    LIST_PARTITION_INFOS = 1009
    TABLE_EXISTS = 1010
    GET_TABLE_SCHEMA = 1011
    GET_METADATA = 1012
    UPDATE_METADATA = 1013
    PRODUCE_LOG = 1014
    FETCH_LOG = 1015
    PUT_KV = 1016
    LOOKUP = 1017
    NOTIFY_LEADER_AND_ISR = 1018
    STOP_REPLICA = 1019
    ADJUST_ISR = 1020
    LIST_OFFSETS = 1021
    COMMIT_KV_SNAPSHOT = 1022
    GET_LATEST_KV_SNAPSHOTS = 1023
    GET_KV_SNAPSHOT_METADATA = 1024
    GET_FILESYSTEM_SECURITY_TOKEN = 1025
    INIT_WRITER = 1026
    COMMIT_REMOTE_LOG_MANIFEST = 1027
    NOTIFY_REMOTE_LOG_OFFSETS = 1028
    NOTIFY_KV_SNAPSHOT_OFFSET = 1029
    COMMIT_LAKE_TABLE_SNAPSHOT = 1030
    NOTIFY_LAKE_TABLE_OFFSET = 1031
    GET_LAKE_SNAPSHOT = 1032
    LIMIT_SCAN = 1033
    PREFIX_LOOKUP = 1034
    GET_DATABASE_INFO = 1035
    CREATE_PARTITION = 1036
    DROP_PARTITION = 1037
    AUTHENTICATE = 1038
    CREATE_ACLS = 1039
    LIST_ACLS = 1040
    DROP_ACLS = 1041
    LAKE_TIERING_HEARTBEAT = 1042
    CONTROLLED_SHUTDOWN = 1043
    ALTER_TABLE = 1044
    DESCRIBE_CLUSTER_CONFIGS = 1045
    ALTER_CLUSTER_CONFIGS = 1046
    ADD_SERVER_TAG = 1047
    REMOVE_SERVER_TAG = 1048
    REBALANCE = 1049
    LIST_REBALANCE_PROGRESS = 1050
    CANCEL_REBALANCE = 1051
    PREPARE_LAKE_TABLE_SNAPSHOT = 1052
    REGISTER_PRODUCER_OFFSETS = 1053
    GET_PRODUCER_OFFSETS = 1054
    DELETE_PRODUCER_OFFSETS = 1055
    ACQUIRE_KV_SNAPSHOT_LEASE = 1056
    RELEASE_KV_SNAPSHOT_LEASE = 1057
    DROP_KV_SNAPSHOT_LEASE = 1058
    GET_TABLE_STATS = 1059
    ALTER_DATABASE = 1060
    SCAN_KV = 1061
    GET_CLUSTER_HEALTH = 1062
    LIST_REMOTE_LOG_MANIFESTS = 1063
    LIST_KV_SNAPSHOTS = 1064

    REGISTER_TABLET_SERVER = 30000
    TABLET_HEARTBEAT = 30001
    ALLOCATE_WRITER_IDS = 30002
    ALLOCATE_IDS = 30003
    UPDATE_LOCATIONS = 30004
    GET_BUCKET_REMOTES = 30005
    UPDATE_CONFIGS = 30006
    COMMIT_TAKEOVERS = 30007
    COMMIT_WAL_FLOOR = 30008
    REPORT_STANDBYS = 30009
    LIST_LOCATIONS = 30010
    ALTER_LOCATION = 30011
    PROBE_LOCATION = 30012
    INSPECT_LOCATION = 30013
    SWEEP_LOCATIONS = 30014
    TAKE_KV_SNAPSHOT = 30016
    ACQUIRE_LATEST_KV_SNAPSHOT_LEASE = 30020
    RENEW_KV_SNAPSHOT_LEASE = 30021
    LIST_KV_SNAPSHOT_LEASES = 30022
    GET_KV_SNAPSHOT_LEASE_USAGE = 30023
    OPEN_KV_SNAPSHOT = 30030
    SCAN_KV_SNAPSHOT = 30031
    CLOSE_KV_SNAPSHOT = 30032
    LIST_KV_SCANS = 30033
    END_KV_SCANS = 30034
    INIT_PRODUCER = 30040
    CHECKPOINT_PRODUCER = 30041
    RELEASE_PRODUCER = 30042
    LIST_PRODUCERS = 30043
    UPDATE_PRODUCERS = 30044
    GET_PRODUCER_ACTIVITY = 30045
    UNDO_PRODUCER = 30046
    EXAMINE_SERVER = 30050
    DESCRIBE_SERVER = 30051
    RELEASE_BUCKET = 30060
    PREPARE_BUCKET = 30061
    REPORT_RELEASED = 30062
    MOVE_BUCKET = 30063
    PLAN_REBALANCE = 30070


EXTENSION_KEY_MIN: Final = 30000

# Keys whose messages are not named after the key in CamelCase.
_MESSAGE_STEM: Final = {
    ApiKey.GET_METADATA: "Metadata",
    ApiKey.GET_FILESYSTEM_SECURITY_TOKEN: "GetFileSystemSecurityToken",
}
_MAX_VERSION: Final = {ApiKey.PUT_KV: 2, ApiKey.LOOKUP: 1, ApiKey.PREFIX_LOOKUP: 1}
_PRIVATE: Final = frozenset(
    {
        ApiKey.UPDATE_METADATA,
        ApiKey.NOTIFY_LEADER_AND_ISR,
        ApiKey.STOP_REPLICA,
        ApiKey.ADJUST_ISR,
        ApiKey.COMMIT_KV_SNAPSHOT,
        ApiKey.COMMIT_REMOTE_LOG_MANIFEST,
        ApiKey.NOTIFY_REMOTE_LOG_OFFSETS,
        ApiKey.NOTIFY_KV_SNAPSHOT_OFFSET,
        ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT,
        ApiKey.NOTIFY_LAKE_TABLE_OFFSET,
        ApiKey.LAKE_TIERING_HEARTBEAT,
        ApiKey.CONTROLLED_SHUTDOWN,
        ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT,
    }
)
_TIERING: Final = frozenset(
    {
        ApiKey.LAKE_TIERING_HEARTBEAT,
        ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT,
        ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT,
    }
)
_OUR_CLIENTS: Final = frozenset(
    {
        ApiKey.LIST_LOCATIONS,
        ApiKey.ALTER_LOCATION,
        ApiKey.PROBE_LOCATION,
        ApiKey.INSPECT_LOCATION,
        ApiKey.SWEEP_LOCATIONS,
        ApiKey.TAKE_KV_SNAPSHOT,
        ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE,
        ApiKey.RENEW_KV_SNAPSHOT_LEASE,
        ApiKey.LIST_KV_SNAPSHOT_LEASES,
        ApiKey.GET_KV_SNAPSHOT_LEASE_USAGE,
        ApiKey.OPEN_KV_SNAPSHOT,
        ApiKey.SCAN_KV_SNAPSHOT,
        ApiKey.CLOSE_KV_SNAPSHOT,
        ApiKey.LIST_KV_SCANS,
        ApiKey.END_KV_SCANS,
        ApiKey.INIT_PRODUCER,
        ApiKey.CHECKPOINT_PRODUCER,
        ApiKey.RELEASE_PRODUCER,
        ApiKey.LIST_PRODUCERS,
        ApiKey.UNDO_PRODUCER,
        ApiKey.EXAMINE_SERVER,
        ApiKey.DESCRIBE_SERVER,
        ApiKey.PLAN_REBALANCE,
    }
)
_TABLET_ONLY: Final = frozenset(
    {
        ApiKey.UPDATE_CONFIGS,
        ApiKey.UPDATE_LOCATIONS,
        ApiKey.UPDATE_METADATA,
        ApiKey.PRODUCE_LOG,
        ApiKey.FETCH_LOG,
        ApiKey.PUT_KV,
        ApiKey.LOOKUP,
        ApiKey.NOTIFY_LEADER_AND_ISR,
        ApiKey.STOP_REPLICA,
        ApiKey.LIST_OFFSETS,
        ApiKey.INIT_WRITER,
        ApiKey.NOTIFY_REMOTE_LOG_OFFSETS,
        ApiKey.NOTIFY_KV_SNAPSHOT_OFFSET,
        ApiKey.NOTIFY_LAKE_TABLE_OFFSET,
        ApiKey.LIMIT_SCAN,
        ApiKey.PREFIX_LOOKUP,
        ApiKey.GET_TABLE_STATS,
        ApiKey.SCAN_KV,
        ApiKey.TAKE_KV_SNAPSHOT,
        ApiKey.OPEN_KV_SNAPSHOT,
        ApiKey.SCAN_KV_SNAPSHOT,
        ApiKey.CLOSE_KV_SNAPSHOT,
        ApiKey.LIST_KV_SCANS,
        ApiKey.END_KV_SCANS,
        ApiKey.UPDATE_PRODUCERS,
        ApiKey.GET_PRODUCER_ACTIVITY,
        ApiKey.UNDO_PRODUCER,
        ApiKey.RELEASE_BUCKET,
        ApiKey.PREPARE_BUCKET,
    }
)
_BOTH_ROLES: Final = frozenset(
    {
        ApiKey.API_VERSIONS,
        ApiKey.LIST_DATABASES,
        ApiKey.DATABASE_EXISTS,
        ApiKey.GET_TABLE_INFO,
        ApiKey.LIST_TABLES,
        ApiKey.LIST_PARTITION_INFOS,
        ApiKey.TABLE_EXISTS,
        ApiKey.GET_TABLE_SCHEMA,
        ApiKey.GET_METADATA,
        ApiKey.GET_LATEST_KV_SNAPSHOTS,
        ApiKey.GET_KV_SNAPSHOT_METADATA,
        ApiKey.GET_FILESYSTEM_SECURITY_TOKEN,
        ApiKey.GET_LAKE_SNAPSHOT,
        ApiKey.GET_DATABASE_INFO,
        ApiKey.AUTHENTICATE,
        ApiKey.LIST_ACLS,
        ApiKey.DESCRIBE_CLUSTER_CONFIGS,
        ApiKey.GET_CLUSTER_HEALTH,
        ApiKey.EXAMINE_SERVER,
        ApiKey.DESCRIBE_SERVER,
    }
)


@dataclass(frozen=True, slots=True)
class Api:
    """One RPC."""

    key: ApiKey
    """The number in the frame header."""
    name: str
    """The protocol's name for it, for logs and metrics."""
    min_version: int
    """The oldest version a server answers."""
    max_version: int
    """The newest version a server answers, inclusive."""
    public: bool
    """The protocol calls it public."""
    for_clients: bool
    """It is answered on every listener; otherwise it is for servers only."""
    request: type[Message]
    """The message in a request frame."""
    response: type[Message]
    """The message in the answer."""
    roles: frozenset[Role]
    """The role that answers it when the roles run apart."""


def _roles(key: ApiKey) -> frozenset[Role]:
    if key in _BOTH_ROLES:
        return frozenset({"coordinator", "tablet"})
    return frozenset({"tablet"}) if key in _TABLET_ONLY else frozenset({"coordinator"})


def _api(key: ApiKey) -> Api:
    stem = _MESSAGE_STEM.get(key) or key.name.title().replace("_", "")
    public = key < EXTENSION_KEY_MIN and key not in _PRIVATE
    return Api(
        key=key,
        name=key.name,
        min_version=0,
        max_version=_MAX_VERSION.get(key, 0),
        public=public,
        for_clients=public or key in _TIERING or key in _OUR_CLIENTS,
        request=getattr(messages, f"{stem}Request"),
        response=getattr(messages, f"{stem}Response"),
        roles=_roles(key),
    )


APIS: Final[Mapping[int, Api]] = MappingProxyType({int(key): _api(key) for key in ApiKey})
"""Every RPC by its key."""
