"""The coordinator's APIs, asked through their messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.support import Cluster, auto_partitioned, call, table_json
from tests.paths import FIXTURES
from zufluss.cluster.image import ClusterImage
from zufluss.cluster.metadata_service import MetadataService
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.table import TableDescriptor
from zufluss.net.services import Services
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey

PATH = {"database_name": "fluss", "table_name": "t"}
INT = b'{"type":"INTEGER"}'


def spec(**values: str) -> dict[str, Any]:
    return {"partition_key_values": [{"key": k, "value": v} for k, v in values.items()]}


async def refused(cluster: Cluster, key: ApiKey, **fields: Any) -> ErrorCode:
    with pytest.raises(ZuflussError) as caught:
        await cluster.call(key, **fields)
    assert caught.value.message
    return caught.value.code


async def create(cluster: Cluster, table: bytes, name: str = "t") -> None:
    path = {"database_name": "fluss", "table_name": name}
    await cluster.call(
        ApiKey.CREATE_TABLE, table_path=path, table_json=table, ignore_if_exists=False
    )


async def partition_names(cluster: Cluster, **partial: str) -> list[str]:
    fields: dict[str, Any] = {"partial_partition_spec": spec(**partial)} if partial else {}
    found = await cluster.call(ApiKey.LIST_PARTITION_INFOS, table_path=PATH, **fields)
    return [
        "$".join(pair.value for pair in info.partition_spec.partition_key_values)
        for info in found.partitions_info
    ]


# Databases


async def test_databases_from_creation_to_drop(cluster: Cluster) -> None:
    await cluster.call(
        ApiKey.CREATE_DATABASE,
        database_name="d",
        ignore_if_exists=False,
        database_json=b'{"version":1,"comment":"c","custom_properties":{"a":"1"}}',
    )
    await cluster.call(
        ApiKey.ALTER_DATABASE,
        database_name="d",
        ignore_if_not_exists=False,
        config_changes=[
            {"config_key": "b", "config_value": "2", "op_type": 0},
            {"config_key": "a", "op_type": 1},
        ],
    )
    info = await cluster.call(ApiKey.GET_DATABASE_INFO, database_name="d")
    assert json.loads(info.database_json) == {
        "version": 1,
        "comment": "c",
        "custom_properties": {"b": "2"},
    }
    exists = await cluster.call(ApiKey.DATABASE_EXISTS, database_name="d")
    listed = await cluster.call(ApiKey.LIST_DATABASES)
    assert (exists.exists, list(listed.database_name)) == (True, ["d", "fluss"])
    await cluster.call(
        ApiKey.DROP_DATABASE, database_name="d", ignore_if_not_exists=False, cascade=False
    )
    assert not (await cluster.call(ApiKey.DATABASE_EXISTS, database_name="d")).exists


async def test_a_database_without_descriptor_is_empty(cluster: Cluster) -> None:
    """pyfluss leaves `database_json` out."""
    await cluster.call(ApiKey.CREATE_DATABASE, database_name="d", ignore_if_exists=False)
    info = await cluster.call(ApiKey.GET_DATABASE_INFO, database_name="d")
    assert json.loads(info.database_json) == {"version": 1, "custom_properties": {}}


async def test_a_list_with_summary_leaves_the_names_empty(cluster: Cluster) -> None:
    await create(cluster, table_json())
    found = await cluster.call(ApiKey.LIST_DATABASES, include_summary=True)
    assert list(found.database_name) == []
    assert [(s.database_name, s.table_count) for s in found.database_summary] == [("fluss", 1)]


async def test_a_database_property_can_only_be_set_or_deleted(cluster: Cluster) -> None:
    change = {"config_key": "a", "config_value": "1", "op_type": 2}
    code = await refused(
        cluster,
        ApiKey.ALTER_DATABASE,
        database_name="fluss",
        ignore_if_not_exists=False,
        config_changes=[change],
    )
    assert code == ErrorCode.INVALID_DATABASE_EXCEPTION


# Tables


@pytest.mark.parametrize("name", ["log_zstd", "log_none", "log_nested", "log_stats", "kv_all"])
async def test_a_table_of_the_java_client_is_stored_as_fluss_stores_it(
    tmp_path: Path, name: str
) -> None:
    """The request of a real client in, the descriptor of a real server out."""
    cluster = await Cluster(tmp_path).start()
    request = (FIXTURES / "tables" / f"{name}.request.json").read_bytes()
    stored = json.loads((FIXTURES / "tables" / f"{name}.stored.json").read_bytes())
    await create(cluster, request)
    info = await cluster.call(ApiKey.GET_TABLE_INFO, table_path=PATH)
    assert (info.table_id, info.schema_id) == (0, 1)
    assert TableDescriptor.from_json(info.table_json) == TableDescriptor.from_json(
        json.dumps(stored)
    )
    await cluster.stop()


async def test_tables_are_listed_found_and_dropped(cluster: Cluster) -> None:
    for name in ("t", "b", "a"):
        await create(cluster, table_json(), name)
    found = await cluster.call(ApiKey.LIST_TABLES, database_name="fluss")
    assert list(found.table_name) == ["a", "b", "t"]
    await cluster.call(ApiKey.DROP_TABLE, table_path=PATH, ignore_if_not_exists=False)
    assert not (await cluster.call(ApiKey.TABLE_EXISTS, table_path=PATH)).exists
    await cluster.call(ApiKey.DROP_TABLE, table_path=PATH, ignore_if_not_exists=True)


async def test_added_columns_make_a_new_schema(cluster: Cluster) -> None:
    """Old batches are read with the old schema, so clients can still get it."""
    await create(cluster, table_json())
    column = {"column_name": "c", "data_type_json": INT, "comment": "new"}
    await cluster.call(
        ApiKey.ALTER_TABLE,
        table_path=PATH,
        ignore_if_not_exists=False,
        add_columns=[{**column, "column_position_type": 0}],
    )
    current = await cluster.call(ApiKey.GET_TABLE_SCHEMA, table_path=PATH)
    first = await cluster.call(ApiKey.GET_TABLE_SCHEMA, table_path=PATH, schema_id=1)
    assert current.schema_id == 2
    names = [[c["name"] for c in json.loads(s.schema_json)["columns"]] for s in (first, current)]
    assert names == [["a", "b"], ["a", "b", "c"]]
    code = await refused(
        cluster,
        ApiKey.ALTER_TABLE,
        table_path=PATH,
        ignore_if_not_exists=False,
        add_columns=[{**column, "column_position_type": 0}],
    )
    assert code == ErrorCode.INVALID_ALTER_TABLE_EXCEPTION


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"drop_columns": [{"column_name": "a"}]}, 56),
        ({"rename_columns": [{"old_column_name": "a", "new_column_name": "z"}]}, 56),
        ({"modify_columns": [{"column_name": "a"}]}, 56),
        (
            {
                "add_columns": [
                    {"column_name": "c", "data_type_json": INT, "column_position_type": 1}
                ]
            },
            56,
        ),
        (
            {
                "add_columns": [
                    {"column_name": "c", "data_type_json": b"{", "column_position_type": 0}
                ]
            },
            56,
        ),
        (
            {
                "add_columns": [
                    {
                        "column_name": "c",
                        "data_type_json": INT,
                        "column_position_type": 0,
                        "agg_function_type": "median",
                    }
                ]
            },
            39,
        ),
        (
            {
                "config_changes": [
                    {"config_key": "table.log.format", "config_value": "INDEXED", "op_type": 0}
                ]
            },
            56,
        ),
        (
            {"config_changes": [{"config_key": "table.log.ttl", "op_type": 0}]},
            56,
        ),
    ],
)
async def test_an_alteration_that_is_not_possible_changes_nothing(
    cluster: Cluster, fields: dict[str, Any], code: int
) -> None:
    await create(cluster, table_json())
    before = await cluster.call(ApiKey.GET_TABLE_INFO, table_path=PATH)
    got = await refused(
        cluster, ApiKey.ALTER_TABLE, table_path=PATH, ignore_if_not_exists=False, **fields
    )
    assert got == code
    assert await cluster.call(ApiKey.GET_TABLE_INFO, table_path=PATH) == before


async def test_properties_are_altered_and_keep_the_schema(cluster: Cluster) -> None:
    await create(cluster, table_json())
    changes = [
        {"config_key": "table.log.ttl", "config_value": "3d", "op_type": 0},
        {"config_key": "mine", "config_value": "1", "op_type": 0},
    ]
    await cluster.call(
        ApiKey.ALTER_TABLE, table_path=PATH, ignore_if_not_exists=False, config_changes=changes
    )
    info = await cluster.call(ApiKey.GET_TABLE_INFO, table_path=PATH)
    descriptor = TableDescriptor.from_json(info.table_json)
    assert descriptor.properties["table.log.ttl"] == "3d"
    assert descriptor.custom_properties == {"mine": "1"}
    assert info.schema_id == 1


# Partitions


async def test_partitions_are_listed_by_partial_spec(cluster: Cluster) -> None:
    """In key order, whatever order the client named the values in."""
    await create(cluster, table_json("a INT, d STRING, r STRING", partitions=("d", "r")))
    for day, region in (("1", "EU"), ("1", "US"), ("2", "EU")):
        await cluster.call(
            ApiKey.CREATE_PARTITION,
            table_path=PATH,
            partition_spec=spec(r=region, d=day),
            ignore_if_not_exists=False,
        )
    assert await partition_names(cluster) == ["1$EU", "1$US", "2$EU"]
    assert await partition_names(cluster, r="EU") == ["1$EU", "2$EU"]
    assert await partition_names(cluster, r="EU", d="2") == ["2$EU"]
    assert await partition_names(cluster, d="3") == []
    fields = {"table_path": PATH, "partial_partition_spec": spec(z="1")}
    assert await refused(cluster, ApiKey.LIST_PARTITION_INFOS, **fields) == 43


async def test_the_flag_of_create_partition_means_ignore_if_exists(cluster: Cluster) -> None:
    await create(cluster, table_json("a INT, d STRING", partitions=("d",)))
    fields = {"table_path": PATH, "partition_spec": spec(d="1")}
    for _ in range(2):
        await cluster.call(ApiKey.CREATE_PARTITION, **fields, ignore_if_not_exists=True)
    code = await refused(cluster, ApiKey.CREATE_PARTITION, **fields, ignore_if_not_exists=False)
    assert code == 42


async def test_a_key_given_twice_is_refused(cluster: Cluster) -> None:
    await create(cluster, table_json("a INT, d STRING", partitions=("d",)))
    pairs = [{"key": "d", "value": "1"}, {"key": "d", "value": "2"}]
    code = await refused(
        cluster,
        ApiKey.CREATE_PARTITION,
        table_path=PATH,
        partition_spec={"partition_key_values": pairs},
        ignore_if_not_exists=False,
    )
    assert code == 43


async def test_auto_partitions_are_there_when_create_table_answers(cluster: Cluster) -> None:
    """And when a table is altered to have more of them."""
    await create(cluster, auto_partitioned(num_precreate="2"))
    assert await partition_names(cluster) == ["20240601", "20240602"]
    change = {"config_key": "table.auto-partition.num-precreate", "config_value": "3", "op_type": 0}
    await cluster.call(
        ApiKey.ALTER_TABLE, table_path=PATH, ignore_if_not_exists=False, config_changes=[change]
    )
    assert await partition_names(cluster) == ["20240601", "20240602", "20240603"]


# Metadata


async def test_metadata_names_the_servers_on_the_callers_own_listener(cluster: Cluster) -> None:
    """SASL port in, SASL ports out."""
    for listener, hosts in (("CLIENT", ("co", 1, "ts", 3)), ("INTERNAL", ("co-in", 2, "ts-in", 4))):
        found = await cluster.call(ApiKey.GET_METADATA, listener)
        coordinator, [tablet] = found.coordinator_server, found.tablet_servers
        assert (coordinator.host, coordinator.port, tablet.host, tablet.port) == hosts
        assert (coordinator.node_id, tablet.node_id, tablet.rack) == (0, 1, "r1")
        assert not tablet.HasField("listeners")
    hidden = await cluster.call(ApiKey.GET_METADATA, "OTHER")
    assert not hidden.HasField("coordinator_server")
    assert list(hidden.tablet_servers) == []


async def test_metadata_of_a_table_has_its_leaders(cluster: Cluster) -> None:
    await create(cluster, table_json(buckets=2))
    found = await cluster.call(ApiKey.GET_METADATA, table_path=[PATH])
    [table] = found.table_metadata
    buckets = [(b.bucket_id, b.leader_id, b.leader_epoch) for b in table.bucket_metadata]
    assert buckets == [(0, 1, 0), (1, 1, 0)]
    assert [list(b.replica_id) for b in table.bucket_metadata] == [[1], [1]]
    assert TableDescriptor.from_json(table.table_json).bucket_count == 2
    assert list(table.schemas) == [], "old schemas are for servers"


async def test_a_partitioned_table_has_buckets_in_its_partitions_only(cluster: Cluster) -> None:
    """By name or by id, and once when asked for both ways."""
    await create(cluster, table_json("a INT, d STRING", partitions=("d",), buckets=2))
    await cluster.call(
        ApiKey.CREATE_PARTITION,
        table_path=PATH,
        partition_spec=spec(d="1"),
        ignore_if_not_exists=False,
    )
    named = {**PATH, "partition_name": "1"}
    for fields in (
        {"partitions_path": [named]},
        {"partitions_id": [0]},
        {"partitions_path": [named], "partitions_id": [0]},
    ):
        found = await cluster.call(ApiKey.GET_METADATA, table_path=[PATH], **fields)
        assert list(found.table_metadata[0].bucket_metadata) == []
        [partition] = found.partition_metadata
        assert (partition.partition_id, partition.partition_name) == (0, "1")
        assert [b.leader_id for b in partition.bucket_metadata] == [1, 1]


async def test_metadata_of_what_is_not_there_is_an_error(cluster: Cluster) -> None:
    """7 for a table, 36 for a partition; Fluss says -1 for the table."""
    await create(cluster, table_json())
    other = {"database_name": "fluss", "table_name": "none"}
    named = {**PATH, "partition_name": "x"}
    assert await refused(cluster, ApiKey.GET_METADATA, table_path=[other]) == 7
    assert await refused(cluster, ApiKey.GET_METADATA, partitions_path=[named]) == 36
    assert await refused(cluster, ApiKey.GET_METADATA, partitions_id=[99]) == 36


# Errors as a real server gave them

OURS_DIFFER = {"metadata: unknown table": 7, "list partitions: unknown key": 43}


def coordinator_cases() -> list[Any]:
    cases = json.loads((FIXTURES / "errors.json").read_text())["cases"]
    keys = {*range(1001, 1013), 1035, 1036, 1037}
    return [pytest.param(c, id=c["name"]) for c in cases if c["api_key"] in keys]


@pytest.mark.parametrize("case", coordinator_cases())
async def test_errors_are_those_of_a_real_server(cluster: Cluster, case: dict[str, Any]) -> None:
    """The expected error codes are Fluss's, with documented exceptions."""
    await cluster.call(ApiKey.CREATE_DATABASE, database_name="db", ignore_if_exists=False)
    plain, by_day = table_json(), table_json("a INT, d STRING", partitions=("d",))
    for name, table in (("kv", plain), ("lg", plain), ("pt", by_day)):
        await cluster.call(
            ApiKey.CREATE_TABLE,
            table_path={"database_name": "db", "table_name": name},
            table_json=table,
            ignore_if_exists=False,
        )
    fields = json.loads(json.dumps(case["request"]).replace("$db", "db"))
    code = await refused(cluster, ApiKey(case["api_key"]), **fields)
    assert code == OURS_DIFFER.get(case["name"], case["code"])


# The cluster as a whole


async def test_health_is_green_with_all_leaders_and_red_without_one(cluster: Cluster) -> None:
    await create(cluster, table_json(buckets=3))
    health = await cluster.call(ApiKey.GET_CLUSTER_HEALTH)
    counts = (health.num_replicas, health.in_sync_replicas, health.num_leader_replicas)
    assert (*counts, health.active_leader_replicas, health.status) == (3, 3, 3, 3, 0)
    cluster.image.tablets.clear()
    health = await cluster.call(ApiKey.GET_CLUSTER_HEALTH)
    assert (health.active_leader_replicas, health.status) == (0, 2)


async def test_described_configs_are_those_that_were_set_without_secrets(tmp_path: Path) -> None:
    module = "org.apache.fluss.security.auth.sasl.plain.PlainLoginModule"
    conf = {
        "default.bucket.number": "3",
        "security.sasl.plain.jaas.config": f'{module} required user_a="hush";',
    }
    cluster = await Cluster(tmp_path, conf).start()
    found = await cluster.call(ApiKey.DESCRIBE_CLUSTER_CONFIGS)
    rows = {c.config_key: (c.config_value, c.config_source) for c in found.configs}
    assert set(rows) == {*conf, "data.dir"}
    assert rows["default.bucket.number"] == ("3", "INITIAL_SERVER_CONFIG")
    assert "hush" not in str(found)
    await cluster.stop()


async def test_the_file_token_is_empty_for_local_files(cluster: Cluster) -> None:
    """Every log scanner of pyfluss asks for it."""
    found = await cluster.call(ApiKey.GET_FILESYSTEM_SECURITY_TOKEN)
    assert (found.schema, found.token) == ("file", b"")


async def test_every_writer_gets_an_id_of_its_own(cluster: Cluster) -> None:
    """Also after a restart, which may skip ids but never repeats one."""
    first = [(await cluster.call(ApiKey.INIT_WRITER)).writer_id for _ in range(3)]
    assert first == [0, 1, 2]
    again = await cluster.restart()
    later = (await again.call(ApiKey.INIT_WRITER)).writer_id
    await again.stop()
    assert later > max(first)


async def test_one_process_with_both_roles_takes_no_other_tablet_servers(cluster: Cluster) -> None:
    """An API without a handler is not offered."""
    keys = {api.key for api in cluster.services.advertised()}
    assert ApiKey.REGISTER_TABLET_SERVER not in keys
    coordinator = {key for key in APIS if "coordinator" in APIS[key].roles}
    assert keys - {ApiKey.INIT_WRITER} <= coordinator


async def test_a_tablet_server_answers_the_same_questions_from_its_own_picture() -> None:
    """The read-only service needs an image and nothing else."""
    services = Services()
    services.attach(MetadataService(ClusterImage(), Configuration.of({}), str))
    assert all("tablet" in api.roles for api in services.advertised())
    found = await call(services, ApiKey.LIST_DATABASES, m.ListDatabasesRequest())
    assert list(found.database_name) == []
