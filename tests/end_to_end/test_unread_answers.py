"""Clients that send many requests of a few bytes at once and read no answer.

Each answer is small enough, but a read from a socket may bring thousands of such requests. If their
answers were all made, a connection would take hundreds of megabytes, and twenty connections ended a
server that had 16 GB.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from google.protobuf.message import Message

import zufluss
from tests.end_to_end.kv import Codec, lookup_request
from tests.end_to_end.raw import RawClient
from tests.memory import growth
from tests.servers import WarmServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import pack_request

CONNECTIONS, REQUESTS = 8, 1000
SHORT, LONG = 200_000, 900_000
SEND_MEMORY = 64 << 20
GROWTH_MAX = 600 << 20
"""The bound, 8 MB per connection, and answers that are being made; it would be 1.6 GB or more."""


def fetch(table_id: int) -> m.FetchLogRequest:
    request = m.FetchLogRequest(
        follower_server_id=-1, max_bytes=64 << 20, max_wait_ms=1, min_bytes=1
    )
    table = request.tables_req.add(table_id=table_id, projection_pushdown_enabled=False)
    table.buckets_req.add(bucket_id=0, fetch_offset=0, max_fetch_bytes=64 << 20)
    return request


def test_answers_that_nobody_reads_have_a_bound_however_many_are_asked_for(tmp_path: Path) -> None:
    properties = {"zufluss.net.send-memory": str(SEND_MEMORY)}
    with WarmServer(tmp_path, properties) as server, zufluss.connect(server.bootstrap) as conn:
        conn.admin.create_table("fluss.keyed", "id BIGINT, text STRING, PRIMARY KEY (id)")
        conn.admin.create_table("fluss.events", "text STRING")
        keyed, events = conn.table("fluss.keyed"), conn.table("fluss.events")
        with keyed.upsert() as writer, events.append() as appender:
            writer.write({"id": [1, 2], "text": ["x" * SHORT, "x" * LONG]})
            for _ in range(20):
                appender.write({"text": ["x" * LONG]})
        keyed_id, events_id = keyed.info.table_id, events.info.table_id
        codec = Codec(keyed.info.schema)
        costly: dict[str, tuple[ApiKey, Message]] = {
            "short rows": (ApiKey.LOOKUP, lookup_request(keyed_id, [codec.key((1,))])),
            "long rows": (ApiKey.LOOKUP, lookup_request(keyed_id, [codec.key((2,))])),
            "many rows": (ApiKey.LOOKUP, lookup_request(keyed_id, [codec.key((2,))] * 60)),
            "batches": (ApiKey.FETCH_LOG, fetch(events_id)),
            "a scan of a log": (
                ApiKey.LIMIT_SCAN,
                m.LimitScanRequest(table_id=events_id, bucket_id=0, limit=1000),
            ),
        }
        for name, (key, request) in costly.items():
            body = request.SerializeToString()
            frames = b"".join(pack_request(key, 0, i, body) for i in range(REQUESTS))

            def ask(frames: bytes = frames) -> None:
                with ExitStack() as unread, RawClient(server.port) as other:
                    for _ in range(CONNECTIONS):
                        unread.enter_context(RawClient(server.port)).send(frames)
                    for _ in range(300):
                        assert other.alive()

            grown = growth(server.pid, ask)
            assert grown <= GROWTH_MAX, f"{name}: grew by {grown >> 20} MiB"
        assert keyed.lookup(1) == {"id": 1, "text": "x" * SHORT}
