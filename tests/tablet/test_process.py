"""A server process and the limits of the machine it runs on."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.end_to_end.raw import RawClient, produce_request, table_path
from tests.tablet.support import batch
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

BUCKETS = 200


def test_a_shell_that_allows_few_open_files_does_not_limit_the_buckets(tmp_path: Path) -> None:
    """Each bucket being written holds a file open; the usual soft limit of 1024 is soon reached."""
    shell = ("sh", "-c", 'ulimit -Sn 100 && exec "$0" "$@"')
    command = (*shell, sys.executable, "-m", "zufluss.cli.main", "dev")
    with DevServer(tmp_path, command=command) as server, RawClient(server.port) as client:
        descriptor = (
            b'{"version":1,"schema":{"version":1,"columns":[{"name":"a","data_type":{"type":'
            b'"BIGINT"}},{"name":"b","data_type":{"type":"STRING"}}]},"partition_key":[],'
            b'"bucket_key":[],"bucket_count":%d,"properties":{},"custom_properties":{}}' % BUCKETS
        )
        client.call(
            ApiKey.CREATE_TABLE,
            m.CreateTableRequest(
                table_path=table_path("fluss", "t"), table_json=descriptor, ignore_if_exists=False
            ),
        )
        request = produce_request(client.table_id("fluss", "t"), batch())
        request.buckets_req.extend(
            m.PbProduceLogReqForBucket(bucket_id=i, records=batch()) for i in range(1, BUCKETS)
        )
        answer = client.call(ApiKey.PRODUCE_LOG, request)
        assert {entry.error_code for entry in answer.buckets_resp} == {0}
