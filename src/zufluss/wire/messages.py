"""Every message of the protocol in one namespace, whichever `.proto` file declares the message.

Use it as `from zufluss.wire import messages as m` and then `m.ProduceLogRequest`.
"""

# ruff: noqa: F403 - this module is the list of generated modules, not of their four hundred names
from zufluss.wire.proto.auth_pb2 import *
from zufluss.wire.proto.cluster_pb2 import *
from zufluss.wire.proto.common_pb2 import *
from zufluss.wire.proto.extension_pb2 import *
from zufluss.wire.proto.kv_pb2 import *
from zufluss.wire.proto.lake_pb2 import *
from zufluss.wire.proto.log_pb2 import *
from zufluss.wire.proto.meta_pb2 import *
from zufluss.wire.proto.snapshot_pb2 import *
