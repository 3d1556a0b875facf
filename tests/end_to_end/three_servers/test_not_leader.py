"""A request that reaches the wrong server: error 12 for what exists, unknown for what does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster_of import ClusterServer
from tests.end_to_end.raw import RawClient, fetch_request, produce_request
from zufluss.client.sync.connection import Connection
from zufluss.errors import ErrorCode
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

NOT_LEADER = int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
UNKNOWN = int(ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION)


@pytest.fixture(scope="module")
def tables(ours: Connection) -> dict[str, int]:
    """A log table and a primary-key table with three buckets; their ids."""
    ours.admin.create_table("nl_log", "id BIGINT, v STRING", bucket_count=3)
    ours.admin.create_table("nl_keyed", "id BIGINT, v STRING", primary_key=["id"], bucket_count=3)
    return {name: ours.admin.table_info(name).table_id for name in ("nl_log", "nl_keyed")}


def requests(log: int, keyed: int, bucket: int) -> dict[ApiKey, Any]:
    """A request of each kind for one bucket."""
    scan = m.PbScanReqForBucket(table_id=keyed, bucket_id=bucket)
    put = m.PbPutKvReqForBucket(bucket_id=bucket, records=b"")
    return {
        ApiKey.PRODUCE_LOG: produce_request(log, b"", bucket),
        ApiKey.FETCH_LOG: fetch_request(log, 0, bucket, max_wait_ms=0),
        ApiKey.PUT_KV: m.PutKvRequest(acks=-1, table_id=keyed, timeout_ms=1000, buckets_req=[put]),
        ApiKey.LOOKUP: m.LookupRequest(
            table_id=keyed, buckets_req=[{"bucket_id": bucket, "keys": [b"x" * 8]}]
        ),
        ApiKey.PREFIX_LOOKUP: m.PrefixLookupRequest(
            table_id=keyed, buckets_req=[{"bucket_id": bucket, "keys": [b"x" * 8]}]
        ),
        ApiKey.LIST_OFFSETS: m.ListOffsetsRequest(
            follower_server_id=-1, offset_type=1, table_id=log, bucket_id=[bucket]
        ),
        ApiKey.LIMIT_SCAN: m.LimitScanRequest(table_id=log, bucket_id=bucket, limit=1),
        ApiKey.GET_TABLE_STATS: m.GetTableStatsRequest(
            table_id=keyed, buckets_req=[{"bucket_id": bucket}]
        ),
        ApiKey.SCAN_KV: m.ScanKvRequest(bucket_scan_req=scan, call_seq_id=0, batch_size_bytes=1000),
    }


def code_of(answer: Any) -> int:
    """The error of a bucket in an answer, wherever its message has it."""
    if "tables_resp" in answer.DESCRIPTOR.fields_by_name:
        answer = answer.tables_resp[0]
    for field in ("buckets_resp", "bucket_resp"):
        if field in answer.DESCRIPTOR.fields_by_name:
            return int(getattr(answer, field)[0].error_code)
    return int(answer.error_code)


def test_a_request_at_the_wrong_server_gets_error_12(
    cluster: ClusterServer, tables: dict[str, int]
) -> None:
    log, keyed = tables["nl_log"], tables["nl_keyed"]
    leaders = {name: cluster.leaders("fluss", name) for name in tables}
    ports = cluster.ports()
    for bucket in range(3):
        for api, request in requests(log, keyed, bucket).items():
            of_log = getattr(request, "table_id", keyed) == log or api is ApiKey.FETCH_LOG
            leader = leaders["nl_log" if of_log else "nl_keyed"][bucket]
            other = next(port for server, port in ports.items() if server != leader)
            with RawClient(other) as client:
                assert error_of(client, api, request) == NOT_LEADER, api


def test_a_bucket_that_does_not_exist_is_unknown_at_every_server(
    cluster: ClusterServer, tables: dict[str, int]
) -> None:
    for port in cluster.ports().values():
        with RawClient(port) as client:
            for log, keyed, bucket in ((*tables.values(), 9), (10**6, 10**6 + 1, 0)):
                for api, request in requests(log, keyed, bucket).items():
                    assert error_of(client, api, request) == UNKNOWN, api


def error_of(client: RawClient, api: ApiKey, request: Any) -> int:
    """The error of a whole request, or of its bucket."""
    return client.error_code(api, request) or code_of(client.call(api, request))
