"""Calls that connectors of the Fluss ecosystem make, replayed as frames, and their answers."""

from __future__ import annotations

import fluss
import pyarrow as pa
import pytest
from google.protobuf.message import Message

from tests.end_to_end.helpers import DATABASE, IDS, append, create, fresh_name, ids
from tests.end_to_end.raw import RawClient, table_path
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.record.arrow.message import decode
from zufluss.record.header import iter_headers
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

EMPTY = pa.schema([])


def refusal(raw: RawClient, key: ApiKey, request: Message) -> tuple[ErrorCode, str]:
    """Code and message of the error frame that answers a request."""
    with pytest.raises(ZuflussError) as refused:
        raw.call(key, request)
    return refused.value.code, refused.value.message


@pytest.fixture
async def counted(conn: fluss.FlussConnection, path: fluss.TablePath) -> int:
    """The id of a table with batches of 3, 4 and 100 000 rows, the last too large for one read."""
    table = await create(conn, path, IDS, bucket_count=1)
    for start, stop in ((0, 3), (3, 7), (7, 100_007)):
        await append(table, ids(start, stop))
    return int(table.get_table_info().table_id)


def test_a_fetch_without_columns_counts_rows(raw: RawClient, counted: int) -> None:
    """Spark asks for no column when it counts."""
    rows, offset, size = 0, 0, 0
    while offset < raw.end_offset(counted):
        records = raw.fetch(counted, offset, columns=()).records
        for pos, header in iter_headers(records):
            batch, _ = decode(records, pos, header, EMPTY)
            assert (batch.num_rows, batch.num_columns) == (header.record_count, 0)
            rows += header.record_count
            offset = header.next_offset
        size += len(records)
    assert rows == 100_007
    assert size < 4_096


def test_a_changelog_fetched_without_columns_has_its_change_types(
    raw: RawClient, changed: int
) -> None:
    """A count over a changelog tells rows that came from rows that went."""
    records = raw.fetch(changed, columns=()).records
    kinds = [
        bytes(records[at : at + header.change_types_size])
        for pos, header in iter_headers(records)
        for at in [pos + header.body_offset - header.change_types_size]
    ]
    assert b"".join(kinds) == bytes([1, 1, 2, 3])
    assert sum(header.record_count for _, header in iter_headers(records)) == 4


@pytest.fixture
async def changed(conn: fluss.FlussConnection, path: fluss.TablePath) -> int:
    """The id of a table of two keys, one of which was updated."""
    table = await create(conn, path, IDS, primary_keys=["id"], bucket_count=1)
    writer = table.new_upsert().create_writer()
    for row in ({"id": 1, "text": "a"}, {"id": 2, "text": "b"}):
        writer.upsert(row)
    await writer.flush()
    writer.upsert({"id": 1, "text": "c"})
    await writer.flush()
    return int(table.get_table_info().table_id)


EVERY_RULE = m.PbAclFilter(resource_type=1, operation_type=1, permission_type=1)
RULE = m.PbAclInfo(
    resource_type=2,
    resource_name="fluss-cluster",
    principal_name="Alice",
    principal_type="User",
    host="*",
    operation_type=3,
    permission_type=2,
)


@pytest.mark.parametrize(
    ("key", "request_"),
    [
        (ApiKey.CREATE_ACLS, m.CreateAclsRequest(acl=[RULE])),
        (ApiKey.LIST_ACLS, m.ListAclsRequest(acl_filter=EVERY_RULE)),
        (ApiKey.DROP_ACLS, m.DropAclsRequest(acl_filter=[EVERY_RULE])),
    ],
)
def test_the_access_rule_procedures_of_flink_hear_that_there_is_no_authorizer(
    raw: RawClient, key: ApiKey, request_: Message
) -> None:
    code, text = refusal(raw, key, request_)
    assert code is ErrorCode.SECURITY_DISABLED_EXCEPTION
    assert text.startswith("No Authorizer is configured.")


def test_a_server_tag_of_a_missing_server_is_refused_in_fluss_s_words(raw: RawClient) -> None:
    request = m.AddServerTagRequest(server_ids=[100], server_tag=0)
    code, text = refusal(raw, ApiKey.ADD_SERVER_TAG, request)
    assert code is ErrorCode.SERVER_NOT_EXIST_EXCEPTION
    assert text.startswith("Server 100 not exists when trying to add server tag.")


def test_a_server_has_one_tag_and_a_tag_that_nobody_has_is_removed(raw: RawClient) -> None:
    server = raw.call(ApiKey.GET_METADATA, m.MetadataRequest()).tablet_servers[0].node_id
    tag = {"server_ids": [server], "server_tag": 0}
    raw.call(ApiKey.ADD_SERVER_TAG, m.AddServerTagRequest(**tag))
    try:
        servers = raw.call(ApiKey.GET_METADATA, m.MetadataRequest()).tablet_servers
        assert {node.node_id for node in servers if node.HasField("server_tag")} == {server}
        other = {"server_ids": [server], "server_tag": 1}
        assert raw.error_code(ApiKey.ADD_SERVER_TAG, m.AddServerTagRequest(**other)) == 59
        assert raw.error_code(ApiKey.REMOVE_SERVER_TAG, m.RemoveServerTagRequest(**other)) == 60
    finally:
        raw.call(ApiKey.REMOVE_SERVER_TAG, m.RemoveServerTagRequest(**tag))
    raw.call(ApiKey.REMOVE_SERVER_TAG, m.RemoveServerTagRequest(**tag))


def test_a_rebalance_is_refused_and_there_is_none_to_list_or_to_cancel(raw: RawClient) -> None:
    assert raw.error_code(ApiKey.REBALANCE, m.RebalanceRequest(goals=[0, 1])) == 61
    progress = raw.call(ApiKey.LIST_REBALANCE_PROGRESS, m.ListRebalanceProgressRequest())
    assert not progress.HasField("rebalance_id")
    raw.call(ApiKey.CANCEL_REBALANCE, m.CancelRebalanceRequest(rebalance_id="none"))


PARTITIONED = b"""{"version": 1, "properties": {}, "custom_properties": {}, "bucket_count": 1,
    "partition_key": ["p"], "bucket_key": [],
    "schema": {"version": 1, "columns": [
        {"name": "k", "data_type": {"type": "INTEGER"}, "id": 0},
        {"name": "p", "data_type": {"type": "STRING"}, "id": 1}], "highest_field_id": 1}}"""
PLAIN = PARTITIONED.replace(b'["p"]', b"[]")
RESERVED = PLAIN.replace(b'"k"', b'"__offset"')
CROWDED = PLAIN.replace(b'"bucket_count": 1', b'"bucket_count": 4097')
THRICE = PLAIN.replace(b'"properties": {}', b'"properties": {"table.replication.factor": "3"}')
NOTHING_LOCAL = PLAIN.replace(
    b'"properties": {}', b'"properties": {"table.log.tiered.local-segments": "0"}'
)
UNKNOWN = PLAIN.replace(b'"properties": {}', b'"properties": {"table.log.tll": "1d"}')
NONE = table_path(DATABASE, "none")


def spec(**values: str) -> m.PbPartitionSpec:
    return m.PbPartitionSpec(
        partition_key_values=[m.PbKeyValue(key=k, value=v) for k, v in values.items()]
    )


def creation(name: str, table_json: bytes = PLAIN) -> m.CreateTableRequest:
    path = table_path(DATABASE, name)
    return m.CreateTableRequest(table_path=path, table_json=table_json, ignore_if_exists=False)


@pytest.mark.parametrize(
    ("key", "request_", "code", "text"),
    [
        (
            ApiKey.GET_TABLE_INFO,
            m.GetTableInfoRequest(table_path=NONE),
            7,
            "Table 'wire.none' does not exist.",
        ),
        (
            ApiKey.DROP_TABLE,
            m.DropTableRequest(table_path=NONE, ignore_if_not_exists=False),
            7,
            "Table wire.none does not exist.",
        ),
        (
            ApiKey.GET_TABLE_SCHEMA,
            m.GetTableSchemaRequest(table_path=NONE),
            9,
            "Schema for table wire.none with schema id 0 does not exist.",
        ),
        (
            ApiKey.LIST_TABLES,
            m.ListTablesRequest(database_name="nodb"),
            4,
            "Database nodb does not exist.",
        ),
        (
            ApiKey.CREATE_DATABASE,
            m.CreateDatabaseRequest(database_name=DATABASE, ignore_if_exists=False),
            6,
            "Database wire already exists.",
        ),
        (
            ApiKey.CREATE_DATABASE,
            m.CreateDatabaseRequest(database_name="*db", ignore_if_exists=False),
            16,
            "Database name *db is invalid: '*db' contains one or more characters other than ASCII "
            "alphanumerics, '_' and '-'",
        ),
        (
            ApiKey.CREATE_TABLE,
            creation("__t"),
            15,
            "Table name __t is invalid: '__' is not allowed as prefix, since it is reserved for "
            "internal databases/internal tables/internal partitions in Fluss server",
        ),
        (
            ApiKey.CREATE_TABLE,
            creation("t", RESERVED),
            15,
            "__offset cannot be used as column names, because they are reserved system columns in "
            "Fluss. Please use other names for these columns. The reserved system columns are: "
            "__offset, __timestamp, __bucket",
        ),
        (
            ApiKey.CREATE_TABLE,
            creation("t", CROWDED),
            49,
            "Bucket count 4097 exceeds the maximum limit 128 for a non-partitioned table or "
            "partition.",
        ),
        (
            ApiKey.CREATE_TABLE,
            creation("t", THRICE),
            17,
            "Replication factor: 3 larger than available tablet servers: 1.",
        ),
        (
            ApiKey.CREATE_TABLE,
            creation("t", NOTHING_LOCAL),
            39,
            "'table.log.tiered.local-segments' must be greater than 0.",
        ),
        (
            ApiKey.CREATE_TABLE,
            creation("t", UNKNOWN),
            39,
            "'table.log.tll' is not a recognized Fluss table property in the current cluster "
            "version. You may be using an older Fluss cluster that does not support this property.",
        ),
        (
            ApiKey.GET_METADATA,
            m.MetadataRequest(partitions_id=[987]),
            36,
            "The partition id '987' does not exist",
        ),
    ],
)
def test_refusals_begin_with_the_sentence_that_clients_of_fluss_compare(
    raw: RawClient, key: ApiKey, request_: Message, code: int, text: str
) -> None:
    """Each was asked of a real server; what to do comes behind the sentence."""
    found, message = refusal(raw, key, request_)
    assert (found, message[: len(text)]) == (code, text)


def test_refusals_about_partitions_begin_with_the_sentence_of_fluss(raw: RawClient) -> None:
    name = fresh_name("parts")
    raw.call(ApiKey.CREATE_TABLE, creation(name, PARTITIONED))
    path = table_path(DATABASE, name)
    first = m.CreatePartitionRequest(
        table_path=path, partition_spec=spec(p="a"), ignore_if_not_exists=False
    )
    raw.call(ApiKey.CREATE_PARTITION, first)
    full = f"{DATABASE}.{name}"

    def created(**values: str) -> str:
        request = m.CreatePartitionRequest(
            table_path=path, partition_spec=spec(**values), ignore_if_not_exists=False
        )
        return refusal(raw, ApiKey.CREATE_PARTITION, request)[1]

    missing = m.PbPhysicalTablePath(database_name=DATABASE, table_name=name, partition_name="x")
    assert refusal(raw, ApiKey.GET_METADATA, m.MetadataRequest(partitions_path=[missing])) == (
        36,
        f"Table partition '{full}(p=x)' does not exist.",
    )
    assert created(p="a") == f"Partition 'p=a' already exists for table {full}"
    assert created(q="a").startswith(
        "PartitionSpec PartitionSpec{{q=a}} does not contain partition key 'p' for "
        f"partitioned table {full}."
    )
    assert created(p="a", q="b").startswith(
        f"PartitionSpec size is not equal to partition keys size for partitioned table {full}."
    )
    assert created(p="$*").startswith(
        "The partition value $* is invalid: '$*' contains one or more characters other than ASCII "
        "alphanumerics, '_' and '-'"
    )
    drop = m.DropPartitionRequest(
        table_path=path, partition_spec=spec(p="x"), ignore_if_not_exists=False
    )
    assert refusal(raw, ApiKey.DROP_PARTITION, drop) == (
        36,
        f"Partition 'p=x' does not exist for table {full}",
    )
    raw.call(ApiKey.CREATE_TABLE, creation(f"{name}_plain"))
    plain = table_path(DATABASE, f"{name}_plain")
    listed = m.ListPartitionInfosRequest(table_path=plain)
    assert refusal(raw, ApiKey.LIST_PARTITION_INFOS, listed) == (
        37,
        f"Table '{full}_plain' is not a partitioned table.",
    )


RATE = "kv.rocksdb.shared-rate-limiter.bytes-per-sec"
SET, DELETE, APPEND = 0, 1, 2


def altered(key: str, value: str | None, op: int = SET) -> m.AlterClusterConfigsRequest:
    change = m.PbAlterConfig(config_key=key, config_value=value, op_type=op)
    return m.AlterClusterConfigsRequest(alter_configs=[change])


def listed(raw: RawClient, key: str) -> list[tuple[str, str]]:
    answer = raw.call(ApiKey.DESCRIBE_CLUSTER_CONFIGS, m.DescribeClusterConfigsRequest())
    return [(c.config_value, c.config_source) for c in answer.configs if c.config_key == key]


def test_a_dynamic_option_of_fluss_that_means_nothing_here_is_stored_listed_and_reset(
    raw: RawClient,
) -> None:
    """Flink's set_cluster_configs, get_cluster_configs and reset_cluster_configs."""
    raw.call(ApiKey.ALTER_CLUSTER_CONFIGS, altered(RATE, "200MB"))
    assert listed(raw, RATE) == [("200MB", "DYNAMIC_SERVER_CONFIG")]
    raw.call(ApiKey.ALTER_CLUSTER_CONFIGS, altered(RATE, "300MB"))
    assert listed(raw, RATE) == [("300MB", "DYNAMIC_SERVER_CONFIG")]
    raw.call(ApiKey.ALTER_CLUSTER_CONFIGS, altered(RATE, None, DELETE))
    assert listed(raw, RATE) == []


@pytest.mark.parametrize(
    ("key", "value", "bad"),
    [
        ("kv.snapshot.interval", "5min", "soon"),
        ("log.retention.roll-active-segment.enabled", "false", "perhaps"),
        ("datalake.format", "paimon", "unknown"),
        ("datalake.enabled", "false", "perhaps"),
        ("datalake.paimon.warehouse", "/nowhere", None),
    ],
)
def test_an_option_that_changes_at_run_time_is_stored_listed_and_reset(
    raw: RawClient, key: str, value: str, bad: str | None
) -> None:
    before = listed(raw, key)
    try:
        raw.call(ApiKey.ALTER_CLUSTER_CONFIGS, altered(key, value))
        if bad is not None:
            code, text = refusal(raw, ApiKey.ALTER_CLUSTER_CONFIGS, altered(key, bad))
            assert (code, key in text) == (ErrorCode.INVALID_CONFIG_EXCEPTION, True)
        assert listed(raw, key) == [(value, "DYNAMIC_SERVER_CONFIG")]
    finally:
        raw.call(ApiKey.ALTER_CLUSTER_CONFIGS, altered(key, None, DELETE))
    assert listed(raw, key) == before


@pytest.mark.parametrize(
    ("key", "value", "op", "text"),
    [
        (
            "invalid.config.key",
            "v",
            SET,
            "The config key invalid.config.key is not allowed to be changed dynamically",
        ),
        (
            "invalid.config.key",
            None,
            DELETE,
            "The config key invalid.config.key is not allowed to be changed dynamically",
        ),
        (RATE, "paimon", SET, f"Could not parse value 'paimon' for key '{RATE}'"),
        (RATE, None, SET, f"{RATE} needs a value"),
        (RATE, "1", APPEND, f"operation 2 on {RATE} is not possible"),
        (
            "server.data-disk.write-limit-ratio",
            "2",
            SET,
            "Could not parse value '2' for key 'server.data-disk.write-limit-ratio'",
        ),
    ],
)
def test_a_dynamic_option_that_cannot_be_set_changes_nothing(
    raw: RawClient, key: str, value: str | None, op: int, text: str
) -> None:
    _, found = refusal(raw, ApiKey.ALTER_CLUSTER_CONFIGS, altered(key, value, op))
    assert found.startswith(text)
    assert listed(raw, key) == []
