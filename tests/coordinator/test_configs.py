"""Options that are changed while the cluster runs: who gets them, what holds after a restart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.lake.test_tables import PATH, lake_table
from tests.coordinator.support import Cluster, call
from tests.coordinator.test_registration import Apart
from zufluss.errors import ConfigError, ErrorCode, InvalidTableError, ZuflussError
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_to_proto

SET, DELETE = 0, 1
INTERVAL = "kv.snapshot.interval"
FORMAT = "datalake.format"
ENABLED = "datalake.enabled"
URI = "datalake.iceberg.uri"
SECRET = "datalake.iceberg.s3.secret-access-key"
STATIC = {INTERVAL: "1h", "datalake.iceberg.warehouse": "s3://lake"}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster without a lake, with a tablet server in the same process."""
    cluster = await Cluster(tmp_path / "meta", STATIC).start()
    yield cluster
    await cluster.stop()


@pytest_asyncio.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Apart]:
    """A coordinator and a tablet server that only know each other by messages."""
    apart = Apart(tmp_path / "meta", STATIC)
    await apart.start_coordinator()
    yield apart
    await apart.stop_coordinator()


def changes(values: dict[str, str | None]) -> m.AlterClusterConfigsRequest:
    return m.AlterClusterConfigsRequest(
        alter_configs=[
            m.PbAlterConfig(
                config_key=key, config_value=value, op_type=DELETE if value is None else SET
            )
            for key, value in values.items()
        ]
    )


async def alter(cluster: Cluster | Apart, values: dict[str, str | None]) -> None:
    """Set options, and reset those whose value is None."""
    services = cluster.services if isinstance(cluster, Cluster) else cluster.to_coordinator.services
    await call(services, ApiKey.ALTER_CLUSTER_CONFIGS, changes(values))


async def listed(cluster: Cluster, key: str) -> tuple[str, str] | None:
    """The value of an option and where it was set; None for one that is not set."""
    found = await cluster.call(ApiKey.DESCRIBE_CLUSTER_CONFIGS)
    rows = {c.config_key: (c.config_value, c.config_source) for c in found.configs}
    return rows.get(key)


async def lake_properties(cluster: Cluster) -> dict[str, str]:
    """The properties of the lake that a client gets with the table."""
    answer = await cluster.call(ApiKey.GET_TABLE_INFO, table_path=path_to_proto(PATH))
    properties: dict[str, str] = json.loads(answer.table_json)["properties"]
    prefix = "table.datalake.iceberg."
    return {k.removeprefix(prefix): v for k, v in properties.items() if k.startswith(prefix)}


async def handed_out(cluster: Cluster) -> Any:
    """The table that a tiering service gets, None if it gets none."""
    answer = await cluster.call(ApiKey.LAKE_TIERING_HEARTBEAT, request_table=True)
    return answer.tiering_table.table_id if answer.HasField("tiering_table") else None


async def test_a_lake_that_is_configured_at_run_time_is_there_at_once_and_after_a_restart(
    cluster: Cluster,
) -> None:
    with pytest.raises(InvalidTableError, match="doesn't enable datalake tables"):
        await lake_table(cluster)
    await alter(cluster, {FORMAT: "iceberg", URI: "http://catalog", SECRET: "hush"})
    assert await listed(cluster, FORMAT) == ("iceberg", "DYNAMIC_SERVER_CONFIG")
    assert await listed(cluster, SECRET) == ("******", "DYNAMIC_SERVER_CONFIG")
    await lake_table(cluster)
    everything = {"uri": "http://catalog", "warehouse": "s3://lake"}
    assert await lake_properties(cluster) == everything
    again = await cluster.restart()
    assert await lake_properties(again) == everything
    await alter(again, {URI: "http://another"})
    assert await lake_properties(again) == everything | {"uri": "http://another"}
    await alter(again, {URI: None, "datalake.iceberg.warehouse": "s3://elsewhere"})
    assert await lake_properties(again) == {"warehouse": "s3://elsewhere"}
    await alter(again, {"datalake.iceberg.warehouse": None})
    assert await lake_properties(again) == {"warehouse": "s3://lake"}
    assert await listed(again, "datalake.iceberg.warehouse") == (
        "s3://lake",
        "INITIAL_SERVER_CONFIG",
    )
    await again.stop()


async def test_tables_are_handed_out_only_while_the_cluster_has_a_lake(cluster: Cluster) -> None:
    await alter(cluster, {FORMAT: "iceberg"})
    table = await lake_table(cluster, **{"table.datalake.freshness": "0s"})
    await alter(cluster, {FORMAT: None})
    cluster.clock.now_ms += 3_600_000
    assert await handed_out(cluster) is None
    await alter(cluster, {FORMAT: "iceberg"})
    assert await handed_out(cluster) == table.info.table_id


async def test_a_lake_is_opened_to_tables_at_run_time_once_it_has_a_format(
    cluster: Cluster,
) -> None:
    with pytest.raises(ConfigError, match=r"'datalake\.format' must be configured when"):
        await alter(cluster, {ENABLED: "true"})
    assert await listed(cluster, ENABLED) is None
    await alter(cluster, {FORMAT: "iceberg", ENABLED: "false"})
    with pytest.raises(InvalidTableError, match=r"Set datalake\.enabled = true"):
        await lake_table(cluster)
    await alter(cluster, {ENABLED: "true"})
    await lake_table(cluster)
    with pytest.raises(ConfigError, match="must be configured when"):
        await alter(cluster, {FORMAT: None})
    await alter(cluster, {FORMAT: None, ENABLED: None})
    await alter(cluster, {INTERVAL: "1min"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (INTERVAL, "soon"),
        (INTERVAL, "0s"),
        ("log.retention.roll-active-segment.enabled", "perhaps"),
        (FORMAT, "delta"),
        ("datalake.delta.uri", "http://catalog"),
        ("data.dir", "/elsewhere"),
        ("datalake.iceberg.py-catalog-impl", "subprocess.Popen"),
        ("datalake.iceberg.py-io-impl", "subprocess.Popen"),
    ],
)
async def test_a_bad_value_is_refused_and_nothing_changes(
    cluster: Cluster, key: str, value: str
) -> None:
    await alter(cluster, {INTERVAL: "1min"})
    with pytest.raises(ConfigError) as refused:
        await alter(cluster, {URI: "http://catalog", key: value})
    assert refused.value.code is ErrorCode.INVALID_CONFIG_EXCEPTION
    assert key in refused.value.message
    assert await listed(cluster, URI) is None
    assert await listed(cluster, INTERVAL) == ("1min", "DYNAMIC_SERVER_CONFIG")
    assert cluster.tablet.configs == {INTERVAL: "1min"}


async def test_a_server_in_the_same_process_has_the_options_from_its_first_bucket_on(
    cluster: Cluster,
) -> None:
    await alter(cluster, {INTERVAL: "1min"})
    again = await cluster.restart()
    assert again.tablet.configs_when_assigned == {INTERVAL: "1min"}
    await alter(again, {INTERVAL: None})
    assert again.tablet.configs == {}
    assert await listed(again, INTERVAL) == ("1h", "INITIAL_SERVER_CONFIG")
    await again.stop()


async def test_a_server_learns_the_options_when_it_joins_and_when_they_change(
    apart: Apart,
) -> None:
    await alter(apart, {INTERVAL: "1min"})
    await apart.link.join()
    assert apart.tablet.configs_when_assigned == {INTERVAL: "1min"}
    await alter(apart, {INTERVAL: None, FORMAT: "iceberg", SECRET: "hush"})
    assert apart.tablet.configs == {FORMAT: "iceberg"}, "without the secret, which it does not need"


async def test_a_server_that_missed_a_change_of_the_options_learns_it_with_a_heartbeat(
    apart: Apart,
) -> None:
    await apart.link.join()
    apart.to_tablet.down = True
    await alter(apart, {INTERVAL: "1min"})
    assert apart.tablet.configs == {}
    await apart.link.heartbeat()
    assert apart.tablet.configs == {INTERVAL: "1min"}
    apart.tablet.configs = {}
    await apart.link.heartbeat()
    assert apart.tablet.configs == {}, "it is sent once"


async def test_options_of_another_registration_are_refused(apart: Apart) -> None:
    await apart.link.join()
    request = m.UpdateConfigsRequest(
        coordinator_epoch=apart.coordinator.catalog.epoch,
        server_epoch=apart.link.server_epoch - 1,
        configs=m.PbDynamicConfigs(version=7, configs=[m.PbKeyValue(key=INTERVAL, value="1s")]),
    )
    with pytest.raises(ZuflussError) as refused:
        await call(apart.tablet_services, ApiKey.UPDATE_CONFIGS, request)
    assert refused.value.code is ErrorCode.INVALID_COORDINATOR_EXCEPTION
    assert apart.tablet.configs == {}
